use aura_bus::{Message, Subject};
use aura_domain::{Epoch, SubId};
use aura_wire::{GapEnvelope, GapReason, control::Announcement, phoenix::Version};
use serde_json::{Value, json};

use crate::rig::{Rig, change, position, project, source};

fn is_gap(payload: &Value, reason: &str) -> bool {
    payload["status"] == "ok"
        && payload["message"] == "Gap: changes may be missing"
        && payload["channel"] == "room"
        && payload["gap"]["reason"] == reason
}

#[tokio::test]
async fn r_frt_1_a_channel_gets_one_message_per_change_with_all_ids_that_match() {
    let rig = Rig::start().await;
    for version in [Version::V1, Version::V2] {
        let mut client = rig.connect(version, "alice").await;
        let bindings = json!([{"table": "t"}, {"table": "u"}, {"table": "t", "event": "INSERT"}]);
        client.subscribe("realtime:room", bindings).await;
        rig.leader_has(3).await;
        let ids: Vec<SubId> = rig.leader.state().subscriptions.keys().copied().collect();
        let seq = if version == Version::V1 { 1 } else { 2 };
        rig.change(seq, "t", &ids).await;
        let got = client.next().await;
        assert_eq!(
            (got.event.as_str(), &got.join_ref, &got.reference),
            ("postgres_changes", &Value::Null, &Value::Null)
        );
        assert_eq!(got.payload["ids"], json!([1, 2, 3]));
        assert_eq!(got.payload["data"]["record"], json!({"id": seq}));
        client.expect_nothing().await;
        drop(client);
        rig.leader_has(0).await;
    }
}

#[tokio::test]
async fn g3_only_who_is_listed_gets_a_change_and_a_doubtful_list_is_nobody() {
    let rig = Rig::start().await;
    let mut alice = rig.subscriber("t", "alice").await;
    let mut bob = rig.subscriber("t", "bob").await;
    rig.change(1, "t", &[rig.leader.sub_id("t", "bob")]).await;
    assert_eq!(bob.next().await.payload["data"]["record"]["id"], 1);
    let all = [rig.leader.sub_id("t", "alice"), rig.leader.sub_id("t", "bob")];
    let sound = change(2, 2, "t", &all);
    let text = String::from_utf8(sound.payload.to_vec()).expect("UTF-8");
    let list = serde_json::to_string(&all).expect("JSON");
    let foreign = project().to_string().replace("6a0c", "6a0d");
    for doubtful in [
        text.replace(&format!(r#""allowed_sub_ids":{list},"#), ""),
        text.replace(&list, "null"),
        text.replace(&list, r#""*""#),
        text.replace(&project().to_string(), &foreign),
        text.replace(&source().to_string(), &foreign),
        text.replace(r#""v":1"#, r#""v":2"#),
        "nonsense".to_owned(),
    ] {
        assert_ne!(doubtful, text);
        rig.publish(Message { payload: doubtful.into(), ..sound.clone() }).await;
    }
    let mut nameless = sound.clone();
    nameless.headers.epoch = None;
    rig.publish(nameless).await;
    rig.change(2, "t", &[]).await;
    rig.change(3, "t", &all).await;
    for client in [&mut alice, &mut bob] {
        assert_eq!(client.next().await.payload["data"]["record"]["id"], 3);
        client.expect_nothing().await;
    }
}

#[tokio::test]
async fn the_claimless_twin_reaches_all_viewers_with_the_role() {
    let rig = Rig::start().await;
    let mut alice = rig.subscriber("t", "alice").await;
    let mut bob = rig.subscriber("t", "bob").await;
    let twin = rig.leader.subscription("t", "alice").twin;
    assert_eq!(twin, rig.leader.subscription("t", "bob").twin);
    rig.change(1, "t", &[twin, rig.leader.sub_id("t", "alice")]).await;
    for client in [&mut alice, &mut bob] {
        assert_eq!(client.next().await.payload["ids"], json!([1]));
        client.expect_nothing().await;
    }
}

#[tokio::test]
async fn r_frt_5_a_position_is_delivered_once_per_binding_and_table() {
    let rig = Rig::start().await;
    let mut client = rig.connect(Version::V2, "alice").await;
    client.subscribe("realtime:room", json!([{"schema": "public"}, {"table": "t"}])).await;
    rig.leader_has(2).await;
    let all: Vec<SubId> = rig.leader.state().subscriptions.keys().copied().collect();
    let mut second_epoch = change(1, 1, "t", &all);
    second_epoch.headers.epoch = Some(Epoch(2));
    let mut newer = change(2, 3, "t", &all);
    newer.headers.epoch = Some(Epoch(2));
    for message in [change(1, 1, "t", &all), change(2, 1, "u", &all), change(3, 2, "t", &all), second_epoch, newer] {
        rig.publish(message).await;
    }
    // The worker lists both bindings, also where only the one for all tables fits "u".
    for (table, id, ids) in
        [("t", 1, json!([1, 2])), ("u", 1, json!([1])), ("t", 2, json!([1, 2])), ("t", 3, json!([1, 2]))]
    {
        let payload = client.next().await.payload;
        let data = &payload["data"];
        assert_eq!((&data["table"], &data["record"]["id"], &payload["ids"]), (&json!(table), &json!(id), &ids));
    }
    client.expect_nothing().await;
}

#[tokio::test]
async fn r_frt_4_a_jump_of_seq_is_announced_and_a_repeat_is_dropped() {
    let rig = Rig::start().await;
    let mut client = rig.subscriber("t", "alice").await;
    let allowed = [rig.leader.sub_id("t", "alice")];
    for message in [change(7, 1, "t", &allowed), change(7, 1, "t", &allowed), change(9, 3, "t", &allowed)] {
        rig.publish(message).await;
    }
    assert_eq!(client.next().await.payload["data"]["record"]["id"], 1);
    let gap = client.next().await;
    assert!(gap.event == "system" && gap.reference.is_null() && is_gap(&gap.payload, "bus"), "{gap:?}");
    assert_eq!(client.next().await.payload["data"]["record"]["id"], 3);
    client.expect_nothing().await;
}

/// A worker whose connection to the bus broke in mid-batch: what its client still held comes first, then the whole batch.
#[tokio::test]
async fn r_ack_1_a_batch_that_comes_again_behind_its_own_end_is_no_gap() {
    let rig = Rig::start().await;
    let mut client = rig.subscriber("t", "alice").await;
    let allowed = [rig.leader.sub_id("t", "alice")];
    for seq in [1, 4, 5, 2, 3, 4, 5, 6] {
        rig.change(seq, "t", &allowed).await;
    }
    for id in 1..=6 {
        assert_eq!(client.next().await.payload["data"]["record"]["id"], id);
    }
    client.expect_nothing().await;
}

/// A leader of a new epoch sends nothing of the old one again.
#[tokio::test]
async fn r_lease_2_what_waits_for_a_message_of_a_past_epoch_is_delivered_behind_a_gap() {
    let rig = Rig::start().await;
    let mut client = rig.subscriber("t", "alice").await;
    let allowed = [rig.leader.sub_id("t", "alice")];
    rig.change(1, "t", &allowed).await;
    rig.change(3, "t", &allowed).await;
    let mut next = change(1, 4, "t", &allowed);
    next.headers.epoch = Some(Epoch(2));
    rig.publish(next).await;
    assert_eq!(client.next().await.payload["data"]["record"]["id"], 1);
    assert!(is_gap(&client.next().await.payload, "bus"));
    for id in [3, 4] {
        assert_eq!(client.next().await.payload["data"]["record"]["id"], id);
    }
    client.expect_nothing().await;
}

#[tokio::test]
async fn r_frt_4_a_lost_tail_is_announced() {
    let rig = Rig::start().await;
    let mut client = rig.subscriber("t", "alice").await;
    rig.change(1, "t", &[rig.leader.sub_id("t", "alice")]).await;
    client.next().await;
    let (epoch, reason, seqs) = (Epoch(1), None, vec![(project(), 2)]);
    let beat = Announcement::LeaderHeartbeat { source: source(), epoch, streaming: true, reason, seqs };
    rig.leader.announce(&beat).await;
    let gap = client.next().await;
    assert!(is_gap(&gap.payload, "bus"), "{gap:?}");
}

#[tokio::test]
async fn g8_a_gap_of_the_worker_reaches_whom_it_concerns() {
    let rig = Rig::start().await;
    let mut alice = rig.subscriber("t", "alice").await;
    let mut bob = rig.subscriber("t", "bob").await;
    let mut other = rig.subscriber("u", "carol").await;
    let gap = GapEnvelope {
        v: 1,
        project: project(),
        source: source(),
        from: Some(position(1)),
        to: Some(position(2)),
        reason: GapReason::PolicyError,
        tables: Some(vec![["public".to_owned(), "t".to_owned()]]),
        sub_ids: Some(vec![rig.leader.sub_id("t", "alice"), rig.leader.sub_id("u", "carol")]),
    };
    rig.publish(Message::new(Subject::gap(project()), gap.encode())).await;
    let got = alice.next().await;
    assert!(is_gap(&got.payload, "policy_error"), "{got:?}");
    assert_eq!(got.payload["gap"]["from"], position(1).to_string());
    bob.expect_nothing().await;
    other.expect_nothing().await;
}

/// An error makes the stock Python client join again: once, then it is a gap like any other.
#[tokio::test]
async fn r_rls_4_what_nobody_can_judge_is_told_by_an_error_once_a_join() {
    let rig = Rig::start().await;
    let mut alice = rig.subscriber("t", "alice").await;
    let mut bob = rig.subscriber("t", "bob").await;
    let gap = |n| GapEnvelope {
        v: 1,
        project: project(),
        source: source(),
        from: Some(position(n)),
        to: Some(position(n)),
        reason: GapReason::NotJudgeable,
        tables: Some(vec![["public".to_owned(), "t".to_owned()]]),
        sub_ids: Some(vec![rig.leader.sub_id("t", "alice")]),
    };
    let publish = |n| rig.publish(Message::new(Subject::gap(project()), gap(n).encode()));
    publish(1).await;
    let told = alice.next().await;
    assert_eq!((told.event.as_str(), &told.payload["status"]), ("system", &json!("error")), "{told:?}");
    assert_eq!(told.payload["extension"], "postgres_changes");
    let message = told.payload["message"].as_str().unwrap_or_default();
    assert!(message.starts_with("not_judgeable: Changes of public.t can't be delivered"), "{message}");
    publish(2).await;
    let again = alice.next().await;
    assert!(is_gap(&again.payload, "not_judgeable"), "{again:?}");
    // What the stock Python client does then.
    alice.join("realtime:room", json!([{"table": "t"}])).await;
    assert_eq!(alice.next().await.event, "phx_close", "the channel before");
    assert_eq!(alice.next().await.payload["status"], "ok");
    assert_eq!(alice.next().await.payload["message"], "Subscribed to PostgreSQL");
    publish(3).await;
    let rejoined = alice.next().await;
    assert!(is_gap(&rejoined.payload, "not_judgeable"), "no loop: {rejoined:?}");
    bob.expect_nothing().await;
}
