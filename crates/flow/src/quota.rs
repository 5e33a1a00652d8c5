//! The memory quota of an engine (R-MEM): bytes are reserved when a row is decoded and released when its [`Reservation`]
//! is dropped, whichever way that happens. Only the intake changes the state; there is no feedback channel.
//!
//! What the intake waits for is one line: usage below it. It publishes the line and its interest with one operation on
//! the very word that releases subtract from, and that operation is the re-check, too. So a release either comes before
//! it, and is seen, or after it, and sees the interest: no interleaving loses a wake-up (R-MEM-5).

use std::{
    future::poll_fn,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use crate::sync::{Arc, AtomicBool, AtomicUsize, AtomicWaker, Ordering::SeqCst, register};

/// Set in the word while the intake waits.
const WAITING: usize = 1 << (usize::BITS - 1);

#[derive(Debug)]
struct Shared {
    /// Bytes held, and [`WAITING`].
    word: AtomicUsize,
    /// What the intake waits for, while it does: fewer bytes held than this.
    line: AtomicUsize,
    /// A release has crossed the line.
    woken: AtomicBool,
    /// Of the bytes held, those that were taken without asking.
    overdraft: AtomicUsize,
    waker: AtomicWaker,
}

/// Owned by the intake.
#[derive(Debug)]
pub struct Quota {
    shared: Arc<Shared>,
    limit: usize,
    pause_at: usize,
    resume_below: usize,
    paused_since: Option<Instant>,
    waiting: bool,
    /// The last tick saw usage below the line and no wake-up: a release may be between the two.
    suspect: bool,
    counts: QuotaCounts,
}

/// What the quota has counted since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QuotaCounts {
    /// Pauses since usage reached 0.80.
    pub pauses: u64,
    /// Waits of one row for room (R-MEM-3).
    pub waits: u64,
    /// Time paused, of pauses that are over.
    pub paused: Duration,
    /// Wake-ups that had to be replaced by the tick: must stay 0, else one was lost.
    pub resume_by_tick: u64,
}

/// A change of the state that [`Quota::look`] has made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Reading stops.
    Paused,
    /// Reading goes on after this time.
    Resumed(Duration),
}

impl Quota {
    /// `limit` bytes; reading pauses at ≥ 0.80 of it and resumes below 0.50 (flow-control.md §0: both anchors' numbers).
    pub fn new(limit: usize) -> Self {
        let shared = Shared {
            word: AtomicUsize::new(0),
            line: AtomicUsize::new(0),
            woken: AtomicBool::new(false),
            overdraft: AtomicUsize::new(0),
            waker: AtomicWaker::new(),
        };
        Self {
            shared: Arc::new(shared),
            limit,
            pause_at: (limit * 4).div_ceil(5),
            resume_below: limit / 2,
            paused_since: None,
            waiting: false,
            suspect: false,
            counts: QuotaCounts::default(),
        }
    }

    /// Takes `bytes` for a row that was decoded: always if nothing is held, else if they fit (R-MEM-3). `None` = the row
    /// waits, and so does all that is behind it; [`Self::look`] with its size says when to try again.
    pub fn admit(&mut self, bytes: usize) -> Option<Reservation> {
        self.has_room(bytes).then(|| {
            self.shared.word.fetch_add(bytes, SeqCst);
            Reservation { shared: Arc::clone(&self.shared), bytes, overdraft: 0 }
        })
    }

    /// Takes `bytes` without asking, as [`Reservation::grow`] does: for what must be remembered whatever is held. Reading
    /// pauses on them like on all others.
    pub fn take(&self, bytes: usize) -> Reservation {
        let mut taken = Reservation { shared: Arc::clone(&self.shared), bytes: 0, overdraft: 0 };
        taken.grow(bytes);
        taken
    }

    /// Whether [`Self::admit`] would take so many.
    pub fn has_room(&self, bytes: usize) -> bool {
        let used = self.used();
        used == 0 || bytes <= self.limit.saturating_sub(used)
    }

    /// Evaluates the thresholds before the next read; `parked` is the size of a row that waits for room. Call it again
    /// after every wake-up: [`Self::may_read`] is as of the last look.
    pub fn look(&mut self, parked: Option<usize>, now: Instant) -> Option<Turn> {
        if self.waiting && !self.shared.woken.load(SeqCst) {
            return None;
        }
        let waited = self.waiting;
        self.end_wait();
        let mut turn = None;
        if self.paused_since.is_some() || self.used() >= self.pause_at {
            let waits = self.wait_below(self.resume_below);
            turn = self.turn(waits, now);
        }
        if let Some(bytes) = parked.filter(|_| self.paused_since.is_none()) {
            // One more than what may be held beside it; beside a row larger than the quota nothing may be.
            let waits = self.wait_below(self.limit.saturating_sub(bytes) + 1);
            self.counts.waits += u64::from(waits && !waited);
        }
        turn
    }

    /// Strictly alternating. A release may come between the look at the upper line and the wait below the lower one: then
    /// there is nothing to pause for.
    fn turn(&mut self, waits: bool, now: Instant) -> Option<Turn> {
        match (self.paused_since, waits) {
            (None, true) => {
                self.paused_since = Some(now);
                self.counts.pauses += 1;
                Some(Turn::Paused)
            }
            (Some(since), false) => {
                let paused = now.saturating_duration_since(since);
                self.paused_since = None;
                self.counts.paused += paused;
                Some(Turn::Resumed(paused))
            }
            _ => None,
        }
    }

    /// The state after the last [`Self::look`]: neither paused nor waiting for room.
    pub fn may_read(&self) -> bool {
        !self.waiting
    }

    /// Usage has reached 0.80: the next look will pause.
    pub fn is_full(&self) -> bool {
        self.used() >= self.pause_at
    }

    /// 100 ms have passed while waiting. True = the line was crossed and no wake-up came: counted, and the next look goes
    /// on.
    pub fn tick(&mut self) -> bool {
        let missed = self.waiting && self.used() < self.shared.line.load(SeqCst) && !self.shared.woken.load(SeqCst);
        if missed && self.suspect {
            self.suspect = false;
            self.counts.resume_by_tick += 1;
            self.shared.woken.store(true, SeqCst);
            return true;
        }
        self.suspect = missed;
        false
    }

    /// Resolves when a release has crossed the line that the last [`Self::look`] waits for. Cancel-safe.
    pub async fn woken(&self) {
        poll_fn(|context| self.poll_woken(context)).await;
    }

    fn poll_woken(&self, context: &Context<'_>) -> Poll<()> {
        register(&self.shared.waker, context.waker());
        if self.shared.woken.load(SeqCst) { Poll::Ready(()) } else { Poll::Pending }
    }

    /// True = waiting now; false = usage is below the line already.
    fn wait_below(&mut self, line: usize) -> bool {
        self.shared.line.store(line, SeqCst);
        let used = self.shared.word.fetch_or(WAITING, SeqCst) & !WAITING;
        self.waiting = true;
        if used < line {
            self.end_wait();
        }
        self.waiting
    }

    fn end_wait(&mut self) {
        if self.waiting {
            self.shared.word.fetch_and(!WAITING, SeqCst);
            self.shared.woken.store(false, SeqCst);
            (self.waiting, self.suspect) = (false, false);
        }
    }

    /// Whether usage has reached 0.80 and not fallen below 0.50 since, and since when.
    pub fn paused_since(&self) -> Option<Instant> {
        self.paused_since
    }

    /// Bytes held now.
    pub fn used(&self) -> usize {
        self.shared.word.load(SeqCst) & !WAITING
    }

    /// Of them, bytes that were taken by [`Reservation::grow`].
    pub fn overdraft(&self) -> usize {
        self.shared.overdraft.load(SeqCst)
    }

    /// Bytes that may be held.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// See [`QuotaCounts`].
    pub fn counts(&self) -> QuotaCounts {
        self.counts
    }
}

/// Bytes held; given back on drop.
#[derive(Debug)]
pub struct Reservation {
    shared: Arc<Shared>,
    bytes: usize,
    overdraft: usize,
}

impl Reservation {
    /// Takes more without asking (R-MEM-2): whoever holds rows already must be able to finish them, or nobody would ever
    /// release anything. Counted as overdraft until it is dropped.
    pub fn grow(&mut self, bytes: usize) {
        self.shared.overdraft.fetch_add(bytes, SeqCst);
        self.shared.word.fetch_add(bytes, SeqCst);
        self.bytes += bytes;
        self.overdraft += bytes;
    }

    /// Nothing yet, of the same quota: for what several rows grow by together.
    #[must_use]
    pub fn empty(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), bytes: 0, overdraft: 0 }
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.overdraft > 0 {
            self.shared.overdraft.fetch_sub(self.overdraft, SeqCst);
        }
        let word = self.shared.word.fetch_sub(self.bytes, SeqCst);
        if word & WAITING != 0 {
            let (before, line) = (word & !WAITING, self.shared.line.load(SeqCst));
            if before >= line && before - self.bytes < line {
                self.shared.woken.store(true, SeqCst);
                self.shared.waker.wake();
            }
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;
