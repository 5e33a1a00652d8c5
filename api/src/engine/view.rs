use aura_domain::{
    Condition, ConditionNote, Desired, EngineLive, EngineReport, EngineState, Epoch, FlowLive, Generation, Lag, Lsn,
    OnDeadline, OperationKind, SourceId, Timed, WorkerId,
};
use aura_store::{Engine, Operation, Source, WorkerRow};
use serde::Serialize;
use utoipa::ToSchema;

use super::attend::is_unreachable;

/// What an engine says of itself counts for so long.
const LIVE_FOR_MS: i64 = 10_000;
/// And what the api saw of a slot whose engine nobody runs, which it looks at every 10 s.
const SEEN_FOR_MS: i64 = 30_000;

/// The reason of an engine whose slot can't be read any more, or isn't there.
const LOST: &str = "slot_lost";

/// What reads a source's changes. `slot`, `filter`, `flow` and `lag` are what the worker that runs it said in the last
/// 10 s; what it didn't say is null. Of an engine that is stopped, `slot` and `lag` are what the api saw in the last 30 s.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Engine)]
pub(crate) struct EngineView {
    /// Id of its source.
    source: SourceId,
    /// Name of its source.
    #[schema(example = "shared")]
    name: String,
    /// What the operator wants.
    desired: Desired,
    /// What was observed last.
    state: EngineState,
    /// Code or text that goes with the state.
    reason: Option<String>,
    /// When it entered the state, RFC 3339.
    #[schema(format = DateTime)]
    since: String,
    /// Rises with each worker that takes over.
    epoch: Epoch,
    /// Rises when positions lose their meaning.
    generation: Generation,
    /// What holds besides the state.
    conditions: Vec<ConditionNote>,
    /// Who runs it; null when nobody does.
    lease: Option<LeaseView>,
    /// The slot.
    slot: SlotView,
    /// The running filter.
    filter: FilterView,
    /// Flow control.
    flow: Option<FlowLive>,
    /// How far it is behind.
    lag: Option<Lag>,
    /// How the last run ended; null before the first end.
    last_report: Option<EngineReport>,
    /// The stop or force-close that isn't over.
    #[serde(skip_serializing_if = "Option::is_none")]
    operation: Option<OperationView>,
}

/// The worker that runs an engine.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EngineLease)]
struct LeaseView {
    /// The worker.
    holder: WorkerId,
    /// It was heard in the last 15 s.
    alive: bool,
    /// Its host or pod.
    host: Option<String>,
    /// Milliseconds since it was heard.
    silent_ms: Option<i64>,
}

/// The replication slot.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EngineSlot)]
struct SlotView {
    /// Its name.
    #[schema(example = "aura_cdc_slot")]
    name: String,
    /// `reserved`, `extended`, `unreserved` or `lost`.
    wal_status: Option<String>,
    /// Bytes until the slot may be lost; null without a limit.
    safe_wal_bytes: Option<i64>,
    /// Server process that holds it.
    active_pid: Option<i32>,
    /// Bytes of log that it keeps.
    retained_bytes: Option<u64>,
    /// What was confirmed last, and is not sent again.
    confirmed_lsn: Option<Lsn>,
}

/// The filter.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EngineFilter)]
struct FilterView {
    /// Registered tables that it covers.
    tables: Option<usize>,
    /// Registered tables that it doesn't.
    holes: Option<usize>,
    /// Registry revision that it holds.
    applied_revision: i64,
}

/// A stop or force-close under way.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EngineOperation)]
struct OperationView {
    /// Shared by all requests that joined it.
    id: i64,
    /// What was asked.
    kind: OperationKind,
    /// RFC 3339.
    #[schema(format = DateTime)]
    started_at: String,
    /// RFC 3339.
    #[schema(format = DateTime)]
    deadline_at: String,
    /// Until the deadline; 0 = it has passed.
    remaining_ms: i64,
    /// What happens at the deadline.
    on_deadline: OnDeadline,
    /// What is over, in order.
    phases: Vec<Timed>,
}

/// What is known of an engine. `confirmed` is the stored position, of the engine's generation.
pub(crate) fn view(
    source: &Source,
    engine: Engine,
    confirmed: Option<(Generation, Lsn)>,
    workers: &[WorkerRow],
) -> EngineView {
    let live = fresh(&engine);
    let conditions = conditions(&engine, live.as_ref(), engine.is_led(workers));
    let seen = live.clone().or_else(|| looked_at(&engine));
    let lag = lag_now(&engine);
    let Engine { desired, state, reason, since, epoch, generation, applied_revision, last_report, .. } = engine;
    // A position of an older generation means nothing any more.
    let stored = confirmed.filter(|(of, _)| *of == generation).map(|(_, lsn)| lsn);
    EngineView {
        source: source.id,
        name: source.name.clone(),
        desired,
        state,
        reason,
        since,
        epoch,
        generation,
        conditions,
        lease: engine.holder.map(|holder| lease(holder, workers)),
        slot: slot(source, stored, seen.as_ref()),
        filter: FilterView {
            tables: live.as_ref().map(|live| live.tables),
            holes: live.as_ref().map(|live| live.holes),
            applied_revision,
        },
        lag,
        last_report,
        operation: engine.operation.map(|operation| shown(operation, live.as_ref())),
        flow: live.map(|live| live.flow),
    }
}

/// How far an engine is behind, as [`view`] shows it.
pub(crate) fn lag_now(engine: &Engine) -> Option<Lag> {
    let seen = fresh(engine).or_else(|| looked_at(engine));
    lag(engine, seen.as_ref())
}

/// What the engine said of itself, unless that was long ago or by a run that is over.
fn fresh(engine: &Engine) -> Option<EngineLive> {
    let fresh = engine.holder.is_some() && engine.live_age_ms.is_some_and(|age| age <= LIVE_FOR_MS);
    engine.live.clone().filter(|_| fresh)
}

/// What the api saw of the slot, while nobody runs the engine. Of a run that has just ended its last word is as good.
fn looked_at(engine: &Engine) -> Option<EngineLive> {
    let seen = engine.holder.is_none() && engine.live_age_ms.is_some_and(|age| age <= SEEN_FOR_MS);
    engine.live.clone().filter(|_| seen)
}

/// The run's own, and what the api found where there is no run.
fn conditions(engine: &Engine, live: Option<&EngineLive>, led: bool) -> Vec<ConditionNote> {
    let mut conditions = live.map(|live| live.conditions.clone()).unwrap_or_default();
    let unreachable = Condition::SourceUnreachable;
    let found = is_unreachable(engine);
    if found && conditions.iter().all(|note| note.condition != unreachable) {
        conditions.push(ConditionNote { condition: unreachable, since: engine.since.clone(), detail: None });
    }
    if engine.desired == Desired::Running && !led {
        let detail = engine.holder.as_ref().map(|holder| format!("{holder} is not heard any more"));
        conditions.push(ConditionNote { condition: Condition::NoWorker, since: engine.since.clone(), detail });
    }
    conditions
}

/// "Lost" when lost, never a number (R-ENG-8).
fn lag(engine: &Engine, live: Option<&EngineLive>) -> Option<Lag> {
    let by_slot = live.is_some_and(|live| live.lag.lost || live.slot.wal_status.as_deref() == Some("lost"));
    if by_slot || engine.reason_code() == Some(LOST) {
        return Some(Lag { bytes: None, seconds: None, lost: true });
    }
    live.map(|live| live.lag)
}

fn lease(holder: WorkerId, workers: &[WorkerRow]) -> LeaseView {
    let worker = workers.iter().find(|worker| worker.id == holder);
    LeaseView {
        holder,
        alive: worker.is_some_and(WorkerRow::is_alive),
        host: worker.map(|worker| worker.host.clone()),
        silent_ms: worker.map(|worker| worker.silent_ms),
    }
}

fn slot(source: &Source, stored: Option<Lsn>, live: Option<&EngineLive>) -> SlotView {
    let said = live.map(|live| live.slot.clone()).unwrap_or_default();
    SlotView {
        name: source.slot_name.clone(),
        wal_status: said.wal_status,
        safe_wal_bytes: said.safe_wal_bytes,
        active_pid: said.active_pid,
        retained_bytes: said.retained_bytes,
        // What is stored follows what was sent.
        confirmed_lsn: stored.max(live.map(|live| live.confirmed_lsn).filter(|lsn| *lsn > Lsn::ZERO)),
    }
}

fn shown(operation: Operation, live: Option<&EngineLive>) -> OperationView {
    let Operation { id, kind, started_at, deadline_at, remaining_ms, on_deadline } = operation;
    let phases = live.map(|live| live.phases.clone()).unwrap_or_default();
    OperationView { id, kind, started_at, deadline_at, remaining_ms: remaining_ms.max(0), on_deadline, phases }
}

#[cfg(test)]
mod tests {
    use aura_domain::SlotLive;
    use aura_store::{Plugin, SlotRecreate};

    use super::*;

    fn source() -> Source {
        Source {
            id: SourceId(uuid::Uuid::nil()),
            name: "shared".to_owned(),
            replication_url: "postgres://u@h/d".to_owned().into(),
            admin_url: None,
            slot_name: "aura_cdc_slot".to_owned(),
            plugin: Plugin::Auto,
            slot_recreate: SlotRecreate::Auto,
            version: 1,
        }
    }

    fn running(live_age_ms: i64) -> Engine {
        let live = EngineLive {
            conditions: vec![ConditionNote {
                condition: Condition::Paused,
                since: "2026-01-01T00:00:00Z".to_owned(),
                detail: None,
            }],
            slot: SlotLive { wal_status: Some("reserved".to_owned()), ..SlotLive::default() },
            lag: Lag { bytes: Some(7), seconds: Some(0.5), lost: false },
            tables: 3,
            ..EngineLive::default()
        };
        Engine {
            source: SourceId(uuid::Uuid::nil()),
            desired: Desired::Running,
            state: EngineState::Running,
            reason: None,
            since: "2026-01-01T00:00:00Z".to_owned(),
            state_age_ms: 1,
            epoch: Epoch(1),
            generation: Generation(1),
            applied_revision: 1,
            holder: Some(WorkerId("w".to_owned())),
            operation: None,
            recreate_slot: false,
            nudges: 0,
            last_report: None,
            live: Some(live),
            live_age_ms: Some(live_age_ms),
        }
    }

    fn show(engine: Engine) -> EngineView {
        let worker = WorkerRow {
            id: WorkerId("w".to_owned()),
            host: "h".to_owned(),
            version: "1".to_owned(),
            max_engines: 8,
            engines: 1,
            draining: false,
            started_at: "2026-01-01T00:00:00Z".to_owned(),
            silent_ms: 1,
        };
        view(&source(), engine, None, &[worker])
    }

    #[test]
    fn r_eng_1_an_engine_that_no_worker_runs_says_so_whatever_its_state() {
        let words = |view: EngineView| view.conditions.iter().map(|note| note.condition).collect::<Vec<_>>();
        assert_eq!(words(view(&source(), running(60_000), None, &[])), [Condition::NoWorker]);
        assert_eq!(words(show(Engine { holder: None, ..running(1) })), [Condition::NoWorker]);
        assert_eq!(words(show(Engine { holder: None, desired: Desired::Stopped, ..running(1) })), []);
    }

    #[test]
    fn what_a_worker_said_counts_for_ten_seconds() {
        let fresh = show(running(9_000));
        assert_eq!((fresh.conditions.len(), fresh.filter.tables), (1, Some(3)));
        assert_eq!(fresh.lag.and_then(|lag| lag.bytes), Some(7));
        let stale = show(running(11_000));
        assert_eq!((stale.conditions.len(), stale.filter.tables, stale.lag), (0, None, None));
        assert!(stale.flow.is_none() && stale.lease.is_some_and(|lease| lease.alive), "its engine says nothing");
        let fenced = show(Engine { holder: None, ..running(1) });
        assert!(
            fenced.conditions.iter().all(|note| note.condition == Condition::NoWorker) && fenced.lease.is_none(),
            "the run that said it is over"
        );
        assert_eq!(fenced.lag.and_then(|lag| lag.bytes), Some(7), "and its slot is still there");
        let unseen = show(Engine { holder: None, ..running(31_000) });
        assert!(unseen.lag.is_none() && unseen.slot.wal_status.is_none());
    }

    #[test]
    fn r_eng_8_the_lag_of_a_lost_slot_is_lost_and_never_a_number() {
        let lost = Some(Lag { bytes: None, seconds: None, lost: true });
        let mut engine = running(1);
        let live = engine.live.as_mut().expect("it says something");
        live.slot.wal_status = Some("lost".to_owned());
        live.lag = Lag { bytes: Some(0), seconds: Some(0.0), lost: false };
        assert_eq!(show(engine).lag, lost);
        for reason in ["slot_lost", "slot_lost: the slot is lost, and slot_recreate is manual"] {
            let failed = Engine { state: EngineState::Failed, reason: Some(reason.to_owned()), ..running(60_000) };
            assert_eq!(show(failed).lag, lost);
        }
    }

    #[test]
    fn r_eng_3_an_unreachable_source_is_a_condition_when_nobody_runs_the_engine() {
        let reason = Some("source_unreachable".to_owned());
        let state = EngineState::ForceClosing;
        let closing = Engine { state, desired: Desired::Stopped, reason, holder: None, ..running(1) };
        let conditions: Vec<_> = show(closing).conditions.iter().map(|note| note.condition).collect();
        assert_eq!(conditions, [Condition::SourceUnreachable]);
    }
}
