//! Reports of runs whose worker couldn't write one (R-ENG-3).

use aura_domain::{DrainReport, EngineReport, LsnReport, OnDeadline, Outcome};

use crate::Engine;

impl Engine {
    /// How its last run ended, as its worker or whoever ended it from outside wrote it.
    pub fn report(&self) -> EngineReport {
        self.last_report.clone().unwrap_or_else(|| self.no_report())
    }

    /// The report of the run that somebody else than its worker ends now, as far as is known: positions and phases as the
    /// worker told them last, rows not at all. Where nobody holds the engine the run is over, and what is known of it stays.
    pub fn report_from_outside(&self, on_deadline: OnDeadline) -> EngineReport {
        if self.holder.is_none() {
            return self.report();
        }
        let outcome = match on_deadline {
            OnDeadline::Force => Outcome::Forced,
            OnDeadline::Abandon => Outcome::Abandoned,
        };
        let live = self.live.clone().unwrap_or_default();
        let known = match (&self.live, self.live_age_ms) {
            (Some(_), Some(age)) => format!("positions are what it said {age} ms before, rows are unknown"),
            _ => "positions and rows are unknown".to_owned(),
        };
        EngineReport {
            outcome,
            reason: Some(format!("the worker did not end it: {known}")),
            drain: DrainReport { phases: live.phases, overrun: true, ..DrainReport::default() },
            lsn: LsnReport {
                received: live.received_lsn,
                resolved: live.resolved_lsn,
                sent: live.confirmed_lsn,
                ..LsnReport::default()
            },
            ..self.no_report()
        }
    }

    fn no_report(&self) -> EngineReport {
        EngineReport {
            source: self.source,
            epoch: self.epoch,
            outcome: Outcome::Drained,
            reason: Some("no worker has reported a run".to_owned()),
            drain: DrainReport::default(),
            lsn: LsnReport::default(),
            rungs: Vec::new(),
            slot_released: false,
            lease_released: false,
        }
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
    fn r_eng_3_a_report_from_outside_says_what_the_worker_said_and_that_rows_are_unknown() {
        let report = running().report_from_outside(OnDeadline::Force);
        assert_eq!((report.outcome, report.epoch), (Outcome::Forced, Epoch(5)));
        assert_eq!((report.lsn.received, report.lsn.resolved, report.lsn.sent), (Lsn(9), Lsn(8), Lsn(7)));
        let reason = report.reason.unwrap_or_default();
        assert!(reason.contains("1200 ms before") && reason.contains("rows are unknown"), "{reason}");
        assert_eq!(running().report_from_outside(OnDeadline::Abandon).outcome, Outcome::Abandoned);
        let silent = Engine { live: None, live_age_ms: None, ..running() };
        assert!(
            silent
                .report_from_outside(OnDeadline::Force)
                .reason
                .is_some_and(|reason| reason.contains("positions and rows"))
        );
    }

    #[test]
    fn what_a_worker_reported_itself_stays() {
        let own = EngineReport { outcome: Outcome::Drained, ..running().report_from_outside(OnDeadline::Force) };
        let left = Engine { holder: None, last_report: Some(own.clone()), ..running() };
        assert_eq!(left.report_from_outside(OnDeadline::Force), own);
    }
}
