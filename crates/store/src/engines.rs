use aura_domain::{
    Desired, EngineLive, EngineReport, EngineState, Epoch, Generation, Lsn, OnDeadline, OperationKind, SourceId,
    WorkerId,
};
use sqlx::{FromRow, PgConnection, types::Json};
use uuid::Uuid;

use crate::{
    Store, StoreError, WorkerRow, bounded,
    decode::{generation, generation_column, lsn, parsed, rfc3339, word},
    registry::notify_status,
};

/// Desired and observed state of a source's engine.
#[derive(Debug, Clone, PartialEq)]
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
    /// How long ago that was in milliseconds, by the database's clock.
    pub state_age_ms: i64,
    /// Fencing token of the worker that runs it.
    pub epoch: Epoch,
    /// See [`Generation`].
    pub generation: Generation,
    /// Registry revision that the running filter and the exact check hold.
    pub applied_revision: i64,
    /// Worker that raised the epoch; `None` once it has left, or was fenced.
    pub holder: Option<WorkerId>,
    /// The open stop or force-close.
    pub operation: Option<Operation>,
    /// An operator asked for a new slot in place of a lost one.
    pub recreate_slot: bool,
    /// Starts and new slots that were asked for so far: what has failed is tried again at once.
    pub nudges: i64,
    /// How the last run ended.
    pub last_report: Option<EngineReport>,
    /// What the present run says of itself.
    pub live: Option<EngineLive>,
    /// Age of `live` in milliseconds, by the database's clock.
    pub live_age_ms: Option<i64>,
}

impl Engine {
    /// The word that the reason begins with, up to a colon.
    pub fn reason_code(&self) -> Option<&str> {
        self.reason.as_deref().map(|reason| reason.split(':').next().unwrap_or(reason))
    }

    /// Whether a worker that was heard lately runs it.
    pub fn is_led(&self, workers: &[WorkerRow]) -> bool {
        let holder = |worker: &&WorkerRow| self.holder.as_ref() == Some(&worker.id);
        workers.iter().find(holder).is_some_and(WorkerRow::is_alive)
    }
}

/// A stop or force-close that isn't over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// Shared by all requests that joined it.
    pub id: i64,
    /// What was asked; a force-close takes a stop over.
    pub kind: OperationKind,
    /// RFC 3339, UTC.
    pub started_at: String,
    /// Its deadline, RFC 3339 UTC.
    pub deadline_at: String,
    /// Milliseconds until the deadline, by the database's clock; negative = overdue.
    pub remaining_ms: i64,
    /// What happens then.
    pub on_deadline: OnDeadline,
}

#[derive(FromRow)]
struct EngineRow {
    source_id: Uuid,
    desired: String,
    state: String,
    reason: Option<String>,
    since: String,
    state_age_ms: i64,
    epoch: i64,
    generation: i32,
    applied_revision: i64,
    holder: Option<String>,
    operation_id: Option<i64>,
    operation: Option<String>,
    operation_started_at: Option<String>,
    operation_deadline_at: Option<String>,
    operation_remaining_ms: Option<i64>,
    operation_on_deadline: Option<String>,
    recreate_slot: bool,
    nudges: i64,
    last_report: Option<Json<EngineReport>>,
    live: Option<Json<EngineLive>>,
    live_age_ms: Option<i64>,
}

macro_rules! columns {
    () => {
        concat!(
            "source_id, desired, state, reason, ",
            rfc3339!("since"),
            " as since, (extract(epoch from clock_timestamp() - since) * 1000)::bigint as state_age_ms,
             epoch, generation, applied_revision, holder, operation_id, operation, ",
            rfc3339!("operation_started_at"),
            " as operation_started_at, ",
            rfc3339!("operation_deadline_at"),
            " as operation_deadline_at,
             (extract(epoch from operation_deadline_at - clock_timestamp()) * 1000)::bigint as operation_remaining_ms,
             operation_on_deadline, recreate_slot, nudges, last_report, live,
             (extract(epoch from clock_timestamp() - live_at) * 1000)::bigint as live_age_ms"
        )
    };
}

impl TryFrom<EngineRow> for Engine {
    type Error = StoreError;

    fn try_from(row: EngineRow) -> Result<Self, StoreError> {
        let operation = row.operation()?;
        Ok(Self {
            operation,
            holder: row.holder.map(WorkerId),
            recreate_slot: row.recreate_slot,
            nudges: row.nudges,
            last_report: row.last_report.map(|Json(report)| report),
            live: row.live.map(|Json(live)| live),
            live_age_ms: row.live_age_ms,
            source: SourceId(row.source_id),
            desired: word(&row.desired, "desired state")?,
            state: word(&row.state, "engine state")?,
            reason: row.reason,
            since: row.since,
            state_age_ms: row.state_age_ms,
            epoch: Epoch(row.epoch),
            generation: generation(row.generation)?,
            applied_revision: row.applied_revision,
        })
    }
}

impl EngineRow {
    fn operation(&self) -> Result<Option<Operation>, StoreError> {
        let Some(id) = self.operation_id else { return Ok(None) };
        let missing = || StoreError::Corrupt("operation");
        Ok(Some(Operation {
            id,
            kind: parsed(self.operation.clone(), "operation")?.ok_or_else(missing)?,
            started_at: self.operation_started_at.clone().ok_or_else(missing)?,
            deadline_at: self.operation_deadline_at.clone().ok_or_else(missing)?,
            remaining_ms: self.operation_remaining_ms.ok_or_else(missing)?,
            on_deadline: parsed(self.operation_on_deadline.clone(), "operation")?.ok_or_else(missing)?,
        }))
    }
}

/// Fails unless `epoch` is the engine's, and keeps it so until the transaction ends: raising it waits for us.
pub(crate) async fn fence(connection: &mut PgConnection, source: SourceId, epoch: Epoch) -> Result<(), StoreError> {
    let query = sqlx::query("select from aura.engines where source_id = $1 and epoch = $2 for no key update");
    let row = query.bind(source.0).bind(epoch.0).fetch_optional(connection).await?;
    row.map(|_| ()).ok_or(StoreError::Fenced)
}

/// Reads an engine and keeps it from changing until the transaction ends.
pub(crate) async fn locked(connection: &mut PgConnection, source: SourceId) -> Result<Engine, StoreError> {
    let query = sqlx::query("select from aura.engines where source_id = $1 for no key update");
    query.bind(source.0).fetch_optional(&mut *connection).await?.ok_or(StoreError::NotFound("engine"))?;
    read_engine(connection, source).await?.ok_or(StoreError::NotFound("engine"))
}

/// Reads one engine.
pub(crate) async fn read_engine(connection: &mut PgConnection, source: SourceId) -> Result<Option<Engine>, StoreError> {
    let query =
        sqlx::query_as::<_, EngineRow>(concat!("select ", columns!(), " from aura.engines where source_id = $1"));
    query.bind(source.0).fetch_optional(connection).await?.map(Engine::try_from).transpose()
}

impl Store {
    /// A new epoch for nobody: every worker's writes fail from now on.
    pub async fn raise_epoch(&self, source: SourceId) -> Result<Epoch, StoreError> {
        Ok(self.new_epoch(source, None).await?.0)
    }

    /// A new epoch for the worker that has just won the source's lease: every older worker's writes fail from now on. With
    /// it comes the engine as it was left: only from that can be told how the run before ended.
    /// The caller then reads the lease again and stops if it isn't its own (R-LEASE-2), and reads the engine again:
    /// somebody may have stopped it meanwhile.
    pub async fn take_engine(&self, source: SourceId, worker: &WorkerId) -> Result<(Epoch, Engine), StoreError> {
        self.new_epoch(source, Some(worker)).await
    }

    async fn new_epoch(&self, source: SourceId, holder: Option<&WorkerId>) -> Result<(Epoch, Engine), StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let before = locked(&mut tx, source).await?;
            let query = sqlx::query_scalar(
                "update aura.engines set epoch = epoch + 1, holder = $2, live = null, live_at = null
                 where source_id = $1 returning epoch",
            );
            let query = query.bind(source.0).bind(holder.map(|worker| &worker.0));
            let epoch = query.fetch_one(&mut *tx).await?;
            tx.commit().await?;
            Ok((Epoch(epoch), before))
        })
        .await
    }

    /// One engine.
    pub async fn engine(&self, source: SourceId) -> Result<Option<Engine>, StoreError> {
        bounded(async {
            let mut connection = self.pool.acquire().await?;
            read_engine(&mut connection, source).await
        })
        .await
    }

    /// All engines, by source.
    pub async fn engines(&self) -> Result<Vec<Engine>, StoreError> {
        let query =
            sqlx::query_as::<_, EngineRow>(concat!("select ", columns!(), " from aura.engines order by source_id"));
        let rows = bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?;
        rows.into_iter().map(Engine::try_from).collect()
    }

    /// Engines that somebody may have to end from outside: with an open operation, `zombie`, or to be stopped.
    pub async fn unsettled_engines(&self) -> Result<Vec<Engine>, StoreError> {
        let query = sqlx::query_as::<_, EngineRow>(concat!(
            "select ",
            columns!(),
            " from aura.engines where operation_id is not null or state = 'zombie' or desired = 'stopped'
             order by source_id"
        ));
        let rows = bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?;
        rows.into_iter().map(Engine::try_from).collect()
    }

    /// Observed state; `since` moves only when the state does, and is never before the open operation, whatever the server's
    /// clock does: what came of an operation is told from what was before it by that. Only while the run lasts: a write that was given up may still
    /// be on its way when the run has left.
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
                "update aura.engines set state = $3, reason = $4,
                    since = case when state = $3 then since else greatest(now(), operation_started_at) end
                 where source_id = $1 and epoch = $2 and holder is not null",
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

    /// What the present run says of itself, while it lasts.
    pub async fn set_live(&self, source: SourceId, epoch: Epoch, live: &EngineLive) -> Result<(), StoreError> {
        let query = sqlx::query(
            "update aura.engines set live = $3, live_at = clock_timestamp()
             where source_id = $1 and epoch = $2 and holder is not null",
        );
        let query = query.bind(source.0).bind(epoch.0).bind(Json(live));
        let done = bounded(async { Ok(query.execute(&self.pool).await?) }).await?;
        if done.rows_affected() == 0 { Err(StoreError::Fenced) } else { Ok(()) }
    }

    /// What the slot of an engine that nobody runs looks like; nothing is written once somebody does.
    pub async fn set_slot(&self, source: SourceId, epoch: Epoch, live: &EngineLive) -> Result<(), StoreError> {
        let query = sqlx::query(
            "update aura.engines set live = $3, live_at = clock_timestamp()
             where source_id = $1 and epoch = $2 and holder is null",
        );
        let query = query.bind(source.0).bind(epoch.0).bind(Json(live));
        bounded(async { Ok(query.execute(&self.pool).await.map(drop)?) }).await
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
}
