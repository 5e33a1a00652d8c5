//! From log events to rows in shards: what is registered is admitted, the rest is counted; transactions are tracked.

use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Instant,
};

use aura_domain::{Change, Lsn, Position, ProjectId};
use aura_flow::{Owner, Quota, ResolvedTracker};
use aura_pgsource::{Decoder, LogEvent};
use aura_wire::GapReason;
use bytes::Bytes;
use tokio::sync::Notify;

use super::{
    gaps::Loss,
    registry::{RegisteredTable, Registry},
    shard::{Row, ShardQueue},
    vitals::{Vitals, record_position},
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
    /// A row that was decoded and waits for memory (R-MEM-3); nothing behind it is read.
    parked: Option<(Change, Arc<RegisteredTable>)>,
    /// End of the last transaction that was read completely: E of R-HOLE-2.
    boundary: Lsn,
    vitals: Arc<Vitals>,
    /// Where panics have happened too often.
    skips: HashSet<Position>,
}

impl Intake {
    pub(crate) fn new(
        shards: Vec<Arc<ShardQueue>>,
        acked: Arc<Notify>,
        quota: usize,
        vitals: Arc<Vitals>,
        skips: HashSet<Position>,
    ) -> Self {
        Self {
            tracker: ResolvedTracker::new(Lsn::ZERO, Instant::now()),
            quota: Quota::new(quota),
            acked,
            pending: shards.iter().map(|_| Vec::new()).collect(),
            shards,
            parked: None,
            boundary: Lsn::ZERO,
            vitals,
            skips,
        }
    }

    /// A session begins to read at `start`. What the last one had read of an unfinished transaction comes again.
    pub(crate) fn begin_session(&mut self, start: Lsn) {
        // It belongs to a transaction that comes again.
        self.parked = None;
        self.tracker.restart(self.boundary, start);
        self.boundary = self.boundary.max(start);
        self.note_received(start);
    }

    /// A new generation: nothing that was read before has a meaning any more.
    pub(crate) fn reset(&mut self) {
        self.boundary = Lsn::ZERO;
        self.vitals.forget_positions();
        self.tracker = ResolvedTracker::new(Lsn::ZERO, Instant::now());
    }

    /// End of the last transaction that was read completely.
    pub(crate) fn boundary(&self) -> Lsn {
        self.boundary
    }

    /// Takes one log record; answers what is lost if it can't be used.
    pub(crate) fn data(
        &mut self,
        decoder: &mut Decoder,
        registry: &Registry,
        start: Lsn,
        end: Lsn,
        payload: &Bytes,
    ) -> Vec<Loss> {
        if self.skips.contains(&record_position(decoder.generation(), start)) {
            return self.give_up(start, registry);
        }
        self.vitals.reading(Some(start));
        let mut lost = Vec::new();
        match decoder.decode(start, payload) {
            LogEvent::Begin { .. } => self.tracker.begin(),
            LogEvent::Change(change) if self.skips.contains(&change.position) => {
                lost = self.give_up_row(&change, registry);
            }
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
        self.vitals.reading(None);
        lost
    }

    /// A record over which the intake has panicked again and again: nobody knows what is in it.
    fn give_up(&mut self, start: Lsn, registry: &Registry) -> Vec<Loss> {
        metrics::counter!("cdc_skipped_rows_total", "reason" => "panic").increment(1);
        tracing::error!(lsn = %start, "a log record is skipped, reading it has panicked three times");
        registry.projects.keys().map(|project| self.lose(*project, None, start)).collect()
    }

    /// A row over which a shard has panicked again and again (R-SD-6).
    fn give_up_row(&mut self, change: &Change, registry: &Registry) -> Vec<Loss> {
        let Some(table) = registry.table(&change.relation) else { return Vec::new() };
        metrics::counter!("cdc_skipped_rows_total", "reason" => "panic").increment(1);
        tracing::error!(position = %change.position, "a row is skipped, judging it has panicked three times");
        let key = table.key.clone();
        let loss = self.lose(key.project, Some([key.schema, key.table]), change.position.change);
        vec![Loss { range: Some((change.position, change.position)), ..loss }]
    }

    /// A record that can't be used: the stream goes on, counted and logged with its position (R-DEC-4). Its table's
    /// subscribers have a gap; all of the source's, where the table can't be read either.
    pub(crate) fn skip(&mut self, event: LogEvent, start: Lsn, bytes: usize, registry: &Registry) -> Vec<Loss> {
        let LogEvent::Skipped { reason, relation } = event else { return Vec::new() };
        metrics::counter!("cdc_skipped_rows_total", "reason" => reason.as_str()).increment(1);
        tracing::warn!(lsn = %start, reason = reason.as_str(), bytes, "a log record can't be used, skipped");
        let Some(relation) = relation else {
            return registry.projects.keys().map(|project| self.lose(*project, None, start)).collect();
        };
        let table = registry.table(&relation).map(|table| table.key.clone());
        table.map(|key| self.lose(key.project, Some([key.schema, key.table]), start)).into_iter().collect()
    }

    /// The confirmed position doesn't pass the row before its loss is announced.
    fn lose(&mut self, project: ProjectId, table: Option<[String; 2]>, start: Lsn) -> Loss {
        let mut loss = Loss::up_to_now(project, GapReason::Undecodable, table);
        if self.tracker.in_transaction() {
            let shard = shard_of(project, self.shards.len());
            self.vitals.admitted(shard);
            loss.claims.push((shard, self.tracker.admit(Owner { shard, project }, start, Instant::now())));
        }
        loss
    }

    /// End of everything that was read.
    pub(crate) fn received(&self) -> Lsn {
        self.vitals.received()
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
            return;
        };
        if let Some(change) = self.admit(change, table) {
            self.parked = Some((change, Arc::clone(table)));
        }
    }

    /// Takes the row in, or gives it back if there is no room for it now.
    fn admit(&mut self, change: Change, table: &Arc<RegisteredTable>) -> Option<Change> {
        let Some(memory) = self.quota.admit(memory_of(&change)) else { return Some(change) };
        let project = table.project.id;
        let shard = shard_of(project, self.shards.len());
        let claim = self.tracker.admit(Owner { shard, project }, change.position.change, Instant::now());
        self.pending[shard].push(Row { change, table: Arc::clone(table), claim, _memory: memory });
        self.vitals.admitted(shard);
        None
    }

    /// Whether the socket may be read: memory is below its lines, and no row waits for some.
    pub(crate) fn ready(&mut self) -> bool {
        let bytes = self.parked.as_ref().map(|(change, _)| memory_of(change));
        self.quota.look(bytes, Instant::now());
        if !self.quota.may_read() {
            return false;
        }
        let Some((change, table)) = self.parked.take() else { return true };
        self.parked = self.admit(change, &table).map(|change| (change, table));
        self.flush();
        // What came in counts before the next read.
        self.quota.look(None, Instant::now());
        self.quota.may_read() && self.parked.is_none()
    }

    fn note_received(&self, lsn: Lsn) {
        self.vitals.note_received(lsn);
    }
}

/// The decoded cells hold about what the text did; the encoded message comes on top once.
fn memory_of(change: &Change) -> usize {
    ROW_OVERHEAD + 2 * change.wire_bytes
}

/// By hash of the project's id (`CDC_NUM_SHARDS`).
fn shard_of(project: ProjectId, shards: usize) -> usize {
    let mut hasher = DefaultHasher::new();
    project.hash(&mut hasher);
    usize::try_from(hasher.finish() % shards as u64).expect("a shard's number is small")
}
