use super::*;
use crate::{FeedbackKind, row::Row};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn s(s: u64) -> Duration {
    Duration::from_secs(s)
}

fn owner() -> Owner {
    Owner { shard: 0, project: "00000000-0000-4000-8000-000000000001".parse().expect("an id") }
}

fn limits() -> ReaderLimits {
    ReaderLimits { quota: 1000, advance_interval: ms(100), stall_limit: s(120), outage_limit: s(900) }
}

fn opening(start: u64, holes: usize) -> Opening {
    let (start, holds_from) = (Lsn(start), Lsn::ZERO);
    let wal_end = start;
    Opening { start, confirmed: Lsn(100), wal_end, holds_from, wal_sender_timeout: s(60), holes }
}

/// A reader in a session that has reached E, with the statuses of that sent.
fn running(now: Instant) -> Reader {
    let mut reader = Reader::new(limits(), now);
    reader.begin_session(opening(100, 0), now);
    assert!(matches!(reader.next(now), Step::Status(StatusUpdate { ask: true, flushed: Lsn(100), .. })));
    reader.keepalive(Lsn(100), false, now);
    assert!(matches!(reader.next(now), Step::Covered(Lsn(100))));
    reader
}

fn row(reader: &mut Reader, lsn: u64, bytes: usize, now: Instant) -> Option<Row<()>> {
    let admission = reader.admit(owner(), Lsn(lsn), bytes, now);
    reader.frame(Lsn(lsn), now);
    admission.map(|admission| admission.carry(()))
}

/// What a wait allows, once all other steps are done.
fn reads(reader: &mut Reader, now: Instant) -> bool {
    loop {
        match reader.next(now) {
            Step::Wait { read, until } => {
                assert!(until > now);
                return read;
            }
            Step::Status(_) | Step::Turn(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn r_hole_2_the_session_is_live_once_e_is_reached_and_asks_until_then() {
    let now = Instant::now();
    let mut reader = Reader::new(limits(), now);
    reader.begin_session(Opening { holds_from: Lsn(300), ..opening(200, 2) }, now);
    assert!(matches!(reader.next(now), Step::Status(StatusUpdate { ask: true, .. })));
    assert!(matches!(reader.next(now), Step::Wait { read: true, until } if until == now + ms(20)));
    reader.frame(Lsn(299), now);
    assert!(matches!(reader.next(now + ms(20)), Step::Status(StatusUpdate { ask: true, .. })));
    assert!(
        matches!(reader.next(now + ms(20)), Step::Wait { until, .. } if until == now + ms(60)),
        "less and less often"
    );
    assert!(!reader.is_covered() && reader.holes_since().is_some());
    reader.frame(Lsn(300), now + ms(30));
    assert!(matches!(reader.next(now + ms(30)), Step::Covered(Lsn(300))));
    assert!(reader.is_covered() && reader.holes_since().is_none());
}

#[test]
fn r_hole_2_a_change_of_the_filter_waits_for_the_end_of_the_transaction() {
    let now = Instant::now();
    let mut reader = running(now);
    reader.begin();
    let held = row(&mut reader, 110, 10, now);
    reader.want(Change { restart: true, holes: 1 }, now);
    assert!(reads(&mut reader, now + s(5)), "in a transaction: read on");
    assert!(reader.goes_on());
    reader.commit(Lsn(120));
    assert!(!reader.goes_on(), "not a frame more");
    assert!(matches!(reader.next(now + s(5)), Step::Refilter));
    let start = reader.start_position(Lsn(100), Some(Lsn(90)), Lsn(500));
    assert_eq!(start, Lsn(120), "the transaction's end, although its row is still out");
    assert_eq!(reader.start_position(Lsn(100), None, Lsn(110)), Lsn(110), "never beyond the server's end");
    drop(held);
}

#[test]
fn r_hole_3_the_first_change_goes_at_once_and_the_next_ones_wait() {
    let now = Instant::now();
    let mut reader = running(now);
    let change = Change { restart: true, holes: 1 };
    reader.want(change, now);
    assert!(matches!(reader.next(now), Step::Refilter));
    reader.begin_session(opening(100, 1), now);
    assert!(matches!(reader.next(now), Step::Status(_)));
    reader.keepalive(Lsn(100), false, now + ms(300));
    assert!(matches!(reader.next(now + ms(300)), Step::Covered(_)));
    reader.want(change, now + ms(300));
    let Step::Wait { until, .. } = reader.next(now + ms(300)) else { panic!("it waits") };
    assert_eq!(until, now + ms(3300), "ten times what the last one cost");
    assert!(matches!(reader.next(now + ms(3300)), Step::Refilter));
    reader.want(Change { restart: false, holes: 0 }, now + ms(3300));
    assert!(matches!(reader.next(now + ms(3300)), Step::Apply), "the list is the old one again: no restart");
}

#[test]
fn r_hole_6_holes_are_named_every_30_s() {
    let now = Instant::now();
    let mut reader = running(now);
    reader.begin();
    reader.want(Change { restart: true, holes: 3 }, now);
    reader.want(Change { restart: true, holes: 4 }, now + s(1));
    assert_eq!(reader.holes_since(), Some(now));
    let mut told = Vec::new();
    for second in 0..=65 {
        let now = now + s(second);
        loop {
            match reader.next(now) {
                Step::Holes => told.push(second),
                Step::Wait { .. } => break,
                _ => {}
            }
        }
    }
    assert_eq!(told, [30, 60]);
}

#[test]
fn r_mem_3_a_row_that_does_not_fit_waits_and_nothing_is_read_meanwhile() {
    let now = Instant::now();
    let mut reader = running(now);
    reader.begin();
    let first = row(&mut reader, 110, 700, now);
    assert!(row(&mut reader, 111, 400, now).is_none());
    assert!(!reader.goes_on() && !reads(&mut reader, now));
    assert_eq!(reader.quota().paused_since(), None, "700 is no reason to pause");
    drop(first);
    let Step::Admit(second) = reader.next(now) else { panic!("there is room") };
    let second = second.carry(());
    assert_eq!((second.lsn(), second.bytes(), reader.admitted()), (Lsn(111), 400, 2));
    assert!(reads(&mut reader, now));
}

#[test]
fn r_mem_4_a_full_quota_stops_the_reading_before_the_next_frame() {
    let now = Instant::now();
    let mut reader = running(now);
    reader.begin();
    let (first, second) = (row(&mut reader, 110, 400, now), row(&mut reader, 111, 400, now));
    assert!(!reader.goes_on(), "before the next frame in memory, too");
    assert!(matches!(reader.next(now), Step::Turn(Turn::Paused)));
    assert!(!reads(&mut reader, now));
    drop(first);
    assert!(matches!(reader.next(now + ms(9)), Step::Turn(Turn::Resumed(paused)) if paused == ms(9)));
    assert!(reads(&mut reader, now));
    drop(second);
}

#[test]
fn r_fb_2_a_paused_and_a_draining_reader_goes_on_saying_that_it_lives() {
    let start = Instant::now();
    for drains in [false, true] {
        let mut reader = running(start);
        reader.begin();
        let _held = row(&mut reader, 110, 900, start);
        if drains {
            reader.drain();
        }
        let mut sent = Vec::new();
        for second in 0..100 {
            match reader.next(start + s(second)) {
                Step::Status(status) => sent.push((second, status.flushed)),
                Step::Turn(Turn::Paused) | Step::Wait { read: false, .. } => {}
                other => panic!("{other:?}"),
            }
        }
        let expected: Vec<_> = (1..10).map(|n| (n * 10, Lsn(100))).collect();
        assert_eq!(sent, expected, "each min(10 s, a quarter of 60 s)");
    }
}

#[test]
fn r_fb_3_who_is_stuck_and_does_not_know_why_fails_and_says_nothing_more() {
    let start = Instant::now();
    let mut reader = running(start);
    reader.begin();
    let _held = row(&mut reader, 110, 900, start);
    assert!(!reads(&mut reader, start));
    while !matches!(reader.next(start + s(119)), Step::Wait { .. }) {}
    assert!(matches!(reader.next(start + s(120)), Step::Fail(Stall::Sink)));
    assert!(reader.final_status(start + s(120)).is_none());
    assert_eq!(reader.withheld(), 1);

    let mut reader = running(start);
    reader.begin();
    let _held = row(&mut reader, 110, 900, start);
    reader.outage(Outage { bus: true, source: false }, start + s(1));
    assert!(!reads(&mut reader, start + s(1)));
    while !matches!(reader.next(start + s(500)), Step::Wait { .. }) {}
    assert!(reader.final_status(start + s(500)).is_some(), "a known outage: keep feeding back");
    assert!(matches!(reader.next(start + s(901)), Step::Fail(Stall::Outage)), "but not for ever");
}

#[test]
fn r_lsn_2_a_keepalive_counts_only_when_nothing_is_in_flight() {
    let now = Instant::now();
    let mut reader = running(now);
    reader.keepalive(Lsn(200), false, now);
    assert_eq!(reader.resolved(), Lsn(200));
    reader.begin();
    reader.keepalive(Lsn(300), true, now);
    assert_eq!(reader.resolved(), Lsn(200), "a transaction is partly read");
    assert!(matches!(
        reader.next(now),
        Step::Status(StatusUpdate { kind: FeedbackKind::Reply, flushed: Lsn(200), .. })
    ));
    let held = row(&mut reader, 310, 10, now);
    reader.commit(Lsn(320));
    reader.keepalive(Lsn(400), false, now);
    assert_eq!(reader.resolved(), Lsn(200), "its row is out");
    held.expect("room").ack();
    reader.keepalive(Lsn(500), false, now);
    assert_eq!(reader.resolved(), Lsn(500));
}

#[test]
fn r_sh_5_a_new_session_is_no_progress_of_a_sink_that_hangs() {
    let now = Instant::now();
    let mut reader = running(now);
    reader.begin();
    let held = row(&mut reader, 110, 10, now);
    reader.commit(Lsn(120));
    assert!(reads(&mut reader, now));
    // The filter changes again and again.
    for minute in 1..4 {
        reader.begin_session(opening(120, 0), now + s(minute * 39));
        assert!(reads_or_covers(&mut reader, now + s(minute * 39)));
    }
    assert!(matches!(reader.next(now + s(120)), Step::Fail(Stall::Sink)));
    drop(held);
}

#[test]
fn r_sh_5_what_was_acknowledged_between_two_sessions_is_progress() {
    let now = Instant::now();
    let mut reader = running(now);
    reader.begin();
    let (first, second) = (row(&mut reader, 110, 10, now), row(&mut reader, 111, 10, now));
    reader.commit(Lsn(120));
    assert!(reads(&mut reader, now));
    first.expect("there is room").ack();
    reader.begin_session(opening(120, 0), now + s(100));
    assert!(reads_or_covers(&mut reader, now + s(121)), "the other one has time until 220");
    drop(second);
}

#[test]
fn r_mem_1_a_row_that_cant_be_used_is_held_too() {
    let now = Instant::now();
    let mut reader = running(now);
    reader.begin();
    let lost: Vec<_> = (0..8).map(|n| reader.claim(owner(), Lsn(110 + n), 100, now)).collect();
    assert!(!reads(&mut reader, now), "0.80 of the quota");
    lost.into_iter().for_each(Admission::ack);
    assert_eq!(reader.quota().used(), 0);
    assert!(reads(&mut reader, now));
}

/// [`reads`], of a session that may just have reached E.
fn reads_or_covers(reader: &mut Reader, now: Instant) -> bool {
    let lsn = reader.received();
    reader.keepalive(lsn, false, now);
    loop {
        match reader.next(now) {
            Step::Wait { read, .. } => return read,
            Step::Status(_) | Step::Turn(_) | Step::Covered(_) => {}
            other => panic!("{other:?}"),
        }
    }
}
