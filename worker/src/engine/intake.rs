//! From log events to rows in shards: what is registered is admitted, the rest is counted; transactions are tracked.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use aura_domain::{Change, Lsn, ProjectId};
use aura_pgsource::{Decoder, LogEvent};
use bytes::Bytes;
use tokio::sync::Notify;

use super::{
    quota::Quota,
    registry::{RegisteredTable, Registry},
    resolved::ResolvedTracker,
    shard::{Row, ShardQueue},
};

/// Fixed overhead of a row besides what the log said of it: structs, allocations, its place in queues (R-MEM-2).
const ROW_OVERHEAD: usize = 512;

/// Lives as long as the lease: a session may end and the next go on where it stopped, rows stay in the pipeline.
pub(crate) struct Intake {
    pub(crate) tracker: ResolvedTracker,
    pub(crate) quota: Quota,
    pub(crate) acked: Arc<Notify>,
    shards: Vec<Arc<ShardQueue>>,
    /// Rows that go to the shards before the intake waits again.
    pending: Vec<Vec<Row>>,
    /// End of the last transaction that was read completely: E of R-HOLE-2.
    boundary: Lsn,
    received: Arc<AtomicU64>,
    pub(crate) admitted: u64,
    pub(crate) skipped: u64,
}

impl Intake {
    pub(crate) fn new(
        shards: Vec<Arc<ShardQueue>>,
        acked: Arc<Notify>,
        quota: usize,
        received: Arc<AtomicU64>,
    ) -> Self {
        Self {
            tracker: ResolvedTracker::new(Lsn::ZERO),
            quota: Quota::new(quota),
            acked,
            pending: shards.iter().map(|_| Vec::new()).collect(),
            shards,
            boundary: Lsn::ZERO,
            received,
            admitted: 0,
            skipped: 0,
        }
    }

    /// A session begins to read at `start`. What the last one had read of an unfinished transaction comes again.
    pub(crate) fn begin_session(&mut self, start: Lsn) {
        self.tracker.restart(self.boundary, start);
        self.boundary = self.boundary.max(start);
        self.note_received(start);
    }

    /// A new generation: nothing that was read before has a meaning any more.
    pub(crate) fn reset(&mut self) {
        self.boundary = Lsn::ZERO;
        self.tracker = ResolvedTracker::new(Lsn::ZERO);
    }

    /// End of the last transaction that was read completely.
    pub(crate) fn boundary(&self) -> Lsn {
        self.boundary
    }

    /// Takes one log record; answers the table whose row could not be used.
    pub(crate) fn data(
        &mut self,
        decoder: &mut Decoder,
        registry: &Registry,
        start: Lsn,
        end: Lsn,
        payload: &Bytes,
    ) -> Option<Arc<RegisteredTable>> {
        let mut lost = None;
        match decoder.decode(start, payload) {
            LogEvent::Begin { .. } => self.tracker.begin(),
            LogEvent::Change(change) => self.change(change, registry),
            LogEvent::Commit { end, .. } => {
                self.tracker.commit(end);
                self.boundary = self.boundary.max(end);
                self.note_received(end);
            }
            event @ LogEvent::Skipped { .. } => lost = self.skip(event, start, payload.len(), registry),
            // TRUNCATE isn't an event of clients (supabase-wire.md §3.1).
            LogEvent::Truncate(_) | LogEvent::Other => {}
        }
        self.note_received(end);
        lost
    }

    /// A record that can't be used: the stream goes on, counted and logged with its position (R-DEC-4). Its table's
    /// subscribers have a gap.
    pub(crate) fn skip(
        &mut self,
        event: LogEvent,
        start: Lsn,
        bytes: usize,
        registry: &Registry,
    ) -> Option<Arc<RegisteredTable>> {
        let LogEvent::Skipped { reason, relation } = event else { return None };
        self.skipped += 1;
        metrics::counter!("cdc_skipped_rows_total", "reason" => reason.as_str()).increment(1);
        tracing::warn!(lsn = %start, reason = reason.as_str(), bytes, "a log record can't be used, skipped");
        registry.table(relation.as_deref()?).cloned()
    }

    /// End of everything that was read.
    pub(crate) fn received(&self) -> Lsn {
        Lsn(self.received.load(Ordering::Acquire))
    }

    /// A keepalive's WAL end counts when nothing is in flight (R-LSN-2, R-DEC-5).
    pub(crate) fn keepalive(&mut self, end: Lsn) {
        self.tracker.resolve();
        self.tracker.idle_at(end);
        self.note_received(end);
    }

    /// Hands collected rows to their shards; never waits.
    pub(crate) fn flush(&mut self) {
        for (shard, rows) in self.shards.iter().zip(&mut self.pending) {
            shard.push(rows);
        }
    }

    fn change(&mut self, change: Change, registry: &Registry) {
        let commit = change.position.commit;
        let Some(table) = registry.table(&change.relation).filter(|table| table.admits(commit)) else {
            metrics::counter!("cdc_skipped_rows_total", "reason" => "unregistered").increment(1);
            self.skipped += 1;
            return;
        };
        let row = self.admit(change, Arc::clone(table));
        let shard = shard_of(row.table.project.id, self.shards.len());
        self.pending[shard].push(row);
        self.admitted += 1;
    }

    fn admit(&mut self, change: Change, table: Arc<RegisteredTable>) -> Row {
        // The decoded cells hold about what the text did; the encoded message comes on top once.
        let memory = self.quota.reserve(ROW_OVERHEAD + 2 * change.wire_bytes);
        Row { change, table, claim: self.tracker.admit(), _memory: memory }
    }

    fn note_received(&self, lsn: Lsn) {
        self.received.fetch_max(lsn.0, Ordering::AcqRel);
    }
}

/// By hash of the project's id (`CDC_NUM_SHARDS`).
fn shard_of(project: ProjectId, shards: usize) -> usize {
    let mut hasher = DefaultHasher::new();
    project.hash(&mut hasher);
    usize::try_from(hasher.finish() % shards as u64).expect("a shard's number is small")
}
