//! Somebody else has the slot, or had it and doesn't know that it is gone: stopped leaders, zombies, strangers.

use std::{
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aura_testkit::{Flow, SlotState, Squatter, SquatterOptions, eventually};

use system_tests::{BusTap, PATIENCE, SLOT, Scene, SplitOptions};

/// A client that holds the slot under this name, reads nothing, and blocks its server in writing.
pub(crate) async fn squat(scene: &Scene, application_name: &str) -> Result<Squatter> {
    let squatter = Squatter::start(SquatterOptions {
        port: scene.split.postgres.port(),
        login: Some(("worker".to_owned(), "worker".to_owned())),
        database: "app".to_owned(),
        slot: SLOT.to_owned(),
        application_name: application_name.to_owned(),
        plugin_options: vec![("format-version".to_owned(), "2".to_owned())],
    })
    .await?;
    let blocked = |state: Option<&SlotState>| {
        state.is_some_and(|state| state.wait_event.as_deref() == Some("WalSenderWriteData"))
    };
    scene.slot.wait(PATIENCE, blocked).await?;
    Ok(squatter)
}

/// The worker is killed, and rows wait for the next one, more than fit into the buffers between a server and its client.
/// Answers the name under which its walsender was known.
pub(crate) async fn abandon(scene: &mut Scene) -> Result<String> {
    let state = scene.slot.wait(PATIENCE, |state| state.is_some_and(|state| state.active)).await?;
    scene.split.worker.process.kill().await?;
    scene.slot.wait_free(PATIENCE).await?;
    scene.insert(100).await?;
    scene.ballast(2000).await?;
    state.and_then(|state| state.application_name).context("it had a name")
}

/// Once the server hears nothing, it is rid of a stopped worker; that one starts again where the bus had proved receipt.
#[tokio::test]
async fn p3_05_a_stopped_worker_loses_the_slot_in_time_and_goes_on_cleanly() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().postgres("wal_sender_timeout", "3s")).await?;
    let tap = BusTap::start(&scene.split.nats).await?;
    let writer = scene.write(100);
    writer.more(100).await?;
    scene.split.worker.process.pause()?;
    scene.slot.wait_free(Duration::from_secs(5)).await?;
    let confirmed = scene.slot.state().await?.and_then(|state| state.confirmed).context("a position")?;
    writer.more(50).await?;
    let woken = Instant::now();
    scene.split.worker.process.resume()?;
    writer.more(100).await?;
    scene.stop_writing(writer).await?;
    scene.all_arrive().await?;
    let tapped = tap.tapped();
    let again = tapped.iter().find(|one| one.when > woken && one.at.is_some_and(|at| at.commit < confirmed));
    assert!(again.is_none(), "confirmed, and sent again: {again:?}");
    assert!(scene.split.worker.process.exited().is_none(), "{}", scene.split.logs());
    Ok(())
}

/// R-FB-5, R-ENG-7 Z6, Z3: flow-control.md E2 under our own name of an older epoch.
#[tokio::test]
async fn p3_12_scene_b_a_keepalive_only_zombie_under_our_name_is_freed() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    let name = abandon(&mut scene).await?;
    let squatter = squat(&scene, &name).await?;
    scene.split.start_worker()?;
    scene.split.wait_until_streaming().await?;
    eventually(PATIENCE, || async { !squatter.is_connected() }).await?;
    // Nobody else can have ended it: the stage's server waits for a minute.
    assert_eq!(scene.split.worker.metric("cdc_zombies_freed_total").await?, Some(1.0), "{}", scene.split.logs());
    scene.all_arrive().await.map(drop)
}

/// R-FB-5, R-ENG-6: what isn't ours is shown and left alone.
#[tokio::test]
async fn p3_12_scene_b_a_stranger_on_the_slot_is_named_and_never_killed() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    abandon(&mut scene).await?;
    let squatter = squat(&scene, "somebody's report").await?;
    scene.split.start_worker()?;
    let shown = eventually(PATIENCE, || async {
        let engine = scene.split.engine().await.unwrap_or_default();
        engine["reason"].as_str().is_some_and(|reason| reason.contains("slot_in_use_by_other"))
    });
    shown.await.with_context(|| scene.split.logs())?;
    assert!(squatter.is_connected());
    drop(squatter);
    scene.split.wait_until_streaming().await?;
    scene.all_arrive().await.map(drop)
}

/// Commits rows that the leader hands to a bus which takes nothing of it, and stops it in the middle of that: what it has said
/// lies on the way, what it has read in its memory. Answers what it held.
async fn stop_the_leader_with_rows_on_the_way(scene: &mut Scene) -> Result<SlotState> {
    let first = scene.slot.wait(PATIENCE, |state| state.is_some_and(|state| state.active)).await?.context("a slot")?;
    // Whoever comes later gets through.
    scene.bus_proxy()?.set_present(Flow::Frozen, |_| true);
    scene.insert(10).await?;
    // It has published them, and has waited for the receipt.
    let said = scene.split.worker.process.line(PATIENCE, |line| line.contains("batch not proved to be received")).await;
    said.with_context(|| scene.split.logs())?;
    scene.insert_sent(10).await?;
    scene.split.worker.process.pause()?;
    Ok(first)
}

/// What was on the way arrives, and the first goes on where it stood, past its lease. Answers when.
async fn wake_the_first(scene: &Scene, tap: &BusTap, old: i64, stale: RangeInclusive<i64>) -> Result<Instant> {
    let before = tap.tapped().len();
    let woken = Instant::now();
    scene.bus_proxy()?.set(Flow::Open);
    scene.split.worker.process.resume()?;
    let emitted = || async {
        let tapped = tap.tapped();
        let of_it = |id| tapped[before..].iter().any(|one| one.epoch == Some(old) && one.id == Some(id));
        stale.clone().all(of_it)
    };
    eventually(PATIENCE, emitted).await.context("the first had nothing to say")?;
    let gave_up = eventually(PATIENCE, || async { !scene.split.worker.is_streaming().await }).await;
    gave_up.with_context(|| scene.split.logs())?;
    Ok(woken)
}

/// R-LEASE-1, R-LEASE-2, R-SD-5: what a leader that slept past its lease still says changes nothing, and it confirms nothing.
/// Its successor has delivered the same rows by then.
#[tokio::test]
async fn scene_d_a_leader_stopped_past_its_lease_is_fenced_when_it_wakes() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().bus_proxy()).await?;
    let tap = BusTap::start(&scene.split.nats).await?;
    scene.insert(10).await?;
    scene.all_arrive().await?;
    let first = stop_the_leader_with_rows_on_the_way(&mut scene).await?;
    let old = tap.tapped().iter().filter_map(|one| one.epoch).max().context("somebody led")?;
    let second = scene.split.another_worker()?;
    let took_over = eventually(PATIENCE, || second.is_streaming()).await;
    took_over.with_context(|| second.process.lines().join("\n"))?;
    let holder = scene.slot.wait_active(PATIENCE).await?;
    assert_ne!(Some(holder), first.pid);
    scene.subscriber.wait(scene.ledger.last()).await?;
    assert_eq!(sessions(&scene, &first).await?, 0, "who could still confirm is gone");
    let woken = wake_the_first(&scene, &tap, old, 11..=20).await?;
    scene.insert(10).await?;
    scene.all_arrive_without_a_gap().await?;
    let seen = scene.subscriber.seen();
    let late = seen.changes.iter().find(|change| change.when > woken && change.id <= 30);
    assert!(late.is_none(), "the first said it after its lease, and it counted: {late:?}");
    // Only who streams from the slot can confirm, and that was the second all along.
    assert_eq!(scene.slot.wait_active(PATIENCE).await?, holder, "the slot stays with the second");
    assert_eq!(sessions(&scene, &first).await?, 0, "the first came back under its old epoch");
    scene.confirmed().await?;
    assert!(second.is_streaming().await);
    Ok(())
}

/// The same where nothing but the epoch tells the first one's rows from news: its successor leads, and can't read yet.
#[tokio::test]
async fn scene_d_nothing_of_a_leader_past_its_lease_is_accepted_though_nobody_else_has_said_it() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().bus_proxy()).await?;
    let tap = BusTap::start(&scene.split.nats).await?;
    scene.insert(10).await?;
    scene.all_arrive().await?;
    let first = stop_the_leader_with_rows_on_the_way(&mut scene).await?;
    let old = tap.tapped().iter().filter_map(|one| one.epoch).max().context("somebody led")?;
    // Before it is blocked in writing to who is stopped: then it couldn't go.
    scene.slot.terminate().await?;
    scene.slot.wait_free(PATIENCE).await?;
    scene.ballast(2000).await?;
    let stranger = squat(&scene, "somebody's report").await?;
    let confirmed = scene.slot.state().await?.and_then(|state| state.confirmed);
    let second = scene.split.another_worker()?;
    // The second leads, and has told the fronts so before it met the stranger.
    let met = eventually(PATIENCE, || async {
        let engine = scene.split.engine().await.unwrap_or_default();
        engine["reason"].as_str().is_some_and(|reason| reason.contains("slot_in_use_by_other"))
    });
    met.await.with_context(|| second.process.lines().join("\n"))?;
    wake_the_first(&scene, &tap, old, 11..=20).await?;
    assert_eq!(sessions(&scene, &first).await?, 0, "the first came back under its old epoch");
    assert_eq!(scene.slot.state().await?.and_then(|state| state.confirmed), confirmed, "it confirmed something");
    assert_eq!(scene.subscriber.count(), 10, "what the first said after its lease was accepted");
    let freed = Instant::now();
    drop(stranger);
    let streams = eventually(PATIENCE, || second.is_streaming()).await;
    streams.with_context(|| second.process.lines().join("\n"))?;
    scene.insert(10).await?;
    scene.all_arrive_without_a_gap().await?;
    let seen = scene.subscriber.seen();
    let early = seen.changes.iter().find(|change| change.id > 10 && change.when < freed);
    assert!(early.is_none(), "only the first can have said it: {early:?}");
    assert_eq!(sessions(&scene, &first).await?, 0, "the first came back under its old epoch");
    Ok(())
}

/// Server processes under the name that this holder had: of its source and epoch.
async fn sessions(scene: &Scene, holder: &SlotState) -> Result<i64> {
    let name = holder.application_name.as_deref().context("it had a name")?;
    let sql = "select count(*) from pg_stat_replication where application_name = $1::text or pid = $2::int4";
    Ok(scene.sql.query_one(sql, &[&name, &holder.pid]).await?.get(0))
}
