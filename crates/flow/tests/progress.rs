//! Invariant 9: with a sink that lives, whatever is committed is delivered and confirmed, of any size.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use aura_domain::{Lsn, ProjectId};
use aura_flow::{
    Admission, Batch, Opening, Outcome, Owner, Reader, ReaderLimits, Reservation, Shard, ShardLimits, Step, Turn,
};
use proptest::{prelude::*, sample::Index};
use uuid::Uuid;

const QUOTA: usize = 1000;
const SHARDS: usize = 2;
const INTERVAL: Duration = Duration::from_millis(100);

/// What a server sends.
#[derive(Debug, Clone, Copy)]
enum Frame {
    Begin,
    Row { project: u128, lsn: u64, bytes: usize },
    Commit(u64),
}

/// Rows of a transaction: project and bytes.
type Transaction = Vec<(u128, usize)>;

/// Sizes about every line that there is; any event, up to ten times the quota.
fn bytes() -> impl Strategy<Value = usize> {
    prop_oneof![
        10 => 1..QUOTA / 8,
        3 => QUOTA / 3..QUOTA,
        1 => Just(QUOTA * 8 / 10),
        1 => QUOTA - 1..=QUOTA + 1,
        1 => QUOTA..=10 * QUOTA,
    ]
}

fn transactions() -> impl Strategy<Value = Vec<Transaction>> {
    let small = prop::collection::vec((0u128..4, bytes()), 1..8);
    // Ten times the quota in rows that fit.
    let huge = prop::collection::vec((0u128..4, QUOTA / 10..QUOTA / 5), 60..100);
    prop::collection::vec(prop_oneof![5 => small, 1 => huge], 1..8)
}

/// A batch on its way, with what it grew by.
struct Flight {
    shard: usize,
    batch: Batch<usize>,
    growth: Reservation,
}

struct Pipeline {
    now: Instant,
    reader: Reader,
    shards: Vec<Shard<usize>>,
    flights: Vec<Flight>,
    log: VecDeque<Frame>,
    /// Number of the row that waits for room.
    parked: Option<usize>,
    rows: usize,
    largest: usize,
    delivered: Vec<usize>,
    confirmed: Lsn,
}

impl Pipeline {
    fn new(log: VecDeque<Frame>) -> Self {
        let now = Instant::now();
        let limits = ReaderLimits {
            quota: QUOTA,
            advance_interval: INTERVAL,
            stall_limit: Duration::from_secs(120),
            outage_limit: Duration::from_secs(900),
        };
        let shard = ShardLimits {
            quota: QUOTA,
            skip_after: Duration::from_secs(60),
            linger: Duration::from_millis(20),
            busy: 2,
            batch_rows: 8,
            batch_bytes: QUOTA / 16,
        };
        let mut reader = Reader::new(limits, now);
        let opening = Opening {
            start: Lsn(1),
            confirmed: Lsn(1),
            wal_end: Lsn(1),
            holds_from: Lsn::ZERO,
            wal_sender_timeout: Duration::from_secs(60),
            holes: 0,
        };
        reader.begin_session(opening, now);
        Self {
            now,
            reader,
            shards: (0..SHARDS).map(|_| Shard::new(shard)).collect(),
            flights: Vec::new(),
            log,
            parked: None,
            rows: 0,
            largest: 0,
            delivered: Vec::new(),
            confirmed: Lsn::ZERO,
        }
    }

    /// Does what the reader says until it waits. True = it may read; and when to ask again.
    fn steps(&mut self) -> (bool, Instant) {
        loop {
            match self.reader.next(self.now) {
                Step::Status(status) => self.confirmed = status.flushed,
                Step::Turn(turn) => self.shards.iter_mut().for_each(|shard| shard.seal(turn == Turn::Paused)),
                Step::Admit(admission) => {
                    let row = self.parked.take().expect("a row waits");
                    self.push(admission, row);
                }
                Step::Fail(stall) => panic!("it gives up: {stall:?}"),
                Step::Wait { read, until } => return (read, until),
                _ => {}
            }
            self.invariant_05();
        }
    }

    fn read(&mut self) {
        match self.log.pop_front().expect("there is more") {
            Frame::Begin => self.reader.begin(),
            Frame::Commit(end) => self.reader.commit(Lsn(end)),
            Frame::Row { project, lsn, bytes } => {
                let shard = usize::try_from(project).expect("small") % SHARDS;
                let owner = Owner { shard, project: ProjectId(Uuid::from_u128(1 + project)) };
                self.largest = self.largest.max(bytes);
                self.rows += 1;
                match self.reader.admit(owner, Lsn(lsn), bytes, self.now) {
                    Some(admission) => self.push(admission, self.rows),
                    None => self.parked = Some(self.rows),
                }
                self.reader.frame(Lsn(lsn), self.now);
            }
        }
    }

    fn push(&mut self, admission: Admission, row: usize) {
        self.shards[admission.shard()].push(admission.carry(row), self.now);
    }

    fn take_off(&mut self) -> bool {
        let before = self.flights.len();
        for (n, shard) in self.shards.iter_mut().enumerate() {
            while let Some(batch) = shard.start(self.now) {
                let mut growth = batch.rows[0].growth();
                growth.grow(batch.rows.iter().map(aura_flow::Row::bytes).sum::<usize>() / 2);
                self.flights.push(Flight { shard: n, batch, growth });
            }
        }
        self.flights.len() > before
    }

    /// The sink takes a batch.
    fn land(&mut self, which: Index) {
        let Flight { shard, batch, growth } = self.flights.swap_remove(which.index(self.flights.len()));
        drop(growth);
        self.delivered.extend(batch.rows.iter().map(|row| row.body));
        self.shards[shard].finish(batch.project, batch.rows, Outcome::Done { skipped: 0 }, self.now);
        self.reader.acked(self.now);
    }

    fn invariant_05(&self) {
        let quota = self.reader.quota();
        let rows: usize = self.shards.iter().map(|shard| shard.gauges(self.now).bytes).sum();
        let held = rows + self.flights.iter().map(|flight| flight.growth.bytes()).sum::<usize>();
        assert_eq!(quota.used(), held, "usage is what is held");
        assert!(held <= QUOTA + self.largest + quota.overdraft(), "{held} with an event of {}", self.largest);
        assert_eq!(quota.counts().resume_by_tick, 0, "a wake-up was lost");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn invariant_09_any_size_is_delivered_and_confirmed(
        transactions in transactions(),
        order in prop::collection::vec(any::<Index>(), 1..20),
    ) {
        let (mut log, mut lsn) = (VecDeque::new(), 10);
        for rows in &transactions {
            log.push_back(Frame::Begin);
            for (project, bytes) in rows {
                lsn += 10;
                log.push_back(Frame::Row { project: *project, lsn, bytes: *bytes });
            }
            lsn += 10;
            log.push_back(Frame::Commit(lsn));
        }
        let rows: usize = transactions.iter().map(Vec::len).sum();
        let mut pipeline = Pipeline::new(log);
        let mut order = order.into_iter().cycle();
        // Of each row: read, taken off, landed; of time: a linger, an interval and a sign of life each.
        let mut budget = 20 * rows + 100;
        while pipeline.delivered.len() < rows || pipeline.confirmed < Lsn(lsn) {
            budget -= 1;
            prop_assert!(budget > 0, "no progress: {} of {rows} delivered, confirmed {}", pipeline.delivered.len(),
                pipeline.confirmed);
            let (read, until) = pipeline.steps();
            // As a sink does, whenever it likes; reading goes on beside it.
            let sink = order.next().expect("a cycle");
            if read && !pipeline.log.is_empty() && sink.index(4) > 0 {
                pipeline.read();
            } else if pipeline.take_off() {
            } else if !pipeline.flights.is_empty() {
                pipeline.land(sink);
            } else if read && !pipeline.log.is_empty() {
                pipeline.read();
            } else {
                let due = pipeline.shards.iter().filter_map(Shard::due).min();
                pipeline.now = due.map_or(until, |due| due.min(until)).max(pipeline.now + Duration::from_millis(1));
            }
            pipeline.invariant_05();
        }
        prop_assert_eq!((pipeline.reader.quota().used(), pipeline.reader.quota().overdraft()), (0, 0));
        pipeline.delivered.sort_unstable();
        prop_assert!(pipeline.delivered.iter().copied().eq(1..=rows), "each once");
    }
}
