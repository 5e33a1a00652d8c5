use std::time::{Duration, Instant};

use crate::sync::{Arc, AtomicU64, Ordering};

/// When the intake last went round (R-FB-4). The task stamps, a thread outside the runtime looks; neither waits.
#[derive(Debug, Clone)]
pub struct Heartbeat {
    base: Instant,
    /// Milliseconds since `base`.
    last: Arc<AtomicU64>,
}

impl Heartbeat {
    /// Beats for the first time now.
    pub fn new(now: Instant) -> Self {
        Self { base: now, last: Arc::new(AtomicU64::new(0)) }
    }

    /// The task is alive.
    pub fn beat(&self, now: Instant) {
        self.last.store(self.millis(now), Ordering::Relaxed);
    }

    /// Time since the last beat.
    pub fn age(&self, now: Instant) -> Duration {
        Duration::from_millis(self.millis(now).saturating_sub(self.last.load(Ordering::Relaxed)))
    }

    fn millis(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.base).as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_fb_4_the_age_is_that_of_the_last_beat() {
        let start = Instant::now();
        let heartbeat = Heartbeat::new(start);
        let watcher = heartbeat.clone();
        assert_eq!(watcher.age(start + Duration::from_secs(31)).as_secs(), 31);
        heartbeat.beat(start + Duration::from_secs(30));
        assert_eq!(watcher.age(start + Duration::from_secs(31)).as_secs(), 1);
    }
}
