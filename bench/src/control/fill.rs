//! Registers many tables of many projects: real ones, since the worker looks where they are.

use std::sync::Arc;

use anyhow::{Context, Result};
use aura_domain::SourceId;
use aura_store::{MasterKey, NewProject, ProjectSettings, Store};
use system_tests::{MASTER_KEY, Split};
use tokio::task::JoinSet;

/// Projects that are made at a time.
const AT_ONCE: usize = 8;
/// Schemas whose tables are made in a transaction: each table is a lock.
const SCHEMAS: usize = 100;

pub(super) async fn fill(split: &Split, projects: usize, tables: usize) -> Result<()> {
    let platform = split.platform().client("platform").await?;
    let source = SourceId(platform.query_one("select id from aura.sources", &[]).await?.get(0));
    let key = MasterKey::new(MASTER_KEY).context("a master key")?;
    let store = Arc::new(Store::connect(&split.platform().url("platform"), key).await?);
    let mut making = JoinSet::new();
    for part in 0..AT_ONCE {
        let store = Arc::clone(&store);
        making.spawn(async move {
            for n in (part..projects).step_by(AT_ONCE) {
                let settings = ProjectSettings::default();
                let new = NewProject { id: None, name: format!("filled {n}"), source, schema: None, settings };
                store.create_project(new, "bench").await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(made) = making.join_next().await {
        made??;
    }
    let schemas = platform.query("select schema_name from aura.projects where name like 'filled %'", &[]).await?;
    let schemas: Vec<String> = schemas.iter().map(|row| row.get(0)).collect();
    let app = split.postgres.client("app").await?;
    for some in schemas.chunks(SCHEMAS) {
        let mut sql = String::new();
        for schema in some {
            sql += &format!("create schema \"{schema}\";");
            (0..tables).for_each(|n| sql += &format!("create table \"{schema}\".t{n} (id bigint);"));
        }
        app.batch_execute(&format!("begin; {sql} commit")).await?;
    }
    register(&app, &platform, &schemas).await
}

/// As the api and the worker leave it.
async fn register(app: &tokio_postgres::Client, platform: &tokio_postgres::Client, schemas: &[String]) -> Result<()> {
    let sql =
        "select n.nspname::text, c.relname::text, c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace
        where c.relkind = 'r' and n.nspname = any ($1)";
    let found = app.query(sql, &[&schemas]).await?;
    let column = |at: usize| found.iter().map(|row| row.get::<_, String>(at)).collect::<Vec<_>>();
    let oids: Vec<u32> = found.iter().map(|row| row.get(2)).collect();
    let sql = "insert into aura.realtime_tables (id, project_id, source_id, schema_name, table_name, table_oid, enabled, status,
            identity_set, previous_identity, enabled_at_lsn, enabled_generation, active_since_lsn, revision, updated_by)
        select gen_random_uuid(), p.id, p.source_id, f.schema_name, f.table_name, f.oid, true, 'active', true, 'd', '0/1', 1,
            '0/1', s.registry_revision + 1, 'bench'
        from unnest($1::text[], $2::text[], $3::oid[]) as f (schema_name, table_name, oid)
        join aura.projects p on p.schema_name = f.schema_name join aura.sources s on s.id = p.source_id";
    platform.execute(sql, &[&column(0), &column(1), &oids]).await?;
    platform.batch_execute("update aura.sources set registry_revision = registry_revision + 1; analyze").await?;
    Ok(())
}
