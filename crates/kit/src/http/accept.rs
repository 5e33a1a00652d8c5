//! Taking connections, with a time limit on what isn't a request yet: a client that sends a byte now and then holds nothing
//! for long.

use std::{convert::Infallible, io, net::SocketAddr, time::Duration};

use axum::{Router, body::Body, extract::ConnectInfo, response::Response};
use hyper::{Request, body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;

/// Longest time from a connection to the end of its first request's head.
const FIRST_HEAD: Duration = Duration::from_secs(10);
/// The same for later ones, with the idle time before: longer than proxies keep a connection (60 s), since one that is
/// closed as the next request comes is an error there.
const NEXT_HEAD: Duration = Duration::from_secs(75);
/// A peer of HTTP/2 that answers no ping for so long is gone.
const PING: Duration = Duration::from_secs(20);
/// Largest head of a request in bytes; a token has at most 8 KiB, and a query has room for another one.
const HEAD_BYTES: usize = 64 << 10;
/// Streams that one connection of HTTP/2 may have open.
const STREAMS: u32 = 200;
/// When the process has no descriptor left, until others have gone.
const NO_DESCRIPTOR: Duration = Duration::from_millis(200);

/// Serves until `leave`, then until each connection has sent what it is sending. Upgraded ones don't count.
pub(super) async fn serve(listener: TcpListener, router: Router, leave: CancellationToken) {
    let connections = TaskTracker::new();
    while let Some(accepted) = leave.run_until_cancelled(listener.accept()).await {
        match accepted {
            Ok((stream, peer)) => {
                drop(connections.spawn(connection(stream, peer, router.clone(), leave.clone())));
            }
            Err(error) if is_the_peers(&error) => {}
            Err(error) => {
                tracing::warn!(%error, "can't take a connection");
                sleep(NO_DESCRIPTOR).await;
            }
        }
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

/// Gone before it was taken.
fn is_the_peers(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

async fn connection(stream: TcpStream, peer: SocketAddr, router: Router, leave: CancellationToken) {
    // A message to a socket must not wait for the acknowledgement of the one before it.
    drop(stream.set_nodelay(true));
    let heard = CancellationToken::new();
    let first = heard.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        first.cancel();
        answer(router.clone(), request, peer)
    });
    let builder = builder();
    let mut serving = std::pin::pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    let silent = async {
        if timeout(FIRST_HEAD, heard.cancelled()).await.is_ok() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        // What a client does wrong is its own affair.
        _ = serving.as_mut() => return,
        () = silent => return metrics::counter!("http_silent_connections_total").increment(1),
        () = leave.cancelled() => serving.as_mut().graceful_shutdown(),
    }
    drop(serving.await);
}

async fn answer(router: Router, request: Request<Incoming>, peer: SocketAddr) -> Result<Response, Infallible> {
    let mut request = request.map(Body::new);
    request.extensions_mut().insert(ConnectInfo(peer));
    router.oneshot(request).await
}

fn builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(NEXT_HEAD).max_buf_size(HEAD_BYTES);
    // WebSockets over HTTP/2 are CONNECTs.
    builder.http2().timer(TokioTimer::new()).enable_connect_protocol().keep_alive_interval(PING);
    builder.http2().keep_alive_timeout(PING).max_concurrent_streams(STREAMS).max_header_list_size(HEAD_BYTES as u32);
    builder
}
