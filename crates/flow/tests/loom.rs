//! Every interleaving of what other threads do to the machines. Only with the feature `loom`.

use std::time::Instant;

use aura_domain::Lsn;
use aura_flow::{Owner, Quota, ResolvedTracker, Turn};
use loom::{future::block_on, thread};

/// At most three preemptions an execution, as loom's authors advise: more takes minutes and has never found more.
fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Two releasers and a waiter: however a release and the wait interleave, a paused intake whose usage falls below the line
/// goes on with no further event (a lost wake-up would be a deadlock here), and each byte is given back once.
#[test]
fn invariants_06_08_no_interleaving_of_release_and_wait_loses_a_wake_up() {
    explore(|| {
        let now = Instant::now();
        let mut quota = Quota::new(10);
        let held = [quota.admit(4).expect("nothing is held"), quota.admit(4).expect("room")];
        let releasers = held.map(|reservation| thread::spawn(move || drop(reservation)));
        let mut turns = Vec::new();
        loop {
            turns.extend(quota.look(None, now));
            if quota.may_read() {
                break;
            }
            block_on(quota.woken());
        }
        assert!(turns.is_empty() || matches!(turns[..], [Turn::Paused, Turn::Resumed(_)]), "{turns:?}");
        for releaser in releasers {
            releaser.join().expect("no panic");
        }
        assert_eq!((quota.used(), quota.counts().resume_by_tick), (0, 0));
    });
}

/// The same with a row that waits for room: another line, the same mechanism.
#[test]
fn invariants_06_08_a_row_that_waits_for_room_is_woken() {
    explore(|| {
        let now = Instant::now();
        let mut quota = Quota::new(10);
        let held = [quota.admit(3).expect("nothing is held"), quota.admit(3).expect("room")];
        let releasers = held.map(|reservation| thread::spawn(move || drop(reservation)));
        let row = loop {
            quota.look(Some(11), now);
            if quota.may_read() {
                break quota.admit(11);
            }
            block_on(quota.woken());
        };
        assert_eq!(row.map(|row| row.bytes()), Some(11), "larger than the quota: alone");
        for releaser in releasers {
            releaser.join().expect("no panic");
        }
        assert_eq!(quota.used(), 0);
    });
}

/// Three droppers: two acknowledge, one only drops; the transaction resolves only if all three acknowledged, and the
/// intake never sees more than that.
#[test]
fn invariant_01_acks_race_with_the_look() {
    let project = "00000000-0000-4000-8000-000000000001".parse().expect("an id");
    for lost in [false, true] {
        explore(move || {
            let now = Instant::now();
            let mut tracker = ResolvedTracker::new(Lsn(1), now);
            tracker.begin();
            let claims = [10, 11, 12].map(|lsn| tracker.admit(Owner { shard: 0, project }, Lsn(lsn), now));
            tracker.commit(Lsn(20));
            let mut droppers = Vec::new();
            for (n, claim) in claims.into_iter().enumerate() {
                droppers.push(thread::spawn(move || if lost && n == 1 { drop(claim) } else { claim.ack() }));
            }
            let early = tracker.resolve();
            assert!(early == Lsn(1) || !lost, "beyond a row that nobody acknowledged");
            for dropper in droppers {
                dropper.join().expect("no panic");
            }
            assert_eq!(tracker.resolve(), if lost { Lsn(1) } else { Lsn(20) });
        });
    }
}
