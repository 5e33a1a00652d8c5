//! The resolved LSN (R-LSN-1): end of the longest prefix of transactions whose every row was received by the bus.
//!
//! One FIFO of groups: the rows of one transaction that belong to one project, counted, not listed (R-BIG-3). Acks are
//! atomic decrements from any thread; only the intake looks at the queue. A group leaves at the front when its counter is
//! zero, and the last one of a transaction carries its end. So a row costs one step when it is read and its group one when
//! it leaves, whatever is outstanding.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use aura_domain::{Lsn, ProjectId};

use crate::sync::{Arc, AtomicU64, Ordering};

/// Projects of one transaction that are counted apart. Transactions that touch more are the platform's, not a tenant's;
/// the rest of their projects share a group under the name of the first.
const GROUPS: usize = 32;

/// Whose a row is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// Number of the shard.
    pub shard: usize,
    /// Tenant.
    pub project: ProjectId,
}

#[derive(Debug)]
struct Group {
    owner: Owner,
    rows_left: AtomicU64,
    /// LSN of its oldest row that isn't acknowledged, and when that was read.
    oldest: AtomicU64,
    oldest_at: AtomicU64,
}

/// A row's claim on its transaction. [`Self::ack`] gives it up; dropping it without does not, so whatever is torn down
/// stalls the position and is sent again, and nothing is lost.
#[derive(Debug)]
pub struct RowClaim {
    group: Arc<Group>,
    lsn: Lsn,
    /// Milliseconds since the tracker's base.
    at: u64,
}

impl RowClaim {
    /// The bus has the row, or it was skipped with an announced gap.
    pub fn ack(self) {
        self.group.rows_left.fetch_sub(1, Ordering::Release);
    }

    /// The row's own LSN.
    pub fn lsn(&self) -> Lsn {
        self.lsn
    }

    /// The row is the first of what its project has on the way: all before it are acknowledged.
    pub fn lead(&self) {
        self.group.oldest.store(self.lsn.0, Ordering::Relaxed);
        self.group.oldest_at.store(self.at, Ordering::Relaxed);
    }
}

/// Who holds the resolved LSN back (R-LSN-5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Culprit {
    /// Whose row it is.
    pub owner: Owner,
    /// The row's own LSN.
    pub lsn: Lsn,
    /// Since it was read.
    pub age: Duration,
}

#[derive(Debug)]
struct Entry {
    group: Arc<Group>,
    /// Set on the last group of a transaction whose COMMIT was read: end of its record.
    end: Option<Lsn>,
    /// Counts transactions, to know where one's groups begin.
    transaction: u64,
}

/// Owned by the intake.
#[derive(Debug)]
pub struct ResolvedTracker {
    queue: VecDeque<Entry>,
    resolved: Lsn,
    open: bool,
    transaction: u64,
    /// Rows of the open transaction that were admitted.
    open_rows: u64,
    base: Instant,
    steps: u64,
    advances: u64,
}

impl ResolvedTracker {
    /// Starts at the position the session streams from.
    pub fn new(start: Lsn, now: Instant) -> Self {
        Self {
            queue: VecDeque::new(),
            resolved: start,
            open: false,
            transaction: 0,
            open_rows: 0,
            base: now,
            steps: 0,
            advances: 0,
        }
    }

    /// BEGIN was read.
    pub fn begin(&mut self) {
        self.open = true;
        self.open_rows = 0;
        self.transaction += 1;
    }

    /// A row of the open transaction was admitted; `lsn` is its own.
    pub fn admit(&mut self, owner: Owner, lsn: Lsn, now: Instant) -> RowClaim {
        self.open_rows += 1;
        let at = self.millis(now);
        let group = self.group(owner).unwrap_or_else(|| self.new_group(owner, lsn, at));
        group.rows_left.fetch_add(1, Ordering::Relaxed);
        RowClaim { group, lsn, at }
    }

    /// The owner's group in the open transaction, or the shared one when there are too many.
    fn group(&mut self, owner: Owner) -> Option<Arc<Group>> {
        let mut looked = 0;
        for entry in self.queue.iter().rev().take_while(|entry| entry.transaction == self.transaction) {
            looked += 1;
            if entry.group.owner == owner {
                self.steps += looked;
                return Some(Arc::clone(&entry.group));
            }
        }
        self.steps += looked + 1;
        let shared = self.queue.back().filter(|_| looked >= GROUPS as u64)?;
        Some(Arc::clone(&shared.group))
    }

    fn new_group(&mut self, owner: Owner, lsn: Lsn, at: u64) -> Arc<Group> {
        let group = Arc::new(Group {
            owner,
            rows_left: AtomicU64::new(0),
            oldest: AtomicU64::new(lsn.0),
            oldest_at: AtomicU64::new(at),
        });
        self.queue.push_back(Entry { group: Arc::clone(&group), end: None, transaction: self.transaction });
        group
    }

    /// COMMIT was read; `end` is the end of its record.
    pub fn commit(&mut self, end: Lsn) {
        self.open = false;
        match self.queue.back_mut() {
            // Without rows that are out the transaction is resolved with whatever is before it.
            Some(back) => back.end = Some(end),
            None => self.advance(end),
        }
    }

    /// The server's WAL end, from a keepalive: counts only when nothing is out and no transaction is open (R-LSN-2).
    pub fn idle_at(&mut self, wal_end: Lsn) {
        if self.is_idle() {
            self.advance(wal_end);
        }
    }

    /// A new session reads from `start`; `boundary` is the end of the last transaction that was read completely. An open
    /// transaction is read again from its beginning: what is out of it keeps its claims but can't resolve more than what
    /// was before it.
    pub fn restart(&mut self, boundary: Lsn, start: Lsn) {
        if let Some(back) = self.queue.back_mut().filter(|back| back.end.is_none()) {
            back.end = Some(boundary);
        }
        self.open = false;
        if self.queue.is_empty() {
            self.advance(start);
        }
    }

    /// Pops what is complete and returns the resolved LSN.
    pub fn resolve(&mut self) -> Lsn {
        self.steps += 1;
        while let Some(front) = self.queue.front() {
            if front.group.rows_left.load(Ordering::Acquire) != 0 {
                break;
            }
            let end = front.end;
            self.queue.pop_front();
            self.steps += 1;
            if let Some(end) = end {
                self.advance(end);
            }
        }
        self.resolved
    }

    fn advance(&mut self, to: Lsn) {
        if to > self.resolved {
            self.resolved = to;
            self.advances += 1;
        }
    }

    /// Nothing is out and no transaction is partly read, as of the last [`Self::resolve`].
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && !self.open
    }

    /// Every row that was read has been acked, as of the last [`Self::resolve`].
    pub fn is_settled(&self) -> bool {
        self.queue.is_empty()
    }

    /// A transaction is partly read.
    pub fn in_transaction(&self) -> bool {
        self.open
    }

    /// Rows of the open transaction that were admitted so far; 0 when none is open.
    pub fn open_rows(&self) -> u64 {
        if self.open { self.open_rows } else { 0 }
    }

    /// Whose row is the oldest that isn't acknowledged: of the front transaction's groups, which are few.
    pub fn culprit(&self, now: Instant) -> Option<Culprit> {
        let front = self.queue.front()?.transaction;
        let groups = self.queue.iter().take_while(|entry| entry.transaction == front).map(|entry| &entry.group);
        let out = groups.filter(|group| group.rows_left.load(Ordering::Acquire) > 0);
        let oldest = out.min_by_key(|group| group.oldest.load(Ordering::Relaxed))?;
        let age = self.millis(now).saturating_sub(oldest.oldest_at.load(Ordering::Relaxed));
        let lsn = Lsn(oldest.oldest.load(Ordering::Relaxed));
        Some(Culprit { owner: oldest.owner, lsn, age: Duration::from_millis(age) })
    }

    /// The resolved LSN as of the last [`Self::resolve`].
    pub fn resolved(&self) -> Lsn {
        self.resolved
    }

    /// Looks at a group so far: what invariant 11 counts instead of time.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// How often the resolved LSN has moved.
    pub fn advances(&self) -> u64 {
        self.advances
    }

    fn millis(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.base).as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;
