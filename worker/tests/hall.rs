//! A worker, a live table, and who listens to it: what each of them gets.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
};

use aura_store::Plugin;
use aura_testkit::eventually;
use serde_json::{Value, json};

use crate::{
    faults::Faulty,
    stage::{PATIENCE, Running, Stage, Watch},
};

/// A table `m` whose rows are their owner's.
pub(crate) const OWNED: &str = "create table m (id int primary key, owner text, body text);
    alter table m enable row level security;
    create policy own on m for select to aura_authenticated using (owner = auth.jwt() ->> 'sub')";
/// A table that all may see. Row security is on, so that each subscription is named by its own id.
pub(crate) fn open(table: &str, columns: &str) -> String {
    format!(
        "create table {table} ({columns}); alter table {table} enable row level security;
         create policy all_of_it on {table} for select using (true)"
    )
}

/// The last row of each test, which the service role sees.
pub(crate) const END: i64 = 999;

/// A worker, a table `m` that is live, and who listens to it.
pub(crate) struct Hall {
    pub(crate) stage: Stage,
    bus: Arc<Faulty>,
    worker: Running,
    pub(crate) watch: Watch,
    /// A claim-less twin may stand for several.
    pub(crate) names: BTreeMap<u64, Vec<String>>,
}

/// One message: kind, for whom, record, old record.
pub(crate) type Event = (String, Vec<String>, Value, Value);

impl Hall {
    pub(crate) async fn new(sql: &str) -> anyhow::Result<Self> {
        Self::with(Plugin::Auto, sql).await
    }

    pub(crate) async fn with(plugin: Plugin, sql: &str) -> anyhow::Result<Self> {
        Self::on(Stage::new(plugin).await?, sql).await
    }

    /// With this many connections for policies.
    pub(crate) async fn with_connections(count: usize, sql: &str) -> anyhow::Result<Self> {
        let mut stage = Stage::new(Plugin::Auto).await?;
        stage.settings.visibility_connections = count;
        Self::on(stage, sql).await
    }

    async fn on(mut stage: Stage, sql: &str) -> anyhow::Result<Self> {
        let bus = Arc::new(Faulty::default());
        stage.bus = Arc::clone(&bus) as _;
        stage.sql.batch_execute(sql).await?;
        let worker = stage.run_worker().await;
        stage.enable("m").await?;
        let watch = stage.changes().await;
        let mut hall = Self { stage, bus, worker, watch, names: BTreeMap::new() };
        hall.join("service", "service_role", json!({"role": "service_role"}), None).await;
        Ok(hall)
    }

    pub(crate) async fn join(&mut self, name: &str, role: &str, claims: Value, filter: Option<&str>) {
        let (id, reply) = self.stage.join("m", role, claims, filter).await;
        assert!(reply.exceptions.is_empty(), "{name}: {reply:?}");
        let twin = self.stage.twins.iter().find(|(sub, _)| *sub == id).map(|(_, twin)| *twin);
        for id in [Some(id), twin].into_iter().flatten() {
            self.names.entry(id).or_default().push(name.to_owned());
        }
    }

    /// Somebody with this `sub`.
    pub(crate) async fn user(&mut self, sub: &str) {
        self.join(sub, "authenticated", json!({"sub": sub, "role": "authenticated"}), None).await;
    }

    /// Alice with a filter.
    pub(crate) async fn filtered(&mut self, name: &str, filter: &str) {
        self.join(name, "authenticated", json!({"sub": "alice", "role": "authenticated", "n": name}), Some(filter))
            .await;
    }

    pub(crate) async fn run(&self, sql: &str) -> anyhow::Result<()> {
        Ok(self.stage.sql.batch_execute(sql).await?)
    }

    /// Runs these while the worker is busy with an earlier row, so that it judges all of them when all have happened.
    pub(crate) async fn late(&self, first: &str, statements: &[&str]) -> anyhow::Result<()> {
        let held = self.bus.hold.write().await;
        let before = self.bus.batches.load(Ordering::SeqCst);
        self.run(first).await?;
        eventually(PATIENCE, || async { self.bus.batches.load(Ordering::SeqCst) > before }).await?;
        for statement in statements {
            self.run(statement).await?;
        }
        drop(held);
        Ok(())
    }

    /// All messages up to the row that is inserted here with these further values.
    pub(crate) async fn events(&mut self, columns: &str) -> anyhow::Result<Vec<Event>> {
        self.run(&format!("insert into m values ({END}{columns})")).await?;
        let mut events = Vec::new();
        loop {
            let seen = self.watch.next().await;
            let (record, old) = (seen.data["record"].clone(), seen.data["old_record"].clone());
            if record["id"] == END {
                return Ok(events);
            }
            let mut names: Vec<_> = seen.ids.iter().flat_map(|id| self.names[id].clone()).collect();
            names.sort_unstable();
            events.push((seen.data["type"].as_str().unwrap_or_default().to_owned(), names, record, old));
        }
    }

    /// What somebody got: kind, record, old record.
    pub(crate) fn of<'a>(events: &'a [Event], name: &str) -> Vec<(&'a str, &'a Value, &'a Value)> {
        let his = events.iter().filter(|event| event.1.iter().any(|to| to == name));
        his.map(|(kind, _, record, old)| (kind.as_str(), record, old)).collect()
    }

    pub(crate) async fn end(self) {
        self.worker.stop().await;
    }
}

pub(crate) fn row(id: i64, owner: &str, body: &str) -> Value {
    json!({"id": id, "owner": owner, "body": body})
}
