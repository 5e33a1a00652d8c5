//! `/health`, `/ready` and `/metrics`.

use std::{pin::Pin, sync::Arc, time::Duration};

use axum::{
    Router,
    response::{IntoResponse, Response},
    routing::get,
};
use http::{HeaderMap, StatusCode, header};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};

use crate::{Code, Metrics, Problem, ShutdownHandle};

/// A probe that takes longer counts as failed, so that a hung dependency doesn't hang the prober.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Answer of a probe: 200 or 503, with a body that says why.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// 200 if true.
    pub ok: bool,
    /// The body.
    pub body: Value,
}

impl Report {
    /// 200.
    pub fn ok(body: Value) -> Self {
        Self { ok: true, body }
    }

    /// 503.
    pub fn failing(body: Value) -> Self {
        Self { ok: false, body }
    }
}

impl IntoResponse for Report {
    fn into_response(self) -> Response {
        let status = if self.ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        (status, [(header::CACHE_CONTROL, "no-store")], axum::Json(self.body)).into_response()
    }
}

type Probe = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Report> + Send>> + Send + Sync>;

/// The probes of a binary.
#[derive(Clone)]
pub struct Probes {
    health: Probe,
    ready: Probe,
    metrics: Metrics,
    metrics_token: Option<SecretString>,
    shutdown: Option<ShutdownHandle>,
}

impl Probes {
    /// Probes that are always content; replace them with [`Self::health`] and [`Self::ready`].
    pub fn new(metrics: Metrics) -> Self {
        let content = || async { Report::ok(json!({"status": "ok"})) };
        Self { health: boxed(content), ready: boxed(content), metrics, metrics_token: None, shutdown: None }
    }

    /// Not ready from the instant in which `shutdown` is triggered, whatever the readiness probe would say.
    #[must_use]
    pub fn until(mut self, shutdown: &ShutdownHandle) -> Self {
        self.shutdown = Some(shutdown.clone());
        self
    }

    /// Whether the process is of use at all: an orchestrator restarts it otherwise.
    #[must_use]
    pub fn health<Fut>(mut self, probe: impl Fn() -> Fut + Send + Sync + 'static) -> Self
    where
        Fut: Future<Output = Report> + Send + 'static,
    {
        self.health = boxed(probe);
        self
    }

    /// Whether the process takes work now.
    #[must_use]
    pub fn ready<Fut>(mut self, probe: impl Fn() -> Fut + Send + Sync + 'static) -> Self
    where
        Fut: Future<Output = Report> + Send + 'static,
    {
        self.ready = boxed(probe);
        self
    }

    /// Asks for this bearer token at `/metrics`.
    #[must_use]
    pub fn metrics_token(mut self, token: Option<SecretString>) -> Self {
        self.metrics_token = token;
        self
    }

    /// Runs the health probe.
    pub async fn check_health(&self) -> Report {
        bounded(&self.health).await
    }

    /// Runs the readiness probe.
    pub async fn check_ready(&self) -> Report {
        if self.shutdown.as_ref().is_some_and(ShutdownHandle::is_triggered) {
            return Report::failing(json!({"status": "draining"}));
        }
        bounded(&self.ready).await
    }

    /// The metrics, or a problem if the token is wrong.
    ///
    /// # Errors
    /// 401 if a token is configured and `headers` don't carry it.
    pub fn render_metrics(&self, headers: &HeaderMap) -> Result<String, Problem> {
        let sent = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        match &self.metrics_token {
            Some(token) if sent != Some(format!("Bearer {}", token.expose_secret()).as_str()) => {
                Err(Problem::new(Code::MissingCredentials, "This installation asks for a token here."))
            }
            _ => Ok(self.metrics.render()),
        }
    }

    /// A router with the three routes.
    pub fn router(self) -> Router {
        let (health, ready, metrics) = (self.clone(), self.clone(), self);
        Router::new()
            .route("/health", get(|| async move { health.check_health().await }))
            .route("/ready", get(|| async move { ready.check_ready().await }))
            .route("/metrics", get(|headers: HeaderMap| async move { metrics.render_metrics(&headers) }))
    }
}

fn boxed<Fut>(probe: impl Fn() -> Fut + Send + Sync + 'static) -> Probe
where
    Fut: Future<Output = Report> + Send + 'static,
{
    Arc::new(move || Box::pin(probe()))
}

async fn bounded(probe: &Probe) -> Report {
    let answer = tokio::time::timeout(PROBE_TIMEOUT, probe()).await;
    answer.unwrap_or_else(|_| Report::failing(json!({"status": "probe timed out"})))
}
