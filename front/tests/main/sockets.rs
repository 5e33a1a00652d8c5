use std::{sync::Arc, time::Duration};

use aura_bus::MemoryBus;
use aura_front::FrontSettings;
use aura_kit::http::Origins;
use aura_testkit::eventually;
use aura_wire::phoenix::Version;
use serde_json::{Value, json};
use tokio_tungstenite::{
    connect_async,
    tungstenite::{self, Message, client::IntoClientRequest},
};

use crate::{
    client::{Client, PATIENCE},
    rig::{FAR, Rig, change, triggered},
};

async fn refused(url: &str) -> (u16, String) {
    match connect_async(url).await {
        Err(tungstenite::Error::Http(response)) => {
            let body = response.body().clone().unwrap_or_default();
            (response.status().as_u16(), String::from_utf8_lossy(&body).into_owned())
        }
        other => panic!("an HTTP response, not {other:?}"),
    }
}

#[tokio::test]
async fn r_frt_1_upgrades_are_refused_as_the_original_does() {
    let rig = Rig::start().await;
    let error = |text: &str| json!({"error": text}).to_string();
    assert_eq!(refused(&rig.ws).await, (401, error("API key is missing")));
    assert_eq!(refused(&format!("{}?apikey=forged", rig.ws)).await, (401, error("Failed to validate JWT signature")));
    assert_eq!(refused(&format!("{}?apikey=a.b.5", rig.ws)).await, (401, error("Token has expired")));
    assert_eq!(refused(&format!("{}?apikey=unknown", rig.ws)).await, (404, error("Tenant not found")));
    assert_eq!(refused(&format!("{}?apikey=away", rig.ws)).await, (500, error("Error connecting to Realtime")));
    assert_eq!(refused(&format!("{}?apikey=a.b.{FAR}&vsn=3.0.0", rig.ws)).await, (403, String::new()));
    assert_eq!(
        refused(&format!("{}?apikey=a.b.{FAR}&apikey=forged", rig.ws)).await,
        (401, error("Failed to validate JWT signature")),
        "the last one counts"
    );
    let plain = rig.ws.replace("/realtime/v1/", "/socket/");
    assert!(Client::connect(&plain, Version::V2, &format!("a.b.{FAR}")).await.is_ok(), "without the prefix, too");
}

/// Status of an upgrade with this `Origin`.
async fn upgrade(rig: &Rig, origin: Option<&str>) -> u16 {
    let mut request = format!("{}?apikey=a.b.{FAR}", rig.ws).into_client_request().expect("a request");
    if let Some(origin) = origin {
        request.headers_mut().insert("origin", origin.parse().expect("a header"));
    }
    match connect_async(request).await {
        Ok((_, response)) => response.status().as_u16(),
        Err(tungstenite::Error::Http(response)) => response.status().as_u16(),
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn n_7_a_page_of_another_origin_opens_no_socket() {
    let origins = Origins::listed(vec!["https://good.example".to_owned()], false);
    let rig = Rig::start_with(FrontSettings { origins, ..Default::default() }, Arc::new(MemoryBus::new())).await;
    assert_eq!(upgrade(&rig, Some("https://good.example")).await, 101);
    assert_eq!(upgrade(&rig, None).await, 101, "no browser: its key says who it is");
    let evil = [
        "https://evil.example",
        "null",
        "https://good.example.evil.example",
        "http://good.example",
        "https://good.example:8443",
    ];
    for origin in evil {
        assert_eq!(upgrade(&rig, Some(origin)).await, 403, "{origin}");
    }
    assert_eq!(upgrade(&Rig::start().await, Some("https://evil.example")).await, 101, "by default the key is enough");
}

#[tokio::test]
async fn r_frt_1_heartbeats_echo_their_reference_also_null() {
    let rig = Rig::start().await;
    for (version, reference) in [(Version::V1, Value::Null), (Version::V2, json!("9")), (Version::V2, json!(9))] {
        let mut client = rig.connect(version, "alice").await;
        client.send(Value::Null, reference.clone(), "phoenix", "heartbeat", json!({})).await;
        let reply = client.next().await;
        assert_eq!((reply.topic.as_str(), reply.event.as_str()), ("phoenix", "phx_reply"));
        assert_eq!((reply.reference, reply.payload), (reference, json!({"status": "ok", "response": {}})));
    }
}

#[tokio::test]
async fn malformed_frames_are_dropped_and_the_socket_lives() {
    let rig = Rig::start().await;
    let mut client = rig.connect(Version::V2, "alice").await;
    for text in ["", "x", "{}", "[]", "[1]", "null", r#"["1","1",7,"phx_join",{}]"#, "[[[["] {
        client.raw(Message::Text(text.into())).await;
    }
    for bytes in [&[][..], &[0, 1], &[3], &[3, 255, 255, 255, 255, 255, 1], &[9, 9, 9]] {
        client.raw(Message::Binary(bytes.to_vec().into())).await;
    }
    client.expect_nothing().await;
}

#[tokio::test]
async fn r_frt_2_a_frame_over_the_limit_closes_the_socket() {
    let rig = Rig::start().await;
    let mut client = rig.connect(Version::V2, "alice").await;
    client.raw(Message::Text("x".repeat(257 << 10).into())).await;
    assert!(matches!(client.close_code().await, Some(1009) | None));
}

#[tokio::test]
async fn an_idle_socket_is_closed() {
    let settings = FrontSettings { idle: Duration::from_millis(200), ..Default::default() };
    let rig = Rig::start_with(settings, Arc::new(MemoryBus::new())).await;
    let mut client = rig.connect(Version::V2, "alice").await;
    assert_eq!(client.close_code().await, Some(1000));
}

#[tokio::test]
async fn r_frt_8_a_drain_says_so_and_closes_with_1012() {
    let rig = Rig::start().await;
    let mut client = rig.subscriber("t", "alice").await;
    rig.front.drain(&triggered()).await;
    let system = client.next().await;
    let expected = json!({"extension": "system", "status": "ok", "message": "Server requested disconnect"});
    assert_eq!((system.event.as_str(), system.topic.as_str(), system.payload), ("system", "realtime:room", expected));
    assert_eq!(client.close_code().await, Some(1012));
    assert_eq!(rig.front.connections(), 0);
    assert!(Client::connect(&rig.ws, Version::V2, &format!("a.b.{FAR}")).await.is_err());
}

#[tokio::test]
async fn g4_a_socket_that_does_not_read_is_closed_and_others_go_on() {
    let settings = FrontSettings { queue_bytes: 64 << 10, ..Default::default() };
    let rig = Rig::start_with(settings, Arc::new(MemoryBus::new())).await;
    let mut slow = rig.subscriber("t", "slow").await;
    let mut quick = rig.subscriber("t", "quick").await;
    let allowed = [rig.leader.sub_id("t", "slow"), rig.leader.sub_id("t", "quick")];
    let pad = format!(r#""errors":null,"pad":"{}""#, "x".repeat(10_000));
    let mut sent = 0;
    // The kernel's buffers take some megabytes before the queue fills.
    while rig.front.connections() == 2 {
        sent += 1;
        assert!(sent < 20_000, "the slow socket is never closed");
        let mut message = change(sent, sent, "t", &allowed);
        let text = String::from_utf8(message.payload.to_vec()).expect("UTF-8");
        message.payload = text.replace(r#""errors":null"#, &pad).into();
        rig.publish(message).await;
        assert_eq!(quick.next().await.payload["data"]["record"]["id"], sent);
    }
    while slow.frame().await.is_some() {}
    let gone = || async { rig.leader.state().subscriptions.len() == 1 };
    eventually(PATIENCE, gone).await.expect("its bindings leave");
}
