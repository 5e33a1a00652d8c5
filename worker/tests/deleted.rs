//! A project that is deleted while its engine runs.

use aura_domain::EngineState;
use aura_store::Plugin;
use aura_testkit::eventually;
use serde_json::json;

use crate::stage::{PATIENCE, Stage};

/// The engine lets go of the project before its roles are dropped; what its tables get then is read over by everybody.
#[tokio::test]
async fn a_deleted_project_is_read_no_more_and_its_engine_goes_on() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Wal2json).await?;
    stage.sql.batch_execute("create table t (id int primary key)").await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let mut watch = stage.changes().await;
    stage.join("t", "anon", json!({}), None).await;
    stage.sql.batch_execute("insert into t values (1)").await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 1}));

    stage.store.delete_project(stage.project, false, |_| true, "test".into()).await?;
    let deleted = stage.store.deleted_project(stage.project).await?.expect("something is left");
    assert_eq!(deleted.tables.len(), 1, "its replica identity is to be restored");
    eventually(PATIENCE, || async { stage.engine().await.applied_revision >= deleted.revision }).await?;
    assert_eq!(stage.admin.deprovision_project(stage.project).await?.roles, Vec::<String>::new());

    stage.sql.batch_execute("insert into t values (2)").await?;
    let end: String = stage.sql.query_one("select pg_current_wal_lsn()::text", &[]).await?.get(0);
    let sql = "select confirmed_flush_lsn >= $1::text::pg_lsn from pg_replication_slots where slot_name = $2";
    let passed = || async {
        let row = stage.sql.query_one(sql, &[&end, &stage.source.slot_name]).await;
        row.is_ok_and(|row| row.get::<_, Option<bool>>(0) == Some(true))
    };
    eventually(PATIENCE, passed).await?;
    let pending = tokio::time::timeout(std::time::Duration::ZERO, watch.next()).await;
    assert!(pending.is_err(), "a row of the deleted project was published");
    assert_eq!(stage.engine().await.state, EngineState::Running);
    worker.stop().await;
    Ok(())
}
