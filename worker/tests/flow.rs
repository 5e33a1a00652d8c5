//! Flow control on real parts: pauses, stalls and projects that hold everybody up.

use std::{
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

use aura_domain::{Condition, EngineState, FlowLive, OnDeadline};
use aura_kit::Metrics;
use aura_store::Plugin;
use aura_testkit::{eventually, eventually_some};
use serde_json::json;
use tokio_postgres::Client;

use crate::{
    faults::Faulty,
    stage::{PATIENCE, Running, Stage},
};

fn flow(worker: &Running) -> FlowLive {
    worker.status.engines().into_values().next().map(|engine| engine.live.flow).unwrap_or_default()
}

/// R-MEM-4, R-MEM-5, R-LSN-5: reading pauses at its line, says why and who, goes on when the bus does, and nothing is lost.
#[tokio::test(flavor = "multi_thread")]
async fn r_mem_4_reading_pauses_and_resumes_and_loses_nothing() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    let bus = Arc::new(Faulty::default());
    stage.bus = Arc::clone(&bus) as _;
    stage.settings.memory_quota = stage.settings.max_engines << 18;
    stage.sql.batch_execute("create table t (id int primary key, body text)").await?;
    let metrics = Metrics::install()?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.enable("t").await?;
    let held = bus.hold.write().await;
    stage.sql.batch_execute("insert into t select n, repeat('x', 1000) from generate_series(1, 2000) n").await?;
    let paused = eventually_some(PATIENCE, || async { Some(flow(&worker)).filter(|flow| flow.paused_since.is_some()) });
    let paused = paused.await?;
    assert_eq!((paused.quota_bytes, paused.pauses), (1 << 18, 1));
    assert!(paused.used_bytes >= (1 << 18) * 8 / 10 && paused.used_bytes < 1 << 19, "{paused:?}");
    assert_eq!(paused.pause_reason.as_deref(), Some("quota"));
    let culprit = paused.culprit.expect("rows are out");
    assert_eq!(culprit.project, stage.project);
    drop(held);
    for id in 1..=2000 {
        assert_eq!(watch.next().await.data["record"]["id"], json!(id));
    }
    eventually(PATIENCE, || async {
        let flow = flow(&worker);
        flow.paused_since.is_none() && flow.used_bytes == 0 && flow.culprit.is_none()
    })
    .await?;
    assert!(watch.gaps.is_empty());
    shows_everything(&metrics.render(), &stage);
    worker.stop().await;
    Ok(())
}

/// F.12, as far as flow control is concerned.
fn shows_everything(metrics: &str, stage: &Stage) {
    let line = |name: &str, labels: &[&str]| {
        let source = stage.source.id.to_string();
        let fits = |line: &&str| {
            line.starts_with(name)
                && line[name.len()..].starts_with('{')
                && line.contains(&source)
                && labels.iter().all(|label| line.contains(label))
        };
        let value = metrics.lines().find(fits).and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        value.unwrap_or_else(|| panic!("{name} {labels:?} is missing: {metrics}"))
    };
    let gauges = [
        "cdc_flow_used_bytes",
        "cdc_flow_quota_bytes",
        "cdc_flow_overdraft_bytes",
        "cdc_flow_paused",
        "cdc_flow_paused_seconds_total",
        "cdc_resolved_lsn",
        "cdc_received_lsn",
        "cdc_confirmed_lsn",
        "cdc_resolved_lag_bytes",
        "cdc_resolved_oldest_seconds",
        "cdc_txn_open_rows",
        "cdc_holes",
        "cdc_hole_oldest_seconds",
        "cdc_feedback_withheld_total",
    ];
    for name in gauges {
        line(name, &[]);
    }
    for name in ["cdc_shard_bytes", "cdc_shard_rows", "cdc_shard_oldest_seconds", "cdc_shard_hot"] {
        line(name, &["shard=\"0\""]);
    }
    line("cdc_feedback_gap_seconds_count", &[]);
    assert!(line("cdc_feedback_total", &["kind=\"advance\""]) > 0.0);
    assert!(line("cdc_resolved_advance_total", &[]) > 0.0);
    assert!(line("cdc_flow_pause_total", &["reason=\"quota\""]) >= 1.0);
    assert!(line("cdc_flow_resume_by_tick_total", &[]) == 0.0, "a wake-up was lost");
}

/// R-MEM-3, R-BIG-2: a row larger than the quota, in a transaction of ten times the quota, behind others.
#[tokio::test(flavor = "multi_thread")]
async fn r_mem_3_a_row_larger_than_the_quota_goes_through_alone() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage.settings.memory_quota = stage.settings.max_engines << 18;
    stage.sql.batch_execute("create table t (id int primary key, body text)").await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.enable("t").await?;
    stage
        .sql
        .batch_execute(
            "begin; insert into t select n, repeat('x', 2000) from generate_series(1, 1200) n;
             insert into t values (1201, repeat('y', 400000)); insert into t values (1202, 'z'); commit",
        )
        .await?;
    for id in 1..=1202 {
        assert_eq!(watch.next().await.data["record"]["id"], json!(id));
    }
    worker.stop().await;
    Ok(())
}

/// R-SH-3: the position passes who holds it up, and his subscribers are told of exactly that.
#[tokio::test(flavor = "multi_thread")]
async fn r_sh_3_a_project_that_hangs_is_skipped_with_a_gap() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    let bus = Arc::new(Faulty::default());
    stage.bus = Arc::clone(&bus) as _;
    stage.settings.skip_after = Duration::from_secs(1);
    stage.sql.batch_execute("create table stuck (id int primary key); create table t (id int primary key)").await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.enable("stuck").await?;
    stage.enable("t").await?;
    stage
        .sql
        .batch_execute("insert into stuck values (1); insert into stuck values (2); insert into t values (3)")
        .await?;
    let gap = watch.next_gap().await;
    assert_eq!(gap["reason"], "skipped");
    assert!(gap["from"].as_str() < gap["to"].as_str(), "from the first row to the last that waited: {gap}");
    let end: String = stage.sql.query_one("select pg_current_wal_lsn()::text", &[]).await?.get(0);
    eventually(PATIENCE, || async {
        let sql = "select confirmed_flush_lsn >= $1::text::pg_lsn from pg_replication_slots";
        stage.sql.query_one(sql, &[&end]).await.is_ok_and(|row| row.get(0))
    })
    .await?;
    stage.sql.batch_execute("insert into t values (4)").await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 4}), "it is tried again with the next row");
    let gaps = stage.store.gaps(stage.source.id, None, 10).await?;
    let recorded = gaps.iter().any(|gap| gap.reason == "skipped" && gap.project == Some(stage.project));
    assert!(recorded, "{gaps:?}");
    let (report, _) = stage.stop(5000, aura_domain::OnDeadline::Force).await?;
    let drain = report.drain;
    assert_eq!((drain.admitted, drain.delivered, drain.skipped, drain.abandoned), (4, 1, 3, 0));
    worker.stop().await;
    Ok(())
}

/// R-SH-5, R-FB-3: a sink that takes nothing, without a word why, ends the run: the slot is free, and what was out is read
/// again and delivered once the sink does.
#[tokio::test(flavor = "multi_thread")]
async fn r_sh_5_a_sink_that_stands_still_fails_the_engine() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    let bus = Arc::new(Faulty::default());
    stage.bus = Arc::clone(&bus) as _;
    stage.settings.stall_limit = Duration::from_millis(1500);
    stage.sql.batch_execute("create table t (id int primary key)").await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.enable("t").await?;
    let held = bus.hold.write().await;
    stage.sql.batch_execute("insert into t values (1), (2)").await?;
    let failed = stage.reaches(EngineState::Failed).await?;
    assert!(failed.reason.as_deref().is_some_and(|reason| reason.starts_with("sink")), "{:?}", failed.reason);
    let slot = stage.slot().await;
    slot.wait_free(Duration::from_secs(1)).await?;
    drop(held);
    for id in [1, 2] {
        assert_eq!(watch.next().await.data["record"], json!({"id": id}));
    }
    stage.reaches(EngineState::Running).await?;
    let (report, _) = stage.stop(5000, aura_domain::OnDeadline::Force).await?;
    assert_eq!((report.drain.admitted, report.drain.delivered, report.drain.abandoned), (2, 2, 0), "counted once");
    worker.stop().await;
    Ok(())
}

/// Peers §4 (c), R-FB-2, R-FB-3: a stop was asked for and nothing moves. The server goes on hearing of us while there is hope,
/// then no more, and the slot is free: long before the stop's own deadline, by nothing but that silence.
#[tokio::test(flavor = "multi_thread")]
async fn peers_4_c_keepalives_end_before_a_stop_in_which_nothing_moves_and_so_does_the_stream() -> anyhow::Result<()> {
    const STALL: f64 = 3.0;
    const TIMEOUT: f64 = 2.0;
    let mut stage = Stage::new(Plugin::Auto).await?;
    let bus = Arc::new(Faulty::default());
    stage.bus = Arc::clone(&bus) as _;
    stage.settings.stall_limit = Duration::from_secs_f64(STALL);
    stage.sql.batch_execute("create table t (id int primary key)").await?;
    stage.sql.batch_execute("alter role aura_worker set wal_sender_timeout = '2s'").await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.enable("t").await?;
    let (slot, outside) = (stage.slot().await, stage.postgres.client("postgres").await?);
    let held = bus.hold.write().await;
    stage.sql.batch_execute("insert into t values (1), (2)").await?;
    let end = slot.log_end().await?;
    slot.wait(PATIENCE, |state| state.is_some_and(|state| state.sent >= Some(end))).await?;
    let (walsender, asked) = (stage.walsender().await?, clock(&outside).await?);
    let replies = Mutex::new(Vec::new());
    let gone = eventually(PATIENCE, || async {
        let last = "select extract(epoch from reply_time)::float8 from pg_stat_replication where pid = $1";
        let Ok(row) = outside.query_opt(last, &[&walsender]).await else { return false };
        let at = row.as_ref().and_then(|row| row.get::<_, Option<f64>>(0)).filter(|at| *at > asked);
        let mut replies = replies.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = at.filter(|at| replies.last() != Some(at));
        replies.extend(fresh);
        row.is_none()
    });
    let gone = async {
        gone.await?;
        clock(&outside).await
    };
    let ((report, took), freed) = tokio::try_join!(stage.stop(15_000, OnDeadline::Force), gone)?;
    let replies = replies.into_inner().unwrap_or_else(PoisonError::into_inner);
    let after: Vec<f64> = replies.iter().map(|at| at - asked).collect();
    assert!(after.len() >= 3, "a drain keeps its stream alive: {after:?}");
    // The time runs from the last row that was read, and a tick is a quarter of the time-out.
    assert!(after.iter().all(|at| *at < STALL + TIMEOUT / 4.0), "it says that it lives, and it doesn't: {after:?}");
    assert!(freed - asked < STALL + TIMEOUT, "{} s: {after:?}", freed - asked);
    assert!(took < Duration::from_secs(10), "{took:?}: {report:?}");
    assert_eq!((report.drain.delivered, report.drain.abandoned), (0, 2), "{report:?}");
    drop(held);
    stage.start().await?;
    for id in [1, 2] {
        assert_eq!(watch.next().await.data["record"], json!({"id": id}));
    }
    worker.stop().await;
    Ok(())
}

/// The server's clock, in seconds.
async fn clock(sql: &Client) -> anyhow::Result<f64> {
    Ok(sql.query_one("select extract(epoch from clock_timestamp())::float8", &[]).await?.get(0))
}

/// R-SH-5: a bus that is known to be away is no stall: reading pauses at most, the slot is kept and nobody is skipped.
#[tokio::test(flavor = "multi_thread")]
async fn r_sh_5_a_known_outage_is_no_stall() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    let bus = Arc::new(Faulty::default());
    stage.bus = Arc::clone(&bus) as _;
    stage.settings.stall_limit = Duration::from_millis(800);
    stage.settings.skip_after = Duration::from_millis(800);
    stage.sql.batch_execute("create table t (id int primary key)").await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.enable("t").await?;
    bus.disconnect(true);
    stage.sql.batch_execute("insert into t values (1)").await?;
    let conditions = || async { stage.engine().await.live.map(|live| live.conditions).unwrap_or_default() };
    eventually(PATIENCE, || async { conditions().await.iter().any(|note| note.condition == Condition::Outage) })
        .await?;
    let fails = || async { stage.engine().await.state != EngineState::Running };
    assert!(eventually(3 * stage.settings.stall_limit, fails).await.is_err(), "it waits");
    bus.disconnect(false);
    assert_eq!(watch.next().await.data["record"], json!({"id": 1}));
    assert!(watch.gaps.is_empty(), "{:?}", watch.gaps);
    worker.stop().await;
    Ok(())
}

/// R-MEM-2, scene h: what a row becomes for many subscribers is bounded, too: pieces of it are judged and handed over, in order.
#[tokio::test(flavor = "multi_thread")]
async fn r_mem_2_a_small_transaction_for_many_subscribers_leaves_in_slices() -> anyhow::Result<()> {
    const ROWS: u64 = 2000;
    let mut stage = Stage::new(Plugin::Auto).await?;
    let bus = Arc::new(Faulty::default());
    stage.bus = Arc::clone(&bus) as _;
    let guarded = "create table t (id int primary key); alter table t enable row level security;
                   create policy everybody on t for select using (true)";
    stage.sql.batch_execute(guarded).await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    for n in 0..200 {
        let claims = json!({"role": "authenticated", "sub": format!("user {n}")});
        let (_, reply) = stage.join("t", "authenticated", claims, None).await;
        assert!(reply.exceptions.is_empty(), "{reply:?}");
    }
    let mut watch = stage.changes().await;
    stage.sql.batch_execute(&format!("insert into t select generate_series(1, {ROWS})")).await?;
    for id in 1..=ROWS {
        let seen = watch.next().await;
        assert_eq!((&seen.data["record"]["id"], seen.seq, seen.ids.len()), (&json!(id), id, 200));
    }
    let largest = bus.largest.load(Ordering::SeqCst);
    assert!((1 << 20..3 << 20).contains(&largest), "{largest} bytes in one batch");
    eventually(PATIENCE, || async { flow(&worker).used_bytes == 0 }).await?;
    worker.stop().await;
    Ok(())
}
