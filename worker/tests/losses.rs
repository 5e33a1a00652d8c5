//! What may be lost is announced, and what may not be seen isn't.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use aura_bus::{NatsBus, NatsOptions, Subject};
use aura_domain::{EngineState, SqlName};
use aura_store::{Plugin, RegistrationStatus, TableRef};
use aura_testkit::{Nats, eventually};
use serde_json::json;

use crate::{
    faults::Faulty,
    hung::another_project,
    stage::{PATIENCE, Stage},
};

#[tokio::test(flavor = "multi_thread")]
async fn g8_a_batch_that_the_bus_refuses_is_announced() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage.bus = Arc::new(Faulty::default());
    stage.sql.batch_execute("create table refused (id int primary key); create table t (id int primary key)").await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.enable("refused").await?;
    stage.enable("t").await?;
    stage.sql.batch_execute("insert into refused values (1), (2)").await?;
    let announced = watch.next_gap().await;
    assert_eq!(announced["reason"], "bus");
    assert!(announced["from"].is_string() && announced["to"].is_string(), "{announced}");
    stage.sql.batch_execute("insert into t values (3)").await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 3}), "the stream goes on");
    worker.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_rls_3_a_filter_on_a_column_that_may_no_longer_be_read_delivers_nothing() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage.sql.batch_execute("create table t (id int primary key, secret int)").await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let (filtered, reply) = stage.join("t", "anon", json!({"role": "anon"}), Some("secret=eq.5")).await;
    assert!(reply.exceptions.is_empty(), "{reply:?}");
    let (whole, _) = stage.join("t", "anon", json!({"role": "anon"}), None).await;
    let mut watch = stage.changes().await;
    stage.sql.batch_execute("insert into t values (1, 5)").await?;
    assert_eq!(watch.next().await.ids.len(), 2);
    let role = format!("\"p_{}_anon\"", stage.project);
    let revoke = format!("revoke select on t from public, aura_anon, {role}; grant select (id) on t to {role}");
    stage.sql.batch_execute(&revoke).await?;
    stage.sql.batch_execute("insert into t values (2, 5)").await?;
    let seen = watch.next().await;
    assert_eq!(seen.data["record"], json!({"id": 2}));
    assert_eq!(seen.ids.len(), 1, "who filters by it would learn its value ({filtered}, {whole})");
    worker.stop().await;
    Ok(())
}

/// R-LSN-6: the slot is made again under a running worker; what was active becomes active in the new generation.
#[tokio::test(flavor = "multi_thread")]
async fn r_lsn_6_a_table_is_active_again_after_a_new_generation() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    stage.sql.batch_execute("create table t (id int primary key); create table off (id int primary key)").await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.enable("t").await?;
    stage.sql.batch_execute("insert into t values (1)").await?;
    watch.next().await;
    let drop_slot = "select pg_terminate_backend(active_pid) from pg_replication_slots where active;
                     select pg_drop_replication_slot(slot_name) from pg_replication_slots";
    eventually(PATIENCE, || async { stage.sql.batch_execute(drop_slot).await.is_ok() }).await?;
    let name = SqlName::new("t")?;
    let table = TableRef { project: stage.project, schema: &stage.schema, table: &name };
    eventually(PATIENCE, || async {
        let generation = stage.store.engine(stage.source.id).await.ok().flatten().map(|engine| engine.generation.0);
        let row = stage.store.registration(table).await.ok().flatten();
        generation == Some(2) && row.is_some_and(|row| row.status == RegistrationStatus::Active)
    })
    .await?;
    stage.sql.batch_execute("insert into t values (2)").await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 2}));
    assert_eq!(watch.gaps.len(), 1, "announced once: {:?}", watch.gaps);
    worker.stop().await;
    let worker = stage.run_worker().await;
    stage.sql.batch_execute("insert into t values (3)").await?;
    // The row before may come again: its COMMIT need not have been read when the worker stopped.
    while watch.next().await.data["record"] != json!({"id": 3}) {}
    assert_eq!(watch.gaps.len(), 1, "a restart loses nothing: {:?}", watch.gaps);
    worker.stop().await;
    Ok(())
}

/// Gaps are recorded for operators; that nobody can record one holds up neither its acknowledgement nor the next.
#[tokio::test(flavor = "multi_thread")]
async fn g8_a_platform_database_that_hangs_delays_no_announcement() -> anyhow::Result<()> {
    const PROJECTS: u128 = 4;
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage.bus = Arc::new(Faulty::default());
    let worker = stage.run_worker().await;
    let (mut watches, mut inserts) = (Vec::new(), String::new());
    for number in 1..=PROJECTS {
        another_project(&mut stage, number, "refused").await?;
        watches.push(stage.changes().await);
        inserts += &format!("insert into {}.refused values (1);", stage.schema.quoted());
    }
    let platform = stage.postgres.client("platform").await?;
    platform.batch_execute("begin; lock table aura.gaps in access exclusive mode").await?;
    stage.sql.batch_execute(&inserts).await?;
    // A record that hangs is given up after 10 s.
    let all = async {
        for watch in &mut watches {
            assert_eq!(watch.next_gap().await["reason"], "bus");
        }
    };
    tokio::time::timeout(PATIENCE, all).await?;
    platform.batch_execute("rollback").await?;
    eventually(PATIENCE, || async {
        let gaps = stage.store.gaps(stage.source.id, None, 100).await.unwrap_or_default();
        gaps.iter().any(|gap| gap.reason == "bus")
    })
    .await?;
    worker.stop().await;
    Ok(())
}

/// All projects have lost the same, and of one of them nobody may be told: the others are, each of them, and the engine
/// says whom it waits for.
#[tokio::test(flavor = "multi_thread")]
async fn r_sh_5_a_project_whose_gap_is_refused_delays_no_other_and_ends_the_engine_by_name() -> anyhow::Result<()> {
    const OTHERS: u128 = 4;
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage.settings.stall_limit = Duration::from_secs(3);
    let denied = stage.project;
    let user = aura_testkit::NatsOptions::default().user("worker", "secret", &[Subject::gap(denied).as_str()]);
    let nats = Nats::start_with(user).await?;
    stage.bus = Arc::new(NatsBus::connect(NatsOptions::new(nats.url_as("worker", "secret"), "test")).await?);
    stage.sql.batch_execute("create table t (id int primary key)").await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let mut watches = Vec::new();
    for number in 1..=OTHERS {
        another_project(&mut stage, number, "t").await?;
        watches.push(stage.changes().await);
    }
    let drop_slot = "select pg_terminate_backend(active_pid) from pg_replication_slots where active;
                     select pg_drop_replication_slot(slot_name) from pg_replication_slots";
    eventually(PATIENCE, || async { stage.sql.batch_execute(drop_slot).await.is_ok() }).await?;
    for watch in &mut watches {
        assert_eq!(watch.next_gap().await["reason"], "slot_recreated");
    }
    let engine = stage.reaches(EngineState::Failed).await?;
    assert_eq!(engine.reason_code(), Some("sink"), "{:?}", engine.reason);
    let reason = engine.reason.unwrap_or_default();
    assert!(reason.contains(&denied.to_string()) && reason.contains("Permissions Violation"), "{reason}");
    let stored = stage.store.position(stage.source.id).await?.map(|(generation, _)| generation.0);
    assert_eq!(stored, Some(1), "a generation of which not everybody knows is not entered");
    worker.stop().await;
    Ok(())
}

/// What the api does for a PUT `{"enabled": false}` includes giving the table its old identity back.
#[tokio::test(flavor = "multi_thread")]
async fn r_reg_8_what_was_committed_before_a_disable_is_published_and_nothing_after() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    stage.sql.batch_execute("create table t (id int primary key); create table u (id int primary key)").await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    stage.enable("u").await?;
    worker.stop().await;
    let mut watch = stage.changes().await;
    stage.sql.batch_execute("insert into t values (1)").await?;
    let name = SqlName::new("t")?;
    let table = TableRef { project: stage.project, schema: &stage.schema, table: &name };
    let lsn = stage.admin.current_wal_insert_lsn().await?;
    let off = stage.store.disable_table(table, lsn, "test", None).await?.expect("it was registered");
    stage.store.identity_restored(off.id).await?;
    stage.sql.batch_execute("insert into t values (2); insert into u values (3)").await?;
    let worker = stage.run_worker().await;
    assert_eq!(watch.next().await.data["record"], json!({"id": 1}));
    assert_eq!(watch.next().await.data["record"], json!({"id": 3}), "not the row after the disable");
    worker.stop().await;
    Ok(())
}

/// The answer to a PUT false waits for the batch that is on its way, and rows behind it that were committed above the
/// disable are not published.
#[tokio::test(flavor = "multi_thread")]
async fn r_reg_8_rows_that_wait_in_a_lane_are_not_published_after_the_disable() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    let bus = Arc::new(Faulty::default());
    stage.bus = Arc::clone(&bus) as _;
    stage.sql.batch_execute("create table t (id int primary key); create table other (id int primary key)").await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.enable("t").await?;
    let held = bus.hold.write().await;
    stage.sql.batch_execute("insert into t values (1)").await?;
    eventually(PATIENCE, || async { bus.batches.load(Ordering::SeqCst) > 0 }).await?;
    let lsn = stage.admin.current_wal_insert_lsn().await?;
    stage.sql.batch_execute("insert into t values (2)").await?;
    let written: String = stage.sql.query_one("select pg_current_wal_lsn()::text", &[]).await?.get(0);
    eventually(PATIENCE, || async {
        let sql = "select sent_lsn >= $1::text::pg_lsn from pg_stat_replication";
        stage.sql.query_one(sql, &[&written]).await.is_ok_and(|row| row.get(0))
    })
    .await?;
    let name = SqlName::new("t")?;
    let table = TableRef { project: stage.project, schema: &stage.schema, table: &name };
    let row = stage.store.disable_table(table, lsn, "test", None).await?.expect("it was registered");
    let applied = || async {
        let engine = stage.store.engine(stage.source.id).await.ok().flatten();
        engine.is_some_and(|engine| engine.applied_revision >= row.revision)
    };
    assert!(eventually(Duration::from_millis(700), applied).await.is_err(), "a batch is still on its way");
    drop(held);
    eventually(PATIENCE, applied).await?;
    stage.enable("other").await?;
    stage.sql.batch_execute("insert into other values (3)").await?;
    let (first, second) = (watch.next().await, watch.next().await);
    assert_eq!((&first.data["record"], &second.data["record"]), (&json!({"id": 1}), &json!({"id": 3})));
    assert_eq!((first.seq, second.seq), (1, 2), "what is not published leaves no hole in the count");
    worker.stop().await;
    Ok(())
}
