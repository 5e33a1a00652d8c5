use std::sync::Arc;

use aura_bus::MemoryBus;
use aura_wire::phoenix::Version;
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;

use crate::{
    client::Client,
    rig::{Rig, hasty},
};

async fn member(rig: &Rig, version: Version, config: Value) -> Client {
    let mut client = rig.connect(version, "alice").await;
    client.join_with("realtime:room", config, None).await;
    assert_eq!(client.next().await.payload["status"], "ok");
    client
}

fn cursor() -> Value {
    json!({"type": "broadcast", "event": "cursor", "payload": {"x": 1}})
}

#[tokio::test]
async fn r_frt_1_text_reaches_all_others_and_the_sender_if_it_wants() {
    let rig = Rig::start().await;
    let mut v1 = member(&rig, Version::V1, json!({})).await;
    let mut v2 = member(&rig, Version::V2, json!({})).await;
    let mut sender = member(&rig, Version::V2, json!({"broadcast": {"self": true, "ack": true}})).await;
    sender.send(json!("1"), json!("2"), "realtime:room", "broadcast", cursor()).await;
    for client in [&mut v1, &mut v2, &mut sender] {
        let got = client.next().await;
        assert_eq!((got.event.as_str(), got.payload, got.reference), ("broadcast", cursor(), Value::Null));
    }
    let ack = sender.next().await;
    assert_eq!((ack.reference, ack.payload), (json!("2"), json!({"status": "ok", "response": {}})));
    v1.send(json!("1"), json!("3"), "realtime:room", "broadcast", cursor()).await;
    assert_eq!(v2.next().await.event, "broadcast");
    v1.expect_nothing().await;
}

#[tokio::test]
async fn r_frt_1_a_binary_push_is_binary_for_version_2_and_text_for_version_1() {
    let rig = Rig::start().await;
    let mut v1 = member(&rig, Version::V1, json!({})).await;
    let mut v2 = member(&rig, Version::V2, json!({})).await;
    let mut sender = member(&rig, Version::V2, json!({})).await;
    let header = [3, 1, 1, 13, 6, 0, 1];
    let push = [&header[..], b"17realtime:roomcursor{\"x\":1}"].concat();
    sender.raw(Message::Binary(push.into())).await;
    let got = v1.next().await;
    assert_eq!((got.event.as_str(), got.payload), ("broadcast", cursor()));
    let Some(Message::Binary(frame)) = v2.frame().await else { panic!("a binary frame") };
    assert_eq!(&frame[..], [&[4, 13, 6, 0, 1][..], b"realtime:roomcursor{\"x\":1}"].concat());
    // What receivers could not parse is not relayed, and raw bytes have no form in version 1.
    let broken = [&header[..], b"17realtime:roomcursor{\"x\":1},"].concat();
    sender.raw(Message::Binary(broken.into())).await;
    let raw = [&[3, 1, 1, 13, 3, 0, 0][..], b"18realtime:roomraw\x01\x02\xff"].concat();
    sender.raw(Message::Binary(raw.into())).await;
    let Some(Message::Binary(frame)) = v2.frame().await else { panic!("a binary frame") };
    assert!(frame.ends_with(b"raw\x01\x02\xff"));
    v1.expect_nothing().await;
}

#[tokio::test]
async fn broadcasts_cross_fronts_once() {
    let bus = Arc::new(MemoryBus::new());
    let here = Rig::start_with(hasty(), Arc::<MemoryBus>::clone(&bus)).await;
    let there = Rig::start_with(hasty(), bus).await;
    let mut neighbour = member(&here, Version::V2, json!({})).await;
    let mut remote = member(&there, Version::V1, json!({})).await;
    let mut sender = member(&here, Version::V2, json!({})).await;
    sender.send(json!("1"), json!("2"), "realtime:room", "broadcast", cursor()).await;
    for client in [&mut neighbour, &mut remote] {
        assert_eq!(client.next().await.payload, cursor());
        client.expect_nothing().await;
    }
    sender.expect_nothing().await;
}

#[tokio::test]
async fn topics_are_apart_and_unjoined_ones_unmatched() {
    let rig = Rig::start().await;
    let mut other = rig.connect(Version::V2, "bob").await;
    other.join("realtime:other.>", json!([])).await;
    other.next().await;
    let mut client = member(&rig, Version::V2, json!({"presence": {"enabled": true, "key": "k"}})).await;
    let state = client.next().await;
    assert_eq!((state.event.as_str(), state.payload), ("presence_state", json!({})));
    client.send(json!("1"), json!("2"), "realtime:room", "broadcast", cursor()).await;
    client.send(json!("1"), json!("3"), "realtime:nowhere", "broadcast", cursor()).await;
    let reply = client.next().await;
    assert_eq!(reply.payload, json!({"status": "error", "response": {"reason": "unmatched topic"}}));
    client.send(json!("1"), json!("4"), "realtime:room", "presence", json!({"event": "track", "payload": {}})).await;
    assert_eq!(client.next().await.payload, json!({"status": "ok", "response": {}}));
    other.expect_nothing().await;
}

#[tokio::test]
async fn r_sec_5_an_inspector_receives_and_sends_nothing() {
    let rig = Rig::start().await;
    let mut member = member(&rig, Version::V2, json!({})).await;
    let mut inspector = rig.connect(Version::V2, "inspector").await;
    inspector.join_with("realtime:room", json!({}), None).await;
    assert_eq!(inspector.next().await.payload["status"], "ok");
    inspector.send(json!("1"), json!("2"), "realtime:room", "broadcast", cursor()).await;
    let refused = inspector.next().await;
    assert_eq!((&refused.reference, &refused.payload["status"]), (&json!("2"), &json!("error")));
    let push = [&[3, 1, 1, 13, 6, 0, 1][..], b"17realtime:roomcursor{\"x\":1}"].concat();
    inspector.raw(Message::Binary(push.into())).await;
    assert_eq!(inspector.next().await.payload["status"], "error");
    member.expect_nothing().await;
    member.send(json!("1"), json!("3"), "realtime:room", "broadcast", cursor()).await;
    assert_eq!(inspector.next().await.event, "broadcast");
}
