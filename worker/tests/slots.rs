//! Slots that are lost, missing, or can't be made yet (R-ENG-8).

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use aura_domain::{Condition, EngineState, OnDeadline};
use aura_store::{Plugin, SlotRecreate};
use aura_testkit::{Postgres, PostgresOptions, Shutdown, SlotWatch, eventually};
use serde_json::json;
use tokio_postgres::Client;

use crate::{
    faults::Faulty,
    stage::{CALLER, PATIENCE, Stage},
};

/// From a start to the stream.
const AT_ONCE: Duration = Duration::from_secs(5);

/// As an administrator by mistake, or a fail-over to a server that doesn't have it.
async fn drop_slot(stage: &Stage) -> anyhow::Result<()> {
    let sql = "select pg_terminate_backend(active_pid) from pg_replication_slots where active;
               select pg_drop_replication_slot(slot_name) from pg_replication_slots";
    eventually(PATIENCE, || async { stage.sql.batch_execute(sql).await.is_ok() }).await
}

async fn gaps(stage: &Stage) -> Vec<String> {
    let gaps = stage.store.gaps(stage.source.id, None, 100).await.expect("read");
    gaps.into_iter().map(|gap| gap.reason).collect()
}

async fn streams_in_generation(stage: &Stage, generation: u32) -> anyhow::Result<()> {
    eventually(PATIENCE, || async {
        let engine = stage.engine().await;
        engine.state == EngineState::Running && engine.generation.0 == generation
    })
    .await
}

/// Into the table `other`.
async fn fill_until_lost(sql: &Client, slot: &SlotWatch) -> anyhow::Result<()> {
    eventually(PATIENCE, || async {
        let fill = "insert into other select repeat('x', 8000) from generate_series(1, 2000); select pg_switch_wal()";
        sql.batch_execute(fill).await.expect("written");
        sql.batch_execute("checkpoint").await.expect("done");
        let state = slot.state().await.expect("read").expect("it is there");
        state.wal_status.as_deref() == Some("lost")
    })
    .await
}

/// Scenario g: the server throws away the log that a stalled engine needs.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_8_a_lost_slot_is_made_again_once_with_one_gap() -> anyhow::Result<()> {
    let options = PostgresOptions::default()
        .setting("max_slot_wal_keep_size", "16MB")
        .setting("max_wal_size", "64MB")
        .setting("min_wal_size", "32MB");
    let mut stage = Stage::on(Postgres::start_with(options).await?, Plugin::Auto).await?;
    let bus = Arc::new(Faulty::default());
    stage.bus = Arc::clone(&bus) as _;
    stage.sql.batch_execute("create table t (id int primary key); create table other (big text)").await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.enable("t").await?;
    let held = bus.hold.write().await;
    stage.sql.batch_execute("insert into t values (1)").await?;
    eventually(PATIENCE, || async { bus.batches.load(Ordering::SeqCst) > 0 }).await?;
    let slot = stage.slot().await;
    let before = slot.state().await?.expect("slot").confirmed;
    for _ in 0..6 {
        let fill = "insert into other select repeat('x', 8000) from generate_series(1, 2000); select pg_switch_wal()";
        stage.sql.batch_execute(fill).await?;
        stage.sql.batch_execute("checkpoint").await?;
    }
    let lost = Instant::now();
    drop(held);
    let announced = watch.next_gap().await;
    assert_eq!(announced["reason"], "slot_recreated", "{announced}");
    streams_in_generation(&stage, 2).await?;
    assert!(lost.elapsed() < Duration::from_secs(10), "{:?}", lost.elapsed());
    assert_eq!(gaps(&stage).await, ["slot_recreated"]);
    let now = slot.state().await?.expect("slot");
    assert!(now.confirmed > before && now.wal_status.as_deref() == Some("reserved"), "{now:?}");
    stage.sql.batch_execute("insert into t values (2)").await?;
    while watch.next().await.data["record"] != json!({"id": 2}) {}
    assert!(watch.gaps.is_empty(), "announced once: {:?}", watch.gaps);
    worker.stop().await;
    Ok(())
}

/// Names of slots are cluster-wide: one that was lost may be somebody else's, and theirs to drop.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_8_a_lost_slot_that_was_never_ours_is_left_alone() -> anyhow::Result<()> {
    let options = PostgresOptions::default()
        .setting("max_slot_wal_keep_size", "16MB")
        .setting("max_wal_size", "64MB")
        .setting("min_wal_size", "32MB");
    let stage = Stage::on(Postgres::start_with(options).await?, Plugin::Auto).await?;
    let make = "select pg_create_logical_replication_slot('aura_cdc_slot', 'wal2json')";
    let (here, elsewhere) = (&stage.sql, stage.postgres.client("platform").await?);
    here.batch_execute("create table other (big text)").await?;
    let slot = stage.slot().await;
    for (owner, reason) in [(&elsewhere, "slot_of_other_database"), (here, "slot_lost")] {
        owner.execute(make, &[]).await?;
        fill_until_lost(here, &slot).await?;
        let worker = stage.worker().await;
        let failed = || async { worker.status.engines().values().any(|engine| engine.code == Some(reason)) };
        eventually(PATIENCE, failed).await?;
        assert!(slot.state().await?.is_some(), "{reason}: it is still there");
        worker.stop().await;
        owner.execute("select pg_drop_replication_slot('aura_cdc_slot')", &[]).await?;
    }
    Ok(())
}

/// The engine had a slot, which went, and under its name there is one now that we can't have made: it is neither read nor,
/// once it is lost, dropped and made again.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_8_a_slot_of_another_plugin_is_left_alone_even_when_lost() -> anyhow::Result<()> {
    let options = PostgresOptions::default()
        .setting("max_slot_wal_keep_size", "16MB")
        .setting("max_wal_size", "64MB")
        .setting("min_wal_size", "32MB");
    let stage = Stage::on(Postgres::start_with(options).await?, Plugin::Auto).await?;
    stage.sql.batch_execute("create table other (big text)").await?;
    let worker = stage.run_worker().await;
    let slot = stage.slot().await;
    eventually(PATIENCE, || async { stage.store.position(stage.source.id).await.is_ok_and(|at| at.is_some()) }).await?;
    worker.stop().await;
    drop_slot(&stage).await?;
    stage.sql.execute("select pg_create_logical_replication_slot('aura_cdc_slot', 'test_decoding')", &[]).await?;
    for lost in [false, true] {
        if lost {
            fill_until_lost(&stage.sql, &slot).await?;
        }
        let worker = stage.worker().await;
        let code = Some("slot_of_other_plugin");
        let failed = || async { worker.status.engines().values().any(|engine| engine.code == code) };
        eventually(PATIENCE, failed).await?;
        assert!(
            stage.reaches(EngineState::Failed).await?.reason.is_some_and(|reason| reason.contains("test_decoding"))
        );
        worker.stop().await;
        let plugin = "select plugin::text from pg_replication_slots where slot_name = 'aura_cdc_slot'";
        let plugin: String = stage.sql.query_one(plugin, &[]).await?.get(0);
        assert_eq!(plugin, "test_decoding", "lost: {lost}");
    }
    assert!(gaps(&stage).await.is_empty());
    Ok(())
}

/// `slot_recreate=manual`: nothing is made, nothing is tried, until an operator asks.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_8_a_manual_slot_waits_for_an_operator() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage.sql.batch_execute("create table t (id int primary key)").await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    // A running engine takes over what is changed of its source.
    let epoch = stage.engine().await.epoch;
    stage.set_slot_recreate(SlotRecreate::Manual).await?;
    eventually(PATIENCE, || async {
        let engine = stage.engine().await;
        engine.epoch > epoch && engine.state == EngineState::Running
    })
    .await?;
    let mut watch = stage.changes().await;
    drop_slot(&stage).await?;
    let engine = stage.reaches(EngineState::Failed).await?;
    let reason = engine.reason.unwrap_or_default();
    assert!(reason.starts_with("slot_lost: ") && reason.contains("manual"), "{reason}");
    assert!(!worker.status.cdc_active());
    assert!(stage.slot().await.state().await?.is_none() && gaps(&stage).await.is_empty());
    // A stop of what waits for an operator is a stop, and says what it waited for.
    let (report, _) = stage.stop(1000, OnDeadline::Force).await?;
    assert_eq!(report.outcome, aura_domain::Outcome::SlotLost, "{report:?}");
    stage.store.request_start(stage.source.id, CALLER).await?;
    stage.reaches(EngineState::Failed).await?;
    stage.store.request_new_slot(stage.source.id, CALLER).await?;
    streams_in_generation(&stage, 2).await?;
    assert!(!stage.engine().await.recreate_slot, "the request is worked off");
    assert_eq!(watch.next_gap().await["reason"], "slot_recreated");
    let told = stage.postgres.log().iter().filter(|line| line.contains("does not exist")).count();
    assert_eq!(told, 0, "no START on a slot that isn't there");
    worker.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_eng_8_at_most_three_slots_an_hour() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    stage.sql.batch_execute("create table t (id int primary key)").await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    for generation in 2..=4 {
        drop_slot(&stage).await?;
        streams_in_generation(&stage, generation).await?;
        // Its position is known, so the next one is a loss, too.
        eventually(PATIENCE, || async {
            let position = stage.store.position(stage.source.id).await.ok().flatten();
            position.is_some_and(|(of, _)| of.0 == generation)
        })
        .await?;
    }
    drop_slot(&stage).await?;
    let engine = stage.reaches(EngineState::Failed).await?;
    assert!(engine.reason.as_deref().is_some_and(|reason| reason.contains("three times")), "{engine:?}");
    assert_eq!(gaps(&stage).await.len(), 3);
    worker.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_eng_8_who_holds_up_a_new_slot_is_shown() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    let open = stage.postgres.client("app").await?;
    open.batch_execute("set application_name = 'report-job'; begin; select pg_current_xact_id()").await?;
    let pid: i32 = open.query_one("select pg_backend_pid()", &[]).await?.get(0);
    let worker = stage.worker().await;
    let waits = |engine: &aura_store::Engine| {
        let reason = engine.reason.as_deref().unwrap_or_default();
        engine.state == EngineState::Starting && reason.contains(&format!("pid {pid} (report-job) for "))
    };
    eventually(PATIENCE, || async { waits(&stage.engine().await) }).await?;
    let holds =
        || {
            worker.status.engines().values().any(|engine| {
                engine.live.conditions.iter().any(|note| note.condition == Condition::WaitingForTransactions)
            })
        };
    eventually(PATIENCE, || async { holds() }).await?;
    open.batch_execute("commit").await?;
    let engine = stage.reaches(EngineState::Running).await?;
    assert_eq!(engine.reason, None);
    eventually(PATIENCE, || async { !holds() }).await?;
    worker.stop().await;
    Ok(())
}

/// The bus is away when the slot is made again, and the worker dies before it is back: the clients are told all the same.
#[tokio::test(flavor = "multi_thread")]
async fn g8_a_gap_waits_for_the_bus_also_across_a_crash() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    let bus = Arc::new(Faulty::default());
    stage.bus = Arc::clone(&bus) as _;
    stage.sql.batch_execute("create table t (id int primary key)").await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let mut watch = stage.changes().await;
    bus.away.store(true, Ordering::SeqCst);
    let tries = bus.batches.load(Ordering::SeqCst);
    drop_slot(&stage).await?;
    streams_in_generation(&stage, 2).await?;
    eventually(PATIENCE, || async { bus.batches.load(Ordering::SeqCst) > tries + 1 }).await?;
    let known = stage.store.position(stage.source.id).await?.expect("a position").0;
    assert_eq!(known.0, 1, "the new generation is not entered before its gap is announced");
    worker.kill();
    let worker = stage.run_worker().await;
    bus.away.store(false, Ordering::SeqCst);
    let announced = watch.next_gap().await;
    assert_eq!(announced["reason"], "new_generation", "{announced}");
    eventually(PATIENCE, || async {
        stage.store.position(stage.source.id).await.ok().flatten().is_some_and(|(of, _)| of.0 == 2)
    })
    .await?;
    worker.stop().await;
    Ok(())
}

/// A row that is too long to be read: its table's subscribers have a gap, though the bus is away when it comes and the
/// worker dies before it is back.
#[tokio::test(flavor = "multi_thread")]
async fn r_dec_4_the_gap_of_a_row_that_cant_be_used_waits_for_the_bus() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    let bus = Arc::new(Faulty::default());
    stage.bus = Arc::clone(&bus) as _;
    stage.sql.batch_execute("create table t (id int primary key, big text)").await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let mut watch = stage.changes().await;
    bus.away.store(true, Ordering::SeqCst);
    let tries = bus.batches.load(Ordering::SeqCst);
    let limit = stage.settings.max_message();
    assert_eq!(limit, 16 << 20, "twice the largest event: what one row may cost in memory (R-MEM-9)");
    stage.sql.batch_execute(&format!("insert into t values (1, repeat('x', {limit}))")).await?;
    eventually(PATIENCE, || async { bus.batches.load(Ordering::SeqCst) > tries + 1 }).await?;
    worker.kill();
    let worker = stage.run_worker().await;
    bus.away.store(false, Ordering::SeqCst);
    let announced = watch.next_gap().await;
    assert_eq!((&announced["reason"], &announced["tables"]), (&json!("undecodable"), &json!([["public", "t"]])));
    // One that is read, but larger than an event may be, comes without its large column.
    stage.sql.batch_execute(&format!("insert into t values (2, repeat('x', {}))", limit - 1024)).await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 2}));
    let end = stage.slot().await.log_end().await?;
    stage.slot().await.wait(PATIENCE, |slot| slot.is_some_and(|slot| slot.confirmed >= Some(end))).await?;
    assert_eq!(gaps(&stage).await, ["undecodable"]);
    let reports = worker.stop().await;
    assert_eq!((reports[0].drain.skipped, reports[0].drain.abandoned), (1, 0), "{reports:?}");
    Ok(())
}

/// What the server lacks is said, not tried: the engine goes on by itself once it is there.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_9_an_engine_that_lacks_something_fails_with_its_code_until_it_is_there() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage.sql.batch_execute("alter role aura_worker noreplication").await?;
    let worker = stage.worker().await;
    let failed = stage.reaches(EngineState::Failed).await?;
    assert_eq!(failed.reason_code(), Some("no_replication_attribute"), "{:?}", failed.reason);
    assert!(failed.reason.is_some_and(|reason| reason.contains("REPLICATION")), "with what mends it");
    assert!(!worker.status.cdc_active());
    stage.sql.batch_execute("alter role aura_worker replication").await?;
    stage.reaches(EngineState::Running).await?;
    worker.stop().await;
    stage.postgres.stop(Shutdown::Fast).await?;
    let replica = Postgres::start_with(PostgresOptions::default().setting("wal_level", "replica")).await?;
    let stage = Stage::on(replica, Plugin::Auto).await?;
    let worker = stage.worker().await;
    let failed = stage.reaches(EngineState::Failed).await?;
    assert_eq!(failed.reason_code(), Some("wal_level"), "{:?}", failed.reason);
    worker.stop().await;
    Ok(())
}

/// What needs a person is not looked at often; the person says when it is worth it.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_9_a_start_tries_what_has_failed_again_at_once() -> anyhow::Result<()> {
    let options = PostgresOptions::default().setting("log_statement", "all");
    let stage = Stage::on(Postgres::start_with(options).await?, Plugin::Auto).await?;
    stage.sql.batch_execute("alter role aura_worker noreplication").await?;
    let worker = stage.worker().await;
    // The second pause is longer than what a start may take.
    let looks = || stage.postgres.log().iter().filter(|line| line.contains("r.rolreplication")).count();
    eventually(PATIENCE, || async { looks() >= 2 }).await?;
    stage.reaches(EngineState::Failed).await?;
    stage.sql.batch_execute("alter role aura_worker replication").await?;
    stage.store.request_start(stage.source.id, CALLER).await?;
    eventually(AT_ONCE, || async { worker.status.cdc_active() }).await?;
    worker.stop().await;
    Ok(())
}
