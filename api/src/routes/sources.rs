use aura_domain::SourceId;
use aura_kit::{Code, Json};
use aura_pgsource::SourceUrl;
use aura_store::{NewSource, Plugin, SlotRecreate, Source, SourceChange};
use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    access::Platform,
    error::{ApiError, Result},
    headers::{IfMatch, version_etag},
    once::OnceJson,
    openapi::ASKS_SOURCE,
    paging::PageQuery,
    routes::{DoneOr, DryRun, Params, Plan, engine_verbs::Request, engines::SourcePath, present},
    source::{Checked, Deleted, change, check, delete, plan_deletion},
    state::AppState,
};

/// Longest name of a source.
const MAX_NAME: usize = 63;
/// Longest name that PostgreSQL takes for a slot.
const MAX_SLOT_NAME: usize = 63;

/// A PostgreSQL server, database and slot. Its URLs hold passwords and are never shown.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Source)]
pub(crate) struct SourceView {
    /// Id.
    id: SourceId,
    /// Unique; stands for the id in paths.
    #[schema(example = "orders")]
    name: String,
    /// Host and port of the worker's URL.
    #[schema(example = "db.example.com:5432")]
    address: String,
    /// Database of the worker's URL.
    #[schema(example = "app")]
    database: String,
    /// The admin's URL is another one.
    has_admin_url: bool,
    /// Its logical replication slot.
    #[schema(example = "aura_cdc_0191d0a0")]
    slot_name: String,
    /// Which output plugin decodes its log.
    plugin: Plugin,
    /// What happens when the slot is lost or missing.
    slot_recreate: SlotRecreate,
}

impl From<Source> for SourceView {
    fn from(source: Source) -> Self {
        // What is stored was checked.
        let url = SourceUrl::from_secret(&source.replication_url).ok();
        let shown = |show: fn(&SourceUrl) -> String| url.as_ref().map(show).unwrap_or_default();
        Self {
            address: shown(SourceUrl::endpoint),
            database: shown(|url| url.database().to_owned()),
            has_admin_url: source.admin_url.is_some(),
            id: source.id,
            name: source.name,
            slot_name: source.slot_name,
            plugin: source.plugin,
            slot_recreate: source.slot_recreate,
        }
    }
}

/// A page of sources.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SourcePage {
    /// By name.
    items: Vec<SourceView>,
    /// Behind the last item; null at the end.
    next_cursor: Option<String>,
}

/// What a source is made from.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "name": "orders",
    "replication_url": "postgres://cdc:secret@db.example.com/app",
    "admin_url": "postgres://admin:secret@db.example.com/app"
}))]
pub(crate) struct CreateSource {
    /// Unique: 1 to 63 of `A-Z a-z 0-9 . _ -`, the first a letter or digit.
    name: String,
    /// The worker's login: REPLICATION, no superuser.
    #[schema(value_type = String)]
    replication_url: SecretString,
    /// The api's login, which makes projects' schemas and roles; the worker's without.
    #[schema(value_type = Option<String>)]
    admin_url: Option<SecretString>,
    /// 1 to 63 of `a-z 0-9 _`; slot names are cluster-wide. `aura_cdc_<8 hex of the id>` without.
    slot_name: Option<String>,
    /// `auto` without: wal2json if its library is there, else pgoutput.
    plugin: Option<Plugin>,
    /// `auto` without: a lost or missing slot is made again, and a gap announced.
    slot_recreate: Option<SlotRecreate>,
}

/// What changes of a source. What is absent stays, null brings the default back.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"admin_url": null, "slot_recreate": "manual"}))]
pub(crate) struct PatchSource {
    /// The worker's login. Changed only while the engine is stopped.
    #[schema(value_type = Option<String>)]
    replication_url: Option<SecretString>,
    /// The api's login; null = the worker's.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    admin_url: Option<Option<SecretString>>,
    /// Changed only while the engine is stopped; null = its default name. The old slot is left as it is.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    slot_name: Option<Option<String>>,
    /// Changed only while the engine is stopped; null = `auto`.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<Plugin>)]
    plugin: Option<Option<Plugin>>,
    /// Null = `auto`.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<SlotRecreate>)]
    slot_recreate: Option<Option<SlotRecreate>>,
}

impl CreateSource {
    fn check(self) -> Result<NewSource> {
        let first = self.name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if !first || self.name.len() > MAX_NAME || !self.name.bytes().all(legal) {
            let detail = "name has 1 to 63 of A-Z a-z 0-9 . _ - and begins with a letter or digit.";
            return Err(ApiError::new(Code::InvalidBody, detail));
        }
        if self.name.parse::<SourceId>().is_ok() {
            return Err(ApiError::new(
                Code::InvalidBody,
                "name is an id: in a path it would stand for another source.",
            ));
        }
        checked_url(&self.replication_url, "replication_url")?;
        self.admin_url.as_ref().map(|url| checked_url(url, "admin_url")).transpose()?;
        self.slot_name.as_deref().map(checked_slot_name).transpose()?;
        Ok(NewSource {
            name: self.name,
            replication_url: self.replication_url,
            admin_url: self.admin_url,
            slot_name: self.slot_name,
            plugin: self.plugin.unwrap_or(Plugin::Auto),
            slot_recreate: self.slot_recreate.unwrap_or(SlotRecreate::Auto),
        })
    }
}

impl PatchSource {
    fn check(self) -> Result<SourceChange> {
        self.replication_url.as_ref().map(|url| checked_url(url, "replication_url")).transpose()?;
        self.admin_url.iter().flatten().try_for_each(|url| checked_url(url, "admin_url"))?;
        self.slot_name.iter().flatten().try_for_each(|name| checked_slot_name(name))?;
        Ok(SourceChange {
            replication_url: self.replication_url,
            admin_url: self.admin_url,
            slot_name: self.slot_name,
            plugin: self.plugin.map(|plugin| plugin.unwrap_or(Plugin::Auto)),
            slot_recreate: self.slot_recreate.map(|word| word.unwrap_or(SlotRecreate::Auto)),
        })
    }
}

/// The parser names the part that it can't read, never its value.
fn checked_url(url: &SecretString, member: &str) -> Result<()> {
    let unusable = |error| ApiError::new(Code::InvalidBody, format!("{member}: {error}."));
    SourceUrl::from_secret(url).map(drop).map_err(unusable)
}

fn checked_slot_name(name: &str) -> Result<()> {
    let legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    if name.is_empty() || name.len() > MAX_SLOT_NAME || !name.bytes().all(legal) {
        return Err(ApiError::new(Code::InvalidBody, "slot_name has 1 to 63 of a-z 0-9 _."));
    }
    Ok(())
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeleteQuery {
    /// End the engine first, and delete the source also if its server can't be reached.
    #[serde(default)]
    force: bool,
    /// Only say what would be done; nothing is changed.
    #[serde(default)]
    dry_run: bool,
}

/// List sources.
///
/// By name. What their engines do is at `/v1/engines`.
#[utoipa::path(
    get,
    path = "/v1/sources",
    operation_id = "list_sources",
    tag = "sources",
    params(PageQuery),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "A page", body = SourcePage)
    )
)]
pub(crate) async fn list_sources(
    _: Platform,
    State(state): State<AppState>,
    Params(query): Params<PageQuery>,
) -> Result<Json<SourcePage>> {
    let window = query.window::<String>("sources")?;
    let mut sources = state.store().list_sources(window.after.as_deref(), window.fetch()).await?;
    let next_cursor = window.cut(&mut sources, |source| source.name.clone());
    Ok(Json(SourcePage { items: sources.into_iter().map(SourceView::from).collect(), next_cursor }))
}

/// Create a source.
///
/// It gets an engine of its own, which a worker of the pool starts at once. With `?dry_run=true` nothing is saved, and the
/// answer is what stands in the way. Also where this refuses nothing the engine may fail: it says why, with the same codes.
#[utoipa::path(
    post,
    path = "/v1/sources",
    operation_id = "create_source",
    tag = "sources",
    extensions(("x-codes" = json!([Code::SourceExists]))),
    params(
        ("idempotency-key" = Option<String>, Header, description = "Any text of 1 to 255 bytes: a repeated request is answered as the first one was, for 24 h"),
        DryRun
    ),
    request_body = CreateSource,
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "Nothing was saved: what was found (`dry_run`)", body = Checked),
        (status = 201, description = "The source", body = SourceView, headers(("Location" = String, description = "The source"), ("ETag" = String, description = "Its version")))
    )
)]
pub(crate) async fn create_source(
    platform: Platform,
    State(state): State<AppState>,
    Params(query): Params<DryRun>,
    OnceJson { body, once }: OnceJson<CreateSource>,
) -> Result<Response> {
    let new = body.check()?;
    if query.dry_run {
        let id = SourceId(uuid::Uuid::new_v4());
        return Ok(Json(check(&new.into_source(id)).await?).into_response());
    }
    once.run(&state, platform.actor(), async |id| {
        let source = state.store().create_source(SourceId(id), new, Request::of(&platform).caller()).await?;
        let location = format!("/v1/sources/{}", source.id);
        Ok((StatusCode::CREATED, [(header::LOCATION, location)], shown(source)).into_response())
    })
    .await
}

/// Show a source.
///
/// What it was made from, without its URLs.
#[utoipa::path(
    get,
    path = "/v1/sources/{source}",
    operation_id = "get_source",
    tag = "sources",
    params(("source" = String, Path, description = "Id or name of the source", example = "shared")),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "The source", body = SourceView, headers(("ETag" = String, description = "Its version")))
    )
)]
pub(crate) async fn get_source(source: SourcePath) -> Response {
    shown(source.into_source())
}

/// A source and its version.
fn shown(source: Source) -> Response {
    ([(header::ETAG, version_etag(source.version))], Json(SourceView::from(source))).into_response()
}

/// Change a source.
///
/// What is absent stays, null brings the default back. What the engine reads by (`replication_url`, `slot_name`, `plugin`)
/// changes only while it is stopped. A worker that is started with `POSTGRES_REPLICATION_URL` sets `shared` again.
#[utoipa::path(
    patch,
    path = "/v1/sources/{source}",
    operation_id = "update_source",
    tag = "sources",
    extensions(("x-codes" = json!([Code::EngineStateConflict]))),
    params(
        ("source" = String, Path, description = "Id or name of the source", example = "shared"),
        ("if-match" = Option<String>, Header, description = "ETag of the version that the change is based on"),
        DryRun
    ),
    request_body = PatchSource,
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "The source as it is now; with `dry_run` what was found, as `validate` has it", body = DoneOr<SourceView, Checked>, headers(("ETag" = String, description = "Its version")))
    )
)]
pub(crate) async fn update_source(
    platform: Platform,
    source: SourcePath,
    State(state): State<AppState>,
    if_match: IfMatch,
    Params(query): Params<DryRun>,
    Json(body): Json<PatchSource>,
) -> Result<Response> {
    let change_to = body.check()?;
    let source = source.into_source();
    if query.dry_run {
        if_match.check(&version_etag(source.version), true)?;
        let found = check(&change_to.applied_to(source)).await?;
        return Ok(Json(DoneOr::<SourceView, _>::Planned(found)).into_response());
    }
    Ok(shown(change(&state, &source, change_to, &if_match, Request::of(&platform).caller()).await?))
}

/// Delete a source.
///
/// Its engine must be stopped, or is ended first with `?force=true`, and no project may use it. The slot is dropped if it
/// has the name that we give, and so is the publication; the answer says what became of them.
#[utoipa::path(
    delete,
    path = "/v1/sources/{source}",
    operation_id = "delete_source",
    tag = "sources",
    extensions(("x-codes" = json!([ASKS_SOURCE, Code::EngineStateConflict, Code::SourceInUse, Code::SlotInUseByOther]))),
    params(
        ("source" = String, Path, description = "Id or name of the source", example = "orders"),
        ("if-match" = Option<String>, Header, description = "ETag of the version that is to be deleted"),
        DeleteQuery
    ),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "It is deleted: what became of its slot and publication; with `dry_run` a `Plan`", body = DoneOr<Deleted, Plan>)
    )
)]
pub(crate) async fn delete_source(
    platform: Platform,
    source: SourcePath,
    State(state): State<AppState>,
    if_match: IfMatch,
    Params(query): Params<DeleteQuery>,
) -> Result<Response> {
    let source = source.into_source();
    if query.dry_run {
        let plan = plan_deletion(&state, &source, query.force, &if_match).await?;
        return Ok(Json(DoneOr::<Deleted, _>::Planned(Plan { plan })).into_response());
    }
    let deleted = delete(&state, &source, query.force, &if_match, Request::of(&platform).caller()).await?;
    Ok(Json(DoneOr::<_, Plan>::Done(deleted)).into_response())
}

/// Look whether a source has what we need.
///
/// Nothing is changed. With a body: as if that change had been made.
#[utoipa::path(
    post,
    path = "/v1/sources/{source}/validate",
    operation_id = "validate_source",
    tag = "sources",
    params(("source" = String, Path, description = "Id or name of the source", example = "shared")),
    request_body = Option<PatchSource>,
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "What was found", body = Checked)
    )
)]
pub(crate) async fn validate_source(
    _: Platform,
    source: SourcePath,
    body: Option<Json<PatchSource>>,
) -> Result<Json<Checked>> {
    let change = body.map(|Json(body)| body).unwrap_or_default().check()?;
    Ok(Json(check(&change.applied_to(source.into_source())).await?))
}

/// A source by its id or name.
pub(crate) async fn find_source(state: &AppState, word: &str) -> Result<Source> {
    let found = match word.parse::<SourceId>() {
        Ok(id) => state.store().source(id).await?,
        // No name has it, and no database takes it.
        Err(_) if word.contains('\0') => None,
        Err(_) => state.store().source_by_name(word).await?,
    };
    found.ok_or_else(ApiError::source_not_found)
}
