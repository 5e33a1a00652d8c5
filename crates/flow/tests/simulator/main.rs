//! The simulator (P.2): the machines that production runs, in a plain loop with fakes whose rules are the measured ones, a
//! virtual clock and one seed. Every step checks invariants 1, 2, 5, 6, 7, 8, 10, 12 and 13; every run's end the others.
//!
//! `AURA_SIM_SEED=17` runs one seed again, `AURA_SIM_SEED=17:5` one with the faults of this mask only. `AURA_SIM_SEEDS=1000000`
//! runs so many.

mod bus;
mod chance;
mod check;
mod platform;
mod run;
mod script;
mod source;
mod worker;
mod world;

use std::{
    collections::BTreeMap,
    env,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
};

use run::Stats;
use script::Script;

/// Seeds that have failed once, each with the mask of faults that it takes.
const REGRESSIONS: &str = include_str!("regressions.txt");

/// The script of a seed, with the faults of the mask.
fn script(seed: u64, mask: u64) -> Script {
    let mut script = Script::new(seed);
    let mut n = 0;
    script.faults.retain(|_| {
        n += 1;
        mask >> ((n - 1) % 64) & 1 == 1
    });
    script
}

/// Leaves out faults for as long as the same seed fails without them.
fn shrink(seed: u64, mut mask: u64) -> u64 {
    let faults = Script::new(seed).faults.len().min(63);
    mask &= (1 << faults) - 1;
    for fault in 0..faults {
        let without = mask & !(1 << fault);
        if without != mask && run::run(seed, &script(seed, without)).is_err() {
            mask = without;
        }
    }
    mask
}

fn fail(seed: u64, mask: u64, violation: &str) -> ! {
    let mask = shrink(seed, mask);
    let script = script(seed, mask);
    let smaller = run::run(seed, &script).err().unwrap_or_default();
    panic!(
        "AURA_SIM_SEED={seed}:{mask} breaks an invariant: {violation}\nwith fewer faults: {smaller}\n{:?} {:?}\nfaults: {:?}\nkeep it in regressions.txt",
        script.workload, script.settings, script.faults
    );
}

fn parse(line: &str) -> (u64, u64) {
    let (seed, mask) = line.split_once(':').unwrap_or((line, "18446744073709551615"));
    (seed.trim().parse().expect("a seed"), mask.trim().parse().expect("a mask"))
}

/// A value of the environment; this is a test, nothing else reads it.
fn var(name: &str) -> Option<String> {
    env::var(name).ok()
}

#[test]
fn seeds_that_failed_once() {
    for line in REGRESSIONS.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (seed, mask) = parse(line.split_whitespace().next().expect("a seed"));
        if let Err(violation) = run::run(seed, &script(seed, mask)) {
            fail(seed, mask, &violation);
        }
    }
}

/// Invariant 11 at its size: the cost of an acknowledgement and of a look doesn't know of the backlog, nor of the holes.
#[test]
fn invariant_11_a_hundred_thousand_transactions_and_holes_cost_no_more_each() {
    let stats = run::run(1, &Script::hundred_thousand()).expect("every invariant holds");
    assert!(!stats.cut && stats.rows == 100_000, "{stats:?}");
}

/// Invariant 10 to its number: the position passes whatever a project holds up within `skip_after` and an interval, and all
/// other projects' rows arrive.
#[test]
fn invariant_10_a_project_that_is_stuck_for_ever_holds_the_position_for_skip_after_and_an_interval() {
    let mut gaps = 0;
    for seed in 0..300 {
        let script = Script::one_is_stuck(seed);
        let stats = run::run(seed, &script).unwrap_or_else(|violation| {
            panic!("seed {seed}: {violation}\n{:?} {:?}", script.workload, script.settings)
        });
        assert!(!stats.cut, "seed {seed}: {stats:?}");
        gaps += stats.gaps;
    }
    assert!(gaps > 300, "nobody was stuck: {gaps}");
}

/// Invariants 1 to 15 as the simulator can see them; see the module.
#[test]
fn invariants_01_to_15_hold_for_every_seed() {
    if let Some(one) = var("AURA_SIM_SEED") {
        let (seed, mask) = parse(&one);
        match run::run(seed, &script(seed, mask)) {
            Ok(stats) => println!("seed {seed}: {stats:?}"),
            Err(violation) => fail(seed, mask, &violation),
        }
        return;
    }
    let seeds = var("AURA_SIM_SEEDS").map_or(5000, |seeds| seeds.parse().expect("a number"));
    let (next, failed) = (AtomicU64::new(0), AtomicBool::new(false));
    let threads = thread::available_parallelism().map_or(2, usize::from);
    let all: Vec<(u64, Result<Stats, String>)> = thread::scope(|scope| {
        let work = || {
            let mut done = Vec::new();
            while !failed.load(Ordering::Relaxed) {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= seeds {
                    break;
                }
                let outcome = run::run(seed, &script(seed, u64::MAX));
                failed.fetch_or(outcome.is_err(), Ordering::Relaxed);
                done.push((seed, outcome));
            }
            done
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a run panicked")).collect()
    });
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    for (seed, outcome) in all {
        let stats = outcome.unwrap_or_else(|violation| fail(seed, u64::MAX, &violation));
        let fields = [
            ("runs", 1),
            ("cut", u64::from(stats.cut)),
            ("steps", stats.steps),
            ("rows", stats.rows),
            ("gaps", stats.gaps),
            ("pauses", stats.pauses),
            ("failures", stats.failures),
            ("virtual seconds", stats.virtual_ms / 1000),
        ];
        for (name, value) in fields {
            *sums.entry(name).or_default() += value;
        }
    }
    println!("{sums:?}");
    assert!(sums["cut"] * 20 < sums["runs"], "too many runs are cut before their end");
    assert!(
        ["gaps", "pauses", "failures", "rows"].iter().all(|name| sums[name] > 0),
        "the runs miss what they are for"
    );
}
