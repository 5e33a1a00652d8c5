//! What the one task that owns the socket decides (R-FB-1): read or not, send a status or not and which, change the filter
//! here or not, go on or give up. It lasts as long as the lease; sessions come and go in it.
//!
//! Whoever drives it reports what it read and what happened, and asks [`Reader::next`] what to do until that is
//! [`Step::Wait`].

mod session;

use std::time::{Duration, Instant};

use aura_domain::Lsn;

use self::session::Session;
pub use self::session::{Opening, StatusUpdate};
use crate::{Culprit, Debounce, Outage, Owner, Quota, ResolvedTracker, Stall, StallWatch, Turn, row::Admission};

/// While waiting for memory it is looked at this often besides (R-MEM-5).
const TICK: Duration = Duration::from_millis(100);
/// Holes are named in the log this often (R-HOLE-6).
const HOLES_EVERY: Duration = Duration::from_secs(30);

/// What an engine goes by.
#[derive(Debug, Clone, Copy)]
pub struct ReaderLimits {
    /// The engine's share of the memory quota in bytes.
    pub quota: usize,
    /// Shortest distance of two advances of the confirmed position; zero = each at once.
    pub advance_interval: Duration,
    /// R-SH-5.
    pub stall_limit: Duration,
    /// R-SH-5.
    pub outage_limit: Duration,
}

/// A change of what is registered that the running filter doesn't know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// The list of names changes, so the stream must start again.
    pub restart: bool,
    /// Registered tables that the running filter doesn't cover (R-HOLE-1).
    pub holes: usize,
}

/// What to do.
#[derive(Debug)]
pub enum Step {
    /// Send this status.
    Status(StatusUpdate),
    /// The stream has reached E (R-HOLE-2): the filter covers what is registered, from this position on.
    Covered(Lsn),
    /// Take the change over, here between two transactions; the stream goes on.
    Apply,
    /// End the session here and begin one with the new filter.
    Refilter,
    /// Reading has stopped or goes on: say so, and have the shards seal meanwhile.
    Turn(Turn),
    /// There is room for the row that waited.
    Admit(Admission),
    /// Say which tables are holes.
    Holes,
    /// Close the socket and fail; send nothing any more (R-FB-3).
    Fail(Stall),
    /// Nothing until something happens: a frame if `read`, memory below its line if not ([`Quota::woken`]), an
    /// acknowledgement, a change, or the time.
    Wait {
        /// The socket may be read.
        read: bool,
        /// When to ask again at the latest.
        until: Instant,
    },
}

/// See the module.
#[derive(Debug)]
pub struct Reader {
    limits: ReaderLimits,
    quota: Quota,
    tracker: ResolvedTracker,
    stall: StallWatch,
    debounce: Debounce,
    session: Option<Session>,
    /// A row that was decoded and waits for memory (R-MEM-3): whose, its LSN, its bytes. Nothing behind it is read.
    parked: Option<(Owner, Lsn, usize)>,
    change: Option<Change>,
    /// The session that begins next, or has begun last, was for a change of the filter.
    refiltering: bool,
    /// Since when there are holes without a break.
    holes_since: Option<Instant>,
    holes_told: Option<Instant>,
    /// End of the last transaction that was read completely: E of R-HOLE-2.
    boundary: Lsn,
    received: Lsn,
    draining: bool,
    /// When the tick while waiting for memory is due.
    tick_at: Option<Instant>,
    withheld: u64,
    admitted: u64,
    /// Bytes that were held when it was last looked at.
    held: usize,
}

impl Reader {
    /// Before the first session.
    pub fn new(limits: ReaderLimits, now: Instant) -> Self {
        Self {
            limits,
            quota: Quota::new(limits.quota),
            tracker: ResolvedTracker::new(Lsn::ZERO, now),
            stall: StallWatch::new(limits.stall_limit, limits.outage_limit, now),
            debounce: Debounce::default(),
            session: None,
            parked: None,
            change: None,
            refiltering: false,
            holes_since: None,
            holes_told: None,
            boundary: Lsn::ZERO,
            received: Lsn::ZERO,
            draining: false,
            tick_at: None,
            withheld: 0,
            admitted: 0,
            held: 0,
        }
    }

    /// Where a session reads from: nothing that was confirmed or read before comes again (R-LSN-7, R-HOLE-2). `stored` is
    /// what we remember to have confirmed in this generation; the server may have gone back since. Never beyond the
    /// server's WAL end.
    pub fn start_position(&self, confirmed: Lsn, stored: Option<Lsn>, wal_end: Lsn) -> Lsn {
        confirmed.max(stored.unwrap_or(Lsn::ZERO)).max(self.boundary).min(wal_end.max(confirmed))
    }

    /// A session begins. What the last one had read of an unfinished transaction comes again.
    pub fn begin_session(&mut self, opening: Opening, now: Instant) {
        self.parked = None;
        self.change = None;
        self.tracker.resolve();
        self.tracker.restart(self.boundary, opening.start);
        self.boundary = self.boundary.max(opening.start);
        self.received = self.received.max(opening.start);
        // What was acknowledged between two sessions is progress; that one begins is none, or a sink that hangs would never
        // show where sessions are short.
        if self.quota.used() < self.held {
            self.stall.acked(now);
        }
        self.holes(opening.holes, now);
        self.session = Some(Session::new(opening, self.limits.advance_interval, now));
    }

    /// The session is over: nothing is confirmed before the next one begins.
    pub fn end_session(&mut self) {
        self.session = None;
    }

    /// A new generation: nothing that was read before has a meaning any more.
    pub fn forget(&mut self, now: Instant) {
        self.boundary = Lsn::ZERO;
        self.received = Lsn::ZERO;
        self.parked = None;
        self.tracker = ResolvedTracker::new(Lsn::ZERO, now);
    }

    /// Reads no more; statuses go on until what was read is acknowledged.
    pub fn drain(&mut self) {
        self.draining = true;
        self.change = None;
    }

    /// BEGIN was read.
    pub fn begin(&mut self) {
        self.tracker.begin();
    }

    /// A row of the open transaction was read. `None` = there is no room: keep it until [`Step::Admit`], and read nothing
    /// meanwhile.
    pub fn admit(&mut self, owner: Owner, lsn: Lsn, bytes: usize, now: Instant) -> Option<Admission> {
        let Some(memory) = self.quota.admit(bytes) else {
            self.parked = Some((owner, lsn, bytes));
            return None;
        };
        self.admitted += 1;
        Some(Admission { owner, claim: self.tracker.admit(owner, lsn, now), memory, at: now })
    }

    /// A row of the open transaction can't be used: the position doesn't pass it before its loss was announced, and what is
    /// remembered of it is held until then (R-MEM-1).
    pub fn claim(&mut self, owner: Owner, lsn: Lsn, bytes: usize, now: Instant) -> Admission {
        self.admitted += 1;
        Admission { owner, claim: self.tracker.admit(owner, lsn, now), memory: self.quota.take(bytes), at: now }
    }

    /// COMMIT was read; `end` is the end of its record, what is confirmed to the server.
    pub fn commit(&mut self, end: Lsn) {
        self.tracker.commit(end);
        self.boundary = self.boundary.max(end);
        self.received = self.received.max(end);
        if let Some(session) = &mut self.session {
            session.server_end = session.server_end.max(end);
        }
    }

    /// A frame was read, up to `lsn`, whatever it was.
    pub fn frame(&mut self, lsn: Lsn, now: Instant) {
        self.stall.read(now);
        self.received = self.received.max(lsn);
        if let Some(session) = &mut self.session {
            session.reached = session.reached.max(lsn);
            session.server_end = session.server_end.max(lsn);
        }
    }

    /// The server's position; it counts only when nothing is in flight (R-LSN-2).
    pub fn keepalive(&mut self, wal_end: Lsn, reply_requested: bool, now: Instant) {
        self.tracker.resolve();
        self.tracker.idle_at(wal_end);
        self.frame(wal_end, now);
        if let Some(session) = self.session.as_mut().filter(|_| reply_requested) {
            session.feedback.ask();
        }
    }

    /// Rows were acknowledged.
    pub fn acked(&mut self, now: Instant) {
        self.stall.acked(now);
    }

    /// What is known to be away now.
    pub fn outage(&mut self, outage: Outage, now: Instant) {
        self.stall.outage(outage, now);
    }

    /// What is registered has changed, to this in comparison with the running filter. The latest counts.
    pub fn want(&mut self, change: Change, now: Instant) {
        if !self.draining {
            self.change = Some(change);
            if self.is_covered() {
                self.holes(change.holes, now);
            }
        }
    }

    /// Whether to take the next frame that is in memory already, without asking [`Self::next`] in between.
    pub fn goes_on(&self) -> bool {
        let change = self.change.is_some() && !self.tracker.in_transaction();
        self.parked.is_none() && !change && self.quota.may_read() && !self.quota.is_full()
    }

    /// What to do now.
    pub fn next(&mut self, now: Instant) -> Step {
        let resolved = self.resolve();
        self.held = self.quota.used();
        self.stall.working(self.works(), now);
        if let Some(stall) = self.stall.check(now) {
            self.withheld += 1;
            return Step::Fail(stall);
        }
        let step = self.filter_step(now).or_else(|| self.status_step(resolved, now)).or_else(|| self.memory_step(now));
        let step = step.or_else(|| self.holes_step(now));
        step.unwrap_or_else(|| Step::Wait { read: self.reads(), until: self.until(resolved, now) })
    }

    /// What may be confirmed: never beyond what the server itself has (R-ENG-8).
    fn resolve(&mut self) -> Lsn {
        let resolved = self.tracker.resolve();
        self.session.as_ref().map_or(resolved, |session| resolved.min(session.server_end))
    }

    /// Rows are out, those of an older generation included, which no position waits for: their memory does.
    fn works(&self) -> bool {
        !self.tracker.is_settled() || self.quota.used() > 0
    }

    fn reads(&self) -> bool {
        !self.draining && self.parked.is_none() && self.quota.may_read()
    }

    fn filter_step(&mut self, now: Instant) -> Option<Step> {
        if let Some(e) = self.session.as_mut().and_then(Session::cover) {
            let started = self.session.as_ref().map_or(now, |session| session.started);
            let refiltered = std::mem::take(&mut self.refiltering);
            self.debounce.restarted(now.saturating_duration_since(started), refiltered, now);
            self.holes(self.change.map_or(0, |change| change.holes), now);
            return Some(Step::Covered(e));
        }
        let change = self.change.filter(|_| !self.tracker.in_transaction() && !self.draining)?;
        if !change.restart {
            self.change = None;
            return Some(Step::Apply);
        }
        self.refiltering = self.is_covered() && self.debounce.allows(now);
        self.refiltering.then_some(Step::Refilter)
    }

    fn status_step(&mut self, resolved: Lsn, now: Instant) -> Option<Step> {
        let session = self.session.as_mut()?;
        let kind = session.due_kind(resolved, now)?;
        if !self.stall.may_feed(now) {
            self.withheld += 1;
            return Some(Step::Fail(Stall::Sink));
        }
        Some(Step::Status(session.status(kind, resolved, self.received, now)))
    }

    fn memory_step(&mut self, now: Instant) -> Option<Step> {
        if self.tick_at.is_some_and(|at| now >= at) {
            self.quota.tick();
            self.tick_at = None;
        }
        loop {
            let parked = self.parked.filter(|_| !self.draining);
            if let Some(turn) = self.quota.look(parked.map(|(_, _, bytes)| bytes), now) {
                return Some(Step::Turn(turn));
            }
            if !self.quota.may_read() {
                self.tick_at = self.tick_at.or(Some(now + TICK));
                return None;
            }
            self.tick_at = None;
            let (owner, lsn, bytes) = parked?;
            // Somebody may have grown in between; then the next look waits.
            if let Some(admission) = self.admit(owner, lsn, bytes, now) {
                self.parked = None;
                return Some(Step::Admit(admission));
            }
        }
    }

    fn holes_step(&mut self, now: Instant) -> Option<Step> {
        let told = self.holes_told.filter(|told| now >= *told + HOLES_EVERY);
        told.map(|_| {
            self.holes_told = Some(now);
            Step::Holes
        })
    }

    fn until(&self, resolved: Lsn, now: Instant) -> Instant {
        let status = self.session.as_ref().map(|session| session.due(resolved, now));
        let refilter = self.change.filter(|change| change.restart && !self.tracker.in_transaction() && !self.draining);
        let refilter = refilter.filter(|_| self.is_covered()).and_then(|_| self.debounce.allowed_at());
        let holes = self.holes_told.map(|told| told + HOLES_EVERY);
        let times = [status, refilter, holes, self.stall.due(), self.tick_at];
        times.into_iter().flatten().min().unwrap_or(now + HOLES_EVERY)
    }

    /// The last status of a session: what is resolved now.
    pub fn final_status(&mut self, now: Instant) -> Option<StatusUpdate> {
        let resolved = self.resolve();
        self.stall.working(self.works(), now);
        let session = self.session.as_mut().filter(|_| self.stall.may_feed(now))?;
        Some(session.last_status(resolved, self.received, now))
    }

    fn holes(&mut self, holes: usize, now: Instant) {
        if holes == 0 {
            (self.holes_since, self.holes_told) = (None, None);
        } else {
            self.holes_since = self.holes_since.or(Some(now));
            self.holes_told = self.holes_told.or(Some(now));
        }
    }
}

/// What it shows.
impl Reader {
    /// The memory; its [`Quota::woken`] is what to wait for when a wait doesn't read.
    pub fn quota(&self) -> &Quota {
        &self.quota
    }

    /// End of what the bus has received without a hole.
    pub fn resolved(&self) -> Lsn {
        self.tracker.resolved()
    }

    /// How often it has moved.
    pub fn advances(&self) -> u64 {
        self.tracker.advances()
    }

    /// Last flush position sent, or the slot's at connect; zero before the first session.
    pub fn flushed(&self) -> Lsn {
        self.session.as_ref().map_or(Lsn::ZERO, |session| session.feedback.flushed())
    }

    /// End of everything that was read.
    pub fn received(&self) -> Lsn {
        self.received
    }

    /// End of the last transaction that was read completely.
    pub fn boundary(&self) -> Lsn {
        self.boundary
    }

    /// Every row that was read has been acknowledged, as of the last [`Self::next`].
    pub fn is_settled(&self) -> bool {
        self.tracker.is_settled()
    }

    /// A transaction is partly read.
    pub fn in_transaction(&self) -> bool {
        self.tracker.in_transaction()
    }

    /// Rows of the open transaction that were admitted so far.
    pub fn open_rows(&self) -> u64 {
        self.tracker.open_rows()
    }

    /// The running filter covers what it has; the engine runs.
    pub fn is_covered(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.covered)
    }

    /// From where on a change that is taken over now holds.
    pub fn applies_from(&self) -> Lsn {
        self.session.as_ref().map_or(self.boundary, |session| self.boundary.max(session.e))
    }

    /// Who holds the resolved LSN back (R-LSN-5).
    pub fn culprit(&self, now: Instant) -> Option<Culprit> {
        self.tracker.culprit(now)
    }

    /// Since when there are holes (R-HOLE-6).
    pub fn holes_since(&self) -> Option<Instant> {
        self.holes_since
    }

    /// Since when nothing was acknowledged although rows are out, and what is known to be away.
    pub fn stalled_for(&self, now: Instant) -> (Duration, Outage) {
        (self.stall.idle_for(now), self.stall.present_outage())
    }

    /// Statuses that were due and not sent (R-FB-3).
    pub fn withheld(&self) -> u64 {
        self.withheld
    }

    /// Rows that were admitted so far.
    pub fn admitted(&self) -> u64 {
        self.admitted
    }

    /// Steps of the position's queue: what invariant 11 counts instead of time.
    pub fn steps(&self) -> u64 {
        self.tracker.steps()
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;
