//! The resolved LSN (R-LSN-1): end of the longest prefix of transactions whose every row was received by the bus.
//!
//! One FIFO of transactions, each with a counter of rows that are still out. Acks are atomic decrements from any thread;
//! only the intake looks at the queue. Cost is O(1) amortised per transaction, whatever is outstanding.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use aura_domain::Lsn;

/// A row's claim on its transaction. [`Self::ack`] gives it up; dropping it without does not, so whatever is torn down
/// stalls the position and is sent again, and nothing is lost.
#[derive(Debug)]
pub(crate) struct RowClaim(Arc<AtomicU64>);

impl RowClaim {
    /// The bus has the row, or it was skipped with an announced gap.
    pub(crate) fn ack(self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

#[derive(Debug)]
struct Transaction {
    /// End of the commit record; `None` while its COMMIT wasn't read.
    end: Option<Lsn>,
    rows_left: Arc<AtomicU64>,
}

/// Owned by the intake.
#[derive(Debug)]
pub(crate) struct ResolvedTracker {
    queue: VecDeque<Transaction>,
    resolved: Lsn,
    open: bool,
}

impl ResolvedTracker {
    /// Starts at the position the session streams from.
    pub(crate) fn new(start: Lsn) -> Self {
        Self { queue: VecDeque::new(), resolved: start, open: false }
    }

    /// BEGIN was read.
    pub(crate) fn begin(&mut self) {
        self.open = true;
    }

    /// A row of the open transaction was admitted.
    pub(crate) fn admit(&mut self) -> RowClaim {
        let joins_open = self.queue.back().is_some_and(|back| back.end.is_none());
        if !joins_open {
            self.queue.push_back(Transaction { end: None, rows_left: Arc::new(AtomicU64::new(0)) });
        }
        let back = self.queue.back().expect("just pushed");
        back.rows_left.fetch_add(1, Ordering::Relaxed);
        RowClaim(Arc::clone(&back.rows_left))
    }

    /// COMMIT was read; `end` is the end of its record.
    pub(crate) fn commit(&mut self, end: Lsn) {
        self.open = false;
        match self.queue.back_mut() {
            // Without rows of its own the transaction is resolved with whatever is before it.
            Some(back) => back.end = Some(end),
            None => self.resolved = self.resolved.max(end),
        }
    }

    /// The server's WAL end, from a keepalive: counts only when nothing is out and no transaction is open (R-LSN-2).
    pub(crate) fn idle_at(&mut self, wal_end: Lsn) {
        if self.is_idle() {
            self.resolved = self.resolved.max(wal_end);
        }
    }

    /// A new session reads from `start`; `boundary` is the end of the last transaction that was read completely. An open
    /// transaction is read again from its beginning: what is out of it keeps its claims but can't resolve more than what
    /// was before it.
    pub(crate) fn restart(&mut self, boundary: Lsn, start: Lsn) {
        if let Some(back) = self.queue.back_mut().filter(|back| back.end.is_none()) {
            back.end = Some(boundary);
        }
        self.open = false;
        if self.queue.is_empty() {
            self.resolved = self.resolved.max(start);
        }
    }

    /// Pops what is complete and returns the resolved LSN.
    pub(crate) fn resolve(&mut self) -> Lsn {
        while let Some(front) = self.queue.front() {
            let Some(end) = front.end.filter(|_| front.rows_left.load(Ordering::Acquire) == 0) else { break };
            self.resolved = self.resolved.max(end);
            self.queue.pop_front();
        }
        self.resolved
    }

    /// Nothing is out and no transaction is partly read.
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty() && !self.open
    }

    /// Every row that was read has been acked.
    pub(crate) fn is_settled(&self) -> bool {
        self.queue.iter().all(|transaction| transaction.rows_left.load(Ordering::Acquire) == 0)
    }

    /// A transaction is partly read.
    pub(crate) fn in_transaction(&self) -> bool {
        self.open
    }

    /// Transactions that are out.
    pub(crate) fn outstanding(&self) -> usize {
        self.queue.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Op {
        Transaction { rows: u8 },
        Ack(prop::sample::Index),
        Drop(prop::sample::Index),
        Keepalive,
        Resolve,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0u8..4).prop_map(|rows| Op::Transaction { rows }),
            6 => any::<prop::sample::Index>().prop_map(Op::Ack),
            1 => any::<prop::sample::Index>().prop_map(Op::Drop),
            1 => Just(Op::Keepalive),
            2 => Just(Op::Resolve),
        ]
    }

    /// The definition, O(n): the end of the longest prefix of complete transactions.
    #[derive(Default)]
    struct Model {
        transactions: Vec<(u64, Vec<bool>)>,
        idle: u64,
    }

    impl Model {
        fn resolved(&self) -> u64 {
            let complete = self.transactions.iter().take_while(|(_, acked)| acked.iter().all(|a| *a)).last();
            complete.map_or(0, |(end, _)| *end).max(self.idle)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        /// Invariants 1 and 2: never beyond the acknowledged prefix, never backwards.
        #[test]
        fn r_lsn_1_equals_the_definition(ops in prop::collection::vec(op(), 0..60)) {
            let mut tracker = ResolvedTracker::new(Lsn(0));
            let mut model = Model::default();
            let mut out: Vec<(usize, usize, RowClaim)> = Vec::new();
            let mut lsn = 0;
            let mut before = Lsn(0);
            for op in ops {
                match op {
                    Op::Transaction { rows } => {
                        tracker.begin();
                        let at = model.transactions.len();
                        for row in 0..usize::from(rows) {
                            out.push((at, row, tracker.admit()));
                        }
                        prop_assert!(tracker.in_transaction());
                        lsn += 10;
                        tracker.commit(Lsn(lsn));
                        model.transactions.push((lsn, vec![false; rows.into()]));
                    }
                    Op::Ack(index) if !out.is_empty() => {
                        let (at, row, claim) = out.swap_remove(index.index(out.len()));
                        claim.ack();
                        model.transactions[at].1[row] = true;
                    }
                    Op::Drop(index) if !out.is_empty() => {
                        out.swap_remove(index.index(out.len()));
                    }
                    Op::Keepalive => {
                        tracker.resolve();
                        lsn += 5;
                        if model.transactions.iter().all(|(_, acked)| acked.iter().all(|a| *a)) {
                            model.idle = lsn;
                        }
                        tracker.idle_at(Lsn(lsn));
                    }
                    _ => {}
                }
                let resolved = tracker.resolve();
                prop_assert_eq!(resolved.0, model.resolved());
                prop_assert!(resolved >= before);
                before = resolved;
            }
        }
    }
}
