use std::time::{SystemTime, UNIX_EPOCH};

use aura_wire::phoenix::Version;
use serde_json::json;

use crate::rig::{FAR, Rig};

fn in_seconds(seconds: u64) -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs() + seconds
}

#[tokio::test]
async fn a_refreshed_token_of_the_same_person_changes_nothing() {
    let rig = Rig::start().await;
    let mut client = rig.subscriber("t", "alice").await;
    let requests = rig.leader.state().requests.len();
    for token in [format!("alice.authenticated.{}", FAR + 1), "sb_publishable_x".to_owned()] {
        client.send(json!("1"), json!("2"), "realtime:room", "access_token", json!({"access_token": token})).await;
    }
    client.send(json!("1"), json!("2"), "realtime:room", "access_token", json!({"access_token": null})).await;
    client.expect_nothing().await;
    rig.change(1, "t", &[rig.leader.sub_id("t", "alice")]).await;
    assert_eq!(client.next().await.payload["ids"], json!([1]));
    assert_eq!(rig.leader.state().requests.len(), requests);
}

#[tokio::test]
async fn g3_a_token_of_somebody_else_ends_the_old_bindings_and_registers_new_ones() {
    let rig = Rig::start().await;
    let mut client = rig.subscriber("t", "alice").await;
    let alice = rig.leader.sub_id("t", "alice");
    let token = json!({"access_token": format!("bob.authenticated.{FAR}")});
    client.send(json!("1"), json!("2"), "realtime:room", "access_token", token).await;
    assert_eq!(client.next().await.payload["message"], "Subscribed to PostgreSQL");
    rig.leader_has(1).await;
    rig.change(1, "t", &[alice]).await;
    rig.change(2, "t", &[rig.leader.sub_id("t", "bob")]).await;
    assert_eq!(client.next().await.payload["data"]["record"]["id"], 2);
}

#[tokio::test]
async fn a_bad_token_closes_the_channel_and_keeps_the_socket() {
    let rig = Rig::start().await;
    let mut client = rig.subscriber("t", "alice").await;
    client.send(json!("1"), json!("2"), "realtime:room", "access_token", json!({"access_token": "forged"})).await;
    let system = client.next().await.payload;
    let expected = json!({"extension": "system", "status": "error", "message": "Failed to validate JWT signature",
        "channel": "room"});
    assert_eq!(system, expected);
    let close = client.next().await;
    assert_eq!((close.event.as_str(), close.reference), ("phx_close", json!("1")));
    rig.leader_has(0).await;
    client.expect_nothing().await;
}

#[tokio::test]
async fn a_token_that_cannot_be_looked_at_now_makes_the_client_join_again() {
    let rig = Rig::start().await;
    let mut client = rig.subscriber("t", "alice").await;
    client.send(json!("1"), json!("2"), "realtime:room", "access_token", json!({"access_token": "away"})).await;
    let system = client.next().await.payload;
    assert_eq!(system["message"], "Realtime was unable to connect to the project database");
    let error = client.next().await;
    assert_eq!((error.event.as_str(), error.reference), ("phx_error", json!("1")), "after phx_close it would not");
    rig.leader_has(0).await;
    client.subscribe("realtime:room", json!([{"table": "t"}])).await;
}

#[tokio::test]
async fn r_frt_3_an_expired_token_closes_the_channel_and_keeps_the_socket() {
    let rig = Rig::start().await;
    let mut client = rig.connect(Version::V2, "alice").await;
    let token = format!("bob.authenticated.{}", in_seconds(2));
    client.join_with("realtime:room", json!({"postgres_changes": [{"table": "t"}]}), Some(&token)).await;
    client.next().await;
    client.next().await;
    let system = client.next().await.payload;
    let message = system["message"].as_str().expect("a text");
    assert!(message.starts_with("Token has expired ") && message.ends_with(" seconds ago"), "{message}");
    assert_eq!(client.next().await.event, "phx_close");
    client.expect_nothing().await;
}
