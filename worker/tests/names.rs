//! Registrations follow their tables, and what is lost meanwhile is announced (R-REG-2, R-HOLE-4).

use std::collections::BTreeSet;

use anyhow::Context as _;
use aura_domain::SqlName;
use aura_store::{Plugin, Registration, RegistrationStatus, TableRef};
use aura_testkit::eventually_some;
use serde_json::json;

use crate::stage::{PATIENCE, Stage, Watch};

/// Waits until the registration under this name is in the state, and all about it has been told.
async fn settles(stage: &Stage, table: &str, status: RegistrationStatus) -> anyhow::Result<Registration> {
    let name = SqlName::new(table)?;
    let table = TableRef { project: stage.project, schema: &stage.schema, table: &name };
    eventually_some(PATIENCE, || async {
        let row = stage.store.registration(table).await.ok().flatten();
        row.filter(|row| row.status == status && row.changed_from.is_none())
    })
    .await
    .with_context(|| format!("{name} isn't {status}"))
}

/// The tables of the next `count` gaps, all for the same reason.
async fn changed(watch: &mut Watch, count: usize) -> BTreeSet<String> {
    let mut tables = BTreeSet::new();
    for _ in 0..count {
        let gap = watch.next_gap().await;
        assert_eq!((&gap["reason"], gap["tables"][0][0].as_str()), (&json!("table_changed"), Some("public")), "{gap}");
        tables.extend(gap["tables"][0][1].as_str().map(str::to_owned));
    }
    tables
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

async fn renamed(plugin: Plugin) -> anyhow::Result<()> {
    let stage = Stage::new(plugin).await?;
    stage.sql.batch_execute("create table t (id int primary key)").await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let mut watch = stage.changes().await;
    stage.sql.batch_execute("insert into t values (1)").await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 1}));
    stage.sql.batch_execute("alter table t rename to u").await?;
    stage.sql.batch_execute("insert into u values (2)").await?;
    assert_eq!(changed(&mut watch, 2).await, set(&["t", "u"]), "who listens under either name");
    let followed = settles(&stage, "u", RegistrationStatus::Active).await?;
    assert_eq!((followed.enabled, followed.reason), (true, None));
    stage.sql.batch_execute("insert into u values (3)").await?;
    let seen = watch.next().await;
    assert_eq!((&seen.data["record"], &seen.data["table"]), (&json!({"id": 3}), &json!("u")));
    worker.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_hole_4_a_renamed_table_is_followed_and_the_loss_announced() -> anyhow::Result<()> {
    renamed(Plugin::Wal2json).await
}

#[tokio::test(flavor = "multi_thread")]
async fn r_hole_4_a_renamed_table_is_followed_in_a_publication() -> anyhow::Result<()> {
    renamed(Plugin::PgOutput).await
}

#[tokio::test(flavor = "multi_thread")]
async fn r_reg_2_a_dropped_or_moved_table_is_missing_and_its_subscribers_are_told() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    let tables = "create table dropped (id int primary key); create table moved (id int primary key);
                  create table stays (id int primary key)";
    stage.sql.batch_execute(tables).await?;
    let worker = stage.run_worker().await;
    for table in ["dropped", "moved", "stays"] {
        stage.enable(table).await?;
    }
    let mut watch = stage.changes().await;
    stage
        .sql
        .batch_execute("drop table dropped; create schema elsewhere; alter table moved set schema elsewhere")
        .await?;
    assert_eq!(changed(&mut watch, 2).await, set(&["dropped", "moved"]));
    let dropped = settles(&stage, "dropped", RegistrationStatus::Missing).await?;
    assert_eq!(dropped.reason.as_deref(), Some("the table was dropped"));
    let moved = settles(&stage, "moved", RegistrationStatus::Missing).await?;
    assert_eq!(moved.reason.as_deref(), Some("the table was moved to the schema elsewhere"));
    // A new table under the name never goes live by accident.
    stage.sql.batch_execute("create table dropped (id int primary key)").await?;
    stage.sql.batch_execute("insert into dropped values (1); insert into elsewhere.moved values (1)").await?;
    stage.sql.batch_execute("insert into stays values (2)").await?;
    assert_eq!(watch.next().await.data["table"], "stays");

    // One that comes back is the same table.
    stage.sql.batch_execute(&format!("alter table elsewhere.moved set schema {}", stage.schema.quoted())).await?;
    assert_eq!(changed(&mut watch, 1).await, set(&["moved"]));
    settles(&stage, "moved", RegistrationStatus::Active).await?;
    stage.sql.batch_execute("insert into moved values (3)").await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 3}));
    worker.stop().await;
    Ok(())
}
