//! The SQL that a toggle runs, by pgbench: what is left is the api's and the worker's share.

use anyhow::{Context, Result, ensure};
use aura_testkit::ProcessOptions;
use system_tests::{Directory, Project, Split};

/// Seconds of each run.
const SECONDS: &str = "10";

/// What the platform database does: who asks, what is known, the intent, the ALTER's outcome, and the worker's report.
const PLATFORM: &str = "select * from aura.projects p join aura.keys k on k.project_id = p.id where p.id = :project;
select * from aura.realtime_tables where project_id = :project and schema_name = :schema and table_name = 't' || :n;
begin;
select from aura.sources where id = :source for no key update;
select * from aura.realtime_tables where project_id = :project and schema_name = :schema and table_name = 't' || :n;
update aura.sources set registry_revision = registry_revision + 1 where id = :source returning registry_revision;
select pg_notify('bench', :source);
update aura.realtime_tables set status = 'pending', updated_at = now() where project_id = :project
    and schema_name = :schema and table_name = 't' || :n;
insert into aura.audit (project_id, actor, action, target, before, after)
    values (:project, 'bench', 'bench', 'bench', '{}', '{}');
commit;
select generation from aura.engines where source_id = :source;
begin;
select from aura.sources where id = :source for no key update;
update aura.sources set registry_revision = registry_revision + 1 where id = :source returning registry_revision;
select pg_notify('bench', :source);
update aura.realtime_tables set identity_set = true, updated_at = now() where project_id = :project
    and schema_name = :schema and table_name = 't' || :n;
commit;
begin;
select from aura.engines where source_id = :source for no key update;
update aura.realtime_tables set status = 'active' where project_id = :project and schema_name = :schema
    and table_name = 't' || :n;
select pg_notify('bench', :source);
commit;
select * from aura.realtime_tables where project_id = :project and schema_name = :schema and table_name = 't' || :n;
";

/// What the source does, with the api's own statement about a table for each look.
fn source_script() -> String {
    let table = include_str!("../../../crates/pgsource/src/admin/tables.sql");
    let lines = table.lines().map(|line| line.split("--").next().unwrap_or_default());
    let look = lines.collect::<Vec<_>>().join("\n");
    let look =
        [("$1", "array[:schema]"), ("$2", "('t' || :n)"), ("$3", "null"), ("$4", "null"), ("$5", "null"), ("$6", "1")]
            .iter()
            .fold(look, |sql, (from, to)| sql.replace(from, to));
    format!(
        "{look};\n{look};\nbegin;\nset local lock_timeout = 200;\nlock table only :ident.t:n in access exclusive mode;\n{look};\n\
         alter table only :ident.t:n replica identity full;\nselect pg_current_wal_insert_lsn()::text;\ncommit;\n{look};\n"
    )
}

/// Toggles per second that PostgreSQL could do, each client on a table of its own, one database's work after the other's.
pub(super) async fn run(split: &Split, project: &Project, clients: usize) -> Result<f64> {
    let directory = Directory::create()?;
    let platform = split.platform().client("platform").await?;
    let source: String = platform.query_one("select id::text from aura.sources", &[]).await?.get(0);
    let mut seconds = 0.0;
    for (name, database, script) in [
        ("platform", split.platform().url("platform"), PLATFORM.to_owned()),
        ("source", split.postgres.url("app"), source_script()),
    ] {
        let file = directory.0.join(name);
        std::fs::write(&file, format!("\\set n :client_id\n{script}"))?;
        let (clients, file) = (clients.to_string(), file.to_string_lossy().into_owned());
        let defined = [
            format!("project='{}'", project.id),
            format!("schema='{}'", project.schema),
            format!("ident=\"{}\"", project.schema),
            format!("source='{source}'"),
        ];
        let command = ProcessOptions::new("pgbench").args(["--no-vacuum", "--client", &clients, "--jobs", "2"]);
        let command = command.args(["--time", SECONDS, "--file", &file]);
        let command = defined.iter().fold(command, |command, one| command.args(["--define", one]));
        let lines = command.arg(&database).start()?.succeeds(system_tests::PATIENCE * 2).await?;
        let rate = lines.iter().find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse::<f64>().ok());
        let rate = rate.with_context(|| format!("pgbench says no rate: {lines:?}"))?;
        ensure!(rate > 0.0, "{lines:?}");
        seconds += 1.0 / rate;
    }
    Ok(1.0 / seconds)
}
