//! What one client may take of a server.

use std::time::Duration;

use anyhow::Result;
use aura_kit::{
    Json, ShutdownHandle,
    http::{
        Limits, Server,
        client::{TrustedProxies, network},
    },
};
use axum::{
    Router,
    routing::{get, post},
};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{Instant, sleep},
};

/// A burst of one request a second.
const BURST: usize = 10;

async fn serve(limits: Limits) -> Result<(u16, Server)> {
    let router = Router::new()
        .route("/v1/thing", get(|| async {}).post(|_: Json<Value>| async {}))
        .route("/socket", get(|| async {}))
        .route("/health", get(|| async {}))
        .route("/slow", post(|_: Json<Value>| async {}));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    Ok((port, Server::start(listener, router, limits, &ShutdownHandle::new(Duration::from_secs(5)))?))
}

/// Sends a request as it is and returns the answer as it is.
async fn raw(port: u16, request: &str) -> Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    let mut answer = Vec::new();
    // A server that refuses a body answers and closes before it has read it.
    drop(stream.write_all(request.as_bytes()).await);
    drop(stream.read_to_end(&mut answer).await);
    Ok(String::from_utf8(answer)?)
}

async fn ask(port: u16, path: &str, headers: &str) -> Result<(u16, String)> {
    let answer = raw(port, &format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n")).await?;
    Ok((status(&answer), answer))
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or_default()
}

fn header<'a>(answer: &'a str, name: &str) -> Option<&'a str> {
    answer.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

#[tokio::test]
async fn n_24_a_flood_from_one_address_is_refused_whatever_it_says_in_forwarded_for() -> Result<()> {
    let (port, _server) = serve(Limits::new(1, 0, TrustedProxies::default())).await?;
    let mut refused = String::new();
    for n in 0..3 * BURST {
        let (status, answer) = ask(port, "/socket", &format!("x-forwarded-for: 198.51.100.{n}\r\n")).await?;
        if status == 429 {
            refused = answer;
        }
    }
    assert_eq!((header(&refused, "ratelimit-remaining"), header(&refused, "ratelimit-limit")), (Some("0"), Some("10")));
    assert_eq!(header(&refused, "retry-after"), header(&refused, "ratelimit-reset"), "{refused}");
    assert!(refused.contains("rate_limited") && header(&refused, "x-request-id").is_some(), "{refused}");
    assert_eq!(ask(port, "/health", "").await?.0, 200, "probes are never refused");
    Ok(())
}

#[tokio::test]
async fn n_24_behind_a_trusted_proxy_each_client_has_its_own_count() -> Result<()> {
    let proxies = TrustedProxies::new([network("127.0.0.0/8").map_err(anyhow::Error::msg)?]);
    let (port, _server) = serve(Limits::new(1, 0, proxies)).await?;
    for n in 0..3 * BURST {
        let headers = format!("x-forwarded-for: 1.1.1.1, 198.51.100.{n}\r\n");
        assert_eq!(ask(port, "/socket", &headers).await?.0, 200);
    }
    Ok(())
}

#[tokio::test]
async fn a_key_has_its_own_count_on_the_control_plane_only() -> Result<()> {
    let (port, _server) = serve(Limits::new(0, 1, TrustedProxies::default())).await?;
    let mut statuses = Vec::new();
    for _ in 0..3 * BURST {
        statuses.push(ask(port, "/v1/thing", "apikey: one\r\n").await?.0);
    }
    assert!(statuses[..BURST].iter().all(|status| *status == 200) && statuses.contains(&429), "{statuses:?}");
    let (other, answer) = ask(port, "/v1/thing", "authorization: Bearer two\r\n").await?;
    assert_eq!((other, header(&answer, "ratelimit-remaining")), (200, Some("9")), "{answer}");
    assert_eq!(header(&answer, "ratelimit-policy"), Some("10;w=10"));
    for _ in 0..3 * BURST {
        assert_eq!(ask(port, "/socket", "apikey: one\r\n").await?.0, 200, "an anon key is every browser's");
    }
    Ok(())
}

#[tokio::test]
async fn n_4_bodies_are_bounded_in_size_and_depth() -> Result<()> {
    let (port, _server) = serve(Limits::off()).await?;
    let post = |body: String| async move {
        let length = body.len();
        let head = "POST /v1/thing HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json";
        raw(port, &format!("{head}\r\ncontent-length: {length}\r\n\r\n{body}")).await.map(|answer| status(&answer))
    };
    assert_eq!(post(format!("{{\"a\":{}1{}}}", "[".repeat(100), "]".repeat(100))).await?, 200);
    assert_eq!(post(format!("{{\"a\":{}1{}}}", "[".repeat(10_000), "]".repeat(10_000))).await?, 400);
    assert_eq!(post(format!("{{\"a\":\"{}\"}}", "x".repeat(10 << 20))).await?, 413);
    Ok(())
}

/// The clock runs ahead whenever nobody has anything to do.
#[tokio::test(start_paused = true)]
async fn n_21_a_head_that_does_not_come_closes_the_connection_after_10_s() -> Result<()> {
    let (port, _server) = serve(Limits::off()).await?;
    for head in ["", "GET /health HTTP/1.1\r\nhost"] {
        let started = Instant::now();
        assert_eq!(raw(port, head).await?, "");
        assert_eq!(started.elapsed().as_secs(), 10, "{head:?}");
    }
    let mut trickle = TcpStream::connect(("127.0.0.1", port)).await?;
    let started = Instant::now();
    while trickle.write_all(b"G").await.is_ok() {
        sleep(Duration::from_secs(1)).await;
        assert!(started.elapsed() < Duration::from_secs(15), "a byte a second holds it");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn n_21_a_body_that_does_not_come_is_answered_with_408_after_10_s() -> Result<()> {
    let (port, _server) = serve(Limits::off()).await?;
    let head = "POST /slow HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json";
    let started = Instant::now();
    let answer = raw(port, &format!("{head}\r\ncontent-length: 100\r\n\r\n{{")).await?;
    assert_eq!((status(&answer), started.elapsed().as_secs()), (408, 10), "{answer}");
    Ok(())
}
