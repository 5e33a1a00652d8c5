//! Requests during the drain.

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use aura_kit::{
    ShutdownHandle,
    http::{Limits, Server},
};
use aura_testkit::{eventually, http_status};
use axum::{Router, routing::get};
use tokio::{net::TcpListener, sync::Notify, time::timeout};

const SOON: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_request_in_flight_is_finished_and_a_new_one_refused() -> Result<()> {
    let (entered, release) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let slow = {
        let (entered, release) = (Arc::clone(&entered), Arc::clone(&release));
        move || async move {
            entered.notify_one();
            release.notified().await;
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let shutdown = ShutdownHandle::new(SOON);
    let server = Server::start(listener, Router::new().route("/slow", get(slow)), Limits::off(), &shutdown)?;
    let request = tokio::spawn(http_status(port, "/slow"));
    entered.notified().await;
    shutdown.trigger();
    assert_eq!(http_status(port, "/slow").await?, 503);
    assert!(timeout(Duration::from_millis(50), server.finished()).await.is_err(), "one is in flight");
    release.notify_one();
    timeout(SOON, server.finished()).await?;
    assert_eq!(request.await??, 200);
    timeout(SOON, server.close()).await?;
    eventually(SOON, || async { http_status(port, "/slow").await.is_err() }).await
}
