use std::{sync::Arc, time::Duration};

use aura_bus::MemoryBus;
use aura_front::FrontSettings;
use aura_kit::http::Origins;
use aura_testkit::eventually;
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use crate::{
    client::PATIENCE,
    rig::{FAR, Rig, hasty, position, triggered},
};

/// A GET whose body is read as it comes.
pub(crate) struct Stream {
    socket: TcpStream,
    pub(crate) text: String,
}

impl Stream {
    pub(crate) async fn open(http: &str, path: &str, header: &str) -> Self {
        let host = http.trim_start_matches("http://");
        let mut socket = TcpStream::connect(host).await.expect("a connection");
        // Version 1.0, so that the body comes without chunks.
        let request = format!("GET {path} HTTP/1.0\r\nHost: {host}\r\n{header}\r\n");
        socket.write_all(request.as_bytes()).await.expect("sent");
        Self { socket, text: String::new() }
    }

    /// Reads until the text contains `wanted`.
    pub(crate) async fn until(&mut self, wanted: &str) {
        while !self.text.contains(wanted) {
            assert!(self.more().await, "the stream ended without {wanted:?}: {}", self.text);
        }
    }

    async fn more(&mut self) -> bool {
        let mut buffer = [0; 4096];
        let read = timeout(PATIENCE, self.socket.read(&mut buffer)).await;
        let len = read.unwrap_or_else(|_| panic!("nothing came after {:?}", self.text)).expect("read");
        self.text.push_str(&String::from_utf8_lossy(&buffer[..len]));
        len > 0
    }

    pub(crate) async fn end(&mut self) {
        while self.more().await {}
    }

    /// The data of the last event.
    fn data(&self) -> Value {
        let line = self.text.lines().rfind(|line| line.starts_with("data: ")).expect("an event");
        serde_json::from_str(&line["data: ".len()..]).expect("JSON")
    }
}

fn key(sub: &str) -> String {
    format!("apikey: {sub}.authenticated.{FAR}\r\n")
}

#[tokio::test]
async fn r_frt_6_a_change_is_an_event_with_its_position_as_id() {
    let rig = Rig::start().await;
    let mut stream =
        Stream::open(&rig.http, "/realtime/v1/sse?schema=public&table=t&filter=id%3Deq.1", &key("alice")).await;
    stream.until("Subscribed to PostgreSQL").await;
    assert!(stream.text.contains("content-type: text/event-stream"), "{}", stream.text);
    assert_eq!(rig.leader.subscription("t", "alice").spec.filter.as_deref(), Some("id=eq.1"));
    rig.change(1, "t", &[rig.leader.sub_id("t", "alice")]).await;
    stream.until("\"record\"").await;
    stream.until(&format!("\nid: {}\n", position(1))).await;
    assert_eq!(stream.data()["record"]["id"], 1);
    rig.change(3, "t", &[rig.leader.sub_id("t", "alice")]).await;
    stream.until("event: gap\n").await;
    drop(stream);
    let gone = || async { rig.leader.state().subscriptions.is_empty() };
    eventually(PATIENCE, gone).await.expect("its binding leaves");
}

#[tokio::test]
async fn keys_come_by_query_and_header_and_bad_ones_are_problems() {
    let rig = Rig::start().await;
    let good = format!("alice.authenticated.{FAR}");
    let mut stream = Stream::open(&rig.http, &format!("/realtime/v1/sse?table=t&apikey={good}"), "").await;
    stream.until("Subscribed to PostgreSQL").await;
    let bearer = format!("Authorization: Bearer {good}\r\napikey: forged\r\n");
    let mut stream = Stream::open(&rig.http, "/realtime/v1/sse?table=t", &bearer).await;
    stream.until("Subscribed to PostgreSQL").await;
    for (path, header, status, code) in [
        ("/realtime/v1/sse?table=t", "", "401", "missing_credentials"),
        ("/realtime/v1/sse?table=t&apikey=forged", "", "401", "invalid_token"),
        ("/realtime/v1/sse?table=t&apikey=a.b.5", "", "401", "token_expired"),
        ("/realtime/v1/sse?table=t&apikey=unknown", "", "404", "project_not_found"),
        ("/realtime/v1/sse?table=t&apikey=away", "", "503", "platform_unavailable"),
        ("/realtime/v1/sse?schema=", &*key("alice"), "422", "invalid_parameter"),
        ("/realtime/v1/websocket", "", "400", "malformed_request"),
    ] {
        let mut stream = Stream::open(&rig.http, path, header).await;
        stream.end().await;
        assert!(stream.text.starts_with(&format!("HTTP/1.0 {status}")), "{}", stream.text);
        assert!(stream.text.contains("application/problem+json"), "{}", stream.text);
        assert!(stream.text.contains(&format!(r#""code":"{code}""#)), "{}", stream.text);
    }
}

#[tokio::test]
async fn a_binding_that_can_never_deliver_is_a_problem() {
    let rig = Rig::start().await;
    rig.leader.state().exceptions.insert("t".to_owned(), ("invalid column for filter x".to_owned(), true));
    let mut stream = Stream::open(&rig.http, "/realtime/v1/sse?table=t&filter=x%3Deq.1", &key("alice")).await;
    stream.end().await;
    assert!(stream.text.starts_with("HTTP/1.0 422"), "{}", stream.text);
    assert!(stream.text.contains("invalid column for filter x"), "{}", stream.text);
}

#[tokio::test]
async fn an_idle_stream_has_comments_and_a_drain_ends_it() {
    let mut settings = hasty();
    settings.sse_comment = Duration::from_millis(50);
    let rig = Rig::start_with(settings, std::sync::Arc::new(aura_bus::MemoryBus::new())).await;
    let mut stream = Stream::open(&rig.http, "/realtime/v1/sse?table=t", &key("alice")).await;
    stream.until("\n:\n\n:\n\n").await;
    rig.front.drain(&triggered()).await;
    stream.end().await;
    assert_eq!(stream.data()["message"], "Server requested disconnect");
}

#[tokio::test]
async fn r_frt_6_a_stream_ends_when_its_token_expires() {
    let rig = Rig::start().await;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs();
    let header = format!("apikey: alice.authenticated.{}\r\n", now + 2);
    let mut stream = Stream::open(&rig.http, "/realtime/v1/sse?table=t", &header).await;
    stream.end().await;
    let message = stream.data()["message"].as_str().expect("a text").to_owned();
    assert!(message.starts_with("Token has expired"), "{message}");
}

#[tokio::test]
async fn n_7_a_page_of_another_origin_opens_no_stream() {
    let origins = Origins::listed(vec!["https://good.example".to_owned()], false);
    let settings = FrontSettings { origins, ..hasty() };
    let rig = Rig::start_with(settings, Arc::new(MemoryBus::new())).await;
    let path = "/realtime/v1/sse?table=t";
    let evil = format!("{}origin: https://good.example.evil.example\r\n", key("alice"));
    let mut refused = Stream::open(&rig.http, path, &evil).await;
    refused.end().await;
    assert!(refused.text.contains("origin_not_allowed"), "{}", refused.text);
    assert!(!refused.text.contains("access-control-allow-origin"), "{}", refused.text);
    let good = format!("{}origin: https://good.example\r\n", key("alice"));
    let mut stream = Stream::open(&rig.http, path, &good).await;
    stream.until("Subscribed").await;
    assert!(stream.text.contains("access-control-allow-origin: https://good.example"), "{}", stream.text);
    assert!(!stream.text.contains("access-control-allow-credentials"), "{}", stream.text);
}
