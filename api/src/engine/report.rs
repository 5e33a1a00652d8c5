//! Reports of runs whose worker couldn't write one (R-ENG-3).

use aura_domain::{DrainReport, EngineReport, LsnReport, OnDeadline, Outcome};
use aura_store::Engine;

/// The report of an engine of whose runs there is none.
pub(super) fn none(engine: &Engine) -> EngineReport {
    let reason = Some("no worker has reported a run".to_owned());
    let (drain, lsn) = (DrainReport::default(), LsnReport::default());
    let (outcome, rungs) = (Outcome::Drained, Vec::new());
    let (slot_released, lease_released) = (false, false);
    EngineReport {
        source: engine.source,
        epoch: engine.epoch,
        outcome,
        reason,
        drain,
        lsn,
        rungs,
        slot_released,
        lease_released,
    }
}

/// The report of the run that the api ends now, as far as is known: positions and phases as its worker told them last,
/// rows not at all. Without a worker the run is over, and what is known of it stays.
pub(super) fn of_run(engine: &Engine, on_deadline: OnDeadline) -> EngineReport {
    if engine.holder.is_none() {
        return engine.last_report.clone().unwrap_or_else(|| none(engine));
    }
    let outcome = match on_deadline {
        OnDeadline::Force => Outcome::Forced,
        OnDeadline::Abandon => Outcome::Abandoned,
    };
    let live = engine.live.clone().unwrap_or_default();
    let known = match (&engine.live, engine.live_age_ms) {
        (Some(_), Some(age)) => format!("positions are what it said {age} ms before, rows are unknown"),
        _ => "positions and rows are unknown".to_owned(),
    };
    EngineReport {
        outcome,
        reason: Some(format!("the worker did not end it in time: {known}")),
        drain: DrainReport { phases: live.phases, overrun: true, ..DrainReport::default() },
        lsn: LsnReport {
            received: live.received_lsn,
            resolved: live.resolved_lsn,
            sent: live.confirmed_lsn,
            ..LsnReport::default()
        },
        ..none(engine)
    }
}

#[cfg(test)]
mod tests {
    use aura_domain::{Desired, EngineLive, EngineState, Epoch, Generation, Lsn, SourceId, WorkerId};

    use super::*;

    fn running() -> Engine {
        let live =
            EngineLive { received_lsn: Lsn(9), resolved_lsn: Lsn(8), confirmed_lsn: Lsn(7), ..EngineLive::default() };
        Engine {
            source: SourceId(uuid::Uuid::nil()),
            desired: Desired::Stopped,
            state: EngineState::Draining,
            reason: None,
            since: String::new(),
            state_age_ms: 10,
            epoch: Epoch(5),
            generation: Generation(1),
            applied_revision: 1,
            holder: Some(WorkerId("w".to_owned())),
            operation: None,
            recreate_slot: false,
            nudges: 0,
            last_report: None,
            live: Some(live),
            live_age_ms: Some(1200),
        }
    }

    #[test]
    fn r_eng_3_the_apis_report_says_what_the_worker_said_and_that_rows_are_unknown() {
        let report = of_run(&running(), OnDeadline::Force);
        assert_eq!((report.outcome, report.epoch), (Outcome::Forced, Epoch(5)));
        assert_eq!((report.lsn.received, report.lsn.resolved, report.lsn.sent), (Lsn(9), Lsn(8), Lsn(7)));
        let reason = report.reason.unwrap_or_default();
        assert!(reason.contains("1200 ms before") && reason.contains("rows are unknown"), "{reason}");
        assert_eq!(of_run(&running(), OnDeadline::Abandon).outcome, Outcome::Abandoned);
        let silent = Engine { live: None, live_age_ms: None, ..running() };
        assert!(of_run(&silent, OnDeadline::Force).reason.is_some_and(|reason| reason.contains("positions and rows")));
    }

    #[test]
    fn what_a_worker_reported_itself_stays() {
        let own = EngineReport { outcome: Outcome::Drained, ..of_run(&running(), OnDeadline::Force) };
        let left = Engine { holder: None, last_report: Some(own.clone()), ..running() };
        assert_eq!(of_run(&left, OnDeadline::Force), own);
    }
}
