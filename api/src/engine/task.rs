//! What an engine needs of the api now, as a function of what is known of it.

use std::time::Duration;

use aura_domain::{Desired, EngineState, OnDeadline, OperationKind};
use aura_store::{Engine, Operation};

/// A worker that lives has so long after the deadline of a force-close to cut its engine and to say so.
const GRACE_MS: i64 = 500;
/// And of a stop: with a deadline of 0 it still takes half a second for a polite end first.
const STOP_GRACE_MS: i64 = 1_000;
/// And so long once it has said that it closes the engine: its rungs may take 2 s, and it alone knows what became of the
/// rows. Longer would leave too little for ours, should it have died over it.
const CLOSING_GRACE_MS: i64 = 2_500;
/// A stop's answer comes within its deadline + 5 s: what we do for it is over by then.
const ANSWER_MS: i64 = 4_300;
/// Our rungs take so long at most.
pub(super) const LADDER: Duration = Duration::from_millis(3_800);
/// With less they are not worth a try: nobody waits for them any more.
const LADDER_AT_LEAST: Duration = Duration::from_millis(1_000);
/// Whoever has taken an end over has written what came of it by then, or is gone.
const TAKEN_FOR_MS: i64 = 7_000;
/// By then it usually has; somebody who asks doesn't wait for longer. Two at a time would each tell half of it.
pub(super) const USUALLY_MS: i64 = 1_000;

/// After so long a live worker's verdict has been looked at from outside, too.
const ASSISTED_MS: i64 = 2_000;

/// What the api does about an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    /// Fence whoever runs it, and end it.
    TakeOver(OnDeadline),
    /// That was done, and the slot was not seen free: try once more.
    Again(OnDeadline),
    /// Its worker lives and could not free the slot either: try it with what else we have, and leave the row to the worker.
    Assist,
    /// Nobody is to hold the slot under our name: look, and end it.
    Watch,
}

/// What is to be done now, if anything. With `urgent` somebody asks for it: what another instance may be at is done, too.
pub(super) fn task(engine: &Engine, led: bool, urgent: bool) -> Option<Task> {
    let Some(operation) = &engine.operation else {
        let unwanted = engine.state == EngineState::Zombie || engine.desired == Desired::Stopped;
        return (!led && unwanted).then_some(Task::Watch);
    };
    if due_in(engine, operation, led) > Duration::ZERO {
        return None;
    }
    let policy = operation.on_deadline;
    if led && is_ended(engine, operation) && engine.reason.is_some() {
        return (policy == OnDeadline::Force).then_some(Task::Assist);
    }
    if !is_taken(engine, operation) {
        return Some(Task::TakeOver(policy));
    }
    // Without a reason yet it is under way.
    let patience = if urgent { USUALLY_MS } else { TAKEN_FOR_MS };
    let under_way = engine.reason.is_none() && engine.state_age_ms < patience;
    (!under_way).then_some(Task::Again(policy))
}

/// Until the api steps in: at once where nobody runs the engine. A worker that lives acts by itself, and has a moment to do
/// so: it alone knows what became of its rows, and who is fenced can't say so any more.
pub(super) fn due_in(engine: &Engine, operation: &Operation, led: bool) -> Duration {
    if !led {
        return Duration::ZERO;
    }
    let grace = match operation.kind {
        _ if engine.reason.is_none() && is_ended(engine, operation) => CLOSING_GRACE_MS,
        OperationKind::Stop => STOP_GRACE_MS,
        OperationKind::ForceClose => GRACE_MS,
    };
    Duration::from_millis(u64::try_from(operation.remaining_ms + grace).unwrap_or(0))
}

/// What the rungs may take when an end is taken over, so that whoever waits for it is still told what came of them.
pub(super) fn ladder(engine: &Engine) -> Duration {
    let left = engine.operation.as_ref().map(|operation| operation.remaining_ms + ANSWER_MS);
    let left = left.map(|left| Duration::from_millis(u64::try_from(left).unwrap_or(0)));
    left.filter(|left| *left >= LADDER_AT_LEAST).unwrap_or(LADDER).min(LADDER)
}

/// The run that the operation is about is over: its worker has left, or was fenced.
fn is_taken(engine: &Engine, operation: &Operation) -> bool {
    engine.holder.is_none() && is_ended(engine, operation)
}

/// The operation has come to its last state but `stopped`.
fn is_ended(engine: &Engine, operation: &Operation) -> bool {
    let ending = matches!(engine.state, EngineState::Closing | EngineState::ForceClosing | EngineState::Zombie);
    // Both are the database's clock in one format.
    ending && engine.since >= operation.started_at
}

/// The operation's outcome is known for now: the slot isn't free, and why is the engine's `reason`.
pub(super) fn is_settled(engine: &Engine) -> bool {
    let Some(operation) = &engine.operation else { return false };
    if engine.reason.is_none() || !is_ended(engine, operation) {
        return false;
    }
    let tried = match operation.on_deadline {
        OnDeadline::Force => -ASSISTED_MS,
        OnDeadline::Abandon => 0,
    };
    engine.holder.is_none() || operation.remaining_ms <= tried
}

#[cfg(test)]
mod tests {
    use aura_domain::{Epoch, Generation, SourceId, WorkerId};

    use super::*;

    const BEFORE: &str = "2026-01-01T00:00:00.000000Z";
    const STARTED: &str = "2026-01-01T00:00:01.000000Z";
    const AFTER: &str = "2026-01-01T00:00:02.000000Z";

    fn engine(state: EngineState, since: &str, holder: bool, operation: Option<Operation>) -> Engine {
        Engine {
            source: SourceId(uuid::Uuid::nil()),
            desired: Desired::Stopped,
            state,
            reason: None,
            since: since.to_owned(),
            state_age_ms: 10,
            epoch: Epoch(1),
            generation: Generation(1),
            applied_revision: 1,
            holder: holder.then(|| WorkerId("w".to_owned())),
            operation,
            recreate_slot: false,
            nudges: 0,
            last_report: None,
            live: None,
            live_age_ms: None,
        }
    }

    fn operation(kind: OperationKind, remaining_ms: i64, on_deadline: OnDeadline) -> Option<Operation> {
        let (started_at, deadline_at) = (STARTED.to_owned(), AFTER.to_owned());
        Some(Operation { id: 1, kind, started_at, deadline_at, remaining_ms, on_deadline })
    }

    #[test]
    fn r_eng_3_a_worker_that_lives_has_until_its_deadline() {
        let stop = |remaining| operation(OperationKind::Stop, remaining, OnDeadline::Abandon);
        let draining = |remaining| engine(EngineState::Draining, AFTER, true, stop(remaining));
        assert_eq!(task(&draining(1), true, false), None);
        assert_eq!(task(&draining(-STOP_GRACE_MS + 1), true, false), None, "it may be about to report");
        assert_eq!(task(&draining(-STOP_GRACE_MS), true, false), Some(Task::TakeOver(OnDeadline::Abandon)));
        assert_eq!(task(&draining(60_000), false, false), Some(Task::TakeOver(OnDeadline::Abandon)), "nobody drains");
        let force = |remaining| operation(OperationKind::ForceClose, remaining, OnDeadline::Force);
        let forced = |remaining| engine(EngineState::Running, BEFORE, true, force(remaining));
        assert_eq!(task(&forced(0), true, true), None, "it ends it at once, and has something to report");
        assert_eq!(task(&forced(-GRACE_MS), true, false), Some(Task::TakeOver(OnDeadline::Force)));
        assert_eq!(task(&forced(0), false, false), Some(Task::TakeOver(OnDeadline::Force)), "nobody does");
    }

    #[test]
    fn r_eng_3_a_worker_that_closes_its_engine_has_time_to_say_what_became_of_the_rows() {
        let kinds = [OperationKind::Stop, OperationKind::ForceClose];
        let states = [EngineState::Closing, EngineState::ForceClosing];
        for (kind, state) in kinds.into_iter().flat_map(|kind| states.map(|state| (kind, state))) {
            let forcing = |remaining, since| engine(state, since, true, operation(kind, remaining, OnDeadline::Force));
            let taken = Some(Task::TakeOver(OnDeadline::Force));
            assert_eq!(task(&forcing(-CLOSING_GRACE_MS + 1, AFTER), true, false), None);
            assert_eq!(task(&forcing(-CLOSING_GRACE_MS, AFTER), true, false), taken);
            assert_eq!(task(&forcing(-STOP_GRACE_MS, BEFORE), true, false), taken, "not for this operation");
            assert_eq!(task(&forcing(0, AFTER), false, false), taken, "it has died over it");
            let blind = Engine { reason: Some("source_unreachable".to_owned()), ..forcing(-STOP_GRACE_MS, AFTER) };
            assert_eq!(task(&blind, true, false), Some(Task::Assist), "it can't, and perhaps we can");
        }
    }

    #[test]
    fn r_eng_3_the_rungs_end_before_the_answer_is_due() {
        let stop = |remaining| {
            engine(EngineState::Running, BEFORE, true, operation(OperationKind::Stop, remaining, OnDeadline::Force))
        };
        assert_eq!(ladder(&stop(10_000)), LADDER, "a dead worker's engine is ended at once");
        for grace in [GRACE_MS, STOP_GRACE_MS, CLOSING_GRACE_MS] {
            let limit = ladder(&stop(-grace)).as_millis();
            assert!((1_000..=3_800).contains(&limit), "{grace}: {limit}");
            assert!(u128::from(grace.unsigned_abs()) + limit <= 4_300, "{grace}: {limit}");
        }
        assert_eq!(ladder(&stop(-60_000)), LADDER, "nobody waits any more");
    }

    #[test]
    fn r_eng_3_what_another_instance_has_taken_is_left_to_it_for_a_while() {
        let stop = || operation(OperationKind::Stop, -1_000, OnDeadline::Force);
        let taken = engine(EngineState::ForceClosing, AFTER, false, stop());
        assert_eq!(task(&taken, false, false), None);
        assert!(!is_settled(&taken));
        assert_eq!(task(&taken, false, true), None, "somebody asks, and it is about to be done");
        let slow = Engine { state_age_ms: USUALLY_MS, ..taken.clone() };
        assert_eq!(task(&slow, false, false), None);
        assert_eq!(task(&slow, false, true), Some(Task::Again(OnDeadline::Force)), "somebody asks");
        let forgotten = Engine { state_age_ms: TAKEN_FOR_MS, ..taken.clone() };
        assert_eq!(task(&forgotten, false, false), Some(Task::Again(OnDeadline::Force)));
        let zombie = Engine { state: EngineState::Zombie, reason: Some("pid 1".to_owned()), ..taken };
        assert_eq!(task(&zombie, false, false), Some(Task::Again(OnDeadline::Force)));
        assert!(is_settled(&zombie));
        let older = engine(EngineState::Zombie, BEFORE, false, stop());
        assert_eq!(task(&older, false, false), Some(Task::TakeOver(OnDeadline::Force)), "from before the stop");
    }

    #[test]
    fn r_eng_7_a_worker_that_lives_and_looks_after_its_zombie_is_helped_and_not_fenced() {
        let stop = |remaining, policy| operation(OperationKind::Stop, remaining, policy);
        let zombie = |remaining, policy| Engine {
            reason: Some("pid 1".to_owned()),
            ..engine(EngineState::Zombie, AFTER, true, stop(remaining, policy))
        };
        let force = zombie(-STOP_GRACE_MS, OnDeadline::Force);
        assert_eq!(task(&force, true, false), Some(Task::Assist));
        assert!(!is_settled(&force) && is_settled(&zombie(-ASSISTED_MS, OnDeadline::Force)));
        assert_eq!(task(&force, false, false), Some(Task::TakeOver(OnDeadline::Force)), "it has died meanwhile");
        let abandoned = zombie(-STOP_GRACE_MS, OnDeadline::Abandon);
        assert_eq!(task(&abandoned, true, false), None);
        assert!(is_settled(&abandoned));
    }

    #[test]
    fn r_eng_7_engines_that_are_to_be_stopped_and_zombies_are_watched_unless_somebody_leads() {
        let stopped = engine(EngineState::Stopped, BEFORE, false, None);
        assert_eq!(task(&stopped, false, false), Some(Task::Watch));
        let running = Engine { desired: Desired::Running, state: EngineState::Running, ..stopped };
        assert_eq!(task(&running, false, false), None, "a worker will take it");
        let zombie = Engine { state: EngineState::Zombie, ..running };
        assert_eq!(task(&zombie, false, false), Some(Task::Watch));
        assert_eq!(task(&zombie, true, false), None, "its worker's care");
    }
}
