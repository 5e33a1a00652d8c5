//! When a standby status update is due, and what it says (R-FB-2, R-FB-7, R-LSN-3, R-LSN-4).

use std::time::{Duration, Instant};

use aura_domain::Lsn;

/// Longest silence, whatever the server's time-out is (10 s as Debezium).
const LONGEST: Duration = Duration::from_secs(10);
const SHORTEST: Duration = Duration::from_millis(100);

/// Why a status is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedbackKind {
    /// The server asked.
    Reply,
    /// The resolved LSN has moved.
    Advance,
    /// The server must hear of us.
    Keepalive,
}

impl FeedbackKind {
    /// Label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Reply => "reply",
            Self::Advance => "advance",
            Self::Keepalive => "keepalive",
        }
    }
}

/// The last word we sent to the server, and when the next one is due.
#[derive(Debug)]
pub struct Feedback {
    keepalive: Duration,
    advance: Duration,
    sent_at: Option<Instant>,
    advanced_at: Option<Instant>,
    flushed: Lsn,
    asked: bool,
}

impl Feedback {
    /// `confirmed` is the slot's confirmed LSN at connect: it is what we report before anything is resolved, and never 0,
    /// so that `flush_lsn` is never NULL. `wal_sender_timeout` of zero means none. `advance` is the shortest distance of
    /// two advances; zero = each is sent at once.
    pub fn new(confirmed: Lsn, wal_sender_timeout: Duration, advance: Duration) -> Self {
        let quarter = if wal_sender_timeout.is_zero() { LONGEST } else { wal_sender_timeout / 4 };
        let keepalive = quarter.clamp(SHORTEST, LONGEST);
        let flushed = confirmed.max(Lsn(1));
        Self { keepalive, advance, sent_at: None, advanced_at: None, flushed, asked: false }
    }

    /// The server asked for a reply.
    pub fn ask(&mut self) {
        self.asked = true;
    }

    /// When the next status is due given the present resolved LSN; now or in the past = at once.
    pub fn due(&self, resolved: Lsn, now: Instant) -> Instant {
        let Some(sent_at) = self.sent_at.filter(|_| !self.asked) else { return now };
        let silence = sent_at + self.keepalive;
        // Trailing edge: an advance inside the interval is sent when the interval ends, not with the next event.
        if resolved > self.flushed { self.may_advance_at(now).min(silence) } else { silence }
    }

    fn may_advance_at(&self, now: Instant) -> Instant {
        self.advanced_at.map_or(now, |at| at + self.advance)
    }

    /// Why a status should be sent now, if it should.
    pub fn is_due(&self, resolved: Lsn, now: Instant) -> Option<FeedbackKind> {
        let kind = match () {
            () if self.asked => FeedbackKind::Reply,
            () if resolved > self.flushed && now >= self.may_advance_at(now) => FeedbackKind::Advance,
            () => FeedbackKind::Keepalive,
        };
        (self.due(resolved, now) <= now).then_some(kind)
    }

    /// The flush position to send; remembers that it was sent. A status that is sent for another reason does not advance
    /// sooner than the interval allows.
    pub fn send(&mut self, resolved: Lsn, now: Instant) -> Lsn {
        if now >= self.may_advance_at(now) { self.finish(resolved, now) } else { self.sent(now) }
    }

    /// The last flush position of the session, whatever the interval says.
    pub fn finish(&mut self, resolved: Lsn, now: Instant) -> Lsn {
        if resolved > self.flushed {
            self.flushed = resolved;
            self.advanced_at = Some(now);
        }
        self.sent(now)
    }

    fn sent(&mut self, now: Instant) -> Lsn {
        self.sent_at = Some(now);
        self.asked = false;
        self.flushed
    }

    /// The last flush position sent, or the slot's at connect.
    pub fn flushed(&self) -> Lsn {
        self.flushed
    }

    /// When the last status was sent.
    pub fn sent_at(&self) -> Option<Instant> {
        self.sent_at
    }

    /// Longest silence.
    pub fn interval(&self) -> Duration {
        self.keepalive
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn feedback(start: Instant, advance: Duration) -> Feedback {
        let mut feedback = Feedback::new(Lsn(100), Duration::from_secs(60), advance);
        assert!(
            feedback.is_due(Lsn(100), start).is_some(),
            "the first goes out at once, so that flush_lsn is not NULL"
        );
        assert_eq!(feedback.send(Lsn(0), start), Lsn(100), "R-LSN-4: never below the confirmed LSN, never 0");
        feedback
    }

    #[test]
    fn r_fb_7_the_position_is_never_zero() {
        let start = Instant::now();
        assert_eq!(Feedback::new(Lsn::ZERO, Duration::ZERO, Duration::ZERO).send(Lsn::ZERO, start), Lsn(1));
    }

    #[test]
    fn r_lsn_3_an_advance_waits_for_the_interval_and_no_longer() {
        let start = Instant::now();
        let mut feedback = feedback(start, ms(100));
        let advanced = Lsn(200);
        assert_eq!(feedback.is_due(advanced, start + ms(1)), Some(FeedbackKind::Advance), "the last one is long ago");
        assert_eq!(feedback.send(advanced, start + ms(1)), advanced);
        let further = Lsn(300);
        assert_eq!(feedback.is_due(further, start + ms(100)), None);
        feedback.ask();
        assert_eq!(feedback.send(further, start + ms(50)), advanced, "an answer doesn't advance too soon");
        assert_eq!(feedback.is_due(further, start + ms(101)), Some(FeedbackKind::Advance));
        assert_eq!(feedback.send(further, start + ms(101)), further);
        assert_eq!(feedback.finish(Lsn(400), start + ms(102)), Lsn(400), "the final one is sent at once");
    }

    #[test]
    fn r_lsn_3_interval_zero_sends_every_completion() {
        let start = Instant::now();
        let mut feedback = feedback(start, Duration::ZERO);
        for lsn in 101..110 {
            assert_eq!(feedback.is_due(Lsn(lsn), start), Some(FeedbackKind::Advance));
            assert_eq!(feedback.send(Lsn(lsn), start), Lsn(lsn));
            assert_eq!(feedback.is_due(Lsn(lsn), start), None);
        }
    }

    #[test]
    fn r_fb_2_silence_ends_at_a_quarter_of_the_timeout() {
        let start = Instant::now();
        let mut feedback = feedback(start, ms(100));
        assert_eq!(feedback.is_due(Lsn(100), start + Duration::from_secs(9)), None);
        assert_eq!(feedback.is_due(Lsn(100), start + Duration::from_secs(10)), Some(FeedbackKind::Keepalive));
        feedback.ask();
        assert_eq!(feedback.is_due(Lsn(100), start), Some(FeedbackKind::Reply), "what was asked for is sent at once");
        assert_eq!(Feedback::new(Lsn(1), ms(200), Duration::ZERO).interval(), ms(100));
        assert_eq!(Feedback::new(Lsn(1), Duration::ZERO, Duration::ZERO).interval(), LONGEST);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        /// The scheduler against its definition: positions never go back (2), advances keep their distance and the last
        /// one is sent when it ends (12), no silence is longer than the interval (13).
        #[test]
        fn invariants_02_12_13_the_scheduler_equals_its_model(
            interval in prop_oneof![Just(0u64), 1u64..300],
            steps in prop::collection::vec((0u64..500, 0u64..200, prop::bool::weighted(0.1)), 1..60),
        ) {
            let start = Instant::now();
            let mut feedback = feedback(start, ms(interval));
            let mut now = start;
            let (mut sent, mut sent_at, mut resolved) = (Lsn(100), start, Lsn(0));
            let mut advanced_at: Option<Instant> = None;
            for (lsn, wait, asked) in steps {
                // Whoever drives it looks at the latest when the next status is due.
                let until = now + ms(wait);
                loop {
                    if feedback.is_due(resolved, now).is_some() {
                        let flushed = feedback.send(resolved, now);
                        prop_assert!(flushed == sent || flushed == resolved && resolved > sent);
                        prop_assert!(now - sent_at <= feedback.interval());
                        if flushed > sent {
                            prop_assert!(advanced_at.is_none_or(|at| now - at >= ms(interval)));
                            advanced_at = Some(now);
                        }
                        (sent, sent_at) = (flushed, now);
                    }
                    let due = feedback.due(resolved, now);
                    prop_assert!(due > now);
                    if due > until { break }
                    now = due;
                }
                now = until;
                // The model: behind by less than the interval, never more.
                prop_assert!(resolved <= sent || advanced_at.is_some_and(|at| now - at < ms(interval)));
                resolved = resolved.max(Lsn(lsn));
                if asked {
                    feedback.ask();
                }
            }
        }
    }
}
