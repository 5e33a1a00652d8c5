//! Registrations follow their tables (R-REG-2): what the worker finds out in the source changes the name, or ends in `missing`.

use aura_domain::{Epoch, Relation, SourceId};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::{
    Caller, Registration, RegistrationStatus, Store, StoreError, TableRef, audit, bounded,
    engines::fence,
    registrations::{entry, lock_registry, select, select_by_id},
    registry::notify_status,
    registry::raise_revision,
};

/// Who changes it.
const ACTOR: &str = "worker";

/// What becomes of a registration.
struct Fate {
    table: String,
    status: RegistrationStatus,
    reason: Option<String>,
}

impl Store {
    /// The table of an enabled registration was found under this name, or not at all: renamed inside its schema it is pending
    /// under the new name; gone, moved to another schema, or renamed to what is registered already, it is missing. Either is
    /// to be announced: see [`Registration::changed_from`]. Changes nothing where it stands under its name, or where the
    /// registration is another table's by now: false.
    pub async fn follow_table(
        &self,
        source: SourceId,
        epoch: Epoch,
        (id, oid): (Uuid, u32),
        found: Option<&Relation>,
    ) -> Result<bool, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            lock_registry(&mut tx, source).await?;
            fence(&mut tx, source, epoch).await?;
            let changed = follow(&mut tx, (id, oid), found, Caller { actor: ACTOR, request_id: None }).await?;
            tx.commit().await?;
            Ok(changed)
        })
        .await
    }

    /// [`Store::follow_table`] for a request that meets a renamed table before the worker does.
    pub async fn follow_now(
        &self,
        known: &Registration,
        found: &Relation,
        caller: Caller<'_>,
    ) -> Result<bool, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            lock_registry(&mut tx, known.source).await?;
            let changed = follow(&mut tx, (known.id, known.oid), Some(found), caller).await?;
            tx.commit().await?;
            Ok(changed)
        })
        .await
    }

    /// What [`Store::follow_table`] wrote down has been announced. It may have changed again: then that still is to be.
    pub async fn change_told(&self, epoch: Epoch, told: &Registration) -> Result<(), StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            lock_registry(&mut tx, told.source).await?;
            fence(&mut tx, told.source, epoch).await?;
            let query = sqlx::query(
                "update aura.realtime_tables set changed_from = null, revision = $3 where id = $1 and revision = $2",
            );
            let revision = raise_revision(&mut tx, told.source).await?;
            query.bind(told.id).bind(told.revision).bind(revision).execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(())
        })
        .await
    }
}

async fn follow(
    connection: &mut PgConnection,
    (id, oid): (Uuid, u32),
    found: Option<&Relation>,
    caller: Caller<'_>,
) -> Result<bool, StoreError> {
    let before = select_by_id(connection, id).await?;
    let Some(before) = before.filter(|before| before.enabled && before.oid == oid) else { return Ok(false) };
    let Some(fate) = fate(connection, &before, found).await? else { return Ok(false) };
    let revision = raise_revision(connection, before.source).await?;
    let query = sqlx::query(
        "update aura.realtime_tables set table_name = $2, status = $3, reason = $4, active_since_lsn = null,
            changed_from = coalesce(changed_from, table_name), revision = $5, updated_at = now(), updated_by = $6
         where id = $1",
    );
    let query = query.bind(id).bind(&fate.table).bind(fate.status.as_str()).bind(&fate.reason);
    query.bind(revision).bind(caller.actor).execute(&mut *connection).await?;
    let after = select_by_id(connection, id).await?.ok_or(StoreError::NotFound("registration"))?;
    let entry = entry("table.follow", Some(&before), &after, caller.actor, caller.request_id);
    audit::append(connection, entry).await?;
    notify_status(connection, before.source).await?;
    Ok(true)
}

/// `None` = nothing changes.
async fn fate(
    connection: &mut PgConnection,
    before: &Registration,
    found: Option<&Relation>,
) -> Result<Option<Fate>, StoreError> {
    let missing = |reason: String| Fate {
        table: before.table.to_string(),
        status: RegistrationStatus::Missing,
        reason: Some(reason),
    };
    let stays = |found: &&Relation| found.table == before.table && before.status != RegistrationStatus::Missing;
    let fate = match found {
        None => missing("the table was dropped".to_owned()),
        Some(found) if found.schema != before.schema => {
            missing(format!("the table was moved to the schema {}", found.schema))
        }
        Some(found) if stays(&found) => return Ok(None),
        Some(found) => {
            let name = TableRef { project: before.project, schema: &found.schema, table: &found.table };
            let other = select(connection, name).await?.filter(|other| other.id != before.id);
            match other {
                Some(_) => missing(format!("the table was renamed to {}, and that name is registered", found.table)),
                None => Fate { table: found.table.to_string(), status: RegistrationStatus::Pending, reason: None },
            }
        }
    };
    let known =
        fate.status == before.status && fate.reason == before.reason && fate.status == RegistrationStatus::Missing;
    Ok((!known).then_some(fate))
}
