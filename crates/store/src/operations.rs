use std::time::Duration;

use aura_domain::{Desired, EngineReport, EngineState, Epoch, OnDeadline, OperationKind, SourceId, Verb, VerbEffect};
use serde_json::{Value, json};
use sqlx::{PgConnection, types::Json};

use crate::{Caller, Engine, Operation, Store, StoreError, audit, bounded, engines::locked, registry::notify_status};

/// What became of a request to stop.
#[derive(Debug, Clone, PartialEq)]
pub enum StopRequest {
    /// It is stopped already, and stays so.
    Already(Box<Engine>),
    /// This operation is under way.
    Accepted {
        /// It.
        operation: Operation,
        /// It was under way before; a shorter deadline or a force has tightened it.
        joined: bool,
    },
}

/// What became of a request to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartRequest {
    /// Desired is `running` now.
    Accepted,
    /// Not in this state, or not while a stop is under way.
    Refused {
        /// The state.
        state: EngineState,
        /// When the operation's deadline is over; `None` = no operation is open.
        retry_after_ms: Option<i64>,
    },
}

/// How a run ends, for the engine's row.
#[derive(Debug, Clone)]
pub struct Ending<'a> {
    /// `Stopped` only after the slot was seen inactive; that also ends the open operation.
    pub state: EngineState,
    /// Code or text.
    pub reason: Option<&'a str>,
    /// The run's report.
    pub report: Option<&'a EngineReport>,
}

impl Store {
    /// Desired state `stopped`, and an operation that drains until `deadline`. A second request joins the first: an earlier
    /// deadline and `force` tighten it, a later one changes nothing (R-ENG-3).
    pub async fn request_stop(
        &self,
        source: SourceId,
        deadline: Duration,
        on_deadline: OnDeadline,
        caller: Caller<'_>,
    ) -> Result<StopRequest, StoreError> {
        self.request_end(source, OperationKind::Stop, (deadline, on_deadline), caller).await
    }

    /// Desired state `stopped`, and an operation whose deadline is now. Never `Already`: a slot may be held although the
    /// row says that it isn't.
    pub async fn request_force_close(&self, source: SourceId, caller: Caller<'_>) -> Result<StopRequest, StoreError> {
        self.request_end(source, OperationKind::ForceClose, (Duration::ZERO, OnDeadline::Force), caller).await
    }

    async fn request_end(
        &self,
        source: SourceId,
        kind: OperationKind,
        (deadline, on_deadline): (Duration, OnDeadline),
        caller: Caller<'_>,
    ) -> Result<StopRequest, StoreError> {
        let action = match kind {
            OperationKind::Stop => "engine.stop",
            OperationKind::ForceClose => "engine.force_close",
        };
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let before = locked(&mut tx, source).await?;
            let force = kind == OperationKind::ForceClose;
            let idle = before.operation.is_none() && before.holder.is_none();
            if idle && !force && before.state == EngineState::Stopped {
                set_desired(&mut tx, source, Desired::Stopped).await?;
                let after = locked(&mut tx, source).await?;
                note(&mut tx, caller, action, &before, &after).await?;
                tx.commit().await?;
                return Ok(StopRequest::Already(Box::new(after)));
            }
            let query = sqlx::query(
                "update aura.engines set desired = 'stopped',
                    operation_id = coalesce(operation_id, nextval('aura.engine_operations')),
                    operation = case when operation is null or $2 = 'force-close' then $2 else operation end,
                    operation_started_at = coalesce(operation_started_at, clock_timestamp()),
                    operation_deadline_at = least(operation_deadline_at, clock_timestamp() + $3 * interval '1 ms'),
                    operation_on_deadline = case when operation_on_deadline is null or $4 = 'force' then $4
                        else operation_on_deadline end
                 where source_id = $1",
            );
            let query = query.bind(source.0).bind(kind.as_str()).bind(millis(deadline)).bind(on_deadline.as_str());
            query.execute(&mut *tx).await?;
            let after = locked(&mut tx, source).await?;
            // A crowd that joins wakes nobody.
            if terms(&before) != terms(&after) {
                notify(&mut tx, source).await?;
            }
            note(&mut tx, caller, action, &before, &after).await?;
            tx.commit().await?;
            let operation = after.operation.ok_or(StoreError::Corrupt("operation"))?;
            Ok(StopRequest::Accepted { operation, joined: before.operation.is_some() })
        })
        .await
    }

    /// Desired state `running`, unless something is under way or holds the slot.
    pub async fn request_start(&self, source: SourceId, caller: Caller<'_>) -> Result<StartRequest, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let before = locked(&mut tx, source).await?;
            let state = before.state;
            if before.operation.is_some() || state.effect(Verb::Start) == VerbEffect::Refused {
                let retry_after_ms = before.operation.map(|operation| operation.remaining_ms.max(0));
                return Ok(StartRequest::Refused { state, retry_after_ms });
            }
            let query = sqlx::query("update aura.engines set nudges = nudges + 1 where source_id = $1");
            query.bind(source.0).execute(&mut *tx).await?;
            set_desired(&mut tx, source, Desired::Running).await?;
            let after = locked(&mut tx, source).await?;
            note(&mut tx, caller, "engine.start", &before, &after).await?;
            tx.commit().await?;
            Ok(StartRequest::Accepted)
        })
        .await
    }

    /// Asks the engine to make a new slot in place of its lost or missing one. The worker clears the request.
    pub async fn request_new_slot(&self, source: SourceId, caller: Caller<'_>) -> Result<(), StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let before = locked(&mut tx, source).await?;
            let query =
                sqlx::query("update aura.engines set recreate_slot = true, nudges = nudges + 1 where source_id = $1");
            query.bind(source.0).execute(&mut *tx).await?;
            let after = locked(&mut tx, source).await?;
            note(&mut tx, caller, "engine.recreate_slot", &before, &after).await?;
            notify(&mut tx, source).await?;
            tx.commit().await?;
            Ok(())
        })
        .await
    }

    /// The new slot was made, or isn't needed.
    pub async fn new_slot_made(&self, source: SourceId, epoch: Epoch) -> Result<(), StoreError> {
        let query = sqlx::query("update aura.engines set recreate_slot = false where source_id = $1 and epoch = $2");
        let query = query.bind(source.0).bind(epoch.0);
        let done = bounded(async { Ok(query.execute(&self.pool).await?) }).await?;
        if done.rows_affected() == 0 { Err(StoreError::Fenced) } else { Ok(()) }
    }

    /// The end of a run: the engine is nobody's now, and the others of the pool look at it. Open operations stay open
    /// unless the state is `Stopped`.
    pub async fn leave_engine(&self, source: SourceId, epoch: Epoch, ending: Ending<'_>) -> Result<(), StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let query = sqlx::query(
                "update aura.engines set holder = null, live = null, live_at = null, state = $3, reason = $4,
                    since = case when state = $3 then since else greatest(now(), operation_started_at) end,
                    last_report = coalesce($5, last_report),
                    operation_id = case when $3 = 'stopped' then null else operation_id end,
                    operation = case when $3 = 'stopped' then null else operation end,
                    operation_started_at = case when $3 = 'stopped' then null else operation_started_at end,
                    operation_deadline_at = case when $3 = 'stopped' then null else operation_deadline_at end,
                    operation_on_deadline = case when $3 = 'stopped' then null else operation_on_deadline end
                 where source_id = $1 and epoch = $2",
            );
            let query = query.bind(source.0).bind(epoch.0).bind(ending.state.as_str()).bind(ending.reason);
            let query = query.bind(ending.report.map(Json));
            if query.execute(&mut *tx).await?.rows_affected() == 0 {
                return Err(StoreError::Fenced);
            }
            notify(&mut tx, source).await?;
            tx.commit().await?;
            Ok(())
        })
        .await
    }

    /// The api takes the end of an engine over from whoever runs it: a new epoch for nobody, and `state`. Only one of
    /// several instances succeeds: `None` = somebody else was quicker, or the engine isn't what it was when it was read.
    /// `report` is what is known of the run that ends here.
    pub async fn take_end(
        &self,
        engine: &Engine,
        state: EngineState,
        report: Option<&EngineReport>,
    ) -> Result<Option<Epoch>, StoreError> {
        let operation = engine.operation.as_ref().map(|operation| operation.id);
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let query = sqlx::query_scalar(
                "update aura.engines set epoch = epoch + 1, holder = null, state = $4, reason = null,
                    since = greatest(now(), operation_started_at), last_report = coalesce($5, last_report)
                 where source_id = $1 and epoch = $2 and operation_id is not distinct from $3 returning epoch",
            );
            let query = query.bind(engine.source.0).bind(engine.epoch.0).bind(operation);
            let epoch: Option<i64> = query.bind(state.as_str()).bind(report.map(Json)).fetch_optional(&mut *tx).await?;
            notify(&mut tx, engine.source).await?;
            tx.commit().await?;
            Ok(epoch.map(Epoch))
        })
        .await
    }
}

async fn set_desired(connection: &mut PgConnection, source: SourceId, desired: Desired) -> Result<(), StoreError> {
    let query = sqlx::query("update aura.engines set desired = $2 where source_id = $1");
    query.bind(source.0).bind(desired.as_str()).execute(&mut *connection).await?;
    notify(connection, source).await
}

/// Appends to the audit what a verb changed. One that changed nothing, since it joined or was so already, leaves no line.
async fn note(
    connection: &mut PgConnection,
    caller: Caller<'_>,
    action: &'static str,
    before: &Engine,
    after: &Engine,
) -> Result<(), StoreError> {
    let (from, to) = (terms(before), terms(after));
    // A failed engine that is to run tries again when it is told to start.
    let retried = action == "engine.start" && before.state == EngineState::Failed;
    if from == to && !retried {
        return Ok(());
    }
    audit::append(connection, caller.entry(action, before.source, Some(from), Some(to))).await
}

/// What verbs change of an engine, and its state for those who read the audit.
fn terms(engine: &Engine) -> Value {
    let operation = engine.operation.as_ref().map(|operation| {
        json!({
            "id": operation.id, "kind": operation.kind.as_str(), "deadline_at": operation.deadline_at,
            "on_deadline": operation.on_deadline.as_str()
        })
    });
    json!({
        "desired": engine.desired.as_str(), "state": engine.state.as_str(), "epoch": engine.epoch.0,
        "recreate_slot": engine.recreate_slot, "operation": operation
    })
}

/// Wakes the workers, and whoever waits for the engine's progress.
pub(crate) async fn notify(connection: &mut PgConnection, source: SourceId) -> Result<(), StoreError> {
    let query = sqlx::query("select pg_notify('aura_engines', $1)");
    query.bind(source.to_string()).execute(&mut *connection).await?;
    notify_status(connection, source).await
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
