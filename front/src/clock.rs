//! Wall-clock seconds, for the `exp` of tokens and nothing else.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A token that has just expired is accepted so long (R-SEC-2).
const LEEWAY: i64 = 10;

/// Seconds since 1970.
pub(crate) fn now() -> i64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(elapsed.as_secs()).unwrap_or(i64::MAX)
}

/// When a channel with a token that expires at `expires` is closed: then, or, if it was accepted within the leeway, at
/// the leeway's end.
pub(crate) fn deadline(expires: i64) -> i64 {
    if expires > now() { expires } else { expires.saturating_add(LEEWAY) }
}

/// Time left until `at`; never zero, so that a timer on it can't spin, and at most an hour, so that it can't overflow.
pub(crate) fn until(at: i64) -> Duration {
    let at =
        u64::try_from(at).map_or(UNIX_EPOCH, |secs| UNIX_EPOCH + Duration::from_secs(secs.min(u64::from(u32::MAX))));
    let left = at.duration_since(SystemTime::now()).unwrap_or_default();
    left.clamp(Duration::from_millis(10), Duration::from_secs(3600))
}
