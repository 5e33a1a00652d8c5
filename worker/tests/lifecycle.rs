//! Engines always stop, and say truly how (R-ENG, peers.md §4).

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use aura_domain::{EngineReport, EngineState, Lsn, OnDeadline, OperationKind, Outcome};
use aura_store::{Plugin, StartRequest, StopRequest};
use aura_testkit::{Flow, Postgres, PostgresOptions, Squatter, SquatterOptions, TcpProxy, eventually};
use serde_json::json;

use crate::{
    faults::Faulty,
    stage::{CALLER, PATIENCE, Running, Stage},
};

/// Small time-outs of the server show who relies on them.
async fn stage() -> anyhow::Result<Stage> {
    let options = PostgresOptions::default().setting("wal_sender_timeout", "3s");
    let stage = Stage::on(Postgres::start_with(options).await?, Plugin::Auto).await?;
    stage.sql.batch_execute("create table t (id int primary key)").await?;
    Ok(stage)
}

/// An engine with a row that can't leave: the bus holds it.
async fn stuck() -> anyhow::Result<(Stage, Arc<Faulty>, Running)> {
    let mut stage = stage().await?;
    let bus = Arc::new(Faulty::default());
    stage.bus = Arc::clone(&bus) as _;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    Ok((stage, bus, worker))
}

fn rungs(report: &EngineReport) -> Vec<&str> {
    report.rungs.iter().map(|rung| rung.name.as_str()).collect()
}

fn adds_up(report: &EngineReport) {
    let drain = &report.drain;
    assert_eq!(drain.admitted, drain.delivered + drain.skipped + drain.abandoned, "{report:?}");
    assert_eq!(drain.abandoned, drain.per_shard.iter().map(|shard| shard.abandoned).sum::<u64>(), "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn r_eng_3_a_stop_drains_verifies_and_the_slot_is_free() -> anyhow::Result<()> {
    let stage = stage().await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let mut watch = stage.changes().await;
    stage.sql.batch_execute("insert into t select generate_series(1, 100)").await?;
    for _ in 0..100 {
        watch.next().await;
    }
    let end = Lsn(stage.slot().await.log_end().await?);
    let (report, took) = stage.stop(25_000, OnDeadline::Force).await?;
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!((report.outcome, report.drain.delivered, report.drain.abandoned), (Outcome::Drained, 100, 0));
    adds_up(&report);
    assert!(report.lsn.verified.is_some_and(|verified| verified >= report.lsn.resolved), "{report:?}");
    assert!(report.slot_released && report.lease_released && report.rungs.is_empty(), "{report:?}");
    let phases: Vec<_> = report.drain.phases.iter().map(|phase| phase.name.as_str()).collect();
    assert_eq!(phases, ["intake_stop", "seal", "drain", "final_position", "leave"]);
    let slot = stage.slot().await.state().await?.expect("it stays");
    assert!(!slot.active && Lsn(slot.confirmed.expect("confirmed")) == report.lsn.verified.expect("verified"));
    let engine = stage.engine().await;
    assert_eq!((engine.operation, engine.holder), (None, None));
    assert_eq!(stage.backends().await, 0);

    // Nothing comes twice after a start, and nothing is missing.
    stage.sql.batch_execute("insert into t values (101)").await?;
    stage.start().await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 101}), "{end}");
    assert!(stage.engine().await.epoch > report.epoch);
    worker.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_eng_3_an_idle_engine_stops_within_a_second() -> anyhow::Result<()> {
    let stage = stage().await?;
    let worker = stage.run_worker().await;
    let (report, took) = stage.stop(25_000, OnDeadline::Force).await?;
    assert!(took < Duration::from_secs(1), "{took:?} {report:?}");
    assert_eq!(report.outcome, Outcome::Drained);
    stage.start().await?;
    stage.reaches(EngineState::Running).await?;
    let (report, _) = stage.stop(0, OnDeadline::Force).await?;
    assert_eq!(report.outcome, Outcome::Drained, "it had nothing to do: {report:?}");
    let again = stage.store.request_stop(stage.source.id, Duration::ZERO, OnDeadline::Force, CALLER).await?;
    assert!(matches!(again, StopRequest::Already(_)), "{again:?}");
    worker.stop().await;
    Ok(())
}

/// peers.md §4 (a), (b), (d), (e): a consumer that never returns.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_3_a_stop_with_a_hung_consumer_ends_by_force_and_says_so() -> anyhow::Result<()> {
    let (stage, bus, worker) = stuck().await?;
    let held = bus.hold.write().await;
    stage.sql.batch_execute("insert into t values (1), (2)").await?;
    eventually(PATIENCE, || async { bus.batches.load(Ordering::SeqCst) > 0 }).await?;
    let (report, took) = stage.stop(2000, OnDeadline::Force).await?;
    assert!(took < Duration::from_millis(3500), "{took:?} {report:?}");
    assert_eq!((report.outcome, report.drain.abandoned), (Outcome::Forced, 2));
    adds_up(&report);
    assert!(report.slot_released && !stage.slot().await.state().await?.expect("slot").active);
    drop(held);
    // A second engine gets the slot, and the rows come.
    let mut watch = stage.changes().await;
    stage.start().await?;
    for id in [1, 2] {
        assert_eq!(watch.next().await.data["record"], json!({"id": id}));
    }
    let taken = bus.taken.load(Ordering::SeqCst);
    assert_eq!(taken, 1, "what the first engine was about to say is never said");
    worker.stop().await;
    Ok(())
}

/// The stream breaks while rows are out, and the stop meets an engine that has none: they are delivered and confirmed all
/// the same.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_3_a_stop_without_a_stream_drains_too() -> anyhow::Result<()> {
    let (stage, bus, worker) = stuck().await?;
    let held = bus.hold.write().await;
    stage.sql.batch_execute("insert into t values (1), (2)").await?;
    eventually(PATIENCE, || async { bus.batches.load(Ordering::SeqCst) > 0 }).await?;
    let holder = stage.slot().await.wait_active(PATIENCE).await?;
    stage.sql.execute("select pg_terminate_backend($1)", &[&holder]).await?;
    stage.reaches(EngineState::Backoff).await?;
    let release = async {
        stage.reaches(EngineState::Draining).await?;
        drop(held);
        anyhow::Ok(())
    };
    let (stopped, released) = tokio::join!(stage.stop(10_000, OnDeadline::Force), release);
    released?;
    let (report, _) = stopped?;
    assert_eq!(
        (report.outcome, report.drain.delivered, report.drain.abandoned),
        (Outcome::Drained, 2, 0),
        "{report:?}"
    );
    assert!(report.lsn.verified.is_some_and(|verified| verified >= report.lsn.resolved), "{report:?}");
    adds_up(&report);
    worker.stop().await;
    Ok(())
}

/// Without a source nothing can be confirmed; what was read is delivered, and said to come again.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_3_a_stop_while_the_source_is_away_delivers_what_was_read() -> anyhow::Result<()> {
    let mut stage = stage().await?;
    let proxy = TcpProxy::start(stage.postgres.port()).await?;
    stage.reach_source_through(proxy.port()).await?;
    let bus = Arc::new(Faulty::default());
    stage.bus = Arc::clone(&bus) as _;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let held = bus.hold.write().await;
    stage.sql.batch_execute("insert into t values (1)").await?;
    eventually(PATIENCE, || async { bus.batches.load(Ordering::SeqCst) > 0 }).await?;
    proxy.set(Flow::Cut);
    stage.reaches(EngineState::Backoff).await?;
    let restore = async {
        stage.reaches(EngineState::Draining).await?;
        drop(held);
        eventually(PATIENCE, || async { bus.taken.load(Ordering::SeqCst) > 0 }).await?;
        proxy.set(Flow::Open);
        anyhow::Ok(())
    };
    let (stopped, restored) = tokio::join!(stage.stop(20_000, OnDeadline::Force), restore);
    restored?;
    let (report, _) = stopped?;
    assert_eq!((report.drain.delivered, report.drain.abandoned), (1, 0), "{report:?}");
    assert_eq!(report.outcome, Outcome::Forced, "its row comes again: {report:?}");
    worker.stop().await;
    Ok(())
}

/// The same, but the consumer blocks its thread: it can't even be aborted.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_4_a_task_that_blocks_its_thread_holds_up_nothing() -> anyhow::Result<()> {
    let (stage, bus, worker) = stuck().await?;
    bus.block.shut(true);
    stage.sql.batch_execute("insert into t values (1)").await?;
    eventually(PATIENCE, || async { bus.batches.load(Ordering::SeqCst) > 0 }).await?;
    let (report, took) = stage.stop(1000, OnDeadline::Force).await?;
    assert!(took < Duration::from_secs(6), "{took:?} {report:?}");
    assert_eq!((report.outcome, report.drain.abandoned, report.slot_released), (Outcome::Forced, 1, true));
    bus.block.shut(false);
    let mut watch = stage.changes().await;
    stage.start().await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 1}));
    worker.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_eng_3_a_force_close_needs_no_deadline_and_a_later_one_tightens() -> anyhow::Result<()> {
    let (stage, bus, worker) = stuck().await?;
    let _held = bus.hold.write().await;
    stage.sql.batch_execute("insert into t values (1)").await?;
    eventually(PATIENCE, || async { bus.batches.load(Ordering::SeqCst) > 0 }).await?;
    let (store, source) = (&stage.store, stage.source.id);
    let stop = store.request_stop(source, Duration::from_secs(60), OnDeadline::Abandon, CALLER).await?;
    let StopRequest::Accepted { operation, joined: false } = stop else { panic!("{stop:?}") };
    stage.reaches(EngineState::Draining).await?;
    let start = store.request_start(source, CALLER).await?;
    assert!(matches!(start, StartRequest::Refused { retry_after_ms: Some(1..), .. }), "{start:?}");
    // Fifty at a time: one operation.
    let many = (0..50).map(|_| store.request_stop(source, Duration::from_secs(60), OnDeadline::Abandon, CALLER));
    for answer in futures_util::future::join_all(many).await {
        let StopRequest::Accepted { operation: again, joined: true } = answer? else { panic!("it was under way") };
        assert_eq!(again.id, operation.id);
    }
    let began = Instant::now();
    let forced = store.request_force_close(source, CALLER).await?;
    assert!(
        matches!(forced, StopRequest::Accepted { ref operation, joined: true } if operation.kind == OperationKind::ForceClose)
    );
    let report = stage.reaches(EngineState::Stopped).await?.last_report.expect("a report");
    assert!(began.elapsed() < Duration::from_secs(5), "{report:?}");
    assert_eq!((report.outcome, report.drain.abandoned), (Outcome::Forced, 1));
    assert_eq!(rungs(&report)[..2], ["shutdown", "reset"]);
    assert!(report.slot_released);
    worker.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_eng_3_abandon_ends_no_process_of_the_server() -> anyhow::Result<()> {
    let (stage, bus, worker) = stuck().await?;
    let _held = bus.hold.write().await;
    stage.sql.batch_execute("insert into t values (1)").await?;
    eventually(PATIENCE, || async { bus.batches.load(Ordering::SeqCst) > 0 }).await?;
    let (report, took) = stage.stop(500, OnDeadline::Abandon).await?;
    assert!(took < Duration::from_secs(6), "{took:?}");
    assert_eq!((report.outcome, report.drain.abandoned, report.slot_released), (Outcome::Abandoned, 1, true));
    assert!(!rungs(&report).iter().any(|rung| rung.starts_with("terminate")), "{report:?}");
    worker.stop().await;
    Ok(())
}

/// The worker's SQL connection hangs while its stream is well: the RisingWave case.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_4_a_stop_does_not_hang_on_the_engines_sql_connection() -> anyhow::Result<()> {
    let mut stage = stage().await?;
    let proxy = TcpProxy::start(stage.postgres.port()).await?;
    stage.reach_source_through(proxy.port()).await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let slot = stage.slot().await;
    slot.wait_active(PATIENCE).await?;
    let name = format!("\0aura-cdc:{}:{}\0", stage.source.id, stage.engine().await.epoch);
    proxy.set_where(Flow::Frozen, move |said| said.contains(&name) && !said.contains("replication\0"));
    let (report, took) = stage.stop(3000, OnDeadline::Force).await?;
    assert!(took < Duration::from_secs(8), "{took:?} {report:?}");
    assert!(report.slot_released && report.lsn.verified.is_some(), "{report:?}");
    proxy.set(Flow::Open);
    eventually(PATIENCE, || async { stage.backends().await == 0 }).await?;
    let mut watch = stage.changes().await;
    stage.sql.batch_execute("insert into t values (7)").await?;
    stage.start().await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 7}));
    worker.stop().await;
    Ok(())
}

/// The local force-close works without the platform database's help.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_6_the_worker_cuts_its_engine_without_the_platform_database() -> anyhow::Result<()> {
    let stage = stage().await?;
    let worker = stage.run_worker().await;
    let slot = stage.slot().await;
    slot.wait_active(PATIENCE).await?;
    let epoch = stage.engine().await.epoch;
    let lock = stage.postgres.client("platform").await?;
    lock.batch_execute("begin; lock aura.engines, aura.leases in access exclusive mode").await?;
    let began = Instant::now();
    assert!(worker.desk.force_close(stage.source.id));
    slot.wait_free(Duration::from_secs(5)).await?;
    assert!(began.elapsed() < Duration::from_secs(5));
    lock.batch_execute("commit").await?;
    // Nobody stopped it for good: it is wanted, so it runs again.
    eventually(PATIENCE, || async {
        let engine = stage.engine().await;
        engine.state == EngineState::Running && engine.epoch > epoch
    })
    .await?;
    worker.stop().await;
    Ok(())
}

fn squatter(stage: &Stage, application_name: String) -> SquatterOptions {
    SquatterOptions {
        port: stage.postgres.port(),
        login: None,
        database: "app".to_owned(),
        slot: stage.source.slot_name.clone(),
        application_name,
        plugin_options: vec![("format-version".to_owned(), "2".to_owned())],
    }
}

/// R-ENG-7 Z6, R-FB-5: a client that only says that it is alive, under our name and an older epoch.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_7_a_zombie_of_an_older_epoch_is_freed_and_a_foreigner_never_touched() -> anyhow::Result<()> {
    let stage = stage().await?;
    let worker = stage.run_worker().await;
    let (report, _) = stage.stop(25_000, OnDeadline::Force).await?;
    let old = format!("aura-cdc:{}:{}", stage.source.id, report.epoch);
    let zombie = Squatter::start(SquatterOptions {
        login: Some(("aura_worker".into(), "secret".into())),
        ..squatter(&stage, old)
    })
    .await?;
    stage.start().await?;
    eventually(PATIENCE, || async { !zombie.is_connected() }).await?;

    stage.stop(25_000, OnDeadline::Force).await?;
    let foreigner = Squatter::start(squatter(&stage, "nightly-export".to_owned())).await?;
    let pid = stage.slot().await.wait_active(PATIENCE).await?;
    stage.store.request_start(stage.source.id, CALLER).await?;
    let engine = stage.reaches(EngineState::Backoff).await?;
    let reason = engine.reason.unwrap_or_default();
    assert_eq!(reason, format!("slot_in_use_by_other: pid {pid} (nightly-export)"));
    // A stop frees nothing that isn't ours, and doesn't claim it.
    stage.store.request_stop(stage.source.id, Duration::from_secs(1), OnDeadline::Force, CALLER).await?;
    let engine = stage.reaches(EngineState::Zombie).await?;
    let reason = engine.reason.unwrap_or_default();
    assert!(reason.contains(&pid.to_string()) && reason.contains("nightly-export"), "{reason}");
    assert!(foreigner.is_connected());
    drop(foreigner);
    stage.reaches(EngineState::Stopped).await?;
    worker.stop().await;
    Ok(())
}

/// Creating a slot waits for transactions that are open: stop works behind that, at once.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_3_a_stop_during_starting_works_behind_an_open_transaction() -> anyhow::Result<()> {
    let stage = stage().await?;
    let open = stage.postgres.client("app").await?;
    open.batch_execute("begin; select pg_current_xact_id()").await?;
    let worker = stage.worker().await;
    let slot = stage.slot().await;
    slot.wait_active(PATIENCE).await?;
    let (report, took) = stage.stop(25_000, OnDeadline::Force).await?;
    assert!(took < Duration::from_secs(5), "{took:?} {report:?}");
    assert!(report.slot_released);
    assert!(slot.state().await?.is_none_or(|slot| !slot.active));
    open.batch_execute("commit").await?;
    stage.start().await?;
    worker.stop().await;
    Ok(())
}

/// R-SD-5: nothing more is published, sent or written; the process goes on.
#[tokio::test(flavor = "multi_thread")]
async fn r_sd_5_a_worker_that_lost_its_lease_is_silent() -> anyhow::Result<()> {
    let (stage, bus, worker) = stuck().await?;
    let mut watch = stage.changes().await;
    let held = bus.hold.write().await;
    stage.sql.batch_execute("insert into t values (1)").await?;
    eventually(PATIENCE, || async { bus.batches.load(Ordering::SeqCst) > 0 }).await?;
    let (slot, before) = (stage.slot().await, stage.engine().await);
    let confirmed = slot.state().await?.expect("slot").confirmed;
    let steal = "update aura.leases set holder = 'thief', version = version + 1, duration_ms = 6000,
        renewed_at = clock_timestamp()";
    stage.postgres.client("platform").await?.batch_execute(steal).await?;
    slot.wait_free(stage.settings.lease_duration + Duration::from_secs(2)).await?;
    drop(held);
    let after = stage.engine().await;
    assert_eq!((after.state, after.epoch, after.last_report), (before.state, before.epoch, None), "nothing is written");
    assert_eq!(after.holder, before.holder);
    assert_eq!(slot.state().await?.expect("slot").confirmed, confirmed);
    assert_eq!(bus.taken.load(Ordering::SeqCst), 0, "what was on its way is not said");
    // The thief never renews; then it is anybody's.
    assert_eq!(watch.next().await.data["record"], json!({"id": 1}));
    assert!(stage.engine().await.epoch > before.epoch);
    worker.stop().await;
    Ok(())
}

/// R-SD-6: a panic ends its engine's run, the row is never acknowledged; the third time it is skipped with a gap.
#[tokio::test(flavor = "multi_thread")]
async fn r_sd_6_a_row_that_makes_a_task_panic_three_times_is_skipped_with_a_gap() -> anyhow::Result<()> {
    let mut stage = stage().await?;
    stage.sql.batch_execute("create table poison (id int primary key)").await?;
    stage.bus = Arc::new(Faulty::default());
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    stage.enable("poison").await?;
    let mut watch = stage.changes().await;
    stage.sql.batch_execute("insert into poison values (1); insert into t values (2)").await?;
    let engine = stage.reaches(EngineState::Failed).await?;
    let reason = engine.reason.unwrap_or_default();
    assert!(reason.starts_with("panicked: shard-"), "{reason}");
    let report = engine.last_report.expect("a report");
    assert_eq!((report.outcome, report.slot_released), (Outcome::Failed, true));
    assert!(report.drain.abandoned >= 1, "never acknowledged: {report:?}");
    let announced = watch.next_gap().await;
    assert_eq!(announced["tables"], json!([["public", "poison"]]));
    assert_eq!((&announced["reason"], &announced["from"]), (&json!("undecodable"), &announced["to"]));
    assert_eq!(watch.next().await.data["record"], json!({"id": 2}), "the stream goes on");
    stage.reaches(EngineState::Running).await?;
    assert_eq!(stage.engine().await.epoch.0, 4, "three runs panicked");
    worker.stop().await;
    Ok(())
}

/// A run that ended badly is not repeated for a while, longer each time, unless somebody asks for it.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_1_a_start_does_not_wait_for_the_pause_after_a_failed_run() -> anyhow::Result<()> {
    let mut stage = stage().await?;
    stage.sql.batch_execute("create table poison (id int primary key)").await?;
    stage.bus = Arc::new(Faulty::default());
    let worker = stage.run_worker().await;
    stage.enable("poison").await?;
    // Three runs for the first row, and the fourth one's end is followed by 8 s.
    stage.sql.batch_execute("insert into poison values (1); insert into poison values (2)").await?;
    let failed = || async {
        let engine = stage.engine().await;
        engine.epoch.0 == 4 && engine.state == EngineState::Failed && engine.holder.is_none()
    };
    eventually(PATIENCE, failed).await?;
    stage.store.request_start(stage.source.id, CALLER).await?;
    eventually(Duration::from_secs(5), || async { stage.engine().await.epoch.0 == 5 }).await?;
    worker.stop().await;
    Ok(())
}
