use anyhow::{Context, Result};
use aura_domain::{Change, Lsn, Value};
use aura_pgsource::{Plugin, pgoutput_options, publication::sync_publication};

use crate::lab::{Lab, SLOT, Tail, relation, table};

const WORK: &str = "
    insert into t values (1, repeat('x', 5000), true, '\\xdead', 1.10, array[1, null]);
    update t set flag = false;
    update t set id = 2, n = null;
    insert into d values (1, 'a'), (2, 'b');
    update d set note = 'c' where id = 1;
    update d set id = 9 where id = 2;
    delete from d where id = 9;
    delete from t;";

async fn read(tail: &mut Tail, count: usize) -> Result<Vec<Change>> {
    let mut changes = Vec::new();
    while changes.len() < count {
        changes.extend(tail.transaction().await?.0);
    }
    Ok(changes)
}

/// What both plugins must agree on.
fn comparable(mut change: Change) -> Change {
    change.wire_bytes = 0;
    change
}

#[tokio::test]
async fn r_dec_1_both_plugins_give_the_same_changes_and_positions() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run(
        "create table t (id int primary key, big text, flag bool, raw bytea, n numeric, list int[]);
         alter table t alter big set storage external; alter table t replica identity full;
         create table d (id int primary key, note text)",
    )
    .await?;
    let tables = [relation("public", "t")?, relation("public", "d")?];
    let change = sync_publication(&lab.sql, "aura_cdc_pub", &tables).await?;
    assert_eq!((change.added.len(), change.refused.len()), (2, 0));
    let created = lab.create_slot(Plugin::Wal2json).await?;
    let mut second = lab.replication().await?;
    second.create_slot("other", Plugin::PgOutput).await?;
    lab.run(WORK).await?;

    let mut tail = lab.tail(created, &[table("public", "t")?, table("public", "d")?]).await?;
    let expected: Vec<Change> = read(&mut tail, 9).await?.into_iter().map(comparable).collect();
    let stream = second.start("other", Lsn::ZERO, &pgoutput_options("aura_cdc_pub")).await?;
    let mut tail = Tail::new(stream, Plugin::PgOutput);
    let actual: Vec<Change> = read(&mut tail, 9).await?.into_iter().map(comparable).collect();
    assert_eq!(actual, expected);
    let toast = actual[1].new.as_ref().context("new")?.get("big");
    assert_eq!(toast, Some(&Value::Text("x".repeat(5000).into())));
    Ok(())
}

#[tokio::test]
async fn a_truncate_of_two_tables_has_a_position_for_each() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run("create table a (id int primary key); create table b (id int primary key)").await?;
    sync_publication(&lab.sql, "aura_cdc_pub", &[relation("public", "a")?, relation("public", "b")?]).await?;
    lab.create_slot(Plugin::PgOutput).await?;
    lab.run("truncate a, b").await?;
    let stream = lab.replication().await?.start(SLOT, Lsn::ZERO, &pgoutput_options("aura_cdc_pub")).await?;
    let (changes, _) = Tail::new(stream, Plugin::PgOutput).transaction().await?;
    assert_eq!(changes.len(), 2);
    assert!(changes[0].position.n != changes[1].position.n && changes[0].position.change == changes[1].position.change);
    Ok(())
}

#[tokio::test]
async fn r_reg_6_a_table_that_is_refused_keeps_out_no_other() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run("create table \"quo\"\"te\" (id int); create table gone (id int); create table t (id int)").await?;
    let (odd, gone, t) = (relation("public", "quo\"te")?, relation("public", "gone")?, relation("public", "t")?);
    let missing = relation("public", "missing")?;
    let change = sync_publication(&lab.sql, "p ub", &[odd.clone(), gone.clone()]).await?;
    assert_eq!(change.added.len(), 2);
    let change = sync_publication(&lab.sql, "p ub", &[odd.clone(), missing.clone(), t.clone()]).await?;
    assert_eq!((change.added, change.dropped), (vec![t.clone()], vec![gone]));
    assert_eq!(change.refused, [(missing, aura_pgsource::SqlState::UNDEFINED_TABLE)]);
    let again = sync_publication(&lab.sql, "p ub", &[odd, t]).await?;
    assert_eq!(again, Default::default());
    let none = sync_publication(&lab.sql, "p ub", &[]).await?;
    assert_eq!(none.dropped.len(), 2);
    Ok(())
}
