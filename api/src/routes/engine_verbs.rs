use std::time::Duration;

use aura_domain::{EngineReport, OnDeadline};
use aura_kit::{Code, Json, Problem};
use aura_store::{Caller, Source};
use axum::{
    extract::{Path, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use utoipa::ToSchema;

use crate::{
    access::Platform,
    engine::{self, EngineView, StopTerms, Stopped},
    error::{ApiError, Result},
    headers::Wait,
    openapi::ASKS_SOURCE,
    routes::{engines::show, sources::find_source},
    state::AppState,
};

/// Longest drain.
const MAX_DEADLINE_MS: u64 = 300_000;
/// What a stop takes besides its drain, at most: an answer comes, also when the platform database doesn't.
const BEYOND: Duration = Duration::from_millis(4_800);

/// How to stop.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({"deadline_ms": 25000, "on_deadline": "force"}))]
pub(crate) struct StopEngine {
    /// Drain for so long, 0 to 300 000; 0 skips the drain.
    #[schema(default = 25000, maximum = 300_000)]
    deadline_ms: u64,
    /// Then: the kill ladder, or leave the server's process alone.
    on_deadline: OnDeadline,
}

impl Default for StopEngine {
    fn default() -> Self {
        Self { deadline_ms: 25_000, on_deadline: OnDeadline::Force }
    }
}

impl StopEngine {
    fn terms(&self) -> Result<StopTerms> {
        let Self { deadline_ms, on_deadline } = *self;
        if deadline_ms > MAX_DEADLINE_MS {
            return Err(ApiError::new(Code::InvalidBody, format!("deadline_ms is 0 to {MAX_DEADLINE_MS}.")));
        }
        Ok(StopTerms { deadline: Duration::from_millis(deadline_ms), on_deadline })
    }
}

/// Nothing to say.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Nothing {}

/// Start an engine.
///
/// Its desired state is `running` from now on. 200 once it runs, 202 when that takes longer than `Prefer: wait=<s>`
/// (default 5, at most 60).
#[utoipa::path(
    post,
    path = "/v1/engines/{source}/start",
    operation_id = "start_engine",
    tag = "engines",
    extensions(("x-codes" = json!([Code::EngineStateConflict, Code::SlotInUseByOther]))),
    params(
        ("source" = String, Path, description = "Id or name of the source", example = "shared"),
        ("prefer" = Option<String>, Header, description = "`wait=<seconds>`", example = "wait=5")
    ),
    request_body(content = Option<Nothing>, example = json!({})),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "It runs", body = EngineView),
        (status = 202, description = "It is to run, and doesn't yet", body = EngineView, headers(("Location" = String, description = "Where to look"))),
        (status = 409, description = "`engine_state_conflict`: a stop is under way, or the slot is held; the problem has `state`, `legal_verbs` and `retry_after_ms`. `slot_in_use_by_other`: the problem has `pid` and `application_name`")
    )
)]
pub(crate) async fn start_engine(
    platform: Platform,
    State(state): State<AppState>,
    Path(word): Path<String>,
    Wait(wait): Wait,
    _: Option<Json<Nothing>>,
) -> Result<Response> {
    let request = Request::of(&platform);
    in_time(wait + BEYOND, async {
        let source = find_source(&state, &word).await?;
        let runs = engine::start(&state, &source, wait, request.caller()).await?;
        if runs { Ok(Json(show(&state, &source).await?).into_response()) } else { open(&state, &source).await }
    })
    .await
}

/// Stop an engine.
///
/// Its desired state is `stopped` from now on: it drains until the deadline and closes; what is left then is ended by the
/// kill ladder, whether or not anybody waits for the answer. An answer comes within the deadline and 5 s. `stopped` means
/// that the slot was seen inactive. A second stop joins the first; a shorter deadline or `force` tightens it. With
/// `abandon` no process of the server is ended.
#[utoipa::path(
    post,
    path = "/v1/engines/{source}/stop",
    operation_id = "stop_engine",
    tag = "engines",
    params(("source" = String, Path, description = "Id or name of the source", example = "shared")),
    request_body = Option<StopEngine>,
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "It is stopped: how its last run ended", body = EngineReport),
        (status = 202, description = "Its slot wasn't seen free yet: `state`, `reason` and `conditions` say why", body = EngineView, headers(("Location" = String, description = "Where to look"))),
        (status = 422, description = "`deadline_ms` is out of range, or a field is unknown"),
        (status = 503, description = "The platform database can't be reached: nothing was asked of the engine, or what came of it is not known")
    )
)]
pub(crate) async fn stop_engine(
    platform: Platform,
    State(state): State<AppState>,
    Path(word): Path<String>,
    body: Option<Json<StopEngine>>,
) -> Result<Response> {
    let terms = body.map(|Json(body)| body).unwrap_or_default().terms()?;
    let request = Request::of(&platform);
    in_time(terms.deadline + BEYOND, async {
        let source = find_source(&state, &word).await?;
        match engine::stop(&state, &source, terms, request.caller()).await? {
            Stopped::Report(report) => Ok(Json(report).into_response()),
            Stopped::Open => open(&state, &source).await,
        }
    })
    .await
}

/// End an engine at once.
///
/// Its desired state is `stopped` from now on. What its worker hasn't ended within half a second this instance ends itself:
/// it fences the worker, which may be dead, hung or out of reach, and ends what holds the slot under our name. What isn't
/// ours is never ended.
#[utoipa::path(
    post,
    path = "/v1/engines/{source}/force-close",
    operation_id = "force_close_engine",
    tag = "engines",
    extensions(("x-codes" = json!([Code::SlotInUseByOther]))),
    params(("source" = String, Path, description = "Id or name of the source", example = "shared")),
    request_body(content = Option<Nothing>, example = json!({})),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "It is stopped: how its last run ended", body = EngineReport),
        (status = 202, description = "Its slot wasn't seen free yet: `state`, `reason` and `conditions` say why", body = EngineView, headers(("Location" = String, description = "Where to look"))),
        (status = 409, description = "`slot_in_use_by_other`: the problem has `pid` and `application_name`; it was left alone")
    )
)]
pub(crate) async fn force_close_engine(
    platform: Platform,
    State(state): State<AppState>,
    Path(word): Path<String>,
    _: Option<Json<Nothing>>,
) -> Result<Response> {
    let request = Request::of(&platform);
    in_time(BEYOND, async {
        let source = find_source(&state, &word).await?;
        match engine::force_close(&state, &source, request.caller()).await? {
            Stopped::Report(report) => Ok(Json(report).into_response()),
            Stopped::Open => open(&state, &source).await,
        }
    })
    .await
}

/// Replace a lost or missing slot.
///
/// For sources with `slot_recreate: manual`, whose engine fails with `slot_lost`. What is lost is announced as a gap.
#[utoipa::path(
    post,
    path = "/v1/engines/{source}/recreate-slot",
    operation_id = "recreate_slot",
    tag = "engines",
    extensions(("x-codes" = json!([ASKS_SOURCE, Code::EngineStateConflict, Code::SlotNotLost]))),
    params(("source" = String, Path, description = "Id or name of the source", example = "shared")),
    request_body(content = Option<Nothing>, example = json!({})),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 202, description = "The engine will make a new slot", body = EngineView, headers(("Location" = String, description = "Where to look"))),
        (status = 409, description = "`engine_state_conflict`: the engine runs, or is being stopped. `slot_not_lost`: the slot is there"),
        (status = 503, description = "The source can't be reached")
    )
)]
pub(crate) async fn recreate_slot(
    platform: Platform,
    State(state): State<AppState>,
    Path(word): Path<String>,
    _: Option<Json<Nothing>>,
) -> Result<Response> {
    let request = Request::of(&platform);
    in_time(BEYOND, async {
        let source = find_source(&state, &word).await?;
        engine::new_slot(&state, &source, request.caller()).await?;
        open(&state, &source).await
    })
    .await
}

/// Who asks, for the audit.
pub(crate) struct Request<'a> {
    actor: &'a str,
    id: Option<String>,
}

impl<'a> Request<'a> {
    pub(crate) fn of(platform: &'a Platform) -> Self {
        Self { actor: platform.actor().as_str(), id: aura_kit::request_id::current() }
    }

    pub(crate) fn caller(&self) -> Caller<'_> {
        Caller { actor: self.actor, request_id: self.id.as_deref() }
    }
}

/// 202: not done yet, and how it is.
async fn open(state: &AppState, source: &Source) -> Result<Response> {
    let location = format!("/v1/engines/{}", source.id);
    let view = show(state, source).await?;
    Ok((StatusCode::ACCEPTED, [(header::LOCATION, location), (header::RETRY_AFTER, "1".to_owned())], Json(view))
        .into_response())
}

/// Whoever asks for something is answered in time, also when the platform database hangs.
async fn in_time(limit: Duration, answer: impl Future<Output = Result<Response>>) -> Result<Response> {
    let late = |_| Problem::new(Code::PlatformUnavailable, "The platform database takes too long.").retry_after(1);
    timeout(limit, Box::pin(answer)).await.map_err(late)?
}
