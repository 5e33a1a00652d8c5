use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use aura_domain::ProjectId;
use aura_kit::{Code, Problem};
use tokio::time::Instant;

use crate::error::Result;

const MINUTE: Duration = Duration::from_secs(60);
/// Projects that are remembered before old windows are swept.
const SWEEP_ABOVE: usize = 1024;

/// At most so much of something per project in a minute, such as changing toggles (R-HOLE-3): each costs a change of the
/// running filter. Per process, in windows of a minute.
pub(crate) struct ToggleRate {
    per_minute: u32,
    windows: Mutex<HashMap<ProjectId, Window>>,
}

struct Window {
    start: Instant,
    used: u32,
}

impl ToggleRate {
    pub(crate) fn new(per_minute: u32) -> Self {
        Self { per_minute, windows: Mutex::default() }
    }

    /// Counts one, or answers 429 with the seconds until the next window.
    pub(crate) fn count(&self, project: ProjectId) -> Result<()> {
        self.count_at(project, Instant::now())
    }

    fn count_at(&self, project: ProjectId, now: Instant) -> Result<()> {
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        if windows.len() > SWEEP_ABOVE {
            windows.retain(|_, window| now - window.start < MINUTE);
        }
        let window = windows.entry(project).or_insert(Window { start: now, used: 0 });
        if now - window.start >= MINUTE {
            *window = Window { start: now, used: 0 };
        }
        if window.used >= self.per_minute {
            let left = MINUTE.saturating_sub(now - window.start).as_secs() + 1;
            let detail = format!("A project may switch tables {} times a minute.", self.per_minute);
            return Err(Problem::new(Code::RateLimited, detail).retry_after(left).into());
        }
        window.used += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_hole_3_a_project_has_its_own_count_which_starts_again_after_a_minute() {
        let rate = ToggleRate::new(2);
        let (a, b) = (ProjectId(uuid::Uuid::from_u128(1)), ProjectId(uuid::Uuid::from_u128(2)));
        let now = Instant::now();
        let ok = |project, seconds| rate.count_at(project, now + Duration::from_secs(seconds)).is_ok();
        assert_eq!([ok(a, 0), ok(a, 1), ok(a, 59)], [true, true, false]);
        assert!(ok(b, 59));
        assert!(ok(a, 60));
    }
}
