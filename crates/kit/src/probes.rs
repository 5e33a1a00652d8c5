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
use subtle::ConstantTimeEq;

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

/// Who may see what only operators need.
#[derive(Debug, Clone)]
pub enum MetricsAccess {
    /// Whoever reaches the listener.
    Everybody,
    /// Whoever sends this as a bearer token.
    Token(SecretString),
    /// Nobody: it is a public address, and no token is configured.
    Nobody,
}

impl MetricsAccess {
    /// Lets a request pass.
    ///
    /// # Errors
    /// 401 if the headers don't carry the token, or there is none.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), Problem> {
        let refused = |detail| Err(Problem::new(Code::MissingCredentials, detail));
        match self {
            Self::Everybody => Ok(()),
            Self::Nobody => refused("Nobody may read this at a public address, unless AURA_METRICS_TOKEN is set."),
            Self::Token(token) => {
                let wanted = format!("Bearer {}", token.expose_secret());
                let sent = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()).unwrap_or_default();
                // The time tells nothing of how much was right.
                match bool::from(sent.ct_eq(wanted.as_bytes())) {
                    true => Ok(()),
                    false => refused("This installation asks for a token here."),
                }
            }
        }
    }
}

type Probe = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Report> + Send>> + Send + Sync>;

/// The probes of a binary.
#[derive(Clone)]
pub struct Probes {
    health: Probe,
    ready: Probe,
    metrics: Metrics,
    access: MetricsAccess,
    shutdown: Option<ShutdownHandle>,
}

impl Probes {
    /// Probes that are always content; replace them with [`Self::health`] and [`Self::ready`].
    pub fn new(metrics: Metrics) -> Self {
        let content = || async { Report::ok(json!({"status": "ok"})) };
        Self {
            health: boxed(content),
            ready: boxed(content),
            metrics,
            access: MetricsAccess::Everybody,
            shutdown: None,
        }
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

    /// Shows the metrics to these only.
    #[must_use]
    pub fn metrics_access(mut self, access: MetricsAccess) -> Self {
        self.access = access;
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
    /// 401 if `headers` don't carry what is asked for.
    pub fn render_metrics(&self, headers: &HeaderMap) -> Result<String, Problem> {
        self.access.check(headers).map(|()| self.metrics.render())
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
