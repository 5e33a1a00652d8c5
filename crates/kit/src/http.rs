//! Listening, serving and the layers that every HTTP surface has.

mod accept;
pub mod client;
pub mod origins;
pub mod rate;

use std::{any::Any, net::SocketAddr};

use axum::{
    Router,
    body::Body,
    extract::{DefaultBodyLimit, Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use http::{HeaderValue, Version, header};
use tokio::{net::TcpListener, task::JoinHandle, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower_http::catch_panic::CatchPanicLayer;

pub use origins::Origins;
pub use rate::Limits;

use crate::{Code, Problem, ShutdownHandle, request_id};

/// Largest body in bytes unless a route says otherwise.
pub const BODY_LIMIT: usize = 1024 * 1024;

/// A listener that could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("can't listen on {address}: {}", reason(error))]
pub struct BindError {
    address: SocketAddr,
    /// No source of ours: the message says all of it.
    error: std::io::Error,
}

fn reason(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => "the port is taken".to_owned(),
        std::io::ErrorKind::PermissionDenied => "not permitted".to_owned(),
        _ => error.to_string(),
    }
}

/// Opens a listener; port 0 picks a free one.
///
/// # Errors
/// The address is taken or not ours; the message names it.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, BindError> {
    TcpListener::bind(address).await.map_err(|error| BindError { address, error })
}

/// Adds what every surface has: request id, a log line per request, panics and unknown routes as problems, a body limit.
/// Apply it last, after merging routers.
pub fn with_layers(router: Router) -> Router {
    limited(router, Limits::off())
}

/// The same, and nobody asks more often than `limits` allow.
fn limited(router: Router, limits: Limits) -> Router {
    router
        .fallback(|| async { Problem::new(Code::RouteNotFound, "No route has this path.") })
        .method_not_allowed_fallback(|| async {
            Problem::new(Code::MethodNotAllowed, "The Allow header lists what this path takes.")
        })
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn_with_state(limits, Limits::pass))
        .layer(middleware::from_fn(log_request))
        .layer(middleware::from_fn(request_id::layer))
}

#[expect(clippy::needless_pass_by_value, reason = "the layer's signature")]
fn panicked(panic: Box<dyn Any + Send + 'static>) -> Response<Body> {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref().copied());
    tracing::error!(panic = text, request_id = request_id::current(), "a handler panicked");
    Problem::new(Code::Internal, "The log has more under this request id.").into_response()
}

/// One line per request: method, route pattern (never the path: it holds names), status, time.
async fn log_request(request: Request, next: Next) -> Response {
    let started = Instant::now();
    let method = request.method().clone();
    let route = request.extensions().get::<axum::extract::MatchedPath>().map(|path| path.as_str().to_owned());
    let response = next.run(request).await;
    let (status, elapsed) = (response.status().as_u16(), started.elapsed());
    let code = response.extensions().get::<Code>().map(|code| code.as_str());
    metrics::histogram!("http_request_duration_seconds").record(elapsed.as_secs_f64());
    tracing::debug!(
        %method,
        route,
        status,
        code,
        elapsed_ms = elapsed.as_secs_f64() * 1000.0,
        request_id = request_id::current(),
        "request"
    );
    response
}

/// Paths that answer to the very end: probes, and what an operator looks at and forces during a drain that hangs.
const ALWAYS: &[&str] = &["/health", "/ready", "/metrics", "/status", "/engine/"];
/// Clients find another process by then.
const RETRY_AFTER: u64 = 1;

/// A listener and its router. It outlives the trigger: from then on probes are answered and everything else is refused.
#[derive(Debug)]
pub struct Server {
    gate: Gate,
    leave: CancellationToken,
    serving: JoinHandle<()>,
}

impl Server {
    /// Serves `router` within [`with_layers`], to each client as often as `limits` allow.
    ///
    /// # Errors
    /// The listener has no address.
    pub fn start(
        listener: TcpListener,
        router: Router,
        limits: Limits,
        shutdown: &ShutdownHandle,
    ) -> std::io::Result<Self> {
        tracing::info!(address = %listener.local_addr()?, "listening");
        let gate = Gate { shutdown: shutdown.clone(), inside: TaskTracker::new() };
        let router = router.layer(middleware::from_fn_with_state(gate.clone(), Gate::pass));
        let leave = CancellationToken::new();
        let serving = tokio::spawn(accept::serve(listener, limited(router, limits), leave.clone()));
        Ok(Self { gate, leave, serving })
    }

    /// Returns when the drain has started and no request is being handled. Upgraded sockets and streamed bodies don't count.
    pub async fn finished(&self) {
        self.gate.shutdown.token().cancelled().await;
        self.gate.inside.close();
        self.gate.inside.wait().await;
    }

    /// Closes the listener, and each connection once what it is sending is out.
    pub async fn close(self) {
        self.leave.cancel();
        // A panic in there was reported by the runtime.
        drop(self.serving.await);
    }
}

/// Counts requests, and refuses new ones from the trigger on.
#[derive(Debug, Clone)]
struct Gate {
    shutdown: ShutdownHandle,
    inside: TaskTracker,
}

impl Gate {
    async fn pass(State(gate): State<Self>, request: Request, next: Next) -> Response {
        if ALWAYS.iter().any(|path| request.uri().path().starts_with(path)) {
            return next.run(request).await;
        }
        // Counted before the look at the trigger, so that none slips in behind `finished`.
        let _inside = gate.inside.token();
        if gate.shutdown.is_triggered() {
            return refuse(request.version());
        }
        next.run(request).await
    }
}

fn refuse(version: Version) -> Response {
    let problem = Problem::new(Code::ShuttingDown, "Try again, another process will answer.");
    let mut response = problem.retry_after(RETRY_AFTER).into_response();
    if version < Version::HTTP_2 {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}
