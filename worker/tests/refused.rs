//! What the source, or the project itself, refuses to stream (R-REG-6, R-REG-7).

use anyhow::Context as _;
use aura_domain::SqlName;
use aura_store::{Plugin, Registration, RegistrationStatus, TableRef};
use aura_testkit::eventually_some;
use serde_json::json;

use crate::stage::{PATIENCE, Stage};

/// Waits until the registration is as wanted.
async fn becomes(stage: &Stage, table: &str, is: impl Fn(&Registration) -> bool) -> anyhow::Result<Registration> {
    let name = SqlName::new(table)?;
    let table = TableRef { project: stage.project, schema: &stage.schema, table: &name };
    let found = eventually_some(2 * PATIENCE, || async {
        stage.store.registration(table).await.ok().flatten().filter(|row| is(row))
    });
    found.await.with_context(|| format!("{name} isn't as wanted"))
}

#[tokio::test(flavor = "multi_thread")]
async fn r_reg_6_a_table_that_a_publication_refuses_is_blocked_and_no_other() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::PgOutput).await?;
    stage.sql.batch_execute("create table odd (id int primary key); create table t (id int primary key)").await?;
    stage.register("odd").await?;
    stage.sql.batch_execute("alter table odd set unlogged").await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.enable("t").await?;
    stage.sql.batch_execute("insert into t values (1)").await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 1}));
    let blocked = becomes(&stage, "odd", |row| row.status == RegistrationStatus::Blocked).await?;
    assert!(blocked.enabled && blocked.reason.as_ref().is_some_and(|why| why.contains("22023")), "{blocked:?}");
    // Mended, and enabled again.
    stage.sql.batch_execute("alter table odd set logged").await?;
    stage.enable("odd").await?;
    stage.sql.batch_execute("insert into odd values (2)").await?;
    assert_eq!(watch.next().await.data["table"], "odd");
    worker.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_reg_6_a_locked_table_holds_up_no_other_and_is_tried_again() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::PgOutput).await?;
    stage.sql.batch_execute("create table locked (id int primary key); create table t (id int primary key)").await?;
    stage.register("locked").await?;
    let holder = stage.postgres.client("app").await?;
    let lock = format!("begin; lock table {}.locked in share update exclusive mode", stage.schema.quoted());
    holder.batch_execute(&lock).await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.enable("t").await?;
    stage.sql.batch_execute("insert into t values (1)").await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 1}));
    let waits = becomes(&stage, "locked", |row| row.reason.is_some()).await?;
    assert_eq!(waits.status, RegistrationStatus::Pending, "{waits:?}");
    holder.batch_execute("rollback").await?;
    becomes(&stage, "locked", |row| row.status == RegistrationStatus::Active && row.reason.is_none()).await?;
    stage.sql.batch_execute("insert into locked values (2)").await?;
    assert_eq!(watch.next().await.data["table"], "locked");
    worker.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_reg_7_a_project_that_requires_row_security_gets_nothing_of_a_table_without() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage.sql.batch_execute("create table t (id int primary key); grant select on t to public").await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let mut watch = stage.changes().await;
    stage.join("t", "service_role", json!({}), None).await;
    stage.sql.batch_execute("insert into t values (1)").await?;
    let open = watch.next().await;
    assert_eq!((&open.data["record"], open.ids.len()), (&json!({"id": 1}), 1));
    let event = becomes(&stage, "t", |row| row.last_event_at.is_some()).await?;
    assert!(event.last_event_at.is_some_and(|at| at.ends_with('Z')));
    // A running worker follows the setting within one refresh.
    let platform = stage.postgres.client("platform").await?;
    platform.batch_execute("update aura.projects set settings = '{\"require_rls\": true}'").await?;
    let mut id = 1;
    loop {
        id += 1;
        stage.sql.execute("insert into t values ($1)", &[&id]).await?;
        let seen = watch.next().await;
        assert_eq!(seen.data["record"]["id"], id);
        if seen.ids.is_empty() {
            break;
        }
        assert!(id < 100_000, "the setting is not followed");
    }
    stage.sql.batch_execute("alter table t enable row level security; insert into t values (0)").await?;
    assert_eq!(watch.next().await.ids.len(), 1, "with row security it is as ever");
    worker.stop().await;
    Ok(())
}
