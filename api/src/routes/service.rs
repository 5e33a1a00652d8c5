use aura_kit::{Code, Problem, Report};
use axum::{extract::State, http::HeaderMap};
use serde_json::json;

use crate::{error::Result, state::AppState};

/// Whether the process is of use.
///
/// 503 asks for a restart: nothing else mends it.
#[utoipa::path(
    get,
    path = "/health",
    operation_id = "health",
    tag = "service",
    responses((status = 200, description = "Yes", body = Object), (status = 503, description = "No", body = Object))
)]
pub(crate) async fn health(State(state): State<AppState>) -> Report {
    match state.probes() {
        Some(probes) => probes.check_health().await,
        None => Report::ok(json!({"status": "ok"})),
    }
}

/// Whether the process takes work now.
///
/// 503 from the instant in which it begins to end, and while it can't work.
#[utoipa::path(
    get,
    path = "/ready",
    operation_id = "ready",
    tag = "service",
    responses((status = 200, description = "Yes", body = Object), (status = 503, description = "No", body = Object))
)]
pub(crate) async fn ready(State(state): State<AppState>) -> Report {
    match state.probes() {
        Some(probes) => probes.check_ready().await,
        None => Report::ok(json!({"status": "ok"})),
    }
}

/// Metrics for Prometheus.
///
/// With a token where one is configured, as `Authorization: Bearer`.
#[utoipa::path(
    get,
    path = "/metrics",
    operation_id = "metrics",
    tag = "service",
    extensions(("x-codes" = json!([Code::MissingCredentials, Code::RouteNotFound]))),
    responses(
        (status = 200, description = "Text format 0.0.4", body = String, content_type = "text/plain")
    )
)]
pub(crate) async fn metrics(State(state): State<AppState>, headers: HeaderMap) -> Result<String> {
    match state.probes() {
        Some(probes) => Ok(probes.render_metrics(&headers)?),
        None => Err(Problem::new(Code::RouteNotFound, "Another recorder has the metrics.").into()),
    }
}
