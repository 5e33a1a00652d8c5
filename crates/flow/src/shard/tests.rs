use aura_domain::Lsn;
use proptest::prelude::*;

use super::*;
use crate::{Owner, Quota, ResolvedTracker, row::Admission};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const QUOTA: usize = 10_000;
const SKIP_AFTER: Duration = Duration::from_secs(60);
const LINGER: Duration = ms(20);

fn project(n: u8) -> ProjectId {
    format!("00000000-0000-4000-8000-0000000000{n:02x}").parse().expect("an id")
}

/// A shard with what admits its rows. Each row is a transaction of its own, numbered from 1.
struct Rig {
    shard: Shard<u64>,
    quota: Quota,
    tracker: ResolvedTracker,
    start: Instant,
    row: u64,
}

impl Rig {
    fn new() -> Self {
        let limits = ShardLimits {
            quota: QUOTA,
            skip_after: SKIP_AFTER,
            linger: LINGER,
            busy: 2,
            batch_rows: 4,
            batch_bytes: 1000,
        };
        let start = Instant::now();
        let tracker = ResolvedTracker::new(Lsn(0), start);
        Self { shard: Shard::new(limits), quota: Quota::new(10 * QUOTA), tracker, start, row: 0 }
    }

    fn push(&mut self, n: u8, bytes: usize, now: Instant) -> u64 {
        self.row += 1;
        self.tracker.begin();
        let owner = Owner { shard: 0, project: project(n) };
        let memory = self.quota.admit(bytes).expect("room");
        let claim = self.tracker.admit(owner, Lsn(self.row), now);
        self.shard.push(Admission { owner, claim, memory, at: now }.carry(self.row), now);
        self.tracker.commit(Lsn(self.row));
        self.row
    }

    fn start(&mut self, now: Instant) -> Vec<Batch<u64>> {
        std::iter::from_fn(|| self.shard.start(now)).collect()
    }

    fn done(&mut self, batch: Batch<u64>, now: Instant) {
        self.shard.finish(batch.project, batch.rows, Outcome::Done { skipped: 0 }, now);
    }

    fn resolved(&mut self) -> u64 {
        self.tracker.resolve().0
    }
}

fn bodies(batch: &Batch<u64>) -> Vec<u64> {
    batch.rows.iter().map(|row| row.body).collect()
}

#[test]
fn r_sh_1_a_project_is_in_order_with_one_batch_on_the_way_and_holds_up_no_other() {
    let mut rig = Rig::new();
    let now = rig.start;
    rig.push(1, 10, now);
    let first = rig.start(now);
    for _ in 0..5 {
        rig.push(1, 10, now);
    }
    rig.push(2, 10, now);
    let other = rig.start(now);
    assert_eq!((first.len(), bodies(&first[0])), (1, vec![1]), "sealed at once: nothing else to do");
    assert_eq!((other.len(), bodies(&other[0])), (1, vec![7]), "not behind the other project");
    for batch in other.into_iter().chain(first) {
        rig.done(batch, now);
    }
    let second = rig.start(now);
    assert_eq!((second.len(), bodies(&second[0])), (1, vec![2, 3, 4, 5]), "no more than a batch may have");
}

#[test]
fn r_ack_4_the_linger_is_an_upper_bound_and_only_for_a_busy_shard() {
    let mut rig = Rig::new();
    let now = rig.start;
    for n in 1..=2 {
        rig.push(n, 10, now);
    }
    let busy = rig.start(now);
    assert_eq!(busy.len(), 2);
    rig.push(3, 10, now);
    assert!(rig.start(now).is_empty(), "it waits for company");
    assert_eq!(rig.shard.due(), Some(now + LINGER));
    assert!(rig.start(now + LINGER - ms(1)).is_empty());
    let late = rig.start(now + LINGER);
    assert_eq!((late.len(), bodies(&late[0])), (1, vec![3]), "though both others are still on their way");

    rig.push(4, 10, now + LINGER);
    for batch in busy.into_iter().chain(late) {
        rig.done(batch, now + LINGER);
    }
    assert_eq!(rig.start(now + LINGER).len(), 1, "idle again: at once");
}

#[test]
fn r_ack_4_a_full_batch_and_one_that_has_waited_go_at_once() {
    let mut rig = Rig::new();
    let now = rig.start;
    for n in 1..=2 {
        rig.push(n, 10, now);
    }
    let mut busy = rig.start(now);
    for _ in 0..4 {
        rig.push(3, 10, now);
    }
    rig.push(4, 1000, now);
    let full = rig.start(now);
    assert_eq!(full.iter().map(|batch| batch.rows.len()).collect::<Vec<_>>(), [4, 1], "by rows, and by bytes");
    // Two stay on their way, so the shard is busy all the time.
    rig.push(1, 10, now);
    rig.done(busy.remove(0), now + ms(30));
    assert_eq!(rig.start(now + ms(30)).len(), 1, "it has waited behind its own batch");
}

#[test]
fn r_mem_6_sealing_leaves_no_partial_batch_behind() {
    let mut rig = Rig::new();
    let now = rig.start;
    for n in 1..=2 {
        rig.push(n, 10, now);
    }
    let _busy = rig.start(now);
    for n in 3..=6 {
        rig.push(n, 10, now);
    }
    assert!(rig.start(now).is_empty());
    rig.shard.seal(true);
    assert_eq!(rig.start(now).len(), 4);
    rig.push(7, 10, now);
    assert_eq!(rig.start(now).len(), 1, "and what comes while it lasts");
    rig.shard.seal(false);
    rig.push(8, 10, now);
    assert!(rig.start(now).is_empty());
}

#[test]
fn r_sh_2_a_shard_is_hot_from_a_fifth_until_below_a_tenth() {
    let mut rig = Rig::new();
    let now = rig.start;
    rig.push(1, 1999, now);
    assert!(!rig.shard.gauges(now).hot);
    rig.push(2, 1, now);
    assert!(rig.shard.gauges(now).hot);
    let batches = rig.start(now);
    assert!(batches.iter().all(|batch| batch.hot), "it must not look ahead");
    rig.push(3, 999, now);
    for batch in batches {
        rig.done(batch, now);
    }
    assert_eq!(rig.shard.gauges(now), ShardGauges { rows: 1, bytes: 999, delivered: 2, ..ShardGauges::default() });
    rig.push(3, 1001, now);
    let mut batches = rig.start(now);
    rig.done(batches.remove(0), now);
    assert!(rig.shard.gauges(now).hot, "1001 is above a tenth");
}

#[test]
fn r_sh_3_a_silent_project_is_skipped_and_tried_again_with_its_next_row() {
    let mut rig = Rig::new();
    let now = rig.start;
    rig.push(1, 10, now);
    let stuck = rig.start(now).remove(0);
    rig.push(1, 10, now);
    rig.push(2, 10, now);
    let other = rig.start(now).remove(0);
    rig.done(other, now);
    assert_eq!(rig.resolved(), 0);
    assert_eq!(rig.shard.due(), Some(now + SKIP_AFTER));
    assert!(rig.shard.cancels(now + SKIP_AFTER - ms(1)).is_empty());
    let later = now + SKIP_AFTER;
    assert_eq!(rig.shard.cancels(later), [project(1)]);
    assert!(rig.shard.cancels(later).is_empty(), "named once");
    rig.push(1, 10, later);
    rig.shard.finish(project(1), stuck.rows, Outcome::Cancelled, later);
    let skip = rig.start(later).remove(0);
    assert_eq!((skip.job, bodies(&skip)), (Job::Skip, vec![1, 2, 4]), "all that is pending, in order");
    rig.push(1, 10, later);
    rig.done(skip, later);
    assert_eq!(rig.resolved(), 4, "acknowledged as skipped");
    assert_eq!((rig.shard.gauges(later).skipped, rig.shard.gauges(later).delivered), (3, 1));
    let again = rig.start(later).remove(0);
    assert_eq!((again.job, bodies(&again)), (Job::Deliver, vec![5]));
}

#[test]
fn r_sh_3_every_acknowledgement_gives_a_project_its_time_again() {
    let mut rig = Rig::new();
    let now = rig.start;
    for _ in 0..5 {
        rig.push(1, 10, now);
    }
    let first = rig.start(now).remove(0);
    rig.done(first, now + SKIP_AFTER - ms(1));
    assert!(rig.shard.cancels(now + SKIP_AFTER + SKIP_AFTER - ms(2)).is_empty());
    let second = rig.start(now + SKIP_AFTER);
    assert_eq!(rig.shard.cancels(now + SKIP_AFTER + SKIP_AFTER - ms(1)), [project(1)]);
    assert_eq!(second.len(), 1);
}

#[test]
fn r_sh_3_nobody_is_skipped_for_a_known_outage() {
    let mut rig = Rig::new();
    let now = rig.start;
    rig.push(1, 10, now);
    let _stuck = rig.start(now);
    rig.shard.outage(true, now + ms(10));
    assert_eq!(rig.shard.due(), None);
    assert!(rig.shard.cancels(now + 10 * SKIP_AFTER).is_empty());
    let over = now + 5 * SKIP_AFTER;
    rig.shard.outage(false, over);
    assert!(rig.shard.cancels(over + SKIP_AFTER - ms(1)).is_empty(), "the time begins anew");
    assert_eq!(rig.shard.cancels(over + SKIP_AFTER), [project(1)]);
}

#[test]
fn r_sh_3_a_process_that_slept_skips_nobody_for_it() {
    let mut rig = Rig::new();
    let now = rig.start;
    rig.push(1, 10, now);
    let _stuck = rig.start(now);
    let awake = now + 2 * SKIP_AFTER;
    assert!(rig.shard.cancels(awake).is_empty());
    assert_eq!(rig.shard.cancels(awake + SKIP_AFTER), [project(1)], "the time has begun anew");
}

/// A project that holds more than a fifth all the time is in the way only if its rows are as old: one that gets on with a
/// large transaction is not skipped, one that gets on too slowly is.
#[test]
fn r_sh_3_a_heavy_project_is_skipped_when_its_rows_grow_old() {
    for (pace, skipped) in [(ms(5000), false), (ms(13_000), true)] {
        let mut rig = Rig::new();
        let mut now = rig.start;
        let mut named = Vec::new();
        for _ in 0..5 {
            rig.push(1, 600, now);
        }
        while named.is_empty() && now < rig.start + 2 * SKIP_AFTER {
            let batch = rig.start(now).remove(0);
            let until = now + pace;
            while now < until {
                now += ms(1000);
                named.extend(rig.shard.cancels(now));
            }
            rig.done(batch, now);
            rig.push(1, 600, now);
        }
        assert_eq!(!named.is_empty(), skipped, "a batch each {pace:?}");
    }
}

#[test]
fn r_fb_6_the_biggest_of_a_hot_shard_and_the_oldest_go_first() {
    let mut rig = Rig::new();
    let now = rig.start;
    rig.push(1, 10, now);
    let later = now + Duration::from_secs(11);
    rig.push(2, 2500, later);
    rig.push(3, 10, later);
    let batches = rig.start(later);
    assert_eq!(batches.len(), 2);
    let mut slow = rig.shard.skip_slowest(Duration::from_secs(10), later);
    slow.sort_unstable();
    assert_eq!(slow, [project(1), project(2)], "not who has just come");
    assert!(rig.shard.skip_slowest(Duration::from_secs(10), later).is_empty());
}

#[test]
fn abandoned_rows_are_never_acknowledged() {
    let mut rig = Rig::new();
    let now = rig.start;
    rig.push(1, 10, now);
    let on_the_way = rig.start(now);
    rig.push(1, 10, now);
    rig.push(2, 10, now);
    rig.shard.abandon();
    drop(on_the_way);
    assert!(rig.shard.is_empty() && rig.shard.due().is_none());
    assert_eq!((rig.resolved(), rig.quota.used()), (0, 0));
    rig.push(1, 10, now);
    assert_eq!(rig.start(now).len(), 1, "it goes on with what is read again");
}

#[derive(Debug, Clone)]
enum Op {
    Push(u8, usize),
    Finish(prop::sample::Index),
    Wait(u64),
    Seal(bool),
    Outage(bool),
    Slowest,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0u8..5, 1usize..900).prop_map(|(project, bytes)| Op::Push(project, bytes)),
        6 => any::<prop::sample::Index>().prop_map(Op::Finish),
        4 => prop_oneof![0u64..30, Just(61_000u64)].prop_map(Op::Wait),
        1 => any::<bool>().prop_map(Op::Seal),
        1 => any::<bool>().prop_map(Op::Outage),
        1 => Just(Op::Slowest),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    /// Order per project (4), one batch of it on the way, nothing forgotten or counted twice, nobody waits longer than the
    /// linger for a batch of his own (8), and nobody silent is left alone beyond his time (10).
    #[test]
    fn invariants_04_08_10_a_shard_equals_its_model(ops in prop::collection::vec(op(), 1..120)) {
        let mut rig = Rig::new();
        let mut now = rig.start;
        let mut flying: Vec<(Batch<u64>, bool)> = Vec::new();
        let mut ended: HashMap<ProjectId, u64> = HashMap::new();
        let mut outage = false;
        for op in ops {
            match op {
                Op::Push(n, bytes) => drop(rig.push(n, bytes, now)),
                Op::Finish(at) if !flying.is_empty() => {
                    let (batch, cancelled) = flying.swap_remove(at.index(flying.len()));
                    if cancelled {
                        rig.shard.finish(batch.project, batch.rows, Outcome::Cancelled, now);
                    } else {
                        for row in &batch.rows {
                            let before = ended.insert(batch.project, row.body);
                            prop_assert!(before.is_none_or(|before| before < row.body), "out of order, or twice");
                        }
                        rig.done(batch, now);
                    }
                }
                Op::Wait(wait) => now += ms(wait),
                Op::Seal(seal) => rig.shard.seal(seal),
                Op::Outage(on) => {
                    outage = on;
                    rig.shard.outage(on, now);
                }
                Op::Slowest => {
                    let slow = rig.shard.skip_slowest(SKIP_AFTER / 2, now);
                    for (batch, cancelled) in &mut flying {
                        *cancelled |= slow.contains(&batch.project);
                    }
                }
                Op::Finish(_) => {}
            }
            let due = rig.shard.cancels(now);
            prop_assert!(due.is_empty() || !outage);
            for (batch, cancelled) in &mut flying {
                *cancelled |= due.contains(&batch.project);
            }
            for batch in rig.start(now) {
                prop_assert!(!batch.rows.is_empty());
                prop_assert!(flying.iter().all(|(other, _)| other.project != batch.project));
                flying.push((batch, false));
            }
            prop_assert!(rig.shard.due().is_none_or(|due| due > now), "whoever looks when told to has looked at all");
            let gauges = rig.shard.gauges(now);
            prop_assert_eq!(gauges.bytes, rig.quota.used());
            prop_assert_eq!(gauges.rows as u64 + gauges.delivered + gauges.skipped, rig.row);
            for lane in rig.shard.lanes.values() {
                let ready = lane.flight.is_none();
                prop_assert!(!ready || lane.ready_since.is_some_and(|since| now < since + LINGER));
            }
        }
        while let Some((batch, _)) = flying.pop() {
            rig.done(batch, now);
            flying.extend(rig.start(now + LINGER).into_iter().map(|batch| (batch, false)));
        }
        prop_assert!(rig.shard.is_empty());
        prop_assert_eq!((rig.resolved(), rig.quota.used()), (rig.row, 0));
        prop_assert!(rig.shard.by_ack.is_empty() && rig.shard.by_age.is_empty() && rig.shard.over.is_empty());
    }
}
