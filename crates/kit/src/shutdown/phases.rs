use std::{pin::pin, time::Duration};

use aura_domain::Timed;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::ShutdownHandle;

/// How long a phase may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cap {
    /// So long, and never beyond the deadline.
    AtMost(Duration),
    /// Until so long before the deadline, for the phases after it; at least three quarters of what is left.
    Leaving(Duration),
}

impl Cap {
    fn end(self, began: Instant, deadline: Instant, now: Instant) -> Instant {
        match self {
            Self::AtMost(cap) => deadline.min(began + cap),
            Self::Leaving(rest) => deadline - rest.min(deadline.saturating_duration_since(now) / 4),
        }
    }
}

/// The ordered phases of one drain: each is bounded, timed and logged.
#[derive(Debug)]
pub struct Phases {
    shutdown: ShutdownHandle,
}

impl Phases {
    pub(super) fn new(shutdown: ShutdownHandle) -> Self {
        Self { shutdown }
    }

    /// Runs one phase. `None` = it was cut off, at its cap or since the deadline moved.
    pub async fn run<T>(&self, name: &'static str, cap: Cap, work: impl Future<Output = T>) -> Option<T> {
        let began = Instant::now();
        let work = pin!(work);
        let outcome = tokio::select! {
            // What is done is done, also with no time left.
            biased;
            outcome = work => Some(outcome),
            () = passed(self.shutdown.deadlines(), |deadline, now| cap.end(began, deadline, now)) => None,
        };
        self.record(name, began.elapsed(), outcome.is_none());
        outcome
    }

    fn record(&self, phase: &'static str, took: Duration, overrun: bool) {
        let milliseconds = took.as_millis();
        metrics::histogram!("shutdown_phase_seconds", "phase" => phase).record(took.as_secs_f64());
        if overrun {
            tracing::warn!(phase, milliseconds, "cut off, it took too long");
        } else {
            tracing::info!(phase, milliseconds, "done");
        }
        self.shutdown.phase_done(Timed::new(phase, took));
    }
}

/// Returns when what `end` makes of (deadline, now) has passed, however the deadline moves. Cancel-safe.
pub(super) async fn passed(mut deadlines: watch::Receiver<Option<Instant>>, end: impl Fn(Instant, Instant) -> Instant) {
    loop {
        let deadline = *deadlines.borrow_and_update();
        let end = async {
            match deadline {
                Some(at) => sleep_until(end(at, Instant::now())).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = end => return,
            // The sender lives in the handle that the caller has.
            _ = deadlines.changed() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    const DRAIN: Duration = Duration::from_secs(25);

    fn triggered() -> ShutdownHandle {
        let shutdown = ShutdownHandle::new(DRAIN);
        shutdown.trigger();
        shutdown
    }

    fn milliseconds(shutdown: &ShutdownHandle) -> Vec<u64> {
        shutdown.phases_done().iter().map(|phase| phase.ms).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_phase_ends_with_its_work_at_its_cap_or_early_enough_for_the_next() {
        let shutdown = triggered();
        let phases = shutdown.phases();
        let second = Duration::from_secs(1);
        assert_eq!(phases.run("quick", Cap::AtMost(second), ready(7)).await, Some(7));
        assert_eq!(phases.run("capped", Cap::AtMost(second), pending::<()>()).await, None);
        assert_eq!(phases.run("rest", Cap::Leaving(2 * second), pending::<()>()).await, None);
        assert_eq!(phases.run("last", Cap::AtMost(DRAIN), pending::<()>()).await, None);
        assert_eq!(phases.run("after", Cap::AtMost(DRAIN), ready(())).await, Some(()), "what needs no time gets it");
        assert_eq!(milliseconds(&shutdown), [0, 1000, 22_000, 2000, 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn r_sd_4_hurrying_cuts_the_running_phase_and_leaves_time_for_the_next() {
        let shutdown = triggered();
        let phases = shutdown.phases();
        let hurry = async {
            tokio::time::sleep(Duration::from_secs(3)).await;
            shutdown.hurry();
        };
        tokio::join!(phases.run("rest", Cap::Leaving(Duration::from_secs(2)), pending::<()>()), hurry);
        phases.run("last", Cap::AtMost(DRAIN), pending::<()>()).await;
        assert_eq!(milliseconds(&shutdown), [3750, 250]);
    }
}
