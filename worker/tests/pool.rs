//! Workers share sources (R-LEASE-3).

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use aura_domain::{EngineState, SourceId, WorkerId};
use aura_kit::ShutdownHandle;
use aura_lease::NoLease;
use aura_store::{NewSource, NewWorker, Plugin, SlotRecreate};
use aura_testkit::eventually;
use aura_worker::{NotAlone, RegisterError, Worker, WorkerDeps, ensure_alone, register};

use crate::stage::{PATIENCE, Running, Stage};

/// A pool that settles quickly, and `sources` sources in all.
async fn pool(sources: usize) -> anyhow::Result<Stage> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage.settings.settle = Duration::from_secs(1);
    for n in 1..sources {
        let new = NewSource {
            name: format!("dedicated-{n}"),
            replication_url: stage.source.replication_url.clone(),
            admin_url: stage.source.admin_url.clone(),
            slot_name: None,
            plugin: Plugin::Auto,
            slot_recreate: SlotRecreate::Auto,
        };
        stage.store.upsert_source(new).await?;
    }
    Ok(stage)
}

/// Who runs which source, of those that stream.
async fn running(stage: &Stage) -> BTreeMap<SourceId, WorkerId> {
    let engines = stage.store.engines().await.expect("read");
    let streams = engines.into_iter().filter(|engine| engine.state == EngineState::Running);
    streams.filter_map(|engine| Some((engine.source, engine.holder?))).collect()
}

async fn shares(stage: &Stage, workers: &[&Running]) -> Vec<usize> {
    let running = running(stage).await;
    workers.iter().map(|worker| running.values().filter(|holder| *holder == worker.status.worker()).count()).collect()
}

/// Waits until the workers run so many each, in any order.
async fn shared(stage: &Stage, workers: &[&Running], wanted: &[usize]) -> anyhow::Result<()> {
    eventually(PATIENCE, || async {
        let mut shares = shares(stage, workers).await;
        shares.sort_unstable();
        shares == wanted
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn r_lease_3_a_worker_that_joins_gets_its_share_and_one_that_leaves_hands_over_at_once() -> anyhow::Result<()> {
    let stage = pool(4).await?;
    let first = stage.worker().await;
    shared(&stage, &[&first], &[4]).await?;
    let second = stage.worker().await;
    shared(&stage, &[&first, &second], &[2, 2]).await?;
    let third = stage.worker().await;
    shared(&stage, &[&first, &second, &third], &[1, 1, 2]).await?;
    let workers = stage.store.workers().await?;
    assert_eq!(workers.iter().map(|worker| worker.engines).sum::<usize>(), 4);

    let began = Instant::now();
    let reports = third.stop().await;
    assert!(reports.iter().all(|report| report.slot_released && report.lease_released), "{reports:?}");
    shared(&stage, &[&first, &second], &[2, 2]).await?;
    assert!(began.elapsed() < Duration::from_secs(5), "hand-over took {:?}", began.elapsed());
    let workers = stage.store.workers().await?;
    assert_eq!(workers.len(), 2, "who has left is forgotten: {workers:?}");
    first.stop().await;
    second.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_lease_3_a_dead_workers_sources_move_within_lease_and_5_s() -> anyhow::Result<()> {
    let stage = pool(3).await?;
    let first = stage.worker().await;
    shared(&stage, &[&first], &[3]).await?;
    let second = stage.worker().await;
    shared(&stage, &[&first, &second], &[1, 2]).await?;
    let died = Instant::now();
    first.kill();
    shared(&stage, &[&second], &[3]).await?;
    let limit = stage.settings.lease_duration + Duration::from_secs(5);
    assert!(died.elapsed() < limit, "{:?}", died.elapsed());
    second.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_lease_3_nobody_runs_more_than_its_limit() -> anyhow::Result<()> {
    let mut stage = pool(3).await?;
    stage.settings.max_engines = 1;
    let small = stage.worker().await;
    shared(&stage, &[&small], &[1]).await?;
    stage.settings.max_engines = 8;
    let large = stage.worker().await;
    shared(&stage, &[&small, &large], &[1, 2]).await?;
    assert_eq!(shares(&stage, &[&small]).await, [1]);
    small.stop().await;
    shared(&stage, &[&large], &[3]).await?;
    large.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_lease_3_a_worker_without_leases_wants_to_be_alone() -> anyhow::Result<()> {
    let stage = pool(1).await?;
    ensure_alone(&stage.store, &stage.settings).await?;
    let worker = stage.run_worker().await;
    let refused = ensure_alone(&stage.store, &stage.settings).await;
    assert!(matches!(&refused, Err(NotAlone::Rival { rival, .. }) if rival == worker.status.worker()), "{refused:?}");
    worker.stop().await;
    ensure_alone(&stage.store, &stage.settings).await?;
    // One that died without a word is waited for.
    let dead = WorkerId("worker-dead".to_owned());
    let row = NewWorker { id: &dead, host: "h", version: "1", max_engines: 1, draining: false };
    stage.store.heartbeat(row).await?;
    ensure_alone(&stage.store, &stage.settings).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_sec_4_a_worker_without_leases_fails_as_soon_as_another_joins() -> anyhow::Result<()> {
    let stage = pool(1).await?;
    let shutdown = ShutdownHandle::new(PATIENCE);
    let worker = Worker::new(WorkerDeps {
        store: stage.store.clone(),
        bus: Arc::clone(&stage.bus),
        lease: Arc::new(NoLease),
        settings: stage.settings.clone(),
    });
    let life = tokio::spawn(worker.run(shutdown.clone()));
    eventually(PATIENCE, || async { running(&stage).await.len() == 1 }).await?;
    let other = stage.worker().await;
    eventually(PATIENCE, || async { shutdown.is_triggered() }).await?;
    assert!(shutdown.failure().is_some_and(|failure| failure.component == "lease"), "{:?}", shutdown.failure());
    life.await?;
    other.stop().await;
    Ok(())
}

/// A worker with a wrong configuration harms itself; a source that was changed for the worse heals when it is changed back.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_1_a_mistyped_url_ends_nobodys_engine_and_a_corrected_one_heals() -> anyhow::Result<()> {
    let stage = pool(1).await?;
    let worker = stage.run_worker().await;
    let at = |database: &str| NewSource {
        name: stage.source.name.clone(),
        replication_url: stage.postgres.url_as("aura_worker", "secret", database).into(),
        admin_url: stage.source.admin_url.clone(),
        slot_name: None,
        plugin: Plugin::Auto,
        slot_recreate: SlotRecreate::Auto,
    };
    let refused = register(&stage.store, at("nosuch")).await;
    assert!(matches!(refused, Err(RegisterError::Unreachable { .. })), "{refused:?}");
    let known = stage.store.source(stage.source.id).await?.expect("it is there");
    assert!(known.is_same(&stage.source), "{known:?}");
    register(&stage.store, at("app")).await?;
    assert_eq!(stage.engine().await.state, EngineState::Running);

    let epoch = stage.engine().await.epoch;
    stage.store.upsert_source(at("nosuch")).await?;
    let gone = eventually(PATIENCE, || async {
        let engine = stage.engine().await;
        engine.epoch > epoch && engine.state == EngineState::Backoff
    });
    gone.await?;
    stage.store.upsert_source(at("app")).await?;
    stage.reaches(EngineState::Running).await?;
    worker.stop().await;
    Ok(())
}
