//! The WebSocket endpoints: the upgrade, and one task per socket.

mod access;
mod broadcast;
mod channel;
mod join;
mod session;
mod writer;

use std::sync::Arc;

use aura_kit::{Code, Problem};
use aura_wire::phoenix::Version;
use axum::{
    Json,
    extract::{
        State, WebSocketUpgrade,
        ws::{WebSocket, rejection::WebSocketUpgradeRejection},
    },
    response::{IntoResponse, Response},
};
use http::{HeaderMap, StatusCode};
use serde_json::json;

use crate::{
    front::Shared,
    identity::{Identity, TokenError},
    query::Params,
};

/// What a page of another origin is told.
pub(crate) const ORIGIN: &str = "This installation lists the pages that may connect, and yours is not among them.";

/// `GET /socket/websocket`.
pub(crate) async fn upgrade(
    State(shared): State<Arc<Shared>>,
    query: Params,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Response {
    let upgrade = match upgrade {
        Ok(upgrade) => upgrade,
        Err(rejection) => return Problem::new(Code::MalformedRequest, rejection.body_text()).into_response(),
    };
    if !shared.settings.origins.allow(&headers) {
        metrics::counter!("front_connects_refused_total", "reason" => "origin").increment(1);
        return Problem::new(Code::OriginNotAllowed, ORIGIN).into_response();
    }
    let Some(version) = Version::from_param(query.get("vsn")) else {
        return StatusCode::FORBIDDEN.into_response();
    };
    let header = headers.get("x-api-key").and_then(|value| value.to_str().ok());
    let token = token_text(header.or_else(|| query.get("apikey")));
    match connect(&shared, &token).await {
        Ok(identity) => accept(shared, upgrade, version, identity, token),
        Err(error) => refuse(&error),
    }
}

/// As the original: all blank space goes.
fn token_text(token: Option<&str>) -> String {
    token.unwrap_or_default().split_whitespace().collect()
}

async fn connect(shared: &Shared, token: &str) -> Result<Identity, TokenError> {
    if shared.draining() {
        return Err(TokenError::Unavailable);
    }
    if token.is_empty() { Err(TokenError::Missing) } else { shared.auth.connect(token).await }
}

fn refuse(error: &TokenError) -> Response {
    metrics::counter!("front_connects_refused_total", "reason" => error.code()).increment(1);
    (error.status(), Json(json!({"error": error.at_connect()}))).into_response()
}

fn accept(
    shared: Arc<Shared>,
    upgrade: WebSocketUpgrade,
    version: Version,
    identity: Identity,
    token: String,
) -> Response {
    let limit = shared.settings.frame_bytes;
    upgrade
        .max_message_size(limit)
        .max_frame_size(limit)
        .write_buffer_size(64 << 10)
        // A frame to a client has at most 1 MiB; the queue bounds the rest.
        .max_write_buffer_size(4 << 20)
        .on_upgrade(move |socket| serve(shared, socket, version, identity, token))
}

async fn serve(shared: Arc<Shared>, socket: WebSocket, version: Version, identity: Identity, token: String) {
    let tracker = shared.tracker.clone();
    // The web server runs this task; the tracker lets the drain wait for it.
    tracker.track_future(Box::pin(session::run(shared, socket, version, identity, token))).await;
}
