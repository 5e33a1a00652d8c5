//! Where the registered tables are (R-REG-2): one that was renamed is followed, one that is gone becomes missing. Rows that
//! came under a new name before the filter knew it are lost, and its subscribers are told (R-HOLE-4).

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use aura_domain::Relation;
use aura_pgsource::{Found, SourceError, SqlConnection, connect_sql, names_of};
use aura_store::{Registration, RegistrationStatus, StoreError};
use aura_wire::GapReason;
use tokio::sync::watch;
use uuid::Uuid;

use super::{Engine, gaps::Loss, loader::Loaded, partitions::Follower, session::CONNECT};

/// See the module; one per run.
pub(super) struct Census {
    engine: Arc<Engine>,
    loaded: watch::Receiver<Arc<Loaded>>,
    sql: Option<SqlConnection>,
    partitions: Follower,
    /// What was written down last, of which revision of the registration: not again.
    written: HashMap<Uuid, (i64, Option<Relation>)>,
    /// When the last events of tables were written down.
    told: Instant,
}

/// Last events of tables are written this often.
const EVENTS: Duration = Duration::from_secs(10);

impl Census {
    pub(super) fn new(engine: Arc<Engine>, loaded: watch::Receiver<Arc<Loaded>>) -> Self {
        let partitions = Follower::new(Arc::clone(&engine));
        Self { engine, loaded, sql: None, partitions, written: HashMap::new(), told: Instant::now() }
    }

    /// Looks every `CDC_FILTER_REFRESH_MS` until the engine ends.
    pub(super) async fn run(mut self) {
        let halt = self.engine.halt.clone();
        let looking = async {
            loop {
                tokio::time::sleep(self.engine.deps.settings.filter_refresh).await;
                self.tell_events().await;
                let loaded = self.loaded.borrow().clone();
                let enabled: Vec<_> = loaded.snapshot.registrations.iter().filter(|one| one.enabled).collect();
                if let Err(error) = self.look(&loaded, &enabled).await {
                    tracing::debug!(source = %self.engine.source.id, %error, "can't look for the tables");
                    self.sql = None;
                }
            }
        };
        halt.run_until_cancelled(Box::pin(looking)).await;
    }

    /// For people, so one that is lost with a crash or an unreachable database is no loss.
    async fn tell_events(&mut self) {
        if self.told.elapsed() < EVENTS {
            return;
        }
        self.told = Instant::now();
        let events = self.engine.vitals.take_events();
        if events.is_empty() {
            return;
        }
        let told = self.engine.deps.store.saw_events(self.engine.source.id, self.engine.epoch, &events).await;
        if let Err(error) = told {
            tracing::debug!(source = %self.engine.source.id, %error, "last events of tables are not written");
        }
    }

    async fn look(&mut self, loaded: &Loaded, enabled: &[&Registration]) -> Result<(), SourceError> {
        let oids: Vec<_> = enabled.iter().map(|registration| registration.oid).collect();
        if oids.is_empty() {
            return Ok(());
        }
        let engine = &self.engine;
        let sql = match self.sql.take().filter(|sql| !sql.is_closed()) {
            Some(sql) => sql,
            None => connect_sql(&engine.url, &engine.application_name(), Some(&engine.sockets), CONNECT).await?,
        };
        let found = names_of(&sql, &oids).await?;
        self.follow(loaded, enabled, &found).await;
        let partitioned: Vec<_> = enabled
            .iter()
            .copied()
            .filter(|registration| found.get(&registration.oid).is_some_and(|found| found.is_partitioned))
            .collect();
        self.partitions.look(&sql, loaded, &partitioned).await?;
        self.sql = Some(sql);
        Ok(())
    }

    /// The platform database has the last word: what was loaded may have changed.
    async fn follow(&mut self, loaded: &Loaded, enabled: &[&Registration], tables: &HashMap<u32, Found>) {
        for registration in enabled {
            let found = tables.get(&registration.oid).map(|found| &found.relation);
            let outcome = async {
                self.tell(loaded, registration).await?;
                if stands(registration, found) { Ok(()) } else { self.write(registration, found).await }
            };
            match outcome.await {
                // Whoever has taken over sees to it.
                Ok(()) | Err(StoreError::Fenced) => {}
                Err(error) => {
                    tracing::warn!(source = %self.engine.source.id, %error, "what became of a table is not written");
                }
            }
        }
    }

    async fn write(&mut self, registration: &Registration, found: Option<&Relation>) -> Result<(), StoreError> {
        let fact = (registration.revision, found.cloned());
        if self.written.get(&registration.id) == Some(&fact) {
            return Ok(());
        }
        let source = self.engine.source.id;
        let which = (registration.id, registration.oid);
        // Said when it is written down, which is once.
        if self.engine.deps.store.follow_table(source, self.engine.epoch, which, found).await? {
            let now = found.map(|found| format!("{}.{}", found.schema, found.table));
            tracing::warn!(%source, schema = %registration.schema, was = %registration.table, now,
                "a registered table isn't under its name any more");
        }
        self.written.insert(registration.id, fact);
        Ok(())
    }

    /// What was lost goes up to where the filter takes the table in, so that comes first.
    async fn tell(&self, loaded: &Loaded, registration: &Registration) -> Result<(), StoreError> {
        let Some(was) = &registration.changed_from else { return Ok(()) };
        let now = Relation { schema: registration.schema.clone(), table: registration.table.clone() };
        let covered = self.engine.reports.borrow().as_ref().is_some_and(|all| all.covers(registration.id, &now));
        if !covered && registration.status != RegistrationStatus::Missing {
            return Ok(());
        }
        let Some(project) = loaded.projects.get(&registration.project) else { return Ok(()) };
        let mut names = vec![was, &registration.table];
        names.dedup();
        for name in names {
            let table = [project.client_schema(&registration.schema).to_owned(), name.to_string()];
            self.engine.gaps.announce(Loss::up_to_now(project.id, GapReason::TableChanged, Some(table))).await;
        }
        self.engine.deps.store.change_told(self.engine.epoch, registration).await
    }
}

/// It is where it is registered.
fn stands(registration: &Registration, found: Option<&Relation>) -> bool {
    let here = |found: &Relation| (&found.schema, &found.table) == (&registration.schema, &registration.table);
    registration.status != RegistrationStatus::Missing && found.is_some_and(here)
}
