//! From log events to rows in shards: what is registered is admitted, the rest is counted. The decisions are the
//! [`Reader`]'s.

use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Instant,
};

use aura_domain::{Cell, Change, Image, Lsn, Position, ProjectId};
use aura_flow::{Admission, Opening, Owner, Reader, Turn};
use aura_pgsource::{Decoder, LogEvent, StreamMessage};
use aura_wire::GapReason;
use bytes::Bytes;
use tokio::sync::Notify;

use super::{
    gaps::Loss,
    measure::Counted,
    registry::Registry,
    shard::{Payload, Row, ShardQueue},
    vitals::{Vitals, record_position},
};

/// Fixed overhead of a row besides its cells: allocations, its place in queues (R-MEM-2).
const ROW_OVERHEAD: usize = 512;
/// What is remembered of a row that can't be used.
const LOSS_BYTES: usize = ROW_OVERHEAD + size_of::<Loss>();

/// Lives as long as the lease: a session may end and the next go on where it stopped, rows stay in the pipeline.
pub(crate) struct Intake {
    pub(crate) reader: Reader,
    pub(crate) acked: Arc<Notify>,
    shards: Vec<Arc<ShardQueue>>,
    /// Rows that go to the shards before the intake waits again.
    pending: Vec<Vec<Row>>,
    /// A row that was decoded and waits for memory (R-MEM-3).
    parked: Option<Payload>,
    vitals: Arc<Vitals>,
    /// Where panics have happened too often.
    skips: HashSet<Position>,
    pub(crate) counted: Counted,
}

impl Intake {
    pub(crate) fn new(
        reader: Reader,
        shards: Vec<Arc<ShardQueue>>,
        acked: Arc<Notify>,
        vitals: Arc<Vitals>,
        skips: HashSet<Position>,
    ) -> Self {
        let pending = shards.iter().map(|_| Vec::new()).collect();
        Self { reader, acked, pending, shards, parked: None, vitals, skips, counted: Counted::default() }
    }

    /// A session begins; what waited for memory belongs to a transaction that comes again.
    pub(crate) fn begin_session(&mut self, opening: Opening) {
        self.parked = None;
        self.reader.begin_session(opening, Instant::now());
        self.vitals.note_received(self.reader.received());
    }

    /// Takes a message; answers what is lost if it can't be used.
    pub(crate) fn take(&mut self, decoder: &mut Decoder, registry: &Registry, message: &StreamMessage) -> Vec<Loss> {
        let now = Instant::now();
        let mut lost = Vec::new();
        match message {
            StreamMessage::Data { start, end, payload } => {
                lost = self.record(decoder, *start, payload, registry, now);
                self.reader.frame(*end.max(start), now);
            }
            StreamMessage::Keepalive { end, reply_requested } => self.reader.keepalive(*end, *reply_requested, now),
            StreamMessage::Oversize { start, bytes, prefix } => {
                lost = self.skip(decoder.oversize(prefix), *start, *bytes, registry, now);
                self.reader.frame(*start, now);
            }
            StreamMessage::End => {}
        }
        self.vitals.note_received(self.reader.received());
        lost
    }

    fn record(
        &mut self,
        decoder: &mut Decoder,
        start: Lsn,
        payload: &Bytes,
        registry: &Registry,
        now: Instant,
    ) -> Vec<Loss> {
        if self.skips.contains(&record_position(decoder.generation(), start)) {
            return self.give_up(start, registry, now);
        }
        self.vitals.reading(Some(start));
        let mut lost = Vec::new();
        match decoder.decode(start, payload) {
            LogEvent::Begin { .. } => self.reader.begin(),
            LogEvent::Change(change) if self.skips.contains(&change.position) => {
                lost = self.give_up_row(&change, registry, now);
            }
            LogEvent::Change(change) => self.change(change, registry, now),
            LogEvent::Commit { end, .. } => self.reader.commit(end),
            event @ LogEvent::Skipped { .. } => lost = self.skip(event, start, payload.len(), registry, now),
            // TRUNCATE isn't an event of clients (supabase-wire.md §3.1).
            LogEvent::Truncate(_) | LogEvent::Other => {}
        }
        self.vitals.reading(None);
        lost
    }

    /// A record over which the intake has panicked again and again: nobody knows what is in it.
    fn give_up(&mut self, start: Lsn, registry: &Registry, now: Instant) -> Vec<Loss> {
        metrics::counter!("cdc_skipped_rows_total", "reason" => "panic").increment(1);
        tracing::error!(lsn = %start, "a log record is skipped, reading it has panicked three times");
        registry.projects.keys().map(|project| self.lose(*project, None, start, now)).collect()
    }

    /// A row over which a shard has panicked again and again (R-SD-6).
    fn give_up_row(&mut self, change: &Change, registry: &Registry, now: Instant) -> Vec<Loss> {
        let Some(table) = registry.table(&change.relation) else { return Vec::new() };
        metrics::counter!("cdc_skipped_rows_total", "reason" => "panic").increment(1);
        tracing::error!(position = %change.position, "a row is skipped, judging it has panicked three times");
        let key = table.key.clone();
        let loss = self.lose(key.project, Some([key.schema, key.table]), change.position.change, now);
        vec![Loss { range: Some((change.position, change.position)), ..loss }]
    }

    /// A record that can't be used: the stream goes on, counted and logged with its position (R-DEC-4). Its table's
    /// subscribers have a gap; all of the source's, where the table can't be read either.
    fn skip(&mut self, event: LogEvent, start: Lsn, bytes: usize, registry: &Registry, now: Instant) -> Vec<Loss> {
        let LogEvent::Skipped { reason, relation } = event else { return Vec::new() };
        metrics::counter!("cdc_skipped_rows_total", "reason" => reason.as_str()).increment(1);
        tracing::warn!(lsn = %start, reason = reason.as_str(), bytes, "a log record can't be used, skipped");
        let Some(relation) = relation else {
            return registry.projects.keys().map(|project| self.lose(*project, None, start, now)).collect();
        };
        let table = registry.table(&relation).map(|table| table.key.clone());
        table.map(|key| self.lose(key.project, Some([key.schema, key.table]), start, now)).into_iter().collect()
    }

    /// The confirmed position doesn't pass the row before its loss is announced.
    fn lose(&mut self, project: ProjectId, table: Option<[String; 2]>, start: Lsn, now: Instant) -> Loss {
        let mut loss = Loss::up_to_now(project, GapReason::Undecodable, table);
        if self.reader.in_transaction() {
            let shard = shard_of(project, self.shards.len());
            self.vitals.admitted(shard);
            loss.claims.push(self.reader.claim(Owner { shard, project }, start, LOSS_BYTES, now));
        }
        loss
    }

    fn change(&mut self, change: Change, registry: &Registry, now: Instant) {
        let commit = change.position.commit;
        let Some(table) = registry.table(&change.relation).filter(|table| table.admits(commit)) else {
            metrics::counter!("cdc_skipped_rows_total", "reason" => "unregistered").increment(1);
            return;
        };
        let owner = Owner { shard: shard_of(table.project.id, self.shards.len()), project: table.project.id };
        let (lsn, bytes) = (change.position.change, memory_of(&change));
        let payload = Payload { change, table: Arc::clone(table) };
        match self.reader.admit(owner, lsn, bytes, now) {
            Some(admission) => self.collect(admission, payload),
            None => self.parked = Some(payload),
        }
    }

    /// There is room for the row that waited.
    pub(crate) fn unpark(&mut self, admission: Admission) {
        if let Some(payload) = self.parked.take() {
            self.collect(admission, payload);
            self.flush();
        }
    }

    fn collect(&mut self, admission: Admission, payload: Payload) {
        let shard = admission.shard();
        self.vitals.admitted(shard);
        self.pending[shard].push(admission.carry(payload));
    }

    /// Hands collected rows to their shards; never waits.
    pub(crate) fn flush(&mut self) {
        for (shard, rows) in self.shards.iter().zip(&mut self.pending) {
            shard.push(rows);
        }
    }

    /// Reading has stopped or goes on (R-MEM-6: no release may wait for input then).
    pub(crate) fn turn(&self, turn: Turn) {
        for shard in &self.shards {
            shard.seal(turn == Turn::Paused);
        }
    }

    /// Seals for good: nothing more is read.
    pub(crate) fn drain(&mut self) {
        self.flush();
        self.reader.drain();
        for shard in &self.shards {
            shard.seal(true);
        }
    }

    /// Gives up on the projects that hold everybody up (R-FB-6).
    pub(crate) fn skip_slowest(&self) {
        for shard in &self.shards {
            shard.skip_slowest();
        }
    }

    /// Drops every row on its way without an acknowledgement; the next session reads them again.
    pub(crate) fn abandon(&mut self) {
        self.flush();
        self.parked = None;
        for shard in &self.shards {
            shard.abandon();
        }
        self.reader.forget(Instant::now());
    }

    /// A new generation: positions that were read have no meaning any more.
    pub(crate) fn forget(&mut self) {
        self.parked = None;
        self.vitals.forget_positions();
        self.reader.forget(Instant::now());
    }

    /// The shards, in order.
    pub(crate) fn shards(&self) -> &[Arc<ShardQueue>] {
        &self.shards
    }
}

/// What the decoded row holds; the encoded message comes on top when it is made (R-MEM-2).
fn memory_of(change: &Change) -> usize {
    let cells = |image: &Option<Image>| image.as_ref().map_or(0, |image| image.0.capacity() * size_of::<Cell>());
    ROW_OVERHEAD + size_of::<Row>() + cells(&change.new) + cells(&change.old) + change.wire_bytes
}

/// By hash of the project's id (`CDC_NUM_SHARDS`).
fn shard_of(project: ProjectId, shards: usize) -> usize {
    let mut hasher = DefaultHasher::new();
    project.hash(&mut hasher);
    usize::try_from(hasher.finish() % shards as u64).expect("a shard's number is small")
}
