//! One part of an engine hangs for good: what is done about it, and what goes on beside it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context as _;
use aura_domain::{EngineState, Lsn, OnDeadline, Outcome, ProjectId, ShardReport};
use aura_store::{CreatedProject, NewProject, Plugin};
use aura_testkit::{Flow, TcpProxy, eventually};
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use serde_json::json;
use uuid::Uuid;

use crate::{
    faults::{Faulty, Gate},
    stage::{CALLER, PATIENCE, Stage},
};

/// Blocks the thread of whoever counts a status, once its gate is shut: that is the task that owns the socket.
#[derive(Default)]
struct Blocking {
    gate: Gate,
    blocks: AtomicBool,
}

impl Blocking {
    fn shut(&self, shut: bool) {
        self.gate.shut(shut);
        self.blocks.store(false, Ordering::SeqCst);
    }
}

impl Recorder for Blocking {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        if key.name() == "cdc_feedback_total" {
            self.blocks.store(true, Ordering::SeqCst);
            self.gate.pass();
        }
        Counter::noop()
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// The task that owns the socket gives the sign of life itself (R-FB-1): when it hangs, nobody says that it lives, and the
/// slot is free without anybody having asked for a stop. The server would wait for a minute.
#[tokio::test(flavor = "multi_thread")]
async fn r_fb_4_an_intake_that_blocks_its_thread_loses_the_slot_without_a_stop() -> anyhow::Result<()> {
    let recorder = Arc::new(Blocking::default());
    metrics::set_global_recorder(Arc::clone(&recorder)).expect("each test has its own process");
    let mut stage = Stage::new(Plugin::Auto).await?;
    // Signs of life are a second apart.
    stage.settings.watchdog_limit = Duration::from_secs(2);
    stage.sql.batch_execute("create table t (id int primary key)").await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let (slot, epoch, mut watch) = (stage.slot().await, stage.engine().await.epoch, stage.changes().await);
    slot.wait_active(PATIENCE).await?;
    recorder.shut(true);
    stage.sql.batch_execute("insert into t values (1)").await?;
    eventually(PATIENCE, || async { recorder.blocks.load(Ordering::SeqCst) }).await?;
    assert!(slot.state().await?.is_some_and(|state| state.active), "it hangs, and nobody knows yet");
    slot.wait_free(stage.settings.watchdog_limit + Duration::from_secs(3)).await?;
    recorder.shut(false);
    stage.sql.batch_execute("insert into t values (2)").await?;
    while watch.next().await.data["record"] != json!({"id": 2}) {}
    assert!(stage.engine().await.epoch > epoch, "by another run");
    worker.stop().await;
    Ok(())
}

/// One more project with a live table, for which the stage's tables are from now on.
pub(crate) async fn another_project(stage: &mut Stage, number: u128, table: &str) -> anyhow::Result<()> {
    let new = NewProject {
        // Which shard is whose goes by the id.
        id: Some(ProjectId(Uuid::from_u128(number))),
        name: format!("project {number}"),
        source: stage.source.id,
        schema: None,
        settings: Default::default(),
    };
    let CreatedProject { project, secrets, .. } = stage.store.create_project(new, "test").await?;
    stage.admin.provision_project(project.id, &project.schema, &[], &secrets.visibility_password).await?;
    (stage.project, stage.schema) = (project.id, project.schema);
    let path = stage.schema.quoted();
    stage.sql.batch_execute(&format!("set search_path = {path}; create table {table} (id int primary key)")).await?;
    stage.enable(table).await
}

/// A drain goes on in every shard until the deadline, whichever of them can't end.
#[tokio::test(flavor = "multi_thread")]
async fn r_sd_2_a_stuck_project_keeps_no_others_rows_from_being_drained() -> anyhow::Result<()> {
    const OTHERS: u64 = 5;
    let mut stage = Stage::new(Plugin::Auto).await?;
    let bus = Arc::new(Faulty::default());
    stage.bus = Arc::clone(&bus) as _;
    let worker = stage.run_worker().await;
    another_project(&mut stage, 1, "stuck").await?;
    let stuck = stage.schema.quoted().to_string();
    let mut others = String::new();
    for number in 0..OTHERS {
        another_project(&mut stage, 2 + u128::from(number), "t").await?;
        others += &format!("insert into {}.t values (1);", stage.schema.quoted());
    }
    // All of it is on its way when the stop comes, what can't leave first of all.
    let held = bus.hold.write().await;
    stage.sql.batch_execute(&format!("insert into {stuck}.stuck values (1)")).await?;
    eventually(PATIENCE, || async { bus.batches.load(Ordering::SeqCst) > 0 }).await?;
    stage.sql.batch_execute(&others).await?;
    let end = Lsn(stage.slot().await.log_end().await?);
    let received = || worker.status.engines().into_values().any(|engine| engine.live.received_lsn >= end);
    eventually(PATIENCE, || async { received() }).await?;
    stage.store.request_stop(stage.source.id, Duration::from_secs(2), OnDeadline::Force, CALLER).await?;
    stage.reaches(EngineState::Draining).await?;
    drop(held);
    let report = stage.reaches(EngineState::Stopped).await?.last_report.expect("a report");
    let drain = &report.drain;
    assert_eq!(
        (drain.admitted, drain.delivered, drain.skipped, drain.abandoned),
        (OTHERS + 1, OTHERS, 0, 1),
        "{report:?}"
    );
    assert_eq!(report.outcome, Outcome::Forced);
    let count = |which: fn(&ShardReport) -> bool| drain.per_shard.iter().filter(|shard| which(shard)).count();
    assert_eq!(count(|shard| shard.abandoned > 0), 1, "{report:?}");
    assert!(count(|shard| shard.abandoned == 0 && shard.delivered > 0) >= 1, "the others have shards of their own");
    worker.stop().await;
    Ok(())
}

/// The end of a process waits for no database: what was drained and verified is said, though nobody can write it down.
#[tokio::test(flavor = "multi_thread")]
async fn r_sd_3_a_process_ends_while_the_platform_database_hangs() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    let proxy = TcpProxy::start(stage.postgres.port()).await?;
    stage.platform_port = proxy.port();
    stage.settings.lease_duration = Duration::from_secs(15);
    stage.sql.batch_execute("create table t (id int primary key)").await?;
    let leader = stage.run_worker().await;
    stage.enable("t").await?;
    let mut watch = stage.changes().await;
    stage.sql.batch_execute("insert into t values (1)").await?;
    watch.next().await;
    let standby = stage.worker().await;
    eventually(PATIENCE, || async { standby.status.is_ready() }).await?;
    proxy.set(Flow::Frozen);

    let began = Instant::now();
    assert_eq!(standby.stop().await, []);
    assert!(began.elapsed() < Duration::from_secs(1), "idle, and it took {:?}", began.elapsed());

    let began = Instant::now();
    let reports = leader.stop().await;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    let [report] = reports.as_slice() else { panic!("one engine: {reports:?}") };
    assert_eq!(
        (report.outcome, report.drain.delivered, report.slot_released),
        (Outcome::Drained, 1, true),
        "{report:?}"
    );
    assert!(!report.is_incomplete(), "{report:?}");
    Ok(())
}

/// What goes wrong in a drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    /// A batch that the bus never answers.
    Sink,
    /// A shard's task panics, in the middle of the drain.
    Panic,
    /// A shard's task blocks its thread: it can't be aborted, and keeps its queue, its rows and all its handles for good.
    Thread,
}

/// Invariant 14, R-SD-6, R-SD-8: any of them, and all of them at once.
#[tokio::test(flavor = "multi_thread")]
async fn invariant_14_a_process_is_gone_in_time_whichever_tasks_hang_panic_or_keep_what_they_have() -> anyhow::Result<()>
{
    use Wrong::{Panic, Sink, Thread};
    for wrong in [&[Sink, Panic][..], &[Sink, Thread], &[Panic, Thread], &[Sink, Panic, Thread]] {
        gone_in_time(wrong).await.with_context(|| format!("{wrong:?}"))?;
    }
    Ok(())
}

async fn gone_in_time(wrong: &[Wrong]) -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    let bus = Arc::new(Faulty::default());
    stage.bus = Arc::clone(&bus) as _;
    stage.settings.drain_timeout = Duration::from_secs(4);
    let worker = stage.run_worker().await;
    // Projects of three shards; each table under a name that needs no schema.
    for (number, table) in [(1, "stuck"), (2, "poison"), (4, "t")] {
        another_project(&mut stage, number, table).await?;
        stage.sql.batch_execute(&format!("create view public.{table} as select * from {table}")).await?;
    }
    let held = bus.hold.write().await;
    let mut rows = 0;
    for (one, table) in [(Wrong::Sink, "stuck"), (Wrong::Panic, "poison"), (Wrong::Thread, "t")] {
        if wrong.contains(&one) {
            rows += 1;
            bus.block.shut(one == Wrong::Thread);
            stage.sql.batch_execute(&format!("insert into public.{table} values (1)")).await?;
            eventually(PATIENCE, || async { bus.batches.load(Ordering::SeqCst) == rows }).await?;
        }
    }
    let asked = Instant::now();
    worker.shutdown.trigger();
    stage.reaches(EngineState::Draining).await?;
    drop(held);
    let limit = stage.settings.drain_timeout + Duration::from_secs(2);
    let reports = tokio::time::timeout(limit, worker.stop()).await?;
    anyhow::ensure!(asked.elapsed() < limit, "{:?}", asked.elapsed());
    bus.block.shut(false);
    let [report] = &reports[..] else { anyhow::bail!("{reports:?}") };
    let drain = &report.drain;
    let sum = drain.delivered + drain.skipped + drain.abandoned;
    anyhow::ensure!(drain.admitted == rows as u64 && drain.admitted == sum && drain.abandoned > 0, "{report:?}");
    let panicked = report.reason.as_deref().is_some_and(|reason| reason.starts_with("panicked"));
    anyhow::ensure!(panicked == wrong.contains(&Wrong::Panic), "{report:?}");
    anyhow::ensure!(report.slot_released, "{report:?}");
    Ok(())
}
