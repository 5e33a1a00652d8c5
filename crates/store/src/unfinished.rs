//! What is left to do about tables' replica identities (R-REG-3): a request may have crashed, or met a lock.

use aura_domain::{Epoch, ProjectId, SourceId};
use sqlx::postgres::types::Oid;
use uuid::Uuid;

use crate::{
    Registration, Store, StoreError, bounded,
    decode::rfc3339,
    engines::fence,
    registrations::{columns, registrations},
    registry::notify_status,
};

/// At most so many at once; the rest comes next time.
const LIMIT: i64 = 1000;

impl Store {
    /// Enabled registrations whose identity isn't known to be set, and disabled ones whose old identity isn't known to be
    /// back, the oldest first. Left alone are those of the last 5 s, which a request is still busy with, and of the
    /// latter for 30 s those that were turned off before their ALTER was done: it may still come.
    pub async fn unfinished(&self) -> Result<Vec<Registration>, StoreError> {
        let query = sqlx::query_as(concat!(
            "select ",
            columns!(),
            " from aura.realtime_tables r join aura.projects pr on pr.id = r.project_id
              where ((r.enabled and not r.identity_set and r.status <> 'missing' and pr.deleted_at is null
                    and r.updated_at < now() - interval '5 s')
                or (not r.enabled and r.previous_identity is not null
                    and r.updated_at < now() - case when r.identity_set then interval '5 s' else interval '30 s' end))
              order by r.updated_at limit $1"
        ));
        registrations(bounded(async { Ok(query.bind(LIMIT).fetch_all(&self.pool).await?) }).await?)
    }

    /// Says why an enabled registration is still pending: what its ALTER waits for.
    pub async fn waits_for(&self, waiting: &Registration, reason: &str) -> Result<(), StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let query = sqlx::query(
                "update aura.realtime_tables set reason = $3 where id = $1 and revision = $2 and enabled
                    and not identity_set and status = 'pending' and reason is distinct from $3",
            );
            query.bind(waiting.id).bind(waiting.revision).bind(reason).execute(&mut *tx).await?;
            notify_status(&mut tx, waiting.source).await?;
            tx.commit().await?;
            Ok(())
        })
        .await
    }

    /// The registration of a table by its OID, which leads where the names differ (R-REG-2).
    pub async fn registration_by_oid(&self, project: ProjectId, oid: u32) -> Result<Option<Registration>, StoreError> {
        let query = sqlx::query_as(concat!(
            "select ",
            columns!(),
            " from aura.projects pr join aura.realtime_tables r on r.source_id = pr.source_id and r.table_oid = $2
              where pr.id = $1 and r.project_id = $1 order by r.enabled desc, r.updated_at desc limit 1"
        ));
        let query = query.bind(project.0).bind(Oid(oid));
        Ok(registrations(bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?)?.pop())
    }

    /// Sets what the last changes of these registrations are from, as the worker saw them.
    pub async fn saw_events(&self, source: SourceId, epoch: Epoch, events: &[(Uuid, f64)]) -> Result<(), StoreError> {
        let ids: Vec<Uuid> = events.iter().map(|(id, _)| *id).collect();
        let seconds: Vec<f64> = events.iter().map(|(_, at)| *at).collect();
        bounded(async {
            let mut tx = self.pool.begin().await?;
            fence(&mut tx, source, epoch).await?;
            let query = sqlx::query(
                "update aura.realtime_tables r set last_event_at = greatest(r.last_event_at, to_timestamp(e.at))
                 from unnest($2::uuid[], $3::float8[]) as e (id, at) where r.id = e.id and r.source_id = $1",
            );
            query.bind(source.0).bind(&ids).bind(&seconds).execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(())
        })
        .await
    }
}
