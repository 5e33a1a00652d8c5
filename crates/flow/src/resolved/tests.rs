use proptest::prelude::*;

use super::*;

fn owner(n: u8) -> Owner {
    let project = format!("00000000-0000-4000-8000-0000000000{n:02x}").parse().expect("an id");
    Owner { shard: usize::from(n % 4), project }
}

#[derive(Debug, Clone)]
enum Op {
    Begin,
    Row(u8),
    Commit,
    Ack(prop::sample::Index),
    Fail(prop::sample::Index),
    Keepalive,
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => Just(Op::Begin),
        5 => (0u8..5).prop_map(Op::Row),
        3 => Just(Op::Commit),
        6 => any::<prop::sample::Index>().prop_map(Op::Ack),
        1 => any::<prop::sample::Index>().prop_map(Op::Fail),
        1 => Just(Op::Keepalive),
        1 => Just(Op::Restart),
    ]
}

struct Row {
    owner: Owner,
    lsn: u64,
    at: Instant,
    acked: bool,
}

/// The definition, O(n): the end of the longest prefix of complete transactions.
#[derive(Default)]
struct Model {
    transactions: Vec<(Option<u64>, Vec<Row>)>,
    floor: u64,
}

impl Model {
    fn resolved(&self) -> u64 {
        let complete = |(end, rows): &&(Option<u64>, Vec<Row>)| end.is_some() && rows.iter().all(|row| row.acked);
        let ends = self.transactions.iter().take_while(complete).filter_map(|(end, _)| *end);
        ends.max().unwrap_or(0).max(self.floor)
    }

    fn settled(&self) -> bool {
        self.transactions.iter().all(|(_, rows)| rows.iter().all(|row| row.acked))
    }

    fn oldest(&self) -> Option<&Row> {
        self.transactions.iter().find_map(|(_, rows)| rows.iter().find(|row| !row.acked))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    /// Invariants 1 and 2, with rows acknowledged in any order, lost rows, and sessions that end anywhere: never beyond
    /// the acknowledged prefix, never backwards, and never behind it either.
    #[test]
    fn invariants_01_02_the_tracker_equals_the_definition(ops in prop::collection::vec(op(), 0..80)) {
        let now = Instant::now();
        let mut tracker = ResolvedTracker::new(Lsn(0), now);
        let mut model = Model::default();
        let mut out: Vec<(usize, usize, RowClaim)> = Vec::new();
        let (mut lsn, mut boundary, mut before) = (0, 0, Lsn(0));
        for op in ops {
            lsn += 10;
            match op {
                Op::Begin if !tracker.in_transaction() => {
                    tracker.begin();
                    model.transactions.push((None, Vec::new()));
                }
                Op::Row(n) if tracker.in_transaction() => {
                    let at = model.transactions.len() - 1;
                    out.push((at, model.transactions[at].1.len(), tracker.admit(owner(n), Lsn(lsn), now)));
                    model.transactions[at].1.push(Row { owner: owner(n), lsn, at: now, acked: false });
                }
                Op::Commit if tracker.in_transaction() => {
                    tracker.commit(Lsn(lsn));
                    model.transactions.last_mut().expect("open").0 = Some(lsn);
                    boundary = lsn;
                }
                Op::Ack(index) if !out.is_empty() => {
                    let (at, row, claim) = out.swap_remove(index.index(out.len()));
                    claim.ack();
                    model.transactions[at].1[row].acked = true;
                }
                Op::Fail(index) if !out.is_empty() => drop(out.swap_remove(index.index(out.len()))),
                Op::Keepalive => {
                    tracker.resolve();
                    if model.settled() && !tracker.in_transaction() {
                        model.floor = model.floor.max(lsn);
                    }
                    tracker.idle_at(Lsn(lsn));
                }
                Op::Restart => {
                    tracker.resolve();
                    if let Some((end @ None, _)) = model.transactions.last_mut() {
                        *end = Some(boundary);
                    }
                    tracker.restart(Lsn(boundary), Lsn(boundary));
                }
                _ => {}
            }
            let resolved = tracker.resolve();
            prop_assert_eq!(resolved.0, model.resolved());
            prop_assert_eq!(tracker.is_settled(), model.settled());
            prop_assert!(resolved >= before);
            before = resolved;
        }
    }

    /// R-LSN-5: lanes acknowledge in order, batch by batch, and the report names the oldest row that is out.
    #[test]
    fn r_lsn_5_the_culprit_is_the_oldest_row_that_is_out(
        transactions in prop::collection::vec(prop::collection::vec(0u8..4, 1..6), 1..8),
        batches in prop::collection::vec((0u8..4, 1usize..4), 0..40),
    ) {
        let start = Instant::now();
        let mut tracker = ResolvedTracker::new(Lsn(0), start);
        let mut model = Model::default();
        let mut lanes: Vec<VecDeque<(usize, usize, RowClaim)>> = (0..4).map(|_| VecDeque::new()).collect();
        let mut lsn = 0;
        for (n, rows) in transactions.into_iter().enumerate() {
            tracker.begin();
            model.transactions.push((None, Vec::new()));
            for project in rows {
                lsn += 10;
                let at = start + Duration::from_millis(lsn);
                let claim = tracker.admit(owner(project), Lsn(lsn), at);
                let lane = &mut lanes[usize::from(project)];
                lane.push_back((n, model.transactions[n].1.len(), claim));
                if lane.len() == 1 { lane[0].2.lead() }
                model.transactions[n].1.push(Row { owner: owner(project), lsn, at, acked: false });
            }
            lsn += 10;
            tracker.commit(Lsn(lsn));
        }
        let now = start + Duration::from_secs(60);
        for (lane, rows) in batches {
            let lane = &mut lanes[usize::from(lane)];
            for _ in 0..rows.min(lane.len()) {
                let (at, row, claim) = lane.pop_front().expect("so many");
                claim.ack();
                model.transactions[at].1[row].acked = true;
            }
            if let Some((_, _, claim)) = lane.front() { claim.lead() }
            tracker.resolve();
            let expected = model.oldest().map(|row| Culprit { owner: row.owner, lsn: Lsn(row.lsn), age: now - row.at });
            prop_assert_eq!(tracker.culprit(now), expected);
        }
    }
}

/// Invariant 11: 10^6 rows outstanding, in 10^5 transactions, acknowledged in an order that keeps the front blocked to the
/// end; the cost of each ack and each look does not know of the backlog.
#[test]
fn invariant_11_steps_do_not_grow_with_the_backlog() {
    let now = Instant::now();
    let mut tracker = ResolvedTracker::new(Lsn(0), now);
    let mut claims = Vec::with_capacity(1_000_000);
    for transaction in 0u64..100_000 {
        tracker.begin();
        for row in 0..10u8 {
            claims.push(tracker.admit(owner(row % 3), Lsn(transaction * 100 + u64::from(row)), now));
        }
        tracker.commit(Lsn(transaction * 100 + 99));
    }
    let read = tracker.steps();
    assert!(read <= 4 * 1_000_000, "{read} steps for reading");
    let first = claims.remove(0);
    let mut looks = 0;
    for (n, claim) in claims.into_iter().rev().enumerate() {
        claim.ack();
        if n % 10 == 0 {
            looks += 1;
            assert_eq!(tracker.resolve(), Lsn(0));
        }
    }
    first.ack();
    assert_eq!(tracker.resolve(), Lsn(99_999 * 100 + 99));
    let acked = tracker.steps() - read;
    assert!(acked <= 1_000_000 + looks + 1, "{acked} steps for 10^6 acks and {looks} looks");
}

/// R-BIG-3: a transaction's record is a counter, not a list.
#[test]
fn r_big_3_a_transaction_is_as_small_as_its_projects_are_few() {
    let now = Instant::now();
    let mut tracker = ResolvedTracker::new(Lsn(0), now);
    tracker.begin();
    let claims: Vec<_> = (0..100_000u64).map(|n| tracker.admit(owner((n % 2) as u8), Lsn(n), now)).collect();
    assert_eq!((tracker.queue.len(), tracker.open_rows()), (2, 100_000));
    claims.into_iter().for_each(RowClaim::ack);
    assert_eq!(tracker.resolve(), Lsn(0), "not before COMMIT was read");
    assert!(tracker.is_settled() && !tracker.is_idle());
    tracker.commit(Lsn(200_000));
    assert_eq!(tracker.resolve(), Lsn(200_000));
    tracker.begin();
    for n in 0..=255 {
        tracker.admit(owner(n), Lsn(300_000 + u64::from(n)), now);
    }
    assert_eq!(tracker.queue.len(), GROUPS);
}
