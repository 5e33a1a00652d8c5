//! Nanoseconds an acknowledgement costs the resolved position (P.5: at most 100) with 64 shards and 10^6 rows outstanding:
//! `cargo bench -p aura-flow`. One line of JSON.

use std::{
    collections::VecDeque,
    hint::black_box,
    time::{Duration, Instant},
};

use aura_domain::{Lsn, ProjectId};
use aura_flow::{Owner, ResolvedTracker, RowClaim};
use uuid::Uuid;

const SHARDS: usize = 64;
const OUTSTANDING: u64 = 1_000_000;
/// Rows of a transaction.
const ROWS: u64 = 4;
/// The intake looks once for so many acknowledgements.
const LOOK: u64 = 1000;

struct Load {
    tracker: ResolvedTracker,
    shards: Vec<VecDeque<RowClaim>>,
    lsn: u64,
    random: u64,
    now: Instant,
}

impl Load {
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// A transaction of a tenant.
    fn transaction(&mut self) {
        let shard = usize::try_from(self.random() % SHARDS as u64).expect("small");
        let owner = Owner { shard, project: ProjectId(Uuid::from_u128(shard as u128)) };
        self.tracker.begin();
        for _ in 0..ROWS {
            self.lsn += 100;
            let claim = self.tracker.admit(owner, Lsn(self.lsn), self.now);
            self.shards[shard].push_back(claim);
        }
        self.lsn += 100;
        self.tracker.commit(Lsn(self.lsn));
    }

    /// The next row of some shard: each in its order, the shards in any.
    fn acknowledge(&mut self) {
        let mut shard = usize::try_from(self.random() % SHARDS as u64).expect("small");
        while self.shards[shard].is_empty() {
            shard = (shard + 1) % SHARDS;
        }
        self.shards[shard].pop_front().expect("not empty").ack();
    }
}

fn main() {
    let now = Instant::now();
    let shards = (0..SHARDS).map(|_| VecDeque::new()).collect();
    let mut load =
        Load { tracker: ResolvedTracker::new(Lsn(0), now), shards, lsn: 0, random: 88_172_645_463_325_252, now };
    for _ in 0..OUTSTANDING / ROWS {
        load.transaction();
    }
    // As many come as go, so that a million are out all the time.
    let (mut acking, mut reading) = (Vec::new(), Vec::new());
    for _ in 0..3 * OUTSTANDING / LOOK {
        let began = Instant::now();
        for _ in 0..LOOK {
            load.acknowledge();
        }
        black_box(load.tracker.resolve());
        acking.push(began.elapsed());
        let began = Instant::now();
        for _ in 0..LOOK / ROWS {
            load.transaction();
        }
        reading.push(began.elapsed());
    }
    #[expect(clippy::print_stdout, reason = "its output")]
    {
        println!(
            "{{\"shards\":{SHARDS},\"outstanding\":{OUTSTANDING},\"ns_per_ack\":{:.1},\"ns_per_admit\":{:.1}}}",
            median(acking),
            median(reading)
        );
    }
}

/// Nanoseconds a row, of the middle one: whoever else uses the processor shows in a few.
fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_nanos() as f64 / LOOK as f64
}
