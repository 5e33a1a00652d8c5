use std::time::Duration;

use aura_domain::{Desired, EngineLive, EngineState, Epoch, Generation, Lsn, OnDeadline, Position, WorkerId};
use aura_store::{Ending, NewGap, RegistrationStatus, Store, StoreError};

use crate::{CALLER, key, platform};

#[tokio::test]
async fn r_eng_1_desired_and_observed_state_survive_and_are_fenced() {
    let platform = platform().await;
    let store = &platform.store;
    let fresh = store.engine(platform.source).await.expect("read").expect("it exists");
    assert_eq!((fresh.desired, fresh.state, fresh.epoch), (Desired::Running, EngineState::Stopped, Epoch(0)));
    let worker = WorkerId("w".to_owned());
    let (epoch, _) = store.take_engine(platform.source, &worker).await.expect("raised");
    store.set_engine_state(platform.source, epoch, EngineState::Failed, Some("slot_lost")).await.expect("written");
    let failed = store.engine(platform.source).await.expect("read").expect("it exists");
    assert_eq!((failed.state, failed.reason.as_deref()), (EngineState::Failed, Some("slot_lost")));
    store.set_engine_state(platform.source, epoch, EngineState::Failed, None).await.expect("written");
    let again = store.engine(platform.source).await.expect("read").expect("it exists");
    assert_eq!((&again.since, again.reason), (&failed.since, None), "since is when it entered the state");
    store.request_stop(platform.source, Duration::from_secs(1), OnDeadline::Force, CALLER).await.expect("written");
    store.raise_epoch(platform.source).await.expect("raised");
    let late = store.set_engine_state(platform.source, epoch, EngineState::Running, None).await;
    assert!(matches!(late, Err(StoreError::Fenced)), "{late:?}");
    let engine = store.engine(platform.source).await.expect("read").expect("it exists");
    assert_eq!((engine.desired, engine.state), (Desired::Stopped, EngineState::Failed));

    // A write that was given up may still be on its way when the run has left.
    let (epoch, _) = store.take_engine(platform.source, &worker).await.expect("raised");
    let ending = Ending { state: EngineState::Stopped, reason: None, report: None };
    store.leave_engine(platform.source, epoch, ending).await.expect("left");
    let late = store.set_engine_state(platform.source, epoch, EngineState::Closing, None).await;
    assert!(matches!(late, Err(StoreError::Fenced)), "{late:?}");
    let late = store.set_live(platform.source, epoch, &EngineLive::default()).await;
    assert!(matches!(late, Err(StoreError::Fenced)), "{late:?}");
}

#[tokio::test]
async fn r_lsn_6_the_generation_rises_when_positions_lose_their_meaning() {
    let platform = platform().await;
    let store = &platform.store;
    let epoch = store.raise_epoch(platform.source).await.expect("raised");
    let confirm = async |system: &str, timeline, created| {
        store.confirm_generation(platform.source, epoch, system, timeline, created).await.expect("confirmed")
    };
    assert_eq!(confirm("sys-1", 1, true).await, (Generation(1), false), "the first slot starts generation 1");
    let project = platform.project("p").await;
    let on = platform.enable(project, "t", 7).await;
    let set = store.identity_set(on.id, None, Lsn(10), Generation(1)).await.expect("set");
    store.mark_active(platform.source, epoch, set.revision, &[(on.id, Lsn(20))]).await.expect("marked");
    assert_eq!(confirm("sys-1", 1, false).await, (Generation(1), false));
    let active = store.registration_by_id(on.id).await.expect("read").expect("it exists");
    assert_eq!(active.status, RegistrationStatus::Active);
    assert_eq!(confirm("sys-1", 2, false).await, (Generation(2), true), "another timeline");
    let pending = store.registration_by_id(on.id).await.expect("read").expect("it exists");
    assert_eq!((pending.status, pending.active_since_lsn), (RegistrationStatus::Pending, None));
    assert_eq!(confirm("sys-2", 2, false).await, (Generation(3), true), "another server");
    assert_eq!(confirm("sys-2", 2, true).await, (Generation(4), true), "another slot");
    assert_eq!(confirm("sys-2", 2, false).await, (Generation(4), false));
    store.raise_epoch(platform.source).await.expect("raised");
    let late = store.confirm_generation(platform.source, epoch, "sys-3", 1, true).await;
    assert!(matches!(late, Err(StoreError::Fenced)), "{late:?}");
    assert_eq!(store.engine(platform.source).await.expect("read").map(|engine| engine.generation), Some(Generation(4)));
}

#[tokio::test]
async fn r_lsn_7_positions_never_go_back_within_a_generation() {
    let platform = platform().await;
    let store = &platform.store;
    let epoch = store.raise_epoch(platform.source).await.expect("raised");
    assert_eq!(store.position(platform.source).await.expect("read"), None);
    let high = Lsn(0xFFFF_FFFF_0000_0001);
    for (generation, confirmed, kept) in [(1, high, high), (1, Lsn(5), high), (2, Lsn(5), Lsn(5)), (2, Lsn(6), Lsn(6))]
    {
        store.save_position(platform.source, epoch, Generation(generation), confirmed).await.expect("saved");
        let position = store.position(platform.source).await.expect("read");
        assert_eq!(position, Some((Generation(generation), kept)));
    }
    store.raise_epoch(platform.source).await.expect("raised");
    let late = store.save_position(platform.source, epoch, Generation(2), Lsn(9)).await;
    assert!(matches!(late, Err(StoreError::Fenced)), "{late:?}");
    assert_eq!(store.position(platform.source).await.expect("read"), Some((Generation(2), Lsn(6))));
}

#[tokio::test]
async fn g8_losses_are_recorded_and_fenced() {
    let platform = platform().await;
    let store = &platform.store;
    let project = platform.project("p").await;
    let epoch = store.raise_epoch(platform.source).await.expect("raised");
    let position = Position { generation: Generation(1), commit: Lsn(0x16B_3748), change: Lsn(0x16B_3700), n: 2 };
    let gap = NewGap {
        source: platform.source,
        project: Some(project),
        from: Some(position),
        to: None,
        reason: "slot_recreated",
    };
    store.record_gap(epoch, gap.clone()).await.expect("recorded");
    store.record_gap(epoch, NewGap { project: None, from: None, ..gap.clone() }).await.expect("recorded");
    let gaps = store.gaps(platform.source, None, 10).await.expect("read");
    assert_eq!(gaps.iter().map(|gap| gap.project).collect::<Vec<_>>(), [None, Some(project)]);
    assert_eq!((gaps[1].from, gaps[1].to, gaps[1].reason.as_str()), (Some(position), None, "slot_recreated"));
    assert_eq!(store.gaps(platform.source, Some(gaps[0].id), 10).await.expect("read").len(), 1);
    store.raise_epoch(platform.source).await.expect("raised");
    assert!(matches!(store.record_gap(epoch, gap).await, Err(StoreError::Fenced)));
    assert_eq!(store.gaps(platform.source, None, 10).await.expect("read").len(), 2);
}

#[tokio::test]
async fn r_lease_3_a_worker_that_stops_in_mid_transaction_does_not_hold_its_successor_up() {
    let platform = platform().await;
    let stopped = Store::connect(&platform.url, key()).await.expect("connected");
    let mut transaction = stopped.pool().begin().await.expect("begun");
    let fence = "select from aura.engines for no key update";
    sqlx::query(fence).execute(&mut *transaction).await.expect("locked");
    let raised = platform.store.raise_epoch(platform.source).await.expect("not for ever");
    assert_eq!(raised, Epoch(1));
    assert!(transaction.commit().await.is_err(), "what it was about to write is gone");
}
