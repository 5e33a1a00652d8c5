use aura_domain::{Epoch, Generation, Lsn, Position, ProjectId, SourceId};
use sqlx::{FromRow, PgConnection};
use uuid::Uuid;

use crate::{
    Store, StoreError, bounded,
    decode::{generation, generation_column, lsn, parsed, rfc3339, word, words},
    registry::notify_status,
};

words! {
    /// What the operator wants of an engine.
    Desired {
        /// Run it somewhere.
        Running = "running",
        /// Run it nowhere.
        Stopped = "stopped",
    }
}

words! {
    /// What an engine does (design §7).
    EngineState {
        /// Nothing runs, and the slot was seen inactive.
        Stopped = "stopped",
        /// On its way up.
        Starting = "starting",
        /// Streaming.
        Running = "running",
        /// Waiting to try again.
        Backoff = "backoff",
        /// Finishing what it has read.
        Draining = "draining",
        /// Leaving the slot.
        Closing = "closing",
        /// On the kill ladder.
        ForceClosing = "force_closing",
        /// Somebody holds the slot and can't be made to leave.
        Zombie = "zombie",
        /// Needs an operator.
        Failed = "failed",
    }
}

/// Desired and observed state of a source's engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Engine {
    /// Source.
    pub source: SourceId,
    /// What the operator wants.
    pub desired: Desired,
    /// What was observed last.
    pub state: EngineState,
    /// Code or text of `failed`, `backoff`, ….
    pub reason: Option<String>,
    /// When it entered the state, RFC 3339 UTC.
    pub since: String,
    /// Fencing token of the worker that runs it.
    pub epoch: Epoch,
    /// See [`Generation`].
    pub generation: Generation,
    /// Registry revision that the running filter and the exact check hold.
    pub applied_revision: i64,
}

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

#[derive(FromRow)]
struct EngineRow {
    source_id: Uuid,
    desired: String,
    state: String,
    reason: Option<String>,
    since: String,
    epoch: i64,
    generation: i32,
    applied_revision: i64,
}

macro_rules! columns {
    () => {
        concat!(
            "source_id, desired, state, reason, ",
            rfc3339!("since"),
            " as since, epoch, generation, applied_revision"
        )
    };
}

impl TryFrom<EngineRow> for Engine {
    type Error = StoreError;

    fn try_from(row: EngineRow) -> Result<Self, StoreError> {
        Ok(Self {
            source: SourceId(row.source_id),
            desired: word(&row.desired, "desired state")?,
            state: word(&row.state, "engine state")?,
            reason: row.reason,
            since: row.since,
            epoch: Epoch(row.epoch),
            generation: generation(row.generation)?,
            applied_revision: row.applied_revision,
        })
    }
}

/// Fails unless `epoch` is the engine's, and keeps it so until the transaction ends: raising it waits for us.
pub(crate) async fn fence(connection: &mut PgConnection, source: SourceId, epoch: Epoch) -> Result<(), StoreError> {
    let query = sqlx::query("select from aura.engines where source_id = $1 and epoch = $2 for no key update");
    let row = query.bind(source.0).bind(epoch.0).fetch_optional(connection).await?;
    row.map(|_| ()).ok_or(StoreError::Fenced)
}

impl Store {
    /// A new epoch for the worker that has just won the source's lease: every older worker's writes fail from now on.
    /// The caller then reads the lease again and stops if it isn't its own (R-LEASE-2).
    pub async fn raise_epoch(&self, source: SourceId) -> Result<Epoch, StoreError> {
        let query =
            sqlx::query_scalar("update aura.engines set epoch = epoch + 1 where source_id = $1 returning epoch");
        let epoch = bounded(async { Ok(query.bind(source.0).fetch_optional(&self.pool).await?) }).await?;
        epoch.map(Epoch).ok_or(StoreError::NotFound("engine"))
    }

    /// One engine.
    pub async fn engine(&self, source: SourceId) -> Result<Option<Engine>, StoreError> {
        let query =
            sqlx::query_as::<_, EngineRow>(concat!("select ", columns!(), " from aura.engines where source_id = $1"));
        let row = bounded(async { Ok(query.bind(source.0).fetch_optional(&self.pool).await?) }).await?;
        row.map(Engine::try_from).transpose()
    }

    /// All engines, by source.
    pub async fn engines(&self) -> Result<Vec<Engine>, StoreError> {
        let query =
            sqlx::query_as::<_, EngineRow>(concat!("select ", columns!(), " from aura.engines order by source_id"));
        let rows = bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?;
        rows.into_iter().map(Engine::try_from).collect()
    }

    /// What the operator wants from now on; signals the workers. False = it is that already.
    pub async fn set_desired(&self, source: SourceId, desired: Desired) -> Result<bool, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let query = sqlx::query("update aura.engines set desired = $2 where source_id = $1 and desired <> $2");
            let done = query.bind(source.0).bind(desired.as_str()).execute(&mut *tx).await?;
            sqlx::query("select pg_notify('aura_engines', $1)").bind(source.to_string()).execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(done.rows_affected() == 1)
        })
        .await
    }

    /// Observed state; `since` moves only when the state does.
    pub async fn set_engine_state(
        &self,
        source: SourceId,
        epoch: Epoch,
        state: EngineState,
        reason: Option<&str>,
    ) -> Result<(), StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let query = sqlx::query(
                "update aura.engines set state = $3, reason = $4, since = case when state = $3 then since else now() end
                 where source_id = $1 and epoch = $2",
            );
            let query = query.bind(source.0).bind(epoch.0).bind(state.as_str()).bind(reason);
            if query.execute(&mut *tx).await?.rows_affected() == 0 {
                return Err(StoreError::Fenced);
            }
            notify_status(&mut tx, source).await?;
            tx.commit().await?;
            Ok(())
        })
        .await
    }

    /// Compares what the source says of itself with what it was, and raises the generation if positions lost their
    /// meaning: other server, other timeline, or a slot made again (R-LSN-6). What was active is pending again then.
    /// True = raised: the caller announces a gap.
    pub async fn confirm_generation(
        &self,
        source: SourceId,
        epoch: Epoch,
        system_identifier: &str,
        timeline: i32,
        slot_created: bool,
    ) -> Result<(Generation, bool), StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            fence(&mut tx, source, epoch).await?;
            let query = sqlx::query_as(
                "with old as (select source_id, generation, system_identifier is not null
                    and (system_identifier <> $2 or timeline <> $3 or $4) as raised
                  from aura.engines where source_id = $1)
                 update aura.engines e set system_identifier = $2, timeline = $3,
                    generation = old.generation + old.raised::int
                 from old where e.source_id = old.source_id returning e.generation, old.raised",
            );
            let query = query.bind(source.0).bind(system_identifier).bind(timeline).bind(slot_created);
            let (number, raised) = query.fetch_one(&mut *tx).await?;
            if raised {
                let query = sqlx::query(
                    "update aura.realtime_tables set active_since_lsn = null,
                        status = case when status = 'active' then 'pending' else status end where source_id = $1",
                );
                query.bind(source.0).execute(&mut *tx).await?;
            }
            tx.commit().await?;
            Ok((generation(number)?, raised))
        })
        .await
    }

    /// Remembers what was confirmed to the source (R-LSN-7). Never goes back within a generation.
    pub async fn save_position(
        &self,
        source: SourceId,
        epoch: Epoch,
        generation: Generation,
        confirmed: Lsn,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "with fence as (select source_id from aura.engines where source_id = $1 and epoch = $2 for no key update)
             insert into aura.source_positions as p (source_id, generation, confirmed_lsn, epoch)
             select source_id, $3, $4::text::pg_lsn, $2 from fence
             on conflict (source_id) do update set generation = excluded.generation, epoch = excluded.epoch,
                updated_at = now(), confirmed_lsn = case when p.generation = excluded.generation
                    then greatest(p.confirmed_lsn, excluded.confirmed_lsn) else excluded.confirmed_lsn end",
        );
        let query = query.bind(source.0).bind(epoch.0).bind(generation_column(generation)).bind(confirmed.to_string());
        let done = bounded(async { Ok(query.execute(&self.pool).await?) }).await?;
        if done.rows_affected() == 0 { Err(StoreError::Fenced) } else { Ok(()) }
    }

    /// What was confirmed last.
    pub async fn position(&self, source: SourceId) -> Result<Option<(Generation, Lsn)>, StoreError> {
        let query = sqlx::query_as::<_, (i32, String)>(
            "select generation, confirmed_lsn::text from aura.source_positions where source_id = $1",
        );
        let row = bounded(async { Ok(query.bind(source.0).fetch_optional(&self.pool).await?) }).await?;
        row.map(|(number, text)| Ok((generation(number)?, lsn(Some(text))?.unwrap_or_default()))).transpose()
    }

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
