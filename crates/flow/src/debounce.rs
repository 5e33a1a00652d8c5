use std::time::{Duration, Instant};

/// Shortest distance of two restarts for the filter.
const SHORTEST: Duration = Duration::from_secs(1);
/// Longest, however dear a restart was.
const LONGEST: Duration = Duration::from_secs(60);

/// When a change of the filter may restart the stream (R-HOLE-3): the first at once, later ones no sooner than ten times
/// what the last restart cost, so that toggles never take more than a tenth of the time. What comes meanwhile goes along.
#[derive(Debug, Default)]
pub struct Debounce {
    not_before: Option<Instant>,
}

impl Debounce {
    /// Whether a restart is allowed now.
    pub fn allows(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|at| now >= at)
    }

    /// When the next restart is allowed; `None` = at once.
    pub fn allowed_at(&self) -> Option<Instant> {
        self.not_before
    }

    /// A restart has shown its first frame at or above E, `cost` after it began; `refiltered` if it was for a change.
    pub fn restarted(&mut self, cost: Duration, refiltered: bool, now: Instant) {
        let shortest = if refiltered { SHORTEST } else { Duration::ZERO };
        self.not_before = Some(now + (cost * 10).clamp(shortest, LONGEST));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_hole_3_the_first_change_goes_at_once_and_later_ones_wait_for_ten_times_the_cost() {
        let start = Instant::now();
        let mut debounce = Debounce::default();
        assert!(debounce.allows(start));
        for (cost_ms, refiltered, wait_ms) in
            [(1, false, 10), (1, true, 1000), (500, true, 5000), (20_000, true, 60_000)]
        {
            debounce.restarted(Duration::from_millis(cost_ms), refiltered, start);
            assert!(!debounce.allows(start + Duration::from_millis(wait_ms - 1)), "{cost_ms}");
            assert!(debounce.allows(start + Duration::from_millis(wait_ms)), "{cost_ms}");
        }
    }
}
