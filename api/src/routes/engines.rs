use aura_domain::{Epoch, Lsn, SourceId, WorkerId};
use aura_kit::{Code, Json, Problem, problem::ProblemBody};
use aura_lease::{Holder, LeaseBackend};
use aura_store::{Engine, PostgresLease, Source};
use axum::{
    extract::{FromRequestParts, State},
    http::request::Parts,
};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    access::{Platform, path_param},
    error::{ApiError, Result},
    routes::sources::find_source,
    state::AppState,
};

/// What reads a source's changes.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Engine)]
pub(crate) struct EngineView {
    /// Id of its source.
    #[schema(value_type = uuid::Uuid)]
    source: SourceId,
    /// `running` or `stopped`: what the operator wants.
    desired: &'static str,
    /// What was observed last: `stopped`, `starting`, `running`, `backoff`, `draining`, `closing`, `force_closing`,
    /// `zombie` or `failed`.
    state: &'static str,
    /// Code or text that goes with the state.
    reason: Option<String>,
    /// When it entered the state, RFC 3339.
    since: String,
    /// Rises with each worker that takes over.
    #[schema(value_type = i64)]
    epoch: Epoch,
    /// Rises when positions lose their meaning.
    generation: u32,
    /// `paused`, `lagging`, …
    conditions: Vec<String>,
    /// Who runs it; null when nobody does.
    lease: Option<LeaseView>,
    /// The slot.
    slot: SlotView,
    /// The running filter.
    filter: FilterView,
}

/// The lease of the worker that runs an engine.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EngineLease)]
struct LeaseView {
    /// The worker.
    #[schema(value_type = String)]
    holder: WorkerId,
    /// Until it expires, unless it is renewed before; 0 = expired.
    remaining_ms: u64,
}

/// The replication slot.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EngineSlot)]
struct SlotView {
    /// Its name.
    name: String,
    /// What was confirmed last, and is not sent again.
    #[schema(value_type = Option<String>, example = "16/B374D848")]
    confirmed_lsn: Option<Lsn>,
}

/// The filter.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EngineFilter)]
struct FilterView {
    /// Registry revision that it holds.
    applied_revision: i64,
}

/// All engines.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EnginePage {
    /// By their source's name.
    items: Vec<EngineView>,
    /// Always null: there are few.
    next_cursor: Option<String>,
}

/// The right to one source, and the source.
pub(crate) struct SourcePath(Source);

impl FromRequestParts<AppState> for SourcePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self> {
        Platform::from_request_parts(parts, state).await?;
        let word = path_param(parts, state, "source").await?;
        Ok(Self(find_source(state, &word).await?))
    }
}

/// List engines.
#[utoipa::path(
    get,
    path = "/v1/engines",
    operation_id = "list_engines",
    tag = "engines",
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "All of them", body = EnginePage),
        (status = "4XX", description = "Refused", body = ProblemBody, content_type = "application/problem+json"),
        (status = "5XX", description = "Not possible now", body = ProblemBody, content_type = "application/problem+json")
    )
)]
pub(crate) async fn list_engines(_: Platform, State(state): State<AppState>) -> Result<Json<EnginePage>> {
    let mut items = Vec::new();
    for source in state.store().sources().await? {
        items.push(show(&state, source).await?);
    }
    Ok(Json(EnginePage { items, next_cursor: None }))
}

/// Show an engine.
#[utoipa::path(
    get,
    path = "/v1/engines/{source}",
    operation_id = "get_engine",
    tag = "engines",
    params(("source" = String, Path, description = "Id or name of the source")),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "The engine", body = EngineView),
        (status = "4XX", description = "Refused", body = ProblemBody, content_type = "application/problem+json"),
        (status = "5XX", description = "Not possible now", body = ProblemBody, content_type = "application/problem+json")
    )
)]
pub(crate) async fn get_engine(
    SourcePath(source): SourcePath,
    State(state): State<AppState>,
) -> Result<Json<EngineView>> {
    Ok(Json(show(&state, source).await?))
}

async fn show(state: &AppState, source: Source) -> Result<EngineView> {
    let engine = state.store().engine(source.id).await?.ok_or_else(ApiError::source_not_found)?;
    let position = state.store().position(source.id).await?;
    let lease = lease(state, source.id).await?;
    let Engine { source: id, desired, state, reason, since, epoch, generation, applied_revision, .. } = engine;
    // A position of an older generation means nothing any more.
    let confirmed_lsn = position.filter(|(of, _)| *of == generation).map(|(_, lsn)| lsn);
    Ok(EngineView {
        source: id,
        desired: desired.as_str(),
        state: state.as_str(),
        reason,
        since,
        epoch,
        generation: generation.0,
        conditions: Vec::new(),
        lease,
        slot: SlotView { name: source.slot_name, confirmed_lsn },
        filter: FilterView { applied_revision },
    })
}

/// Who holds the source's lease. The platform database knows only its own: with another back end it is null.
async fn lease(state: &AppState, source: SourceId) -> Result<Option<LeaseView>> {
    let holder = PostgresLease::new(state.store()).holder(&format!("source-{source}")).await;
    let unreadable = |error| {
        tracing::warn!(%error, "lease");
        ApiError::from(Problem::new(Code::PlatformUnavailable, "Try again in a moment.").retry_after(1))
    };
    Ok(holder.map_err(unreadable)?.map(|Holder { holder, remaining }| LeaseView {
        holder,
        remaining_ms: u64::try_from(remaining.as_millis()).unwrap_or(u64::MAX),
    }))
}
