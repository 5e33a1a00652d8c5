//! `/engine/{source}/start|stop|force-close` on the worker's own port: for when there is no api to ask. The platform key
//! always, also from this machine, and JSON only, so that no web page can send it (R-SEC-7).

use std::time::{Duration, Instant};

use aura_auth::{AuthError, Verifier, token_from_headers};
use aura_domain::{EngineReport, EngineState, OnDeadline, SourceId};
use aura_kit::{Code, Problem, json::Object};
use aura_store::{Caller, Engine, StartRequest, StopRequest, Store, StoreError};
use axum::{
    Json, Router,
    body::Bytes,
    extract::{FromRequestParts, Path, State},
    http::{HeaderMap, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
    routing::post,
};
use secrecy::SecretString;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::Desk;

/// Longest drain (R-ENG-3).
const MAX_DEADLINE_MS: u64 = 300_000;
/// A stop is answered by its deadline and this.
const BEYOND: Duration = Duration::from_millis(4800);
/// How long a start is waited for.
const START: Duration = Duration::from_secs(5);
/// Between two looks at the row.
const POLL: Duration = Duration::from_millis(50);

/// What the routes need.
#[derive(Clone)]
pub(crate) struct Verbs {
    pub(crate) desk: Desk,
    pub(crate) store: Store,
    /// Of platform keys; `None` = it isn't configured, and nobody is let in.
    pub(crate) secret: Option<SecretString>,
}

impl Verbs {
    pub(crate) fn router(self) -> Router {
        Router::new()
            .route("/engine/{source}/start", post(start))
            .route("/engine/{source}/stop", post(stop))
            .route("/engine/{source}/force-close", post(force_close))
            .with_state(self)
    }
}

/// Who asks for a change, in the audit.
const CALLER: Caller<'static> = Caller { actor: "platform", request_id: None };

/// The right to run the platform.
struct Platform;

impl FromRequestParts<Verbs> for Platform {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &Verbs) -> Result<Self, Problem> {
        let Some(secret) = &state.secret else {
            let detail = "This worker has no AURA_PLATFORM_JWT_SECRET, so it can't verify any key.";
            return Err(Problem::new(Code::InvalidToken, detail));
        };
        let verified = token_from_headers(&parts.headers).and_then(|token| Verifier::verify_platform(secret, token));
        verified.map(|_| Self).map_err(|error| {
            let code = match error {
                AuthError::Missing => Code::MissingCredentials,
                AuthError::Expired => Code::TokenExpired,
                _ => Code::InvalidToken,
            };
            Problem::new(code, format!("Not a platform key: {error}."))
        })
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct StopBody {
    deadline_ms: u64,
    on_deadline: OnDeadline,
}

impl Default for StopBody {
    fn default() -> Self {
        Self { deadline_ms: 25_000, on_deadline: OnDeadline::Force }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

/// A body may be left out; the content type may not.
fn body<T: DeserializeOwned + Default>(headers: &HeaderMap, bytes: &Bytes) -> Result<T, Problem> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if kind.split(';').next().map(str::trim) != Some("application/json") {
        return Err(Problem::new(
            Code::UnsupportedMediaType,
            "Send content-type: application/json, also without a body.",
        ));
    }
    if bytes.is_empty() {
        return Ok(T::default());
    }
    serde_json::from_slice(bytes).map(|Object(body)| body).map_err(|error| {
        let code = if error.is_data() { Code::InvalidBody } else { Code::MalformedRequest };
        Problem::new(code, format!("The body can't be used: {error}."))
    })
}

/// What an engine is, as far as it matters to whoever asked.
#[derive(Debug, Serialize)]
struct Shown {
    source: SourceId,
    state: EngineState,
    reason: Option<String>,
    epoch: i64,
    last_report: Option<EngineReport>,
}

impl From<Engine> for Shown {
    fn from(engine: Engine) -> Self {
        let Engine { source, state, reason, epoch, last_report, .. } = engine;
        Self { source, state, reason, epoch: epoch.0, last_report }
    }
}

async fn start(
    _: Platform,
    State(verbs): State<Verbs>,
    Path(word): Path<String>,
    headers: HeaderMap,
    bytes: Bytes,
) -> Result<Response, Problem> {
    body::<Nothing>(&headers, &bytes)?;
    let source = verbs.find(&word).await?;
    match verbs.store.request_start(source, CALLER).await.map_err(problem)? {
        StartRequest::Accepted => verbs.answer(source, EngineState::Running, START).await,
        StartRequest::Refused { state, retry_after_ms } => {
            let legal: Vec<_> = state.legal_verbs().map(|verb| serde_json::Value::from(verb.as_str())).collect();
            let conflict =
                Problem::new(Code::EngineStateConflict, format!("Not possible now: start; its state is {state}."));
            let conflict = conflict.with("state", state.as_str()).with("legal_verbs", legal);
            Err(match retry_after_ms {
                Some(ms) => {
                    conflict.with("retry_after_ms", ms).retry_after(u64::try_from(ms).unwrap_or(0).div_ceil(1000))
                }
                None => conflict,
            })
        }
    }
}

async fn stop(
    _: Platform,
    State(verbs): State<Verbs>,
    Path(word): Path<String>,
    headers: HeaderMap,
    bytes: Bytes,
) -> Result<Response, Problem> {
    let StopBody { deadline_ms, on_deadline } = body(&headers, &bytes)?;
    if deadline_ms > MAX_DEADLINE_MS {
        return Err(Problem::new(Code::InvalidBody, format!("deadline_ms is 0 to {MAX_DEADLINE_MS}.")));
    }
    let source = verbs.find(&word).await?;
    let deadline = Duration::from_millis(deadline_ms);
    match verbs.store.request_stop(source, deadline, on_deadline, CALLER).await.map_err(problem)? {
        StopRequest::Already(engine) => Ok(ended(*engine)),
        StopRequest::Accepted { operation, .. } => {
            let left = Duration::from_millis(u64::try_from(operation.remaining_ms).unwrap_or(0));
            verbs.answer(source, EngineState::Stopped, left + BEYOND).await
        }
    }
}

/// The engine of this process first: that needs nobody.
async fn force_close(
    _: Platform,
    State(verbs): State<Verbs>,
    Path(word): Path<String>,
    headers: HeaderMap,
    bytes: Bytes,
) -> Result<Response, Problem> {
    body::<Nothing>(&headers, &bytes)?;
    let known = verbs.desk.find(&word);
    let cut = known.is_some_and(|source| verbs.desk.force_close(source));
    let asking = async {
        let source = verbs.find(&word).await?;
        verbs.store.request_force_close(source, CALLER).await.map_err(problem)?;
        verbs.answer(source, EngineState::Stopped, BEYOND).await
    };
    match tokio::time::timeout(BEYOND, asking).await {
        Ok(Err(error)) if cut && error.code() == Code::PlatformUnavailable => Err(cut_only()),
        Ok(answer) => answer,
        Err(_) if cut => Err(cut_only()),
        Err(_) => Err(Problem::new(Code::PlatformUnavailable, "The platform database takes too long.").retry_after(1)),
    }
}

fn cut_only() -> Problem {
    let detail = "The engine was cut off here. Its desired state could not be stored, so it starts again when the platform \
                  database is back: ask again then.";
    Problem::new(Code::PlatformUnavailable, detail).retry_after(1)
}

impl Verbs {
    /// By id or name. One that this worker knows needs no database.
    async fn find(&self, word: &str) -> Result<SourceId, Problem> {
        if let Some(source) = self.desk.find(word) {
            return Ok(source);
        }
        let by_name = self.store.source_by_name(word).await.map_err(problem)?;
        let source = match (by_name, word.parse()) {
            (None, Ok(id)) => self.store.source(id).await.map_err(problem)?,
            (source, _) => source,
        };
        source
            .map(|source| source.id)
            .ok_or_else(|| Problem::new(Code::SourceNotFound, "No source has that id or name."))
    }

    /// The state of an engine that is to be run is its worker's word, and that may be dead.
    async fn is_true(&self, engine: &Engine) -> Result<bool, Problem> {
        Ok(engine.state == EngineState::Stopped || engine.is_led(&self.store.workers().await.map_err(problem)?))
    }

    /// 200 once the engine is in the wanted state, 202 when that takes longer.
    async fn answer(&self, source: SourceId, wanted: EngineState, limit: Duration) -> Result<Response, Problem> {
        let deadline = Instant::now() + limit;
        loop {
            let engine = self.store.engine(source).await.map_err(problem)?;
            let engine = engine.ok_or_else(|| Problem::new(Code::SourceNotFound, "The source is gone."))?;
            if engine.state == wanted && engine.operation.is_none() && self.is_true(&engine).await? {
                return Ok(ended(engine));
            }
            if Instant::now() >= deadline {
                return Ok((StatusCode::ACCEPTED, Json(Shown::from(engine))).into_response());
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

fn ended(engine: Engine) -> Response {
    Json(Shown::from(engine)).into_response()
}

fn problem(error: StoreError) -> Problem {
    match &error {
        StoreError::NotFound(_) => Problem::new(Code::SourceNotFound, "No source has that id or name."),
        error if error.is_retryable() => {
            Problem::new(Code::PlatformUnavailable, "Try again in a moment.").retry_after(1)
        }
        error => Problem::internal(error),
    }
}
