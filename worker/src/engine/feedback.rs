//! When a standby status update is due, and what it says (R-FB-2, R-FB-7, R-LSN-3, R-LSN-4). No clock of its own: the
//! caller passes the monotonic time.

use std::time::{Duration, Instant};

use aura_domain::Lsn;

/// The last word we sent to the server, and when the next one is due.
#[derive(Debug)]
pub(crate) struct Feedback {
    keepalive: Duration,
    advance: Duration,
    sent_at: Option<Instant>,
    flushed: Lsn,
    asked: bool,
}

impl Feedback {
    /// `start` is the slot's confirmed LSN at connect, never 0: it is what we report before anything is resolved, so
    /// `flush_lsn` is never NULL. `wal_sender_timeout` of zero means none.
    pub(crate) fn new(start: Lsn, wal_sender_timeout: Duration, advance: Duration) -> Self {
        let quarter = if wal_sender_timeout.is_zero() { Duration::from_secs(10) } else { wal_sender_timeout / 4 };
        let keepalive = quarter.clamp(Duration::from_millis(100), Duration::from_secs(10));
        Self { keepalive, advance, sent_at: None, flushed: start, asked: false }
    }

    /// The server asked for a reply.
    pub(crate) fn ask(&mut self) {
        self.asked = true;
    }

    /// When the next status is due given the present resolved LSN; now or in the past = at once.
    pub(crate) fn due(&self, resolved: Lsn, now: Instant) -> Instant {
        let Some(sent_at) = self.sent_at else { return now };
        if self.asked {
            return now;
        }
        // Trailing edge: an advance inside the interval is sent when the interval ends, not with the next event.
        let wait = if resolved > self.flushed { self.advance.min(self.keepalive) } else { self.keepalive };
        sent_at + wait
    }

    /// Whether the present status should be sent now.
    pub(crate) fn is_due(&self, resolved: Lsn, now: Instant) -> bool {
        self.due(resolved, now) <= now
    }

    /// The flush position to send; remembers that it was sent.
    pub(crate) fn send(&mut self, resolved: Lsn, now: Instant) -> Lsn {
        self.flushed = self.flushed.max(resolved);
        self.sent_at = Some(now);
        self.asked = false;
        self.flushed
    }

    /// The last flush position sent.
    pub(crate) fn flushed(&self) -> Lsn {
        self.flushed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn feedback(start: Instant) -> Feedback {
        let mut feedback = Feedback::new(Lsn(100), Duration::from_secs(60), Duration::from_millis(100));
        assert!(feedback.is_due(Lsn(100), start), "the first status goes out at once, so that flush_lsn is not NULL");
        assert_eq!(feedback.send(Lsn(0), start), Lsn(100), "R-LSN-4: never below the confirmed LSN, never 0");
        feedback
    }

    #[test]
    fn r_lsn_3_an_advance_waits_for_the_interval_and_no_longer() {
        let start = Instant::now();
        let mut feedback = feedback(start);
        let advanced = Lsn(200);
        assert!(!feedback.is_due(advanced, start + Duration::from_millis(99)));
        assert!(feedback.is_due(advanced, start + Duration::from_millis(100)));
        assert_eq!(feedback.send(advanced, start + Duration::from_millis(100)), advanced);
    }

    #[test]
    fn r_fb_2_silence_ends_at_a_quarter_of_the_timeout() {
        let start = Instant::now();
        let mut feedback = feedback(start);
        assert!(!feedback.is_due(Lsn(100), start + Duration::from_secs(9)));
        assert!(feedback.is_due(Lsn(100), start + Duration::from_secs(10)));
        feedback.ask();
        assert!(feedback.is_due(Lsn(100), start), "a reply that was asked for is sent at once");
        assert_eq!(Feedback::new(Lsn(1), Duration::from_millis(200), Duration::ZERO).keepalive.as_millis(), 100);
        assert_eq!(Feedback::new(Lsn(1), Duration::ZERO, Duration::ZERO).keepalive.as_secs(), 10);
    }

    proptest! {
        /// Invariants 2 and 12.
        #[test]
        fn positions_never_go_back_and_advances_keep_their_distance(lsns in prop::collection::vec((0u64..500, 1u64..200), 1..50)) {
            let start = Instant::now();
            let mut feedback = feedback(start);
            let mut now = start;
            let (mut sent, mut sent_at) = (Lsn(100), start);
            for (lsn, ms) in lsns {
                now += Duration::from_millis(ms);
                if feedback.is_due(Lsn(lsn), now) {
                    let flushed = feedback.send(Lsn(lsn), now);
                    prop_assert!(flushed >= sent);
                    prop_assert!(flushed == sent || now - sent_at >= Duration::from_millis(100));
                    (sent, sent_at) = (flushed, now);
                }
            }
        }
    }
}
