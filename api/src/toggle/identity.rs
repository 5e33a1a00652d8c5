//! Replica identities: set when a table goes live, given back when it is turned off (R-REG-3).

use std::time::Duration;

use aura_domain::{Generation, Relation};
use aura_kit::{Code, Problem};
use aura_pgsource::admin::{Admin, IdentityError, TableInfo};
use aura_store::{Registration, RegistrationMode, ReplicaIdentity, Store};

use super::{
    partitions::{Former, full_sql, to_restore},
    reconcile::waits_for,
};
use crate::error::{ApiError, Result};

/// All tries of one ALTER together (R-REG-3).
const ALTER_BUDGET: Duration = Duration::from_secs(3);

/// Sets REPLICA IDENTITY FULL, or in manual mode looks whether it is set, and records it. The generation is read before
/// the LSN: should it rise in between, every row of the new one qualifies, and none is lost.
pub(crate) async fn set(store: &Store, admin: &Admin, known: &Registration) -> Result<Registration> {
    let generation = store.engine(known.source).await?.map_or(Generation(1), |engine| engine.generation);
    if known.mode == RegistrationMode::Manual {
        let info = admin.table(&known.schema, &known.table).await?.filter(|info| info.oid == known.oid);
        refuse_unset(&info.ok_or_else(gone)?)?;
        let lsn = admin.current_wal_insert_lsn().await?;
        return Ok(store.identity_set(known.id, None, lsn, generation).await?);
    }
    let relation = known.relation();
    let change = admin.set_replica_identity_full(&relation, known.oid, ALTER_BUDGET).await;
    let change = match change {
        Ok(change) => change,
        Err(error) => return Err(problem(admin, &relation, error).await?),
    };
    let previous = ReplicaIdentity { kind: change.previous.kind, index: change.previous.index };
    let latest = store.identity_set(known.id, Some(&previous), change.lsn, generation).await?;
    if !latest.enabled && change.altered {
        // Another process has turned it off meanwhile, and met a table that wasn't altered yet.
        let owed = Registration { previous_identity: latest.previous_identity.clone().or(Some(previous)), ..latest };
        give_back(store, admin, &owed).await?;
        return Err(Problem::new(Code::ConcurrentChange, "The table was turned off meanwhile.").into());
    }
    Ok(latest)
}

/// [`set`]; what can't be done yet is said in the registration, too.
pub(super) async fn set_or_say(store: &Store, admin: &Admin, known: &Registration) -> Result<Registration> {
    let outcome = set(store, admin, known).await;
    if let Err(error) = &outcome {
        store.waits_for(known, waits_for(error.code())).await?;
    }
    outcome
}

/// Gives a table that was turned off the identity back that it had, if it still is what we set, and records it. A lock
/// that isn't to be had doesn't undo the disabling: the reconciler tries again. False = not restored yet.
pub(crate) async fn restore(store: &Store, admin: &Admin, off: &Registration, settled: bool) -> Result<bool> {
    if off.previous_identity.is_none() {
        return Ok(true);
    }
    if off.mode == RegistrationMode::Auto
        && let Err(error) = give_back(store, admin, off).await
    {
        tracing::warn!(code = %error.code(), registration = %off.id, "replica identity not restored yet");
        return Ok(false);
    }
    // An ALTER that another process has begun may still come; what it leaves is the reconciler's.
    if settled || off.identity_set {
        store.identity_restored(off.id).await?;
    }
    Ok(true)
}

async fn give_back(store: &Store, admin: &Admin, off: &Registration) -> Result<()> {
    // It may have been renamed since.
    let Some(relation) = admin.name_of(off.oid).await? else { return Ok(()) };
    let info = admin.table(&relation.schema, &relation.table).await?;
    for Former { relation, oid, identity } in to_restore(store, off, info.as_ref()).await? {
        let change = admin.restore_replica_identity(&relation, oid, identity.kind, identity.index.as_ref()).await;
        if let Err(error) = change {
            return Err(problem(admin, &relation, error).await?);
        }
    }
    Ok(())
}

/// What is FULL already needs no ALTER; else only the owner may (R-REG-4).
pub(super) fn refuse_foreign_owner(info: &TableInfo) -> Result<()> {
    if info.owned_by_us || info.is_full() {
        return Ok(());
    }
    Err(not_owner(info))
}

/// Of a partitioned table the same goes for each leaf.
fn not_owner(info: &TableInfo) -> ApiError {
    let detail = "Our role doesn't own the table. Let its owner run `sql`, then PUT it again.";
    Problem::new(Code::NotTableOwner, detail).with("sql", owners_sql(info)).into()
}

/// In manual mode the owner sees to it.
pub(super) fn refuse_unset(info: &TableInfo) -> Result<()> {
    if info.is_full() {
        return Ok(());
    }
    let detail = "In manual mode nothing is altered. Let the table's owner run `sql`, then PUT it again.";
    Err(Problem::new(Code::ReplicaIdentityNotFull, detail).with("sql", owners_sql(info)).into())
}

/// Exactly what we would run.
fn owners_sql(info: &TableInfo) -> String {
    full_sql(info).join(";\n") + ";"
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
            info.map_or_else(gone, |info| not_owner(&info))
        }
        IdentityError::Missing => gone(),
        IdentityError::Source(error) => error.into(),
    })
}

fn gone() -> ApiError {
    ApiError::new(Code::ConcurrentChange, "The table was dropped or replaced meanwhile.")
}
