//! The memory quota of an engine (R-MEM): bytes are reserved when a row is decoded and released when its [`Reservation`]
//! is dropped, whichever way that happens. Only the intake reads the state; there is no feedback channel.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
};

use tokio::sync::Notify;

#[derive(Debug)]
struct Shared {
    used: AtomicUsize,
    paused: AtomicBool,
    resume_below: usize,
    resumed: Notify,
}

/// Owned by the intake.
#[derive(Debug)]
pub(crate) struct Quota {
    shared: Arc<Shared>,
    pause_at: usize,
}

/// Bytes held; given back on drop.
#[derive(Debug)]
pub(crate) struct Reservation {
    shared: Arc<Shared>,
    bytes: usize,
}

impl Quota {
    /// `quota` bytes; reading pauses at ≥ 0.80 of it and resumes below 0.50 (flow-control.md §0: both anchors' numbers).
    pub(crate) fn new(quota: usize) -> Self {
        let shared = Shared {
            used: AtomicUsize::new(0),
            paused: AtomicBool::new(false),
            resume_below: quota / 2,
            resumed: Notify::new(),
        };
        Self { shared: Arc::new(shared), pause_at: (quota * 4).div_ceil(5) }
    }

    /// Takes `bytes` for a row that was decoded. Never waits: the pause before the next read keeps
    /// `used ≤ quota + one row` (R-MEM-3).
    pub(crate) fn reserve(&self, bytes: usize) -> Reservation {
        self.shared.used.fetch_add(bytes, SeqCst);
        Reservation { shared: Arc::clone(&self.shared), bytes }
    }

    /// Evaluates the thresholds; true while the socket must not be read.
    pub(crate) fn paused(&self) -> bool {
        let used = self.used();
        let was = self.shared.paused.load(SeqCst);
        let now = if was { used >= self.shared.resume_below } else { used >= self.pause_at };
        if now != was {
            self.shared.paused.store(now, SeqCst);
        }
        // A release between the load of `used` and the store of the flag would see neither; look again.
        if now && !was && self.used() < self.shared.resume_below {
            self.shared.paused.store(false, SeqCst);
            return false;
        }
        now
    }

    /// Resolves when usage has fallen below the resume line while paused (R-MEM-5: register, look again, wait).
    pub(crate) async fn resumed(&self) {
        loop {
            let notified = self.shared.resumed.notified();
            if self.used() < self.shared.resume_below {
                return;
            }
            notified.await;
        }
    }

    /// The state as of the last [`Self::paused`].
    pub(crate) fn is_paused(&self) -> bool {
        self.shared.paused.load(SeqCst)
    }

    /// Bytes held now.
    pub(crate) fn used(&self) -> usize {
        self.shared.used.load(SeqCst)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let before = self.shared.used.fetch_sub(self.bytes, SeqCst);
        let line = self.shared.resume_below;
        if before >= line && before - self.bytes < line && self.shared.paused.load(SeqCst) {
            self.shared.resumed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        /// Invariants 5 and 7: usage is the sum of what is held; pause at ≥ 0.80, resume at < 0.50, nothing in between.
        #[test]
        fn r_mem_4_hysteresis(steps in prop::collection::vec((any::<bool>(), 1usize..400), 1..80)) {
            let quota = Quota::new(1000);
            let mut held = Vec::new();
            let mut paused = false;
            for (take, bytes) in steps {
                if take && !paused {
                    held.push(quota.reserve(bytes));
                } else if !held.is_empty() {
                    held.swap_remove(bytes % held.len());
                }
                let used: usize = held.iter().map(|r: &Reservation| r.bytes).sum();
                prop_assert_eq!(quota.used(), used);
                let now = quota.paused();
                if now != paused {
                    let expected = if now { used >= 800 } else { used < 500 };
                    prop_assert!(expected);
                } else {
                    let expected = if now { used >= 500 } else { used < 800 };
                    prop_assert!(expected);
                }
                paused = now;
            }
            drop(held);
            prop_assert_eq!(quota.used(), 0);
        }
    }

    #[tokio::test]
    async fn r_mem_5_a_paused_intake_is_woken() {
        let quota = Quota::new(1000);
        let held = quota.reserve(900);
        assert!(quota.paused());
        let waiter = quota.resumed();
        tokio::pin!(waiter);
        assert!(futures_util::poll!(&mut waiter).is_pending());
        drop(held);
        waiter.await;
        assert!(!quota.paused());
    }
}
