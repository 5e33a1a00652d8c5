use aura_domain::Epoch;
use aura_wire::{control::Announcement, phoenix::Version};
use serde_json::{Value, json};

use crate::{
    client::PATIENCE,
    rig::{FAR, Rig, hasty, source},
};

const UNREGISTERED: &str = "Unable to subscribe to changes with given parameters.";

#[tokio::test]
async fn r_frt_1_a_join_echoes_its_bindings_and_then_confirms_in_both_versions() {
    let rig = Rig::start().await;
    for version in [Version::V1, Version::V2] {
        let mut client = rig.connect(version, "alice").await;
        let bindings = json!([
            {"event": "insert", "schema": "public", "table": "todos", "filter": "id=eq. 1", "extra": null},
            {"event": "*", "schema": "public", "table": "todos", "select": ["id"]},
        ]);
        client.join("realtime:a:b", bindings.clone()).await;
        let reply = client.next().await;
        assert_eq!((reply.event.as_str(), &reply.reference), ("phx_reply", &json!("1")));
        let mut echoed = reply.payload["response"]["postgres_changes"].clone();
        for (index, entry) in echoed.as_array_mut().expect("a list").iter_mut().enumerate() {
            let id = entry.as_object_mut().expect("an object").remove("id").expect("an id");
            assert_eq!(id, json!(index + 1));
        }
        assert_eq!((&reply.payload["status"], echoed), (&json!("ok"), bindings));
        let system = client.next().await;
        let expected = json!({"extension": "postgres_changes", "status": "ok",
            "message": "Subscribed to PostgreSQL", "channel": "a:b"});
        assert_eq!((system.event.as_str(), system.payload, system.reference), ("system", expected, Value::Null));
    }
    let stored = rig.leader.subscription("todos", "alice");
    assert_eq!((stored.spec.role.as_str(), stored.spec.schema.as_str()), ("authenticated", "public"));
}

#[tokio::test]
async fn a_join_reply_is_held_until_the_leader_has_the_bindings() {
    let rig = Rig::start().await;
    rig.leader.state().answers = false;
    let mut client = rig.connect(Version::V2, "alice").await;
    client.join("realtime:room", json!([{"table": "t"}])).await;
    // A heartbeat isn't held up by the join.
    client.expect_nothing().await;
    rig.leader.state().answers = true;
    assert_eq!(client.next().await.payload["status"], "ok");
    assert_eq!(client.next().await.payload["message"], "Subscribed to PostgreSQL");
}

#[tokio::test]
async fn a_join_is_answered_in_time_even_if_nothing_streams_and_confirmed_later() {
    let rig = Rig::start_with(hasty(), std::sync::Arc::new(aura_bus::MemoryBus::new())).await;
    rig.leader.state().streaming = false;
    let mut client = rig.connect(Version::V2, "alice").await;
    client.join("realtime:room", json!([{"table": "t"}])).await;
    assert_eq!(client.next().await.payload["status"], "ok");
    let system = client.next().await.payload;
    assert_eq!((&system["status"], &system["message"]), (&json!("error"), &json!("not_streaming")));
    let (epoch, reason) = (Epoch(1), None);
    let beat = Announcement::LeaderHeartbeat { source: source(), epoch, streaming: true, reason, seqs: vec![] };
    rig.leader.announce(&beat).await;
    assert_eq!(client.next().await.payload["message"], "Subscribed to PostgreSQL");
}

#[tokio::test]
async fn new_tokens_do_not_prolong_the_hold_of_a_join_reply() {
    let rig = Rig::start_with(hasty(), std::sync::Arc::new(aura_bus::MemoryBus::new())).await;
    rig.leader.state().streaming = false;
    let mut client = rig.connect(Version::V2, "alice").await;
    client.join("realtime:room", json!([{"table": "t"}])).await;
    let began = std::time::Instant::now();
    for n in 0.. {
        assert!(began.elapsed() < PATIENCE, "the join is never answered");
        let token = json!({"access_token": format!("user{n}.authenticated.{FAR}")});
        client.send(json!("1"), json!("2"), "realtime:room", "access_token", token).await;
        client.send(Value::Null, json!("beat"), "phoenix", "heartbeat", json!({})).await;
        let got = client.next().await;
        if got.topic == "realtime:room" {
            assert_eq!((got.reference, &got.payload["status"]), (json!("1"), &json!("ok")));
            return;
        }
    }
}

#[tokio::test]
async fn an_unregistered_table_is_told_and_confirmed_once_it_is_registered() {
    let rig = Rig::start().await;
    rig.leader.state().exceptions.insert("t".to_owned(), (UNREGISTERED.to_owned(), false));
    let mut client = rig.connect(Version::V2, "alice").await;
    client.join("realtime:room", json!([{"table": "t"}])).await;
    assert_eq!(client.next().await.payload["status"], "ok", "errors of bindings don't fail the join");
    let system = client.next().await.payload;
    assert_eq!((&system["status"], &system["message"]), (&json!("error"), &json!(UNREGISTERED)));
    rig.leader.state().exceptions.clear();
    rig.leader.announce(&Announcement::RegistryChanged { source: source(), epoch: Epoch(1) }).await;
    assert_eq!(client.next().await.payload["message"], "Subscribed to PostgreSQL");
}

#[tokio::test]
async fn one_bad_binding_fails_the_whole_set_of_its_channel() {
    let rig = Rig::start().await;
    rig.leader.state().exceptions.insert("bad".to_owned(), ("invalid column for filter x".to_owned(), true));
    let mut client = rig.connect(Version::V2, "alice").await;
    client.join("realtime:room", json!([{"table": "good"}, {"table": "bad", "filter": "x=eq.1"}])).await;
    assert_eq!(client.next().await.payload["response"]["postgres_changes"][1]["id"], 2);
    let system = client.next().await.payload;
    assert_eq!((&system["status"], &system["message"]), (&json!("error"), &json!("invalid column for filter x")));
    rig.leader_has(0).await;
    client.join("realtime:none", json!([{"event": "INSERT"}])).await;
    assert_eq!(client.next().await.payload["status"], "ok");
    let message = client.next().await.payload["message"].as_str().expect("a text").to_owned();
    assert!(message.starts_with("No subscription params provided."), "{message}");
}

/// A column that a filter asks for may get another type: the leader then asks for everything and refuses that binding.
#[tokio::test]
async fn r_rls_10_a_binding_that_was_good_and_is_refused_later_is_told() {
    let rig = Rig::start().await;
    let mut client = rig.connect(Version::V2, "alice").await;
    client.join("realtime:room", json!([{"table": "t", "filter": "x=eq.word"}])).await;
    assert_eq!(client.next().await.payload["status"], "ok");
    assert_eq!(client.next().await.payload["message"], "Subscribed to PostgreSQL");
    rig.leader.state().exceptions.insert("t".to_owned(), ("invalid input syntax".to_owned(), true));
    rig.leader.announce(&Announcement::WantSnapshots { source: source(), epoch: Epoch(1), fronts: None }).await;
    let system = client.next().await.payload;
    assert_eq!((&system["status"], &system["message"]), (&json!("error"), &json!("invalid input syntax")));
    rig.leader_has(0).await;
}

#[tokio::test]
async fn refusals_have_their_codes() {
    let rig = Rig::start().await;
    let mut client = rig.connect(Version::V2, "alice").await;
    let changes = vec![json!({"table": "t"}); 33];
    let cases = [
        ("realtime:", json!({}), None, "TopicNameRequired: You must provide a topic name"),
        (
            "realtime:x",
            json!({"private": true}),
            None,
            "Unauthorized: You do not have permissions to read from this Channel topic: x",
        ),
        ("realtime:x", json!({}), Some("forged"), "JwtSignatureError: Failed to validate JWT signature"),
        ("realtime:x", json!({}), Some("bob.authenticated.5"), "InvalidJWTToken: Token has expired 5 seconds ago"),
        (
            "realtime:x",
            json!({}),
            Some("away"),
            "UnableToConnectToProject: Realtime was unable to connect to the project database",
        ),
        ("realtime:x", json!({}), Some("what"), "MalformedJWT: The token provided is not a valid JWT"),
        (
            "realtime:x",
            json!({"postgres_changes": changes}),
            None,
            "BindingLimitReached: Too many postgres_changes on one channel",
        ),
        ("other", json!({}), None, "unmatched topic"),
    ];
    for (topic, config, token, reason) in cases {
        client.join_with(topic, config, token).await;
        let reply = client.next().await;
        assert_eq!(reply.payload, json!({"status": "error", "response": {"reason": reason}}));
        assert_eq!((reply.event.as_str(), reply.reference), ("phx_reply", json!("1")));
    }
    client.expect_nothing().await;
}

#[tokio::test]
async fn r_frt_2_a_socket_has_at_most_so_many_channels() {
    let rig = Rig::start().await;
    let mut client = rig.connect(Version::V2, "alice").await;
    for n in 0..100 {
        client.join(&format!("realtime:{n}"), json!([])).await;
        assert_eq!(client.next().await.payload["status"], "ok");
    }
    client.join("realtime:100", json!([])).await;
    let reply = client.next().await;
    assert_eq!(reply.payload["response"]["reason"], "ChannelRateLimitReached: Too many channels");
    client.join("realtime:99", json!([])).await;
    assert_eq!(client.next().await.event, "phx_close", "a rejoin is not one more");
    assert_eq!(client.next().await.payload["status"], "ok");
}

#[tokio::test]
async fn leaving_answers_then_closes_and_unregisters() {
    let rig = Rig::start().await;
    let mut client = rig.subscriber("t", "alice").await;
    let mut other = rig.subscriber("t", "alice").await;
    rig.leader_has(1).await;
    client.send(json!("1"), json!("9"), "realtime:room", "phx_leave", json!({})).await;
    let reply = client.next().await;
    assert_eq!((&reply.reference, &reply.payload), (&json!("9"), &json!({"status": "ok", "response": {}})));
    let close = client.next().await;
    assert_eq!((close.event.as_str(), &close.reference, &close.payload), ("phx_close", &json!("1"), &json!({})));
    let sub_id = rig.leader.sub_id("t", "alice");
    rig.change(1, "t", &[sub_id]).await;
    assert_eq!(other.next().await.payload["ids"], json!([1]), "an equal binding of another socket goes on");
    client.expect_nothing().await;
    drop(other);
    rig.leader_has(0).await;
    client.send(json!("1"), json!("10"), "realtime:room", "phx_leave", json!({})).await;
    assert_eq!(client.next().await.payload["status"], "ok", "leaving what isn't joined is fine");
}

#[tokio::test]
async fn a_second_join_closes_the_first_with_its_reference() {
    let rig = Rig::start().await;
    let mut client = rig.subscriber("t", "alice").await;
    let payload =
        json!({"config": {"postgres_changes": [{"table": "t"}]}, "access_token": format!("bob.authenticated.{FAR}")});
    client.send(json!("5"), json!("5"), "realtime:room", "phx_join", payload).await;
    let close = client.next().await;
    assert_eq!((close.event.as_str(), &close.join_ref, &close.reference), ("phx_close", &json!("1"), &json!("1")));
    let reply = client.next().await;
    assert_eq!((&reply.join_ref, &reply.reference), (&json!("5"), &json!("5")));
    assert_eq!(client.next().await.payload["message"], "Subscribed to PostgreSQL");
    rig.leader_has(1).await;
    rig.change(1, "t", &[rig.leader.sub_id("t", "bob")]).await;
    assert_eq!(client.next().await.event, "postgres_changes");
}
