//! Somebody else has the slot, or had it and doesn't know that it is gone: stopped leaders, zombies, strangers.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use aura_testkit::{SlotState, Squatter, SquatterOptions, eventually};

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

/// R-LEASE-1, R-LEASE-2, R-SD-5: a leader that slept past its lease neither publishes anything that counts nor confirms.
#[tokio::test]
async fn scene_d_a_leader_stopped_past_its_lease_is_fenced_when_it_wakes() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    let tap = BusTap::start(&scene.split.nats).await?;
    let writer = scene.write(100);
    writer.more(100).await?;
    // In the middle of its work, with rows in its socket and in its memory.
    scene.split.worker.process.pause()?;
    let first = scene.slot.wait(PATIENCE, |state| state.is_some_and(|state| state.active)).await?.context("a slot")?;
    let old = tap.tapped().iter().filter_map(|one| one.epoch).max().context("somebody led")?;
    let second = scene.split.another_worker()?;
    let took_over = eventually(PATIENCE, || second.is_streaming()).await;
    took_over.with_context(|| second.process.lines().join("\n"))?;
    let holder = scene.slot.wait_active(PATIENCE).await?;
    assert_ne!(Some(holder), first.pid);
    writer.more(100).await?;
    // All that the first can have in its socket has come from the second by now.
    scene.subscriber.wait(writer.last()).await?;
    assert_eq!(sessions(&scene, &first).await?, 0, "who could still confirm is gone");
    let woken = Instant::now();
    scene.split.worker.process.resume()?;
    let gave_up = eventually(PATIENCE, || async { !scene.split.worker.is_streaming().await }).await;
    gave_up.with_context(|| scene.split.logs())?;
    writer.more(100).await?;
    scene.stop_writing(writer).await?;
    scene.all_arrive().await?;
    let seen = scene.subscriber.seen();
    for stale in tap.tapped().iter().filter(|one| one.when > woken && one.epoch <= Some(old)) {
        let late = seen.changes.iter().find(|change| Some(change.at) == stale.at && change.when > woken);
        assert!(
            stale.at.is_some() && late.is_none(),
            "the first said {stale:?} after its lease, and it counted: {late:?}"
        );
    }
    let told = seen.gaps.iter().find(|gap| gap.when > woken);
    assert!(told.is_none(), "the first told of a loss: {told:?}");
    // Only who streams from the slot can confirm, and that was the second all along.
    assert_eq!(scene.slot.wait_active(PATIENCE).await?, holder, "the slot stays with the second");
    assert_eq!(sessions(&scene, &first).await?, 0, "the first came back under its old epoch");
    scene.confirmed().await?;
    assert!(second.is_streaming().await);
    Ok(())
}

/// Server processes under the name that this holder had: of its source and epoch.
async fn sessions(scene: &Scene, holder: &SlotState) -> Result<i64> {
    let name = holder.application_name.as_deref().context("it had a name")?;
    let sql = "select count(*) from pg_stat_replication where application_name = $1::text or pid = $2::int4";
    Ok(scene.sql.query_one(sql, &[&name, &holder.pid]).await?.get(0))
}
