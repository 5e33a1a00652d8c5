use std::sync::Arc;

use aura_bus::{MemoryBus, Message, NatsBus, NatsOptions, Subject};
use aura_domain::{Epoch, Lsn};
use aura_testkit::{Nats, NatsOptions as ServerOptions, eventually};
use aura_wire::{
    GapEnvelope, GapReason,
    control::{Announcement, Request},
    phoenix::Version,
};
use serde_json::json;

use crate::{
    client::PATIENCE,
    rig::{Rig, change, hasty, position, project, source},
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
    rig.publish(of_epoch(2, change(1, 1, "t", &[rig.leader.sub_id("t", "alice")]))).await;
    assert_eq!(client.next().await.event, "postgres_changes");
    client.expect_nothing().await;
}

/// What the old leader was told is received may still be on its way between the servers of a cluster, and never come.
#[tokio::test]
async fn r_frt_4_in_a_cluster_a_new_leader_is_a_gap() {
    let options = ServerOptions::default()
        .line("server_name: one")
        .line("cluster { name: test, listen: \"127.0.0.1:-1\", routes: [\"nats://127.0.0.1:1\"] }");
    let nats = Nats::start_with(options).await.expect("a server");
    let bus = NatsBus::connect(NatsOptions::new(nats.url(), "test")).await.expect("a bus");
    let rig = Rig::start_with(hasty(), Arc::new(bus)).await;
    let mut client = rig.subscriber("t", "alice").await;
    rig.publish(change(1, 1, "t", &[rig.leader.sub_id("t", "alice")])).await;
    assert_eq!(client.next().await.event, "postgres_changes");
    rig.leader.state().epoch = Epoch(2);
    rig.leader.announce(&Announcement::RegistryChanged { source: source(), epoch: Epoch(2) }).await;
    let told = client.next().await;
    assert_eq!((&*told.event, &told.payload["extension"]), ("system", &json!("postgres_changes")), "{told:?}");
}

fn of_epoch(epoch: i64, mut message: Message) -> Message {
    message.headers.epoch = Some(Epoch(epoch));
    message
}

/// R-LEASE-2: epochs are compared per source, so that a leader ends the one before also for projects of which it has said
/// nothing yet.
#[tokio::test]
async fn r_lease_2_nothing_of_an_older_leader_counts_once_a_new_one_is_heard() {
    let rig = Rig::start().await;
    let mut client = rig.subscriber("t", "alice").await;
    let allowed = [rig.leader.sub_id("t", "alice")];
    rig.leader.state().epoch = Epoch(2);
    // What was on its way when the new one was heard still counts: its receipt was proved to the old one.
    const ON_THE_WAY: u64 = 1000;
    for n in 1..=ON_THE_WAY {
        rig.publish(of_epoch(1, change(n, n, "t", &allowed))).await;
    }
    rig.leader.announce(&Announcement::RegistryChanged { source: source(), epoch: Epoch(2) }).await;
    for n in 1..=ON_THE_WAY {
        assert_eq!(client.next().await.payload["data"]["record"]["id"], n);
    }
    client.expect_nothing().await;
    let (from, to, reason) = (Some(position(2000)), Some(position(2000)), GapReason::Skipped);
    let gap = GapEnvelope { v: 1, project: project(), source: source(), from, to, reason, tables: None, sub_ids: None };
    rig.publish(of_epoch(1, change(1001, 2000, "t", &allowed))).await;
    rig.publish(of_epoch(1, Message::new(Subject::gap(project()), gap.encode()))).await;
    rig.publish(of_epoch(2, change(1, 2000, "t", &allowed))).await;
    rig.publish(of_epoch(2, Message::new(Subject::gap(project()), gap.encode()))).await;
    rig.publish(of_epoch(2, change(2, 2001, "t", &allowed))).await;
    let mut got = Vec::new();
    for _ in 0..3 {
        let next = client.next().await;
        let reason = next.payload["gap"]["reason"].as_str().map(str::to_owned);
        got.push((reason, next.payload["data"]["record"]["id"].as_i64()));
    }
    assert_eq!(got, [(None, Some(2000)), (Some("skipped".to_owned()), None), (None, Some(2001))]);
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
