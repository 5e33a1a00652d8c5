use anyhow::{Context, Result};
use aura_domain::{SqlName, quote_ident};
use aura_pgsource::{FilterEntry, Plugin};

use crate::lab::{Lab, relation, table};

const NAMES: [&str; 10] = [
    "Orders",
    "we,ird. t'b*l",
    "quo\"te",
    "back\\slash",
    "select",
    "sixty_three_bytes_sixty_three_bytes_sixty_three_bytes_sixty_thre",
    "🦀 emoji",
    "*",
    " lead and trail ",
    "tab\tand\nline",
];

fn name(index: usize) -> &'static str {
    // 63 bytes, as PostgreSQL would cut it.
    let name = NAMES[index];
    if name.len() > SqlName::MAX_BYTES { &name[..SqlName::MAX_BYTES] } else { name }
}

#[tokio::test]
async fn r_reg_5_every_legal_name_passes_the_filter_alone() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run("create schema \"My.Sche'ma\"").await?;
    for schema in ["public", "My.Sche'ma"] {
        for index in 0..NAMES.len() {
            let table = relation(schema, name(index))?.quoted();
            lab.run(&format!("create table {table} ({} int primary key)", quote_ident(name(index)))).await?;
        }
    }
    let created = lab.create_slot(Plugin::Wal2json).await?;
    lab.run("begin").await?;
    for schema in ["public", "My.Sche'ma"] {
        for index in 0..NAMES.len() {
            lab.run(&format!("insert into {} values ({index})", relation(schema, name(index))?.quoted())).await?;
        }
    }
    lab.run("commit").await?;
    for schema in ["public", "My.Sche'ma"] {
        for index in 0..NAMES.len() {
            let mut tail = lab.tail(created, &[table(schema, name(index))?]).await?;
            let (changes, _) = tail.transaction().await?;
            assert_eq!(changes.len(), 1, "{schema}.{}", name(index));
            assert_eq!(*changes[0].relation, relation(schema, name(index))?);
            assert_eq!(&*changes[0].new.as_ref().context("new")?.0[0].name, name(index));
            tail.stream.close().await;
            aura_pgsource::slot::wait_inactive(&lab.sql, crate::lab::SLOT, crate::lab::PATIENCE).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn r_hole_5_a_schema_entry_lets_all_of_its_tables_through_and_an_empty_list_none() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run("create schema \"a b\"; create table \"a b\".\"x.y\" (id int); create table t (id int)").await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    lab.run("insert into \"a b\".\"x.y\" values (1); insert into t values (1)").await?;
    let mut tail = lab.tail(created, &[FilterEntry::Schema(SqlName::new("a b")?)]).await?;
    let (changes, end) = tail.transaction().await?;
    assert_eq!((&*changes[0].relation.table, changes.len()), ("x.y", 1));
    tail.stream.close().await;
    aura_pgsource::slot::wait_inactive(&lab.sql, crate::lab::SLOT, crate::lab::PATIENCE).await?;

    lab.run("insert into t values (2)").await?;
    let mut tail = lab.tail(end, &[]).await?;
    let wal_end = aura_pgsource::slot::wal_end(&lab.sql).await?;
    loop {
        match tail.event().await? {
            aura_pgsource::LogEvent::Change(change) => anyhow::bail!("let through: {change:?}"),
            aura_pgsource::LogEvent::Commit { end, .. } if end >= wal_end => return Ok(()),
            _ => {}
        }
    }
}
