use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::Wake,
};

use proptest::prelude::*;

use super::*;

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A quota of 1000 that is paused with this much held, in pieces of 100, and what counts its wake-ups.
fn paused(now: Instant) -> (Quota, Vec<Reservation>, Arc<Wakes>) {
    let mut quota = Quota::new(1000);
    let held = (0..9).map(|_| quota.admit(100).expect("room")).collect();
    assert_eq!(quota.look(None, now), Some(Turn::Paused));
    let wakes = Arc::new(Wakes::default());
    assert!(poll(&quota, &wakes).is_pending());
    (quota, held, wakes)
}

fn poll(quota: &Quota, wakes: &Arc<Wakes>) -> Poll<()> {
    quota.poll_woken(&Context::from_waker(&Arc::clone(wakes).into()))
}

#[test]
fn r_mem_4_thresholds_are_integers_rounded_to_the_safe_side() {
    for (limit, pause_at, resume_below) in
        [(1000, 800, 500), (1001, 801, 500), (1003, 803, 501), (1 << 28, 214_748_365, 1 << 27)]
    {
        let quota = Quota::new(limit);
        assert_eq!((quota.pause_at, quota.resume_below), (pause_at, resume_below), "{limit}");
    }
}

#[test]
fn r_mem_3_a_row_is_admitted_if_it_fits_or_if_nothing_is_held() {
    let now = Instant::now();
    let mut quota = Quota::new(1000);
    let whole = quota.admit(1001).expect("nothing is held");
    assert!(quota.admit(1).is_none());
    drop(whole);
    let whole = quota.admit(1000).expect("exactly the quota");
    drop(whole);
    let part = quota.admit(600).expect("room");
    assert!(quota.admit(401).is_none(), "one too many");
    assert_eq!(quota.look(Some(401), now), None);
    assert!(!quota.may_read(), "a row waits, and nothing behind it is read");
    assert_eq!(quota.counts().waits, 1);
    let rest = quota.admit(400).expect("exactly full");
    drop(part);
    assert!(poll(&quota, &Arc::default()).is_ready(), "the line is crossed: 600 would fit");
    assert_eq!(quota.look(Some(401), now), None);
    assert!(quota.may_read() && quota.admit(401).is_some());
    drop(rest);
}

#[test]
fn r_mem_5_a_release_wakes_once_and_only_by_crossing_the_line() {
    let now = Instant::now();
    let (mut quota, mut held, wakes) = paused(now);
    let count = || wakes.0.load(Ordering::SeqCst);
    held.truncate(5);
    assert_eq!(count(), 0, "500 held: not below the line");
    assert!(poll(&quota, &wakes).is_pending());
    held.truncate(4);
    assert_eq!(count(), 1);
    held.clear();
    assert_eq!(count(), 1, "one notify");
    assert!(poll(&quota, &wakes).is_ready());
    let turn = quota.look(None, now + Duration::from_millis(7));
    assert_eq!(turn, Some(Turn::Resumed(Duration::from_millis(7))));
    assert_eq!(quota.counts(), QuotaCounts { pauses: 1, paused: Duration::from_millis(7), ..QuotaCounts::default() });
}

/// R-MEM-2: never waits, goes over the quota, is counted while it lasts.
#[test]
fn r_mem_2_growing_goes_over_the_quota_and_is_counted() {
    let mut quota = Quota::new(1000);
    let mut row = quota.admit(900).expect("room");
    let mut together = row.empty();
    together.grow(300);
    row.grow(50);
    assert_eq!((quota.used(), quota.overdraft()), (1250, 350));
    drop(together);
    assert_eq!((quota.used(), quota.overdraft(), row.bytes()), (950, 50, 950));
    drop(row);
    assert_eq!((quota.used(), quota.overdraft()), (0, 0));
}

#[test]
fn r_mem_5_the_tick_stands_in_for_a_lost_wake_up_and_counts_it() {
    let now = Instant::now();
    let (mut quota, mut held, _) = paused(now);
    held.truncate(4);
    assert!(!quota.tick(), "the wake-up is there");
    assert_eq!(quota.look(None, now), Some(Turn::Resumed(Duration::ZERO)));
    assert_eq!(quota.counts().resume_by_tick, 0);

    let (mut quota, mut held, _) = paused(now);
    // As if a release had lost it.
    quota.shared.word.fetch_and(!WAITING, SeqCst);
    held.clear();
    assert_eq!(quota.look(None, now), None);
    assert!(!quota.tick(), "a release may be between its subtract and its notify");
    assert!(quota.tick());
    assert_eq!(quota.counts().resume_by_tick, 1);
    assert!(matches!(quota.look(None, now), Some(Turn::Resumed(_))));
}

/// Invariant 6: a panic on the way out releases, too.
#[test]
fn invariant_06_a_panic_releases_what_was_held() {
    let mut quota = Quota::new(1000);
    let held = quota.admit(100).expect("room");
    let task = std::thread::spawn(move || {
        let _held = held;
        panic!("on purpose");
    });
    assert!(task.join().is_err());
    assert_eq!(quota.used(), 0);
}

#[derive(Debug, Clone)]
enum Op {
    Take(usize),
    Grow(prop::sample::Index, usize),
    Release(prop::sample::Index),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (1usize..400).prop_map(Op::Take),
        1 => (1000usize..1100).prop_map(Op::Take),
        1 => (any::<prop::sample::Index>(), 1usize..300).prop_map(|(at, bytes)| Op::Grow(at, bytes)),
        5 => any::<prop::sample::Index>().prop_map(Op::Release),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    /// The flow controller against its definition: usage is the sum of what is held and within its bound (5), each byte
    /// is given back once (6), pause and resume alternate at their lines and nowhere else (7), and whoever waits below the
    /// line goes on without the tick (8).
    #[test]
    fn invariants_05_06_07_08_the_quota_equals_its_model(ops in prop::collection::vec(op(), 1..100)) {
        let now = Instant::now();
        let mut quota = Quota::new(1000);
        let mut held: Vec<Reservation> = Vec::new();
        let (mut paused, mut parked, mut largest) = (false, None, 0);
        for op in ops {
            match op {
                Op::Take(bytes) if quota.may_read() && parked.is_none() => {
                    let fits = quota.used() == 0 || quota.used() + bytes <= 1000;
                    match quota.admit(bytes) {
                        Some(row) => held.push(row),
                        None => parked = Some(bytes),
                    }
                    prop_assert_eq!(parked.is_none(), fits);
                    largest = largest.max(bytes);
                }
                Op::Grow(at, bytes) if !held.is_empty() => {
                    let at = at.index(held.len());
                    held[at].grow(bytes);
                }
                Op::Release(at) if !held.is_empty() => drop(held.swap_remove(at.index(held.len()))),
                _ => {}
            }
            let turn = quota.look(parked, now);
            if quota.may_read() && let Some(bytes) = parked.take() {
                held.push(quota.admit(bytes).expect("the look said that there is room"));
                // Before the next read.
                prop_assert!(turn != Some(Turn::Paused));
                match quota.look(None, now) {
                    Some(Turn::Paused) => paused = true,
                    other => prop_assert!(other.is_none()),
                }
            } else {
                match turn {
                    Some(Turn::Paused) => {
                        prop_assert!(!paused && quota.used() >= 800);
                        paused = true;
                    }
                    Some(Turn::Resumed(_)) => {
                        prop_assert!(paused && quota.used() < 500);
                        paused = false;
                    }
                    None => {
                        let right = if paused { quota.used() >= 500 } else { quota.used() < 800 || parked.is_some() };
                        prop_assert!(right);
                    }
                }
            }
            prop_assert_eq!(quota.used(), held.iter().map(Reservation::bytes).sum::<usize>());
            prop_assert!(quota.used() <= 1000 + largest + quota.overdraft());
            prop_assert_eq!(quota.paused_since().is_some(), paused);
            prop_assert!(!quota.tick());
        }
        held.clear();
        quota.look(parked, now);
        prop_assert!(quota.may_read());
        prop_assert_eq!((quota.used(), quota.overdraft(), quota.counts().resume_by_tick), (0, 0, 0));
    }
}
