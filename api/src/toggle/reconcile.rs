//! Finishes what a crash or a lock left between intent and ALTER (R-REG-3).

use std::{collections::HashMap, time::Duration};

use aura_domain::Relation;
use aura_kit::{Code, Problem};
use aura_pgsource::admin::{Admin, IdentityError, TableInfo};
use aura_store::{Registration, ReplicaIdentity, Store};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::partitions::full_sql;
use crate::{
    error::{ApiError, Result},
    state::AppState,
};

/// All tries of one ALTER together (R-REG-3).
const ALTER_BUDGET: Duration = Duration::from_secs(3);
/// How often to look for half states.
const PERIOD: Duration = Duration::from_secs(10);
/// Longest pause between two tries on one table.
const MAX_BACKOFF: Duration = Duration::from_secs(300);

/// Sets REPLICA IDENTITY FULL and records it. The generation is read before the LSN: should it rise in between, every
/// row of the new one qualifies, and none is lost.
pub(crate) async fn set_identity(store: &Store, admin: &Admin, registration: Registration) -> Result<Registration> {
    let generation = match store.engine(registration.source).await? {
        Some(engine) => engine.generation,
        None => aura_domain::Generation(1),
    };
    let relation = Relation { schema: registration.schema.clone(), table: registration.table.clone() };
    let change = match admin.set_replica_identity_full(&relation, registration.oid, ALTER_BUDGET).await {
        Ok(change) => change,
        Err(error) => return Err(problem(admin, &relation, error).await?),
    };
    if registration.identity_set {
        return Ok(registration);
    }
    let previous = ReplicaIdentity { kind: change.previous.kind, index: change.previous.index };
    Ok(store.identity_set(registration.id, Some(&previous), change.lsn, generation).await?)
}

/// What the client learns of an ALTER that failed.
pub(crate) async fn problem(admin: &Admin, relation: &Relation, error: IdentityError) -> Result<ApiError> {
    Ok(match error {
        IdentityError::LockTimeout { blocker } => {
            let detail = "Another transaction holds a lock on the table; it was waited for 3 s.";
            let problem = Problem::new(Code::LockTimeout, detail).retry_after(1);
            match blocker {
                Some(pid) => problem.with("blocking_pid", pid).into(),
                None => problem.into(),
            }
        }
        IdentityError::NotOwner => {
            let info = admin.table(&relation.schema, &relation.table).await?;
            info.map_or_else(replaced, |info| not_owner(&info))
        }
        IdentityError::Missing => replaced(),
        IdentityError::Source(error) => error.into(),
    })
}

fn replaced() -> ApiError {
    Problem::new(Code::ConcurrentChange, "The table was dropped or replaced meanwhile.").into()
}

/// Only the owner may ALTER. Of a partitioned table the same goes for each leaf.
pub(super) fn not_owner(info: &TableInfo) -> ApiError {
    let detail = "Our role doesn't own the table. Let its owner run `sql`, then PUT it again.";
    let sql = full_sql(info).join(";\n") + ";";
    Problem::new(Code::NotTableOwner, detail).with("sql", sql).into()
}

/// Runs until `stop`: every 10 s it looks for enabled tables whose ALTER is still missing and tries it, with a pause
/// per table that doubles from 10 s to 5 min.
pub(crate) async fn reconcile(state: &AppState, stop: &CancellationToken) {
    let mut backoff = Backoff::default();
    while stop.run_until_cancelled(tokio::time::sleep(PERIOD)).await.is_some() {
        if let Some(Err(error)) = stop.run_until_cancelled(Box::pin(round(state, &mut backoff))).await {
            tracing::warn!(code = %error.code(), "reconciler");
        }
    }
}

async fn round(state: &AppState, backoff: &mut Backoff) -> Result<()> {
    let mut unfinished = Vec::new();
    for source in state.store().sources().await? {
        let registry = state.store().registry(source.id).await?;
        unfinished.extend(registry.registrations.into_iter().filter(|known| known.enabled && !known.identity_set));
    }
    backoff.keep_only(&unfinished);
    for registration in unfinished {
        let id = registration.id;
        if !backoff.is_due(id) {
            continue;
        }
        match finish(state, registration).await {
            Ok(()) => backoff.succeeded(id),
            Err(error) => {
                tracing::warn!(code = %error.code(), registration = %id, "replica identity still not set");
                backoff.failed(id);
            }
        }
    }
    Ok(())
}

async fn finish(state: &AppState, known: Registration) -> Result<()> {
    let _turn = state.locks().turn(known.project, &known.schema, &known.table).await?;
    let admin = state.sources().admin(state.store(), known.source).await?;
    // The request that left it may have finished it while we waited for our turn.
    let latest = state.store().registration_by_id(known.id).await?;
    if let Some(latest) = latest.filter(|latest| latest.enabled && !latest.identity_set) {
        set_identity(state.store(), &admin, latest).await?;
    }
    admin.done();
    Ok(())
}

/// When to try which registration again.
#[derive(Default)]
struct Backoff(HashMap<Uuid, (Instant, Duration)>);

impl Backoff {
    fn is_due(&self, id: Uuid) -> bool {
        self.0.get(&id).is_none_or(|(at, _)| Instant::now() >= *at)
    }

    fn succeeded(&mut self, id: Uuid) {
        self.0.remove(&id);
    }

    fn failed(&mut self, id: Uuid) {
        let pause = self.0.get(&id).map_or(PERIOD, |(_, pause)| (*pause * 2).min(MAX_BACKOFF));
        self.0.insert(id, (Instant::now() + pause, pause));
    }

    fn keep_only(&mut self, unfinished: &[Registration]) {
        self.0.retain(|id, _| unfinished.iter().any(|known| known.id == *id));
    }
}
