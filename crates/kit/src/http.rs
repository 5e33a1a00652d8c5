//! Listening, serving and the layers that every HTTP surface has.

use std::{any::Any, net::SocketAddr};

use axum::{
    Router,
    body::Body,
    extract::{DefaultBodyLimit, Request},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    serve::ListenerExt,
};
use tokio::{net::TcpListener, time::Instant};
use tower_http::catch_panic::CatchPanicLayer;

use crate::{Code, Problem, Shutdown, request_id};

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
    router
        .fallback(|| async { Problem::new(Code::RouteNotFound, "No route has this path.") })
        .method_not_allowed_fallback(|| async {
            Problem::new(Code::MethodNotAllowed, "The Allow header lists what this path takes.")
        })
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .layer(CatchPanicLayer::custom(panicked))
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

/// Serves until the shutdown starts, then finishes what is in flight, at most until its deadline.
///
/// # Errors
/// The listener broke.
pub async fn serve(listener: TcpListener, router: Router, shutdown: &Shutdown) -> std::io::Result<()> {
    tracing::info!(address = %listener.local_addr()?, "listening");
    let stop = shutdown.token();
    let service = router.into_make_service_with_connect_info::<SocketAddr>();
    // A message to a socket must not wait for the acknowledgement of the one before it.
    let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
    let server = axum::serve(listener, service).with_graceful_shutdown(stop.cancelled_owned());
    tokio::select! {
        outcome = server => outcome,
        () = shutdown.expired() => {
            tracing::warn!("connections were still open at the deadline");
            Ok(())
        }
    }
}
