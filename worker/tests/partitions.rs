//! Partitioned tables: their rows come under the table's name, whichever partition holds them (R-REG-4, R-HOLE-4).

use aura_store::{Plugin, RegistrationMode};
use aura_testkit::eventually;
use serde_json::{Value, json};

use crate::stage::{PATIENCE, Running, Stage, Watch};

/// A table whose partitions are nested, of which one has its columns in another order and policies of its own.
const ROOT: &str = "create table root (id int, owner text, k int, primary key (id, k)) partition by list (k);
    create table one partition of root for values in (1);
    create table two partition of root for values in (2, 3) partition by list (k);
    create table \"two a\" partition of two for values in (2);
    create table three (k int not null, gone text, owner text, id int not null);
    alter table three drop column gone;
    alter table two attach partition three for values in (3);
    alter table three enable row level security;
    alter table root enable row level security;
    create policy own on root for select to aura_authenticated using (owner = auth.jwt() ->> 'sub')";

async fn live(plugin: Plugin) -> anyhow::Result<(Stage, Running, Watch)> {
    let stage = Stage::new(plugin).await?;
    stage.sql.batch_execute(ROOT).await?;
    let worker = stage.run_worker().await;
    stage.enable("root").await?;
    let watch = stage.changes().await;
    Ok((stage, worker, watch))
}

/// The next change: of which table, what happened, and the rows.
async fn next(watch: &mut Watch) -> (String, String, Value, Value) {
    let data = watch.next().await.data;
    let text = |name: &str| data[name].as_str().unwrap_or_default().to_owned();
    (text("table"), text("type"), data["record"].clone(), data["old_record"].clone())
}

fn of_root(kind: &str, new: Value, old: Value) -> (String, String, Value, Value) {
    ("root".to_owned(), kind.to_owned(), new, old)
}

fn row(id: i32, owner: &str, k: i32) -> Value {
    json!({"id": id, "owner": owner, "k": k})
}

async fn identity(stage: &Stage, table: &str) -> anyhow::Result<String> {
    let sql = "select relreplident::text from pg_class where relnamespace = to_regnamespace($1) and relname = $2";
    Ok(stage.sql.query_one(sql, &[&stage.schema.quoted(), &table]).await?.get(0))
}

async fn under_its_name(plugin: Plugin) -> anyhow::Result<()> {
    let (mut stage, worker, mut watch) = live(plugin).await?;
    let (alice, reply) = stage.join("root", "authenticated", json!({"sub": "alice"}), None).await;
    assert!(reply.exceptions.is_empty(), "{reply:?}");
    let (bob, _) = stage.join("root", "authenticated", json!({"sub": "bob"}), None).await;
    for leaf in ["one", "two a", "three"] {
        assert_eq!(identity(&stage, leaf).await?, "f", "{leaf}");
    }
    stage.sql.batch_execute("insert into root values (1, 'alice', 1), (2, 'bob', 2), (3, 'alice', 3)").await?;
    for (id, owner, whose) in [(1, "alice", alice), (2, "bob", bob), (3, "alice", alice)] {
        let seen = watch.next().await;
        assert_eq!((&seen.data["table"], &seen.data["record"]), (&json!("root"), &row(id, owner, id)), "{plugin:?}");
        let columns = seen.data["columns"].as_array().expect("columns").iter().map(|column| column["name"].clone());
        assert_eq!(columns.collect::<Vec<_>>(), ["id", "owner", "k"], "in the root's order");
        assert_eq!(seen.ids, [whose], "by the root's policy alone");
    }
    stage.sql.batch_execute("update root set id = 8 where k = 3; truncate one").await?;
    let update = of_root("UPDATE", row(8, "alice", 3), row(3, "alice", 3));
    assert_eq!(next(&mut watch).await, update, "whole old rows");
    // To another partition: as PostgreSQL does it, and logs it.
    stage.sql.batch_execute("update root set k = 1 where id = 8; delete from root where id = 2").await?;
    assert_eq!(next(&mut watch).await, of_root("DELETE", Value::Null, row(8, "alice", 3)));
    assert_eq!(next(&mut watch).await, of_root("INSERT", row(8, "alice", 1), Value::Null));
    assert_eq!(next(&mut watch).await, of_root("DELETE", Value::Null, row(2, "bob", 2)));
    assert_eq!(watch.gaps, [Value::Null; 0]);
    worker.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_reg_4_rows_of_partitions_come_under_the_tables_name() -> anyhow::Result<()> {
    under_its_name(Plugin::Wal2json).await
}

#[tokio::test(flavor = "multi_thread")]
async fn r_reg_4_rows_of_partitions_come_under_the_tables_name_from_a_publication() -> anyhow::Result<()> {
    under_its_name(Plugin::PgOutput).await
}

/// Waits until the worker knows `count` partitions, and what they may have missed is told.
async fn knows(stage: &Stage, count: usize) -> anyhow::Result<()> {
    eventually(PATIENCE, || async {
        let snapshot = stage.store.registry(stage.source.id).await.expect("read");
        let there: Vec<_> = snapshot.partitions.iter().filter(|one| one.gone_at.is_none()).collect();
        there.len() == count && there.iter().all(|one| one.told)
    })
    .await
}

async fn new_partitions(plugin: Plugin) -> anyhow::Result<()> {
    let (stage, worker, mut watch) = live(plugin).await?;
    let walsender = stage.walsender().await?;
    stage.sql.batch_execute("create table four partition of root for values in (4)").await?;
    knows(&stage, 4).await?;
    assert_eq!(identity(&stage, "four").await?, "f");
    stage.sql.batch_execute("insert into root values (4, 'a', 4); update root set owner = 'b'").await?;
    assert_eq!(next(&mut watch).await, of_root("INSERT", row(4, "a", 4), Value::Null));
    assert_eq!(next(&mut watch).await, of_root("UPDATE", row(4, "b", 4), row(4, "a", 4)));
    assert_eq!(watch.gaps, [Value::Null; 0], "nothing was written to it before it was read");

    // With rows from before it was known: they may be lost, and that is told.
    let attached = "create table five (like root); insert into five values (5, 'a', 5);
        alter table root attach partition five for values in (5); insert into root values (6, 'a', 5)";
    stage.sql.batch_execute(attached).await?;
    let gap = watch.next_gap().await;
    assert_eq!((&gap["reason"], &gap["tables"][0]), (&json!("table_changed"), &json!(["public", "root"])), "{gap}");
    knows(&stage, 5).await?;
    stage.sql.batch_execute("delete from root where id = 5").await?;
    assert_eq!(next(&mut watch).await, of_root("DELETE", Value::Null, row(5, "a", 5)));
    assert_eq!(stage.walsender().await?, walsender, "the stream goes on");
    worker.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_hole_4_a_new_partition_is_read_and_a_loss_announced() -> anyhow::Result<()> {
    new_partitions(Plugin::Wal2json).await
}

#[tokio::test(flavor = "multi_thread")]
async fn r_hole_4_a_new_partition_is_read_from_a_publication_and_a_loss_announced() -> anyhow::Result<()> {
    new_partitions(Plugin::PgOutput).await
}

/// Who sees to replica identities sees to new partitions', too.
#[tokio::test(flavor = "multi_thread")]
async fn r_reg_4_in_manual_mode_a_new_partition_is_left_as_it_is() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Wal2json).await?;
    stage.sql.batch_execute(ROOT).await?;
    let worker = stage.run_worker().await;
    stage.register_in("root", RegistrationMode::Manual).await?;
    knows(&stage, 3).await?;
    let mut watch = stage.changes().await;
    stage.sql.batch_execute("create table four partition of root for values in (4)").await?;
    knows(&stage, 4).await?;
    assert_eq!(identity(&stage, "four").await?, "d");
    stage.sql.batch_execute("insert into root values (4, 'a', 4)").await?;
    assert_eq!(next(&mut watch).await, of_root("INSERT", row(4, "a", 4), Value::Null));
    worker.stop().await;
    Ok(())
}

/// Nobody saw it come, and nobody was there to lose anything: what the log has of it is delivered, and a gap announced.
#[tokio::test(flavor = "multi_thread")]
async fn r_hole_4_a_partition_that_came_while_no_worker_ran_is_announced() -> anyhow::Result<()> {
    let (stage, worker, mut watch) = live(Plugin::Wal2json).await?;
    worker.stop().await;
    let sql = "create table four partition of root for values in (4); insert into root values (4, 'a', 4)";
    stage.sql.batch_execute(sql).await?;
    let worker = stage.run_worker().await;
    let gap = watch.next_gap().await;
    assert_eq!((&gap["reason"], &gap["tables"][0][1]), (&json!("table_changed"), &json!("root")), "{gap}");
    knows(&stage, 4).await?;
    stage.sql.batch_execute("insert into root values (5, 'a', 4)").await?;
    assert_eq!(next(&mut watch).await.2, row(5, "a", 4));
    worker.stop().await;
    Ok(())
}

async fn detached(plugin: Plugin) -> anyhow::Result<()> {
    let (stage, worker, mut watch) = live(plugin).await?;
    stage.sql.batch_execute("alter table root detach partition one; insert into root values (2, 'a', 2)").await?;
    assert_eq!(next(&mut watch).await, of_root("INSERT", row(2, "a", 2), Value::Null));
    knows(&stage, 2).await?;
    // Not the root's, though the schema is read whole; nor is another one that has a partition's name.
    let sql = "insert into one values (1, 'secret', 1); alter table two detach partition three;
        alter table three rename to former; create table three (id int, owner text, k int);
        insert into three values (3, 'secret', 3); insert into root values (4, 'a', 2)";
    stage.sql.batch_execute(sql).await?;
    let mut seen = Vec::new();
    loop {
        let (table, _, record, _) = next(&mut watch).await;
        seen.push((table, record.clone()));
        if record["id"] == 4 {
            break;
        }
    }
    assert_eq!(seen, [("root".to_owned(), row(4, "a", 2))], "{plugin:?}");
    // It may be registered as what it is now.
    stage.enable("one").await?;
    stage.sql.batch_execute("insert into one values (5, 'a', 1)").await?;
    assert_eq!(next(&mut watch).await, ("one".to_owned(), "INSERT".to_owned(), row(5, "a", 1), Value::Null));
    worker.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_rls_10_a_detached_partitions_rows_are_not_the_tables() -> anyhow::Result<()> {
    detached(Plugin::Wal2json).await
}

#[tokio::test(flavor = "multi_thread")]
async fn r_rls_10_a_detached_partitions_rows_are_not_the_tables_in_a_publication() -> anyhow::Result<()> {
    detached(Plugin::PgOutput).await
}

/// Each under its own name, by its own policies.
#[tokio::test(flavor = "multi_thread")]
async fn r_rls_2_a_partition_may_be_registered_on_its_own_too() -> anyhow::Result<()> {
    let (mut stage, worker, mut watch) = live(Plugin::Wal2json).await?;
    stage.enable("three").await?;
    let (root, _) = stage.join("root", "authenticated", json!({"sub": "alice"}), None).await;
    let (leaf, _) = stage.join("three", "authenticated", json!({"sub": "alice"}), None).await;
    stage.sql.batch_execute("insert into root values (3, 'alice', 3)").await?;
    let mut both = [watch.next().await, watch.next().await].map(|seen| (seen.data["table"].to_string(), seen.ids));
    both.sort();
    assert_ne!(root, leaf);
    assert_eq!(both, [("\"root\"".to_owned(), vec![root]), ("\"three\"".to_owned(), vec![])], "no policy of its own");
    stage.disable("root").await?;
    stage.sql.batch_execute("insert into root values (4, 'alice', 3), (5, 'alice', 1)").await?;
    stage.enable("root").await?;
    stage.sql.batch_execute("insert into root values (6, 'alice', 1)").await?;
    let rest = [watch.next().await, watch.next().await]
        .map(|seen| (seen.data["table"].clone(), seen.data["record"]["id"].clone()));
    assert_eq!(rest, [(json!("three"), json!(4)), (json!("root"), json!(6))]);
    worker.stop().await;
    Ok(())
}
