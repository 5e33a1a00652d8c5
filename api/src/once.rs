//! `Idempotency-Key` (IETF draft-ietf-httpapi-idempotency-key-header): who repeats a request within 24 h gets the first one's
//! answer.

use std::time::Duration;

use aura_kit::{Code, JsonBytes, Problem};
use aura_store::{OnceClaim, OnceRequest};
use axum::{
    body::{Body, to_bytes},
    extract::{FromRequest, Request},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::Response,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    access::Actor,
    error::{ApiError, Result},
    state::AppState,
};

/// Longest key in bytes.
const MAX_KEY: usize = 255;
/// Largest answer that is kept, in bytes; ours have a few KiB.
const MAX_ANSWER: usize = 1 << 20;
/// What of an answer's head is kept.
const HEADERS: [HeaderName; 3] = [header::CONTENT_TYPE, header::LOCATION, header::ETAG];
/// Says that the answer is an earlier one.
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// How often old answers are forgotten.
const SWEEP: Duration = Duration::from_secs(600);

/// A JSON body of a request that may be repeated; without `Idempotency-Key` it is as any other.
pub(crate) struct OnceJson<T> {
    pub(crate) body: T,
    pub(crate) once: Once,
}

/// Whether a request was done before.
#[derive(Default)]
pub(crate) struct Once {
    key: Option<String>,
    /// Method, path, query and body.
    content: Vec<u8>,
}

/// An answer that is kept.
#[derive(Serialize, Deserialize)]
struct Kept {
    status: u16,
    headers: Vec<(String, String)>,
    body: String,
}

impl<T: DeserializeOwned> FromRequest<AppState> for OnceJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self> {
        let key = key(request.headers())?;
        let mut content = format!("{} {}\n", request.method(), request.uri()).into_bytes();
        let JsonBytes(body, bytes) = JsonBytes::from_request(request, state).await?;
        content.extend_from_slice(&bytes);
        Ok(Self { body, once: Once { key, content } })
    }
}

fn key(headers: &HeaderMap) -> Result<Option<String>> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    // As a structured field it is a quoted string; most send it bare.
    let key = value.to_str().ok().map(|text| text.trim().trim_matches('"'));
    match key.filter(|key| (1..=MAX_KEY).contains(&key.len())) {
        Some(key) => Ok(Some(key.to_owned())),
        None => Err(ApiError::invalid_parameter(format!("Idempotency-Key has 1 to {MAX_KEY} visible characters."))),
    }
}

impl Once {
    /// Does `work` unless it was done: its argument is the id of what it makes, the same in every try of the request. Only
    /// successes are kept. A refusal frees the key; after a failure the next try goes on.
    pub(crate) async fn run(
        self,
        state: &AppState,
        actor: &Actor,
        work: impl AsyncFnOnce(Uuid) -> Result<Response>,
    ) -> Result<Response> {
        let Some(key) = &self.key else { return work(Uuid::new_v4()).await };
        let request = OnceRequest { scope: actor.as_str(), key, content: &self.content };
        let ticket = match state.store().claim_once(request).await? {
            OnceClaim::Fresh { ticket } => ticket,
            OnceClaim::Answered(kept) => return replay(&kept),
            OnceClaim::UnderWay => {
                let detail = "Its answer is not there yet.";
                return Err(Problem::new(Code::IdempotencyInProgress, detail).retry_after(1).into());
            }
            OnceClaim::Reused => {
                let detail = "Use a fresh key for another request, and the same one for exactly the same.";
                return Err(ApiError::new(Code::IdempotencyKeyReused, detail));
            }
        };
        match work(ticket).await {
            Ok(response) => keep(state, request, response).await,
            Err(error) => {
                state.store().release_once(request, error.code().status() < 500).await?;
                Err(error)
            }
        }
    }
}

async fn keep(state: &AppState, request: OnceRequest<'_>, response: Response) -> Result<Response> {
    let (parts, body) = response.into_parts();
    let bytes = to_bytes(body, MAX_ANSWER).await.map_err(|error| Problem::internal(&error))?;
    let text = |name: &HeaderName| Some((name.to_string(), parts.headers.get(name)?.to_str().ok()?.to_owned()));
    let kept = Kept {
        status: parts.status.as_u16(),
        headers: HEADERS.iter().filter_map(text).collect(),
        body: String::from_utf8_lossy(&bytes).into_owned(),
    };
    let kept = serde_json::to_vec(&kept).map_err(|error| Problem::internal(&error))?;
    state.store().answer_once(request, &kept).await?;
    Ok(Response::from_parts(parts, Body::from(bytes)))
}

fn replay(kept: &[u8]) -> Result<Response> {
    let kept: Kept = serde_json::from_slice(kept).map_err(|error| Problem::internal(&error))?;
    let mut response = Response::new(Body::from(kept.body));
    *response.status_mut() = StatusCode::from_u16(kept.status).unwrap_or(StatusCode::OK);
    let headers = response.headers_mut();
    for (name, value) in &kept.headers {
        if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), value.parse()) {
            headers.insert(name, value);
        }
    }
    headers.insert(REPLAYED, HeaderValue::from_static("true"));
    Ok(response)
}

/// Forgets old answers, until `stop`.
pub(crate) async fn sweep(state: &AppState, stop: &CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(SWEEP)).await.is_some() {
        if let Err(error) = state.store().forget_answers().await {
            tracing::warn!(%error, "old answers are not forgotten");
        }
    }
}
