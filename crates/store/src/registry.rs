//! Registrations as the worker sees them: what to cover, and what it reports back.

use aura_domain::{Epoch, Lsn, SourceId, SqlName};
use sqlx::{PgConnection, postgres::types::Oid};
use uuid::Uuid;

use crate::{
    Partition, Registration, RegistrationStatus, Store, StoreError, bounded,
    decode::rfc3339,
    engines::fence,
    partitions,
    registrations::{columns, lock_registry, registrations},
};

/// All that a worker must cover, at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct RegistrySnapshot {
    /// `sources.registry_revision`.
    pub revision: i64,
    /// Enabled ones; and disabled ones while rows from before the disable may still be unconfirmed.
    pub registrations: Vec<Registration>,
    /// Of the partitioned ones.
    pub partitions: Vec<Partition>,
}

impl Store {
    /// What the source's worker must cover, from one snapshot. `NotFound` = the source.
    pub async fn registry(&self, source: SourceId) -> Result<RegistrySnapshot, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin_with("begin isolation level repeatable read read only").await?;
            let revision = sqlx::query_scalar("select registry_revision from aura.sources where id = $1");
            let revision = revision.bind(source.0).fetch_optional(&mut *tx).await?;
            let rows = sqlx::query_as(concat!(
                "select ",
                columns!(),
                " from aura.realtime_tables r
                  join aura.projects pr on pr.id = r.project_id and pr.deleted_at is null
                  join aura.engines e on e.source_id = r.source_id
                  left join aura.source_positions p on p.source_id = r.source_id and p.generation = e.generation
                  where r.source_id = $1 and (r.enabled or (r.disabled_generation = e.generation
                    and (p.confirmed_lsn is null or r.disabled_at_lsn > p.confirmed_lsn)))
                  order by r.id"
            ));
            let rows = rows.bind(source.0).fetch_all(&mut *tx).await?;
            let revision = revision.ok_or(StoreError::NotFound("source"))?;
            let partitions = partitions::of_source(&mut tx, source).await?;
            Ok(RegistrySnapshot { revision, registrations: registrations(rows)?, partitions })
        })
        .await
    }

    /// The running filter, made of `revision`, covers these: `(registration, active_since_lsn)`. One that was changed
    /// after that revision is left alone, and so is one that isn't pending.
    pub async fn mark_active(
        &self,
        source: SourceId,
        epoch: Epoch,
        revision: i64,
        active: &[(Uuid, Lsn)],
    ) -> Result<(), StoreError> {
        let ids: Vec<Uuid> = active.iter().map(|(id, _)| *id).collect();
        let lsns: Vec<String> = active.iter().map(|(_, lsn)| lsn.to_string()).collect();
        bounded(async {
            let mut tx = self.pool.begin().await?;
            fence(&mut tx, source, epoch).await?;
            let query = sqlx::query(
                "update aura.realtime_tables r set status = 'active', reason = null,
                    active_since_lsn = coalesce(r.active_since_lsn, a.lsn::pg_lsn)
                 from unnest($3::uuid[], $4::text[]) as a (id, lsn)
                 where r.id = a.id and r.source_id = $1 and r.enabled and r.identity_set and r.revision <= $2
                    and r.status = 'pending'",
            );
            query.bind(source.0).bind(revision).bind(&ids).bind(&lsns).execute(&mut *tx).await?;
            notify_status(&mut tx, source).await?;
            tx.commit().await?;
            Ok(())
        })
        .await
    }

    /// The worker found an enabled registration blocked, missing or pending again; `reason` for people. One that has been
    /// enabled for another table than `oid`, or has followed its table to another name, meanwhile is left alone.
    pub async fn mark_status(
        &self,
        source: SourceId,
        epoch: Epoch,
        (id, oid, name): (Uuid, u32, &SqlName),
        status: RegistrationStatus,
        reason: Option<&str>,
    ) -> Result<(), StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            fence(&mut tx, source, epoch).await?;
            let query = sqlx::query(
                "update aura.realtime_tables set status = $3, reason = $4, active_since_lsn = null
                 where id = $2 and source_id = $1 and enabled and table_oid = $5
                    and table_name = $6",
            );
            let query =
                query.bind(source.0).bind(id).bind(status.as_str()).bind(reason).bind(Oid(oid)).bind(name.as_str());
            query.execute(&mut *tx).await?;
            notify_status(&mut tx, source).await?;
            tx.commit().await?;
            Ok(())
        })
        .await
    }

    /// The source refuses to stream this revision of an enabled registration; `reason` for people. It leaves the worker's
    /// registry until it is enabled again (R-REG-6).
    pub async fn block_table(
        &self,
        source: SourceId,
        epoch: Epoch,
        (id, revision): (Uuid, i64),
        reason: &str,
    ) -> Result<(), StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            lock_registry(&mut tx, source).await?;
            fence(&mut tx, source, epoch).await?;
            let query = sqlx::query(
                "update aura.realtime_tables set status = 'blocked', reason = $4, active_since_lsn = null
                 where id = $2 and source_id = $1 and enabled and revision = $3",
            );
            let query = query.bind(source.0).bind(id).bind(revision).bind(reason);
            if query.execute(&mut *tx).await?.rows_affected() > 0 {
                raise_revision(&mut tx, source).await?;
            }
            notify_status(&mut tx, source).await?;
            tx.commit().await?;
            Ok(())
        })
        .await
    }

    /// The running filter and the exact check hold everything up to `revision` (200 of a PUT, of disables, too).
    pub async fn set_applied_revision(&self, source: SourceId, epoch: Epoch, revision: i64) -> Result<(), StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            fence(&mut tx, source, epoch).await?;
            let query = sqlx::query("update aura.engines set applied_revision = $2 where source_id = $1");
            query.bind(source.0).bind(revision).execute(&mut *tx).await?;
            notify_status(&mut tx, source).await?;
            tx.commit().await?;
            Ok(())
        })
        .await
    }
}

pub(crate) async fn notify_status(connection: &mut PgConnection, source: SourceId) -> Result<(), StoreError> {
    sqlx::query("select pg_notify('aura_registry_status', $1)").bind(source.to_string()).execute(connection).await?;
    Ok(())
}

/// Next revision of the source's registry; the signal goes out with the commit.
pub(crate) async fn raise_revision(connection: &mut PgConnection, source: SourceId) -> Result<i64, StoreError> {
    let query = sqlx::query_scalar(
        "update aura.sources set registry_revision = registry_revision + 1 where id = $1 returning registry_revision",
    );
    let revision = query.bind(source.0).fetch_one(&mut *connection).await?;
    sqlx::query("select pg_notify('aura_registry', $1)").bind(source.to_string()).execute(connection).await?;
    Ok(revision)
}
