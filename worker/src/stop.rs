//! How and by when an engine is to end, whoever asks for it.

use std::time::{Duration, Instant};

use aura_domain::{OnDeadline, OperationKind};
use aura_flow::Budget;
use aura_store::Operation;

/// Two reads of one deadline differ by less.
const JITTER: Duration = Duration::from_millis(50);

/// Of the process's time, for the kill ladder: its own rungs, and a first answer of the server.
const LADDER_RESERVE: Duration = Duration::from_secs(2);
/// What our own rungs take of that, until the server is asked.
const OWN_RUNGS: Duration = Duration::from_millis(250);
/// What the engine's and the process's last words take of it.
const LAST_WORDS: Duration = Duration::from_millis(550);
/// What the rungs on the server get in any case.
pub(crate) const SQL_AT_LEAST: Duration = Duration::from_millis(100);

/// An order to end. Several may hold at a time; the engine follows the tightest of each part (R-ENG-3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stop {
    /// The polite part is over by then; what follows is the kill ladder.
    pub(crate) by: Instant,
    /// What happens then.
    pub(crate) on_deadline: OnDeadline,
    /// How the time is shared out.
    pub(crate) plan: Plan,
}

/// From the loosest to the tightest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Plan {
    /// As at the end of the process: 3 s are kept for the final position and for leaving.
    Drain,
    /// An operation with a deadline: min(2 s, 20 %) are kept.
    Operation,
    /// The kill ladder at once.
    Force,
}

/// The end of the process: its time is shared out between the engines' drain and their ladders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exit {
    /// The engines have drained by then.
    pub(crate) drained_by: Instant,
    /// What comes after that: the ladder's rungs, and the last words.
    pub(crate) reserve: Duration,
}

impl Exit {
    /// Of a process that has to be gone by `at`.
    pub(crate) fn by(at: Instant, now: Instant) -> Self {
        let left = at.saturating_duration_since(now);
        let reserve = LADDER_RESERVE.min(left * 3 / 4);
        Self { drained_by: at - reserve, reserve }
    }

    /// The rungs on the server are over by then: the last words come after them.
    pub(crate) fn sql_by(self) -> Instant {
        let sql = self.reserve.saturating_sub(OWN_RUNGS + LAST_WORDS).max(SQL_AT_LEAST);
        self.drained_by + OWN_RUNGS + sql
    }
}

impl Stop {
    /// The process ends, or the source goes to another worker.
    pub(crate) fn drain(by: Instant) -> Self {
        Self { by, on_deadline: OnDeadline::Force, plan: Plan::Drain }
    }

    /// At once.
    pub(crate) fn force(now: Instant) -> Self {
        Self { by: now, on_deadline: OnDeadline::Force, plan: Plan::Force }
    }

    /// What an operator asked for, read at `read`.
    pub(crate) fn operation(operation: &Operation, read: Instant) -> Self {
        let left = Duration::from_millis(u64::try_from(operation.remaining_ms).unwrap_or(0));
        let plan = match operation.kind {
            OperationKind::Stop => Plan::Operation,
            OperationKind::ForceClose => Plan::Force,
        };
        Self { by: read + left, on_deadline: operation.on_deadline, plan }
    }

    /// Both hold.
    pub(crate) fn and(self, other: Self) -> Self {
        let on_deadline = if self.on_deadline == OnDeadline::Force { self.on_deadline } else { other.on_deadline };
        // A deadline that is far away doesn't change how the time of a nearer one is shared out.
        let nearer = if other.by < self.by { other } else { self };
        let plan = if self.plan.max(other.plan) == Plan::Force { Plan::Force } else { nearer.plan };
        Self { by: nearer.by, on_deadline, plan }
    }

    /// The same order, as exactly as two reads of one row tell.
    pub(crate) fn is_like(self, other: Self) -> bool {
        let apart = self.by.max(other.by) - self.by.min(other.by);
        (self.plan, self.on_deadline) == (other.plan, other.on_deadline) && apart <= JITTER
    }

    /// The time that is left, for the phases of the drain.
    pub(crate) fn budget(self, now: Instant) -> Budget {
        let left = self.by.saturating_duration_since(now);
        match self.plan {
            Plan::Drain => Budget::shutdown(left),
            Plan::Operation | Plan::Force => Budget::stop(left),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_eng_3_the_same_order_read_again_is_no_new_one() {
        let now = Instant::now();
        let order = Stop { by: now, on_deadline: OnDeadline::Force, plan: Plan::Operation };
        assert!(order.is_like(Stop { by: now + Duration::from_millis(9), ..order }));
        assert!(!order.is_like(Stop { by: now + Duration::from_millis(51), ..order }));
        assert!(!order.is_like(Stop { on_deadline: OnDeadline::Abandon, ..order }));
        assert!(!order.is_like(Stop { plan: Plan::Force, ..order }));
    }

    #[test]
    fn r_sd_4_the_ladder_fits_into_what_is_left_of_the_process() {
        let now = Instant::now();
        // Seconds that are left; the binaries keep the last 0.5 s, or a quarter of a single second, for themselves.
        for (left, kept) in [(1.0, 0.25), (2.0, 0.5), (3.0, 0.5), (4.0, 0.5), (25.0, 0.5)] {
            let exit = Exit::by(now + Duration::from_secs_f64(left), now);
            let over = (exit.sql_by() - now).as_secs_f64();
            assert!(over <= left - kept + 1e-6, "{left}: {over}");
        }
        let usual = Exit::by(now + Duration::from_secs(25), now);
        let parts = (usual.drained_by - now, usual.sql_by() - usual.drained_by);
        assert_eq!(parts, (Duration::from_secs(23), Duration::from_millis(1450)));
    }

    #[test]
    fn r_eng_3_a_second_order_only_tightens() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let patient = Stop { by: at(20), on_deadline: OnDeadline::Abandon, plan: Plan::Operation };
        let drain = Stop::drain(at(10));
        let both = Stop { by: at(10), on_deadline: OnDeadline::Force, plan: Plan::Drain };
        assert_eq!((patient.and(drain), drain.and(patient)), (both, both));
        assert_eq!(patient.and(patient), patient);
        assert_eq!(patient.and(Stop::force(now)), Stop::force(now));
        assert_eq!(Stop::force(at(3)).and(drain).plan, Plan::Force);
    }
}
