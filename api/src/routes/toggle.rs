use aura_kit::{Code, Json};
use aura_store::RegistrationMode;
use axum::{
    extract::{OriginalUri, State},
    http::{HeaderMap, HeaderValue, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    access::TableService,
    error::{ApiError, Result},
    openapi::ASKS_SOURCE,
    routes::Params,
    state::AppState,
    toggle::{Answer, CHANGES_TABLE, Change, Desired, Mode, Options, RegistrationView, show},
};

/// Desired state.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"enabled": true}))]
pub(crate) struct RealtimeState {
    /// Whether the table's changes are streamed.
    enabled: bool,
    /// Who sees to the table's REPLICA IDENTITY. As it is, or `auto`, without; only with `enabled: true`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mode: Option<Mode>,
}

impl RealtimeState {
    fn desired(self) -> Result<Desired> {
        match (self.enabled, self.mode) {
            (true, mode) => Ok(Desired::On(mode.map(RegistrationMode::from))),
            (false, None) => Ok(Desired::Off),
            (false, Some(_)) => Err(ApiError::new(Code::InvalidBody, "mode goes with enabled: true.")),
        }
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct TableQuery {
    /// Schema as the client says it; `public`, the default, is the project's main schema.
    #[serde(rename = "schema")]
    #[param(example = "public")]
    _schema: Option<String>,
    /// Show what would be done, do nothing.
    #[serde(default)]
    dry_run: bool,
}

/// Show a table's realtime state.
///
/// What is wanted, what was observed, and what the table itself is like now. A state that is half done is never `active`.
#[utoipa::path(
    get,
    path = "/v1/db/{project}/schema/tables/{table}/realtime",
    operation_id = "get_table_realtime",
    tag = "tables",
    extensions(("x-codes" = json!([ASKS_SOURCE, Code::TableNotFound]))),
    params(
        ("project" = uuid::Uuid, Path, description = "Project id"),
        ("table" = String, Path, description = "Table name as the catalogue has it, percent-encoded"),
        TableQuery
    ),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "The state", body = RegistrationView, headers(("ETag" = String, description = "Version of the desired state")))
    )
)]
pub(crate) async fn get_table_realtime(
    service: TableService,
    State(state): State<AppState>,
    _query: Params<TableQuery>,
) -> Result<Response> {
    Ok(respond(show(&state, &service).await?, None))
}

/// Switch a table's changes on or off.
///
/// Idempotent. On: registers the table, sets REPLICA IDENTITY FULL (waiting for its lock at most 3 s) and signals the
/// worker; mends it, too, when somebody has set it back since (`drift`). With `mode: manual` nothing is altered: the
/// answer is 409 with the statement for the table's owner until it is FULL. Off: restores the replica identity that was there before. Answers 200 once the running filter follows, or 202
/// when that takes longer than `Prefer: wait=<s>` (default 5, at most 60); 202 promises nothing yet.
#[utoipa::path(
    put,
    path = "/v1/db/{project}/schema/tables/{table}/realtime",
    operation_id = "put_table_realtime",
    tag = "tables",
    extensions(("x-codes" = json!([ASKS_SOURCE, CHANGES_TABLE]))),
    params(
        ("project" = uuid::Uuid, Path, description = "Project id"),
        ("table" = String, Path, description = "Table name as the catalogue has it, percent-encoded"),
        ("prefer" = Option<String>, Header, description = "`wait=<seconds>`"),
        ("if-match" = Option<String>, Header, description = "ETag of the state that the change is based on"),
        TableQuery
    ),
    request_body = RealtimeState,
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "It is so", body = RegistrationView, headers(("ETag" = String, description = "Version of the desired state"))),
        (status = 202, description = "Written; the worker hasn't followed yet", body = RegistrationView, headers(("Location" = String, description = "Where to look"), ("Retry-After" = u64, description = "Seconds")))
    )
)]
pub(crate) async fn put_table_realtime(
    service: TableService,
    State(state): State<AppState>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
    Params(query): Params<TableQuery>,
    Json(body): Json<RealtimeState>,
) -> Result<Response> {
    let options = Options::new(&headers, query.dry_run);
    let change = Change { state: &state, service: &service, options };
    Ok(respond(change.run(body.desired()?).await?, Some(&uri)))
}

/// Switch a table's changes off.
///
/// The same as PUT with `{"enabled": false}`.
#[utoipa::path(
    delete,
    path = "/v1/db/{project}/schema/tables/{table}/realtime",
    operation_id = "delete_table_realtime",
    tag = "tables",
    extensions(("x-codes" = json!([ASKS_SOURCE, CHANGES_TABLE]))),
    params(
        ("project" = uuid::Uuid, Path, description = "Project id"),
        ("table" = String, Path, description = "Table name as the catalogue has it, percent-encoded"),
        ("prefer" = Option<String>, Header, description = "`wait=<seconds>`"),
        ("if-match" = Option<String>, Header, description = "ETag of the state that the change is based on"),
        TableQuery
    ),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "It is so", body = RegistrationView),
        (status = 202, description = "Written; the worker hasn't followed yet", body = RegistrationView, headers(("Location" = String, description = "Where to look"), ("Retry-After" = u64, description = "Seconds")))
    )
)]
pub(crate) async fn delete_table_realtime(
    service: TableService,
    State(state): State<AppState>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
    Params(query): Params<TableQuery>,
) -> Result<Response> {
    let options = Options::new(&headers, query.dry_run);
    let change = Change { state: &state, service: &service, options };
    Ok(respond(change.run(Desired::Off).await?, Some(&uri)))
}

/// `uri`: where to look after a 202, with the schema that the query names.
fn respond(answer: Answer, uri: Option<&Uri>) -> Response {
    let status = if answer.done { StatusCode::OK } else { StatusCode::ACCEPTED };
    let mut response = (status, Json(answer.view)).into_response();
    let headers = response.headers_mut();
    let mut set = |name, text: &str| {
        if let Ok(value) = HeaderValue::from_str(text) {
            headers.insert(name, value);
        }
    };
    set(header::ETAG, &answer.etag);
    if let (StatusCode::ACCEPTED, Some(location)) = (status, uri.and_then(Uri::path_and_query)) {
        set(header::LOCATION, location.as_str());
        set(header::RETRY_AFTER, "1");
    }
    response
}
