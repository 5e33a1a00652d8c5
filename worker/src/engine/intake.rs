//! From log events to rows in shards: what is registered is admitted, the rest is counted. The decisions are the
//! [`Reader`]'s.

use std::{
    collections::{HashSet, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Instant,
};

use aura_domain::{Cell, Change, Image, Lsn, Position, ProjectId, Relation};
use aura_flow::{Admission, Opening, Owner, Reader, Turn};
use aura_pgsource::{Decoder, Frame, LogEvent, StreamMessage};
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
    /// A row that was decoded and waits for memory (R-MEM-3); of a partition, once for each table whose row it is.
    parked: VecDeque<Payload>,
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
        Self { reader, acked, pending, shards, parked: VecDeque::new(), vitals, skips, counted: Counted::default() }
    }

    /// A session begins; what waited for memory belongs to a transaction that comes again.
    pub(crate) fn begin_session(&mut self, opening: Opening) {
        self.parked.clear();
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
        let record = record_position(decoder.generation(), start, decoder.frame(payload));
        if self.skips.contains(&record) {
            return self.give_up(decoder.pass_over(payload), start, registry, now);
        }
        self.vitals.reading(Some(record));
        let mut lost = Vec::new();
        match decoder.decode(start, payload) {
            LogEvent::Begin { .. } => self.reader.begin(),
            LogEvent::Change(change) if self.skips.contains(&change.position) => {
                lost = self.give_up_row(&change, registry, now);
            }
            LogEvent::Change(change) => self.change(change, registry, now),
            LogEvent::Commit { end, .. } => self.commit(end),
            event @ LogEvent::Skipped { .. } => lost = self.skip(event, start, payload.len(), registry, now),
            // TRUNCATE isn't an event of clients (supabase-wire.md §3.1).
            LogEvent::Truncate(_) | LogEvent::Other => {}
        }
        self.vitals.reading(None);
        lost
    }

    fn commit(&mut self, end: Lsn) {
        self.reader.commit(end);
        self.vitals.note_boundary(end);
    }

    /// A record over which the intake has panicked again and again: nobody knows what is in it.
    fn give_up(&mut self, frame: Frame, start: Lsn, registry: &Registry, now: Instant) -> Vec<Loss> {
        metrics::counter!("cdc_skipped_rows_total", "reason" => "panic").increment(1);
        tracing::error!(lsn = %start, ?frame, "a log record is skipped, reading it has panicked three times");
        let lost = self.lose(everybody(registry), start, now);
        if frame == Frame::Commit {
            // The message of a commit starts at the end of its record.
            self.commit(start);
        }
        lost
    }

    /// A row over which a shard has panicked again and again (R-SD-6).
    fn give_up_row(&mut self, change: &Change, registry: &Registry, now: Instant) -> Vec<Loss> {
        let whose = subscribers(registry, &change.relation);
        if whose.is_empty() {
            return Vec::new();
        }
        metrics::counter!("cdc_skipped_rows_total", "reason" => "panic").increment(1);
        tracing::error!(position = %change.position, "a row is skipped, judging it has panicked three times");
        let lost = self.lose(whose, change.position.change, now).into_iter();
        lost.map(|loss| Loss { range: Some((change.position, change.position)), ..loss }).collect()
    }

    /// A record that can't be used: the stream goes on, counted and logged with its position (R-DEC-4). Its table's
    /// subscribers have a gap; all of the source's, where the table can't be read either.
    fn skip(&mut self, event: LogEvent, start: Lsn, bytes: usize, registry: &Registry, now: Instant) -> Vec<Loss> {
        let LogEvent::Skipped { reason, relation } = event else { return Vec::new() };
        metrics::counter!("cdc_skipped_rows_total", "reason" => reason.as_str()).increment(1);
        tracing::warn!(lsn = %start, reason = reason.as_str(), bytes, "a log record can't be used, skipped");
        let Some(relation) = relation else {
            return self.lose(everybody(registry), start, now);
        };
        self.lose(subscribers(registry, &relation), start, now)
    }

    /// The confirmed position doesn't pass the record before its loss is announced. Outside of a transaction, as behind a
    /// begin that couldn't be used, it is one of its own: what is read later waits for it, and it moves no position.
    fn lose(
        &mut self,
        whose: impl IntoIterator<Item = (ProjectId, Option<[String; 2]>)>,
        start: Lsn,
        now: Instant,
    ) -> Vec<Loss> {
        let alone = !self.reader.in_transaction();
        if alone {
            self.reader.begin();
        }
        let lost = whose.into_iter().map(|(project, table)| {
            let shard = shard_of(project, self.shards.len());
            self.vitals.admitted(shard);
            let claims = vec![self.reader.claim(Owner { shard, project }, start, LOSS_BYTES, now)];
            Loss { claims, ..Loss::up_to_now(project, GapReason::Undecodable, table) }
        });
        let lost = lost.collect();
        if alone {
            self.reader.commit(self.reader.boundary());
        }
        lost
    }

    fn change(&mut self, change: Change, registry: &Registry, now: Instant) {
        let change = Arc::new(change);
        let mut unregistered = true;
        let (name, commit) = (&change.relation, change.position.commit);
        for table in registry.of(name).filter(|table| table.admits_as(name, commit)) {
            unregistered = false;
            let payload = Payload { change: Arc::clone(&change), table: Arc::clone(table) };
            if self.parked.is_empty() {
                self.admit(payload, now);
            } else {
                self.parked.push_back(payload);
            }
        }
        if unregistered {
            metrics::counter!("cdc_skipped_rows_total", "reason" => "unregistered").increment(1);
        }
    }

    /// Hands the row over, if there is room for it.
    fn admit(&mut self, payload: Payload, now: Instant) {
        let project = payload.table.project.id;
        let owner = Owner { shard: shard_of(project, self.shards.len()), project };
        match self.reader.admit(owner, payload.change.position.change, memory_of(&payload.change), now) {
            Some(admission) => self.collect(admission, payload),
            None => self.parked.push_front(payload),
        }
    }

    /// There is room for the row that waited.
    pub(crate) fn unpark(&mut self, admission: Admission) {
        let Some(payload) = self.parked.pop_front() else { return };
        self.collect(admission, payload);
        if let Some(next) = self.parked.pop_front() {
            self.admit(next, Instant::now());
        }
        self.flush();
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
        self.parked.clear();
        for shard in &self.shards {
            shard.abandon();
        }
        self.reader.forget(Instant::now());
    }

    /// A new generation: positions that were read have no meaning any more.
    pub(crate) fn forget(&mut self) {
        self.parked.clear();
        self.vitals.forget_positions();
        self.reader.forget(Instant::now());
    }

    /// The shards, in order.
    pub(crate) fn shards(&self) -> &[Arc<ShardQueue>] {
        &self.shards
    }
}

/// Whose rows have this name in the log.
fn subscribers(registry: &Registry, name: &Relation) -> Vec<(ProjectId, Option<[String; 2]>)> {
    let whose = registry.of(name).map(|table| &table.key);
    whose.map(|key| (key.project, Some([key.schema.clone(), key.table.clone()]))).collect()
}

/// Who may have lost something, where nobody knows what.
fn everybody(registry: &Registry) -> impl Iterator<Item = (ProjectId, Option<[String; 2]>)> {
    registry.projects.keys().map(|project| (*project, None))
}

/// What the decoded row holds; the encoded message comes on top when it is made (R-MEM-2).
pub(crate) fn memory_of(change: &Change) -> usize {
    let cells = |image: &Option<Image>| image.as_ref().map_or(0, |image| image.0.capacity() * size_of::<Cell>());
    ROW_OVERHEAD + size_of::<Row>() + cells(&change.new) + cells(&change.old) + change.wire_bytes
}

/// By hash of the project's id (`CDC_NUM_SHARDS`).
fn shard_of(project: ProjectId, shards: usize) -> usize {
    let mut hasher = DefaultHasher::new();
    project.hash(&mut hasher);
    usize::try_from(hasher.finish() % shards as u64).expect("a shard's number is small")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use aura_domain::{Generation, SourceId, SqlName};
    use aura_flow::ReaderLimits;
    use aura_pgsource::Plugin;
    use aura_store::{Project, ProjectSecrets, ProjectSettings};
    use uuid::Uuid;

    use super::{super::registry::ProjectInfo, *};

    /// The server's log so far.
    const START: Lsn = Lsn(0x100);

    struct Rig {
        intake: Intake,
        decoder: Decoder,
        registry: Registry,
        at: Instant,
    }

    impl Rig {
        /// Of two projects, with panics that have happened too often at these places.
        fn new(panics: &[(Lsn, Frame)]) -> Self {
            let (at, generation) = (Instant::now(), Generation(1));
            let limits = ReaderLimits {
                quota: 1 << 20,
                advance_interval: Duration::ZERO,
                stall_limit: Duration::from_secs(120),
                outage_limit: Duration::from_secs(900),
            };
            let skips = panics.iter().map(|(start, frame)| record_position(generation, *start, *frame)).collect();
            let (shards, vitals) = (vec![Arc::default(), Arc::default()], Arc::new(Vitals::new(2)));
            let mut intake = Intake::new(Reader::new(limits, at), shards, Arc::default(), vitals, skips);
            intake.begin_session(Opening {
                start: START,
                confirmed: START,
                wal_end: START,
                holds_from: Lsn::ZERO,
                wal_sender_timeout: Duration::ZERO,
                holes: 0,
            });
            let mut registry = Registry::default();
            for number in 1..=2 {
                let project = project(ProjectId(Uuid::from_u128(number)));
                registry.projects.insert(project.id, Arc::new(project));
            }
            Self { intake, decoder: Decoder::new(Plugin::Wal2json, generation), registry, at }
        }

        /// A transaction of one row, which ends at `end`.
        fn transaction(&mut self, begin: u64, end: u64) -> Vec<Loss> {
            let lsns = format!(r#""lsn":"0/{:X}","nextlsn":"0/{end:X}""#, end - 8);
            let row = r#"{"action":"I","schema":"s","table":"t","columns":[]}"#;
            let mut lost = self.read(begin, &format!(r#"{{"action":"B","xid":7,{lsns}}}"#));
            lost.extend(self.read(begin, row));
            lost.extend(self.read(end, &format!(r#"{{"action":"C","xid":7,{lsns}}}"#)));
            lost
        }

        fn read(&mut self, start: u64, line: &str) -> Vec<Loss> {
            let (start, payload) = (Lsn(start), Bytes::from(line.to_owned()));
            let message = StreamMessage::Data { start, end: start, payload };
            self.intake.take(&mut self.decoder, &self.registry, &message)
        }

        /// What the server may be told, whatever it says itself meanwhile.
        fn confirms(&mut self, keepalive: u64) -> Lsn {
            let message = StreamMessage::Keepalive { end: Lsn(keepalive), reply_requested: false };
            self.intake.take(&mut self.decoder, &self.registry, &message);
            self.intake.reader.final_status(self.at).expect("a session").flushed
        }
    }

    fn project(id: ProjectId) -> ProjectInfo {
        let project = Project {
            id,
            name: "demo".to_owned(),
            source: SourceId(Uuid::nil()),
            schema: SqlName::new("s").expect("a name"),
            settings: ProjectSettings::default(),
            version: 1,
            created_at: String::new(),
        };
        let secret = || "secret".to_owned().into();
        ProjectInfo::new(&project, ProjectSecrets { jwt_secret: secret(), visibility_password: secret() })
    }

    fn announce(lost: Vec<Loss>) {
        lost.into_iter().flat_map(|loss| loss.claims).for_each(Admission::ack);
    }

    /// What comes behind a begin that can't be read is outside of any transaction: all the more must it wait.
    #[test]
    fn r_sd_6_no_position_passes_a_begin_that_is_skipped_before_everybody_knows() {
        let mut rig = Rig::new(&[(Lsn(0x210), Frame::Begin)]);
        assert!(rig.transaction(0x200, 0x208).is_empty());
        let lost = rig.transaction(0x210, 0x220);
        assert_eq!(lost.len(), 2, "each project's");
        assert!(lost.iter().all(|loss| loss.claims.len() == 1), "{lost:?}");
        assert!(rig.transaction(0x230, 0x240).is_empty(), "the next one is read");
        assert_eq!(rig.confirms(0x240), Lsn(0x208), "nobody knows yet");
        assert!(!rig.intake.reader.is_settled());
        announce(lost);
        assert_eq!(rig.confirms(0x250), Lsn(0x250));
        assert!(rig.intake.reader.is_settled());
    }

    #[test]
    fn r_sd_6_a_transaction_whose_end_is_skipped_ends_all_the_same() {
        let mut rig = Rig::new(&[(Lsn(0x220), Frame::Commit)]);
        let lost = rig.transaction(0x210, 0x220);
        assert_eq!(lost.len(), 2);
        assert!(!rig.intake.reader.in_transaction());
        assert_eq!(rig.confirms(0x220), START, "nobody knows yet");
        announce(lost);
        assert_eq!(rig.intake.reader.final_status(rig.at).map(|status| status.flushed), Some(Lsn(0x220)));
        assert!(rig.transaction(0x220, 0x230).is_empty(), "the next one begins where it ends");
        assert_eq!(rig.confirms(0x240), Lsn(0x240));
    }

    #[test]
    fn r_sd_6_a_row_that_is_skipped_takes_no_begin_with_it() {
        let mut rig = Rig::new(&[(Lsn(0x210), Frame::Inside)]);
        let lost = rig.transaction(0x210, 0x220);
        assert_eq!(lost.len(), 2, "the row alone: {lost:?}");
        assert_eq!(rig.confirms(0x220), START);
        announce(lost);
        assert_eq!(rig.confirms(0x220), Lsn(0x220));
    }

    /// R-DEC-4: not the intake's fault, and the same for the position.
    #[test]
    fn r_dec_4_no_position_passes_a_begin_that_can_t_be_decoded_before_everybody_knows() {
        let mut rig = Rig::new(&[]);
        let lost = rig.read(0x210, r#"{"action":"B","xid":"?"}"#);
        assert_eq!(lost.len(), 2);
        let end = r#"{"action":"C","xid":7,"lsn":"0/218","nextlsn":"0/220"}"#;
        assert!(rig.read(0x220, end).is_empty());
        assert_eq!(rig.confirms(0x230), START);
        announce(lost);
        assert_eq!(rig.confirms(0x230), Lsn(0x230));
    }
}
