use std::sync::Arc;

use aura_bus::MemoryBus;
use aura_domain::{Epoch, Lsn};
use aura_testkit::eventually;
use aura_wire::{
    control::{Announcement, Request},
    phoenix::Version,
};
use serde_json::json;

use crate::{
    client::PATIENCE,
    rig::{Rig, hasty, source},
};

fn leader(epoch: i64, fronts: Vec<(aura_domain::FrontId, u64)>) -> Announcement {
    Announcement::Leader { source: source(), epoch: Epoch(epoch), start: Lsn(5), fronts }
}

#[tokio::test]
async fn g8_a_new_leader_that_has_our_snapshot_is_no_gap() {
    let rig = Rig::start().await;
    let mut client = rig.subscriber("t", "alice").await;
    {
        let mut state = rig.leader.state();
        state.epoch = Epoch(2);
        state.subscriptions.clear();
    }
    rig.leader.announce(&Announcement::WantSnapshots { source: source(), epoch: Epoch(2), fronts: None }).await;
    rig.leader_has(1).await;
    let listed = rig.leader.state().front.clone();
    rig.leader.announce(&leader(2, listed.into_iter().collect())).await;
    rig.change(1, "t", &[rig.leader.sub_id("t", "alice")]).await;
    assert_eq!(client.next().await.event, "postgres_changes");
    client.expect_nothing().await;
}

#[tokio::test]
async fn g8_a_leader_that_began_without_us_gets_a_snapshot_and_clients_a_gap() {
    let rig = Rig::start().await;
    let mut client = rig.subscriber("t", "alice").await;
    {
        let mut state = rig.leader.state();
        state.epoch = Epoch(2);
        state.subscriptions.clear();
    }
    rig.leader.announce(&leader(2, vec![])).await;
    let gap = client.next().await.payload;
    assert_eq!(gap["gap"]["reason"], "failover");
    rig.leader_has(1).await;
}

#[tokio::test]
async fn joins_wait_for_a_leader_that_comes_late() {
    let rig = Rig::start().await;
    rig.leader.state().answers = false;
    let mut client = rig.connect(Version::V2, "alice").await;
    client.join("realtime:room", json!([{"table": "t"}])).await;
    let asked = || async { !rig.leader.state().requests.is_empty() };
    eventually(PATIENCE, asked).await.expect("a request");
    {
        let mut state = rig.leader.state();
        (state.answers, state.epoch) = (true, Epoch(2));
    }
    rig.leader.announce(&Announcement::WantSnapshots { source: source(), epoch: Epoch(2), fronts: None }).await;
    assert_eq!(client.next().await.payload["status"], "ok");
    assert_eq!(client.next().await.payload["message"], "Subscribed to PostgreSQL");
    let last = rig.leader.state().requests.last().cloned();
    assert!(matches!(last, Some(Request::Snapshot { .. })), "the join became part of the snapshot: {last:?}");
}

#[tokio::test]
async fn a_binding_that_waits_is_asked_about_again_with_the_heartbeat() {
    let rig = Rig::start_with(hasty(), Arc::new(MemoryBus::new())).await;
    rig.leader.state().exceptions.insert("t".to_owned(), ("please wait".to_owned(), false));
    let mut client = rig.connect(Version::V2, "alice").await;
    client.join("realtime:room", json!([{"table": "t"}])).await;
    client.next().await;
    assert_eq!(client.next().await.payload["message"], "please wait");
    rig.leader.state().exceptions.clear();
    assert_eq!(client.next().await.payload["message"], "Subscribed to PostgreSQL");
}

#[tokio::test]
async fn r_eng_9_clients_hear_why_an_engine_stopped_and_when_it_streams_again() {
    let rig = Rig::start_with(hasty(), Arc::new(MemoryBus::new())).await;
    let mut client = rig.subscriber("t", "alice").await;
    let beat = |streaming, reason: Option<&str>| Announcement::LeaderHeartbeat {
        source: source(),
        epoch: Epoch(1),
        streaming,
        reason: reason.map(str::to_owned),
        seqs: vec![],
    };
    rig.leader.announce(&beat(false, Some("plugin_missing"))).await;
    let system = client.next().await.payload;
    assert_eq!((&system["status"], &system["message"]), (&json!("error"), &json!("not_streaming: plugin_missing")));
    rig.leader.announce(&beat(true, None)).await;
    assert_eq!(client.next().await.payload["message"], "Subscribed to PostgreSQL");
    rig.leader.announce(&beat(false, None)).await;
    rig.leader.announce(&beat(true, None)).await;
    client.expect_nothing().await;
}
