//! What is known of a run from outside, whatever its tasks are stuck in: atomics that they write and others read.

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use aura_domain::{DrainReport, Generation, Lsn, Position, ShardReport};
use aura_flow::Heartbeat;
use aura_pgsource::Frame;
use jiff::Timestamp;
use uuid::Uuid;

/// One run's vital signs.
#[derive(Debug)]
pub(crate) struct Vitals {
    /// Of the task that owns the socket (R-FB-4).
    pub(crate) heartbeat: Heartbeat,
    received: AtomicU64,
    boundary: AtomicU64,
    resolved: AtomicU64,
    sent: AtomicU64,
    server_end: AtomicU64,
    /// The last time that a row was done with.
    progress: Heartbeat,
    shards: Vec<Tally>,
    /// Start of the log record that is being read; 0 = none.
    record: AtomicU64,
    /// And the number of its position.
    record_n: AtomicU32,
    generation: AtomicU32,
    /// Where tasks have panicked (R-SD-6).
    panics: Mutex<Vec<Position>>,
    /// When a change of a registration was last published, since somebody took these.
    events: Mutex<HashMap<Uuid, Timestamp>>,
    /// Cut: nothing more is published and no status sent.
    cut: AtomicBool,
}

/// Rows of one shard.
#[derive(Debug, Default)]
struct Tally {
    admitted: AtomicU64,
    delivered: AtomicU64,
    skipped: AtomicU64,
    /// Its task has panicked: what it holds is never acknowledged.
    buried: AtomicBool,
}

/// Position of a log record as a whole, whatever is in it: no row has such a number. A transaction's begin starts where its
/// first row does, and its end where the next begins.
pub(super) fn record_position(generation: Generation, start: Lsn, frame: Frame) -> Position {
    let n = match frame {
        Frame::Inside => u32::MAX,
        Frame::Begin => u32::MAX - 1,
        Frame::Commit => u32::MAX - 2,
    };
    Position { generation, commit: Lsn::ZERO, change: start, n }
}

/// Name of a shard's task.
pub(super) fn shard_name(number: usize) -> String {
    format!("shard-{number}")
}

impl Vitals {
    pub(crate) fn new(shards: usize) -> Self {
        Self {
            heartbeat: Heartbeat::new(Instant::now()),
            received: AtomicU64::new(0),
            boundary: AtomicU64::new(0),
            resolved: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            server_end: AtomicU64::new(0),
            progress: Heartbeat::new(Instant::now()),
            shards: (0..shards).map(|_| Tally::default()).collect(),
            record: AtomicU64::new(0),
            record_n: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            panics: Mutex::default(),
            events: Mutex::default(),
            cut: AtomicBool::new(false),
        }
    }

    /// A change of these registrations was published just now.
    pub(crate) fn published(&self, registrations: impl Iterator<Item = Uuid>) {
        let now = Timestamp::now();
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.extend(registrations.map(|registration| (registration, now)));
    }

    /// What was published since the last call: seconds since 1970 by registration.
    pub(crate) fn take_events(&self) -> Vec<(Uuid, f64)> {
        let events = std::mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner));
        events.into_iter().map(|(registration, at)| (registration, at.as_duration().as_secs_f64())).collect()
    }

    /// Beats for as long as it is polled: for waits that have no end of their own.
    pub(crate) async fn beating(&self, period: Duration) -> Infallible {
        loop {
            self.heartbeat.beat(Instant::now());
            tokio::time::sleep(period).await;
        }
    }

    /// End of what was read.
    pub(crate) fn received(&self) -> Lsn {
        Lsn(self.received.load(Ordering::Acquire))
    }

    pub(crate) fn note_received(&self, lsn: Lsn) {
        self.received.fetch_max(lsn.0, Ordering::AcqRel);
    }

    /// End of the last transaction that was read completely.
    pub(super) fn boundary(&self) -> Lsn {
        Lsn(self.boundary.load(Ordering::Acquire))
    }

    pub(super) fn note_boundary(&self, lsn: Lsn) {
        self.boundary.store(lsn.0, Ordering::Release);
    }

    /// A new generation: positions start anew.
    pub(crate) fn forget_positions(&self) {
        for position in [&self.received, &self.boundary, &self.resolved, &self.sent] {
            position.store(0, Ordering::Release);
        }
    }

    /// End of what the bus has received without a hole.
    pub(crate) fn resolved(&self) -> Lsn {
        Lsn(self.resolved.load(Ordering::Acquire))
    }

    /// End of the server's log, when it was last asked.
    pub(crate) fn server_end(&self) -> Lsn {
        Lsn(self.server_end.load(Ordering::Acquire))
    }

    pub(super) fn note_server_end(&self, lsn: Lsn) {
        self.server_end.store(lsn.0, Ordering::Release);
    }

    /// Last flush position sent.
    pub(crate) fn sent(&self) -> Lsn {
        Lsn(self.sent.load(Ordering::Acquire))
    }

    pub(crate) fn note_status(&self, resolved: Lsn, sent: Lsn) {
        self.resolved.store(resolved.0, Ordering::Release);
        self.sent.store(sent.0, Ordering::Release);
    }

    pub(crate) fn admitted(&self, shard: usize) {
        if self.shards.get(shard).is_some_and(|tally| tally.read().abandoned == 0) {
            // Nobody waited here until now.
            self.progress.beat(Instant::now());
        }
        self.count(shard, |tally| &tally.admitted, 1);
    }

    /// The bus has them, or nobody was to see them.
    pub(crate) fn delivered(&self, shard: usize, rows: usize) {
        self.progress.beat(Instant::now());
        self.count(shard, |tally| &tally.delivered, rows);
    }

    /// The loss was announced.
    pub(crate) fn skipped(&self, shard: usize, rows: usize) {
        self.progress.beat(Instant::now());
        self.count(shard, |tally| &tally.skipped, rows);
    }

    /// They were dropped and will be read again.
    pub(crate) fn forgotten(&self, shard: usize, rows: usize) {
        if let Some(tally) = self.shards.get(shard) {
            tally.admitted.fetch_sub(rows as u64, Ordering::AcqRel);
        }
    }

    fn count(&self, shard: usize, which: impl Fn(&Tally) -> &AtomicU64, rows: usize) {
        if let Some(tally) = self.shards.get(shard) {
            which(tally).fetch_add(rows as u64, Ordering::AcqRel);
        }
    }

    /// The intake turns to a record, or is done with it.
    pub(super) fn reading(&self, record: Option<Position>) {
        if let Some(record) = record {
            self.record_n.store(record.n, Ordering::Release);
        }
        self.record.store(record.map_or(0, |record| record.change.0), Ordering::Release);
    }

    pub(super) fn enter_generation(&self, generation: Generation) {
        self.generation.store(generation.0, Ordering::Release);
    }

    /// A task is about to panic over a row.
    pub(super) fn note_panic(&self, at: Position) {
        self.panics.lock().unwrap_or_else(PoisonError::into_inner).push(at);
    }

    /// Where tasks have panicked: over rows, and the intake over the record that it was reading.
    pub(crate) fn panicked_at(&self) -> Vec<Position> {
        let mut at = self.panics.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let record = Lsn(self.record.load(Ordering::Acquire));
        if record > Lsn::ZERO {
            let generation = Generation(self.generation.load(Ordering::Acquire));
            let n = self.record_n.load(Ordering::Acquire);
            at.push(Position { generation, commit: Lsn::ZERO, change: record, n });
        }
        at
    }

    /// No more words to the bus or the server from tasks that can't be reached otherwise (R-SD-5).
    pub(crate) fn cut(&self) {
        self.cut.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.cut.load(Ordering::SeqCst)
    }

    /// A task has panicked; if it was a shard's, nobody waits for its rows.
    pub(super) fn bury(&self, task: &str) {
        if let Some((_, tally)) = self.shards.iter().enumerate().find(|(number, _)| shard_name(*number) == task) {
            tally.buried.store(true, Ordering::SeqCst);
        }
    }

    /// Every row that was admitted is delivered or skipped, those aside that nobody will deliver.
    pub(crate) fn is_settled(&self) -> bool {
        let settled = |tally: &Tally| tally.buried.load(Ordering::SeqCst) || tally.read().abandoned == 0;
        self.shards.iter().all(settled)
    }

    /// How long rows have waited without any being done with; zero while none waits.
    pub(crate) fn stuck_for(&self, now: Instant) -> Duration {
        if self.is_settled() { Duration::ZERO } else { self.progress.age(now) }
    }

    /// What became of the rows, as of now: what isn't delivered or skipped will come again.
    pub(crate) fn rows(&self) -> DrainReport {
        let per_shard: Vec<_> = self.shards.iter().map(Tally::read).collect();
        let sum = |of: fn(&ShardReport) -> u64| per_shard.iter().map(of).sum::<u64>();
        let (delivered, skipped) = (sum(|shard| shard.delivered), sum(|shard| shard.skipped));
        let abandoned = sum(|shard| shard.abandoned);
        let admitted = delivered + skipped + abandoned;
        DrainReport { admitted, delivered, skipped, abandoned, per_shard, ..DrainReport::default() }
    }
}

impl Tally {
    /// The ways out before the way in: a row that is counted in between looks as if it were still on its way.
    fn read(&self) -> ShardReport {
        let (delivered, skipped) = (self.delivered.load(Ordering::Acquire), self.skipped.load(Ordering::Acquire));
        let admitted = self.admitted.load(Ordering::Acquire);
        ShardReport { delivered, skipped, abandoned: admitted.saturating_sub(delivered + skipped) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_exit_the_rows_add_up() {
        let vitals = Vitals::new(2);
        for shard in [0, 0, 1, 1, 1] {
            vitals.admitted(shard);
        }
        vitals.delivered(0, 2);
        vitals.skipped(1, 1);
        let rows = vitals.rows();
        assert_eq!((rows.admitted, rows.delivered, rows.skipped, rows.abandoned), (5, 2, 1, 2));
        assert_eq!(rows.per_shard[1], ShardReport { delivered: 0, skipped: 1, abandoned: 2 });
    }
}
