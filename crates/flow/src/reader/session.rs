use std::time::{Duration, Instant};

use aura_domain::Lsn;

use crate::{Feedback, FeedbackKind};

/// Until the stream has reached E it is asked for its position, at first so often; with nothing to send, only its answer
/// tells.
const ASK: Duration = Duration::from_millis(20);
/// Later, so often at the latest: the way to E may be a large transaction.
const ASK_SLOWLY: Duration = Duration::from_millis(200);

/// How a session begins.
#[derive(Debug, Clone, Copy)]
pub struct Opening {
    /// Where it reads from.
    pub start: Lsn,
    /// The slot's confirmed LSN at connect.
    pub confirmed: Lsn,
    /// The server's WAL end at connect.
    pub wal_end: Lsn,
    /// From where on its filter holds: a publication that was just changed holds later than `start`.
    pub holds_from: Lsn,
    /// The server's; zero = none.
    pub wal_sender_timeout: Duration,
    /// Registered tables that nothing covers until E is reached.
    pub holes: usize,
}

/// A standby status update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusUpdate {
    /// Received.
    pub written: Lsn,
    /// What the slot's confirmed position becomes.
    pub flushed: Lsn,
    /// Ask for an answer.
    pub ask: bool,
    /// Why it is sent.
    pub kind: FeedbackKind,
    /// Since the last one of the session.
    pub gap: Option<Duration>,
}

/// One session.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) feedback: Feedback,
    pub(super) started: Instant,
    /// From here on the filter covers what is registered.
    pub(super) e: Lsn,
    /// End of what this session has read.
    pub(super) reached: Lsn,
    /// The end of the server's log, as far as it was told.
    pub(super) server_end: Lsn,
    pub(super) covered: bool,
    ask: Duration,
}

impl Session {
    pub(super) fn new(opening: Opening, advance: Duration, now: Instant) -> Self {
        Self {
            feedback: Feedback::new(opening.confirmed, opening.wal_sender_timeout, advance),
            started: now,
            e: opening.start.max(opening.holds_from),
            reached: Lsn::ZERO,
            server_end: opening.wal_end.max(opening.confirmed),
            covered: false,
            ask: ASK,
        }
    }

    /// E, once: when the first frame at or above it has arrived.
    pub(super) fn cover(&mut self) -> Option<Lsn> {
        if self.covered || self.reached < self.e {
            return None;
        }
        self.covered = true;
        Some(self.e)
    }

    pub(super) fn due(&self, resolved: Lsn, now: Instant) -> Instant {
        let due = self.feedback.due(resolved, now);
        if self.covered { due } else { self.feedback.sent_at().map_or(due, |sent| due.min(sent + self.ask)) }
    }

    pub(super) fn due_kind(&self, resolved: Lsn, now: Instant) -> Option<FeedbackKind> {
        let asks = !self.covered && now >= self.due(resolved, now);
        self.feedback.is_due(resolved, now).or_else(|| asks.then_some(FeedbackKind::Keepalive))
    }

    pub(super) fn status(&mut self, kind: FeedbackKind, resolved: Lsn, received: Lsn, now: Instant) -> StatusUpdate {
        let gap = self.feedback.sent_at().map(|sent| now.saturating_duration_since(sent));
        if gap.is_some() && !self.covered {
            self.ask = (self.ask * 2).min(ASK_SLOWLY);
        }
        let flushed = self.feedback.send(resolved, now);
        StatusUpdate { written: flushed.max(received), flushed, ask: !self.covered, kind, gap }
    }

    /// The last one of the session: whatever the interval says.
    pub(super) fn last_status(&mut self, resolved: Lsn, received: Lsn, now: Instant) -> StatusUpdate {
        self.feedback.finish(resolved, now);
        self.status(FeedbackKind::Advance, resolved, received, now)
    }
}
