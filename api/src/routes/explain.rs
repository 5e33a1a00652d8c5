use std::time::Duration;

use aura_bus::{BusError, Message, Subject};
use aura_domain::{
    ChangeKind, Claims, EventFilter, SubscriptionSpec,
    explain::{Answer, Explanation, MadeUp, Question, Which},
};
use aura_kit::{Code, Json, Problem};
use aura_store::Project;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    access::{ProjectService, verify_user},
    error::{ApiError, Result},
    state::AppState,
};

/// A worker answers within 12 s, whatever it waits for.
const ANSWER_LIMIT: Duration = Duration::from_secs(15);

/// What is asked about.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ExplainRequest, example = json!({
    "subscription": {"table": "messages", "filter": "room=eq.1", "role": "authenticated", "claims": {"sub": "a11ce000-0000-4000-8000-000000000001"}},
    "change": {"position": "1-00000000016b3748-00000000016b3700-0"}
}))]
pub(crate) struct ExplainBody {
    /// Who listens to what. It need not be live.
    subscription: SubscriptionBody,
    /// Which change; without, the newest one of the table that the worker remembers.
    change: Option<ChangeBody>,
}

/// A `postgres_changes` entry of a join, and whose it is: a `role` and `claims`, or a `token`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ExplainSubscription)]
pub(crate) struct SubscriptionBody {
    /// As the client says it; `public`, the project's main schema, without.
    schema: Option<String>,
    /// One table.
    table: String,
    /// `*` (without), `INSERT`, `UPDATE` or `DELETE`.
    event: Option<String>,
    /// As the client writes it.
    filter: Option<String>,
    /// Columns; all without.
    select: Option<Vec<String>>,
    /// Role word: `anon`, `authenticated`, `service_role`, or one of the project's own.
    role: Option<String>,
    /// Claims as policies would see them; `role` is added where it is missing.
    #[schema(value_type = Option<Object>)]
    claims: Option<Map<String, Value>>,
    /// An end user's token of the project, in place of role and claims.
    token: Option<String>,
}

/// A change by its row or its position, or a row that is made up.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ExplainChange)]
pub(crate) struct ChangeBody {
    /// Values of the row, as in `{"id": 7}`: the newest change of such a row.
    #[schema(value_type = Option<Object>)]
    row: Option<Map<String, Value>>,
    /// As it stands in every change on the wire.
    position: Option<String>,
    /// Of a made-up row: `INSERT`, `UPDATE` or `DELETE`.
    r#type: Option<String>,
    /// The row after, values as JSON scalars or PostgreSQL's text form; a column that isn't named is null.
    #[schema(value_type = Option<Object>)]
    record: Option<Map<String, Value>>,
    /// The row before.
    #[schema(value_type = Option<Object>)]
    old_record: Option<Map<String, Value>>,
}

/// Explain why a subscription did or did not get a change.
///
/// The worker that leads the project's source answers from the changes that it remembers (the last thousand or so) and
/// from what grants and policies say now. One question of a project at a time.
#[utoipa::path(
    post,
    path = "/v1/projects/{project}/explain",
    operation_id = "explain_change",
    tag = "projects",
    extensions(("x-codes" = json!([Code::BusUnavailable, Code::KeySetUnavailable, Code::EngineNotRunning, Code::SourceSlow]))),
    params(("project" = uuid::Uuid, Path, description = "Project id")),
    request_body = ExplainBody,
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "The ordered verdict", body = Explanation)
    )
)]
pub(crate) async fn explain_change(
    access: ProjectService,
    State(state): State<AppState>,
    Json(body): Json<ExplainBody>,
) -> Result<Json<Explanation>> {
    let change = body.change.map_or(Ok(Which::Newest), ChangeBody::check)?;
    let subscription = body.subscription.check(&state, access.project()).await?;
    ask(&state, access.project(), &Question { subscription, change }).await.map(Json)
}

impl SubscriptionBody {
    async fn check(self, state: &AppState, project: &Project) -> Result<SubscriptionSpec> {
        let event = self.event.as_deref().unwrap_or("*");
        if !["*", "INSERT", "UPDATE", "DELETE"].contains(&event) {
            return Err(invalid("event is *, INSERT, UPDATE or DELETE."));
        }
        if self.schema.as_deref() == Some("*") || self.table == "*" {
            return Err(invalid("Name one schema and one table: a wildcard listens to each of its tables."));
        }
        let (role, claims) = match (self.role, self.token, self.claims) {
            (Some(role), None, claims) => {
                let mut claims = claims.unwrap_or_default();
                claims.entry("role").or_insert_with(|| role.clone().into());
                (role, Value::Object(claims))
            }
            (None, Some(token), None) => {
                let verified = verify_user(state, project.id, &token).await?;
                (verified.role.as_str().to_owned(), verified.payload)
            }
            _ => return Err(invalid("A subscription has a role, with claims or without, or else a token.")),
        };
        let claims = Claims::from_payload(&claims).map_err(|error| invalid(&format!("The {error}.")))?;
        Ok(SubscriptionSpec {
            project: project.id,
            schema: self.schema.unwrap_or_else(|| "public".to_owned()),
            table: Some(self.table),
            event: EventFilter::from_client(event),
            filter: self.filter,
            select: self.select,
            role,
            claims,
        })
    }
}

impl ChangeBody {
    fn check(self) -> Result<Which> {
        let Self { row, position, r#type, record, old_record } = self;
        if let (Some(row), None, None, None, None) = (&row, &position, &r#type, &record, &old_record) {
            let values = |value: &Value| !(value.is_array() || value.is_object());
            let good = !row.is_empty() && row.values().all(values);
            return if good {
                Ok(Which::Row(row.clone()))
            } else {
                Err(invalid("A row has at least one value, a scalar."))
            };
        }
        match (position, r#type, record.is_some(), old_record.is_some()) {
            (Some(position), None, false, false) if row.is_none() => {
                Ok(Which::At(position.parse().map_err(|_| invalid("The position is none."))?))
            }
            (None, Some(kind), new, old) if row.is_none() => {
                let kind = match (kind.as_str(), new, old) {
                    ("INSERT", true, false) => ChangeKind::Insert,
                    ("UPDATE", true, _) => ChangeKind::Update,
                    ("DELETE", false, true) => ChangeKind::Delete,
                    _ => return Err(invalid(ROWS)),
                };
                Ok(Which::MadeUp(MadeUp { kind, record, old_record }))
            }
            _ => Err(invalid("A change is a row, a position, or else a type with its rows.")),
        }
    }
}

const ROWS: &str = "An INSERT has a record, an UPDATE a record and maybe an old_record, a DELETE an old_record; there is no other type.";

fn invalid(detail: &str) -> ApiError {
    ApiError::new(Code::InvalidBody, detail)
}

async fn ask(state: &AppState, project: &Project, question: &Question) -> Result<Explanation> {
    let away = || ApiError::new(Code::BusUnavailable, "Explanations come over the bus.");
    let bus = state.bus().ok_or_else(away)?;
    let payload = serde_json::to_vec(question).map_err(|error| Problem::internal(&error))?;
    if payload.len() > bus.max_payload() {
        return Err(ApiError::new(Code::PayloadTooLarge, "The question doesn't fit into a message of the bus."));
    }
    let silent = || {
        let detail = "No worker answers for the project's source: its engine is stopped, or changes hands.";
        ApiError::from(Problem::new(Code::EngineNotRunning, detail).retry_after(2))
    };
    let reply = match bus.request(Message::new(Subject::explain(project.source), payload), ANSWER_LIMIT).await {
        Ok(reply) => reply,
        Err(BusError::NoResponders | BusError::Timeout(_)) => return Err(silent()),
        Err(error) => {
            tracing::warn!(%error, "bus");
            return Err(away());
        }
    };
    match serde_json::from_slice(&reply.payload) {
        Ok(Answer::Explained(explanation)) => Ok(explanation),
        Ok(Answer::Busy) => {
            let detail = "One question of a project is answered at a time, and few at once.";
            Err(Problem::new(Code::RateLimited, detail).retry_after(1).into())
        }
        Ok(Answer::Late) => {
            Err(Problem::new(Code::SourceSlow, "The source database took too long.").retry_after(1).into())
        }
        Err(error) => Err(Problem::internal(&error).into()),
    }
}
