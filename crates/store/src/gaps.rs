use aura_domain::{Epoch, Position, ProjectId, SourceId};
use sqlx::FromRow;
use uuid::Uuid;

use crate::{
    Store, StoreError, bounded,
    decode::{parsed, rfc3339},
};

/// An announced loss to record.
#[derive(Debug, Clone)]
pub struct NewGap<'a> {
    /// Source.
    pub source: SourceId,
    /// Whose; `None` = every project's.
    pub project: Option<ProjectId>,
    /// First position that may be missing; `None` = unknown.
    pub from: Option<Position>,
    /// Last position that may be missing; `None` = up to the announcement.
    pub to: Option<Position>,
    /// Word of the gap message.
    pub reason: &'a str,
}

/// A recorded loss.
#[derive(Debug, Clone, PartialEq)]
pub struct Gap {
    /// Ascending.
    pub id: i64,
    /// See [`NewGap::project`].
    pub project: Option<ProjectId>,
    /// See [`NewGap::from`].
    pub from: Option<Position>,
    /// See [`NewGap::to`].
    pub to: Option<Position>,
    /// See [`NewGap::reason`].
    pub reason: String,
    /// RFC 3339, UTC.
    pub created_at: String,
}

impl Store {
    /// Records an announced loss.
    pub async fn record_gap(&self, epoch: Epoch, gap: NewGap<'_>) -> Result<(), StoreError> {
        let query = sqlx::query(
            "with fence as (select source_id from aura.engines where source_id = $1 and epoch = $2 for no key update)
             insert into aura.gaps (source_id, project_id, from_position, to_position, reason, epoch)
             select source_id, $3, $4, $5, $6, $2 from fence",
        );
        let query = query
            .bind(gap.source.0)
            .bind(epoch.0)
            .bind(gap.project.map(|project| project.0))
            .bind(gap.from.map(|position| position.to_string()))
            .bind(gap.to.map(|position| position.to_string()))
            .bind(gap.reason);
        let done = bounded(async { Ok(query.execute(&self.pool).await?) }).await?;
        if done.rows_affected() == 0 { Err(StoreError::Fenced) } else { Ok(()) }
    }

    /// How often a source's slot was made again in the last hour (R-ENG-8).
    pub async fn slots_recreated(&self, source: SourceId) -> Result<i64, StoreError> {
        let query = sqlx::query_scalar(
            "select count(*) from aura.gaps where source_id = $1 and reason = 'slot_recreated'
                and created_at > now() - interval '1 hour'",
        );
        bounded(async { Ok(query.bind(source.0).fetch_one(&self.pool).await?) }).await
    }

    /// A source's recorded losses, newest first; `before`: only those with a smaller id (the cursor).
    pub async fn gaps(&self, source: SourceId, before: Option<i64>, limit: u32) -> Result<Vec<Gap>, StoreError> {
        let query = sqlx::query_as::<_, GapRow>(concat!(
            "select id, project_id, from_position, to_position, reason, ",
            rfc3339!("created_at"),
            " as created_at from aura.gaps where source_id = $1 and ($2::bigint is null or id < $2)
             order by id desc limit $3"
        ));
        let query = query.bind(source.0).bind(before).bind(i64::from(limit));
        let rows = bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?;
        rows.into_iter().map(Gap::try_from).collect()
    }
}

#[derive(FromRow)]
struct GapRow {
    id: i64,
    project_id: Option<Uuid>,
    from_position: Option<String>,
    to_position: Option<String>,
    reason: String,
    created_at: String,
}

impl TryFrom<GapRow> for Gap {
    type Error = StoreError;

    fn try_from(row: GapRow) -> Result<Self, StoreError> {
        Ok(Self {
            id: row.id,
            project: row.project_id.map(ProjectId),
            from: parsed(row.from_position, "position")?,
            to: parsed(row.to_position, "position")?,
            reason: row.reason,
            created_at: row.created_at,
        })
    }
}
