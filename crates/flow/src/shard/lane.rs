use std::{collections::VecDeque, time::Instant};

use super::{Job, Row, ShardLimits};

/// A batch on the way; its rows are with whoever carries it.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) job: Job,
    pub(super) cancelled: bool,
}

/// The rows of one project.
#[derive(Debug)]
pub(super) struct Lane<T> {
    pub(super) waiting: VecDeque<Row<T>>,
    pub(super) waiting_bytes: usize,
    pub(super) flight: Option<Flight>,
    /// Held, by what waits and by what is on the way.
    pub(super) bytes: usize,
    /// Last acknowledgement, or when there began to be work.
    pub(super) acked: Instant,
    /// When the oldest row was read.
    pub(super) oldest: Instant,
    pub(super) over_since: Option<Instant>,
    /// Rows wait, and no batch is on the way, since then.
    pub(super) ready_since: Option<Instant>,
    pub(super) sealed: bool,
    /// Its rows are to be skipped.
    pub(super) skip: bool,
}

impl<T> Lane<T> {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            flight: None,
            bytes: 0,
            acked: now,
            oldest: now,
            over_since: None,
            ready_since: None,
            sealed: false,
            skip: false,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.flight.is_none()
    }

    /// A batch is as large as it may be.
    pub(super) fn is_full(&self, limits: &ShardLimits) -> bool {
        self.waiting.len() >= limits.batch_rows || self.waiting_bytes >= limits.batch_bytes
    }

    /// The next batch.
    pub(super) fn take(&mut self, limits: &ShardLimits) -> Vec<Row<T>> {
        let mut bytes = 0;
        let fits = |row: &&Row<T>| {
            bytes += row.bytes();
            bytes <= limits.batch_bytes
        };
        let count = self.waiting.iter().take(limits.batch_rows).take_while(fits).count().max(1);
        let rows: Vec<_> = self.waiting.drain(..count.min(self.waiting.len())).collect();
        self.taken(&rows);
        rows
    }

    /// Everything that waits.
    pub(super) fn take_all(&mut self) -> Vec<Row<T>> {
        let rows: Vec<_> = std::mem::take(&mut self.waiting).into();
        self.taken(&rows);
        rows
    }

    fn taken(&mut self, rows: &[Row<T>]) {
        self.waiting_bytes -= rows.iter().map(Row::bytes).sum::<usize>();
        self.ready_since = None;
        self.sealed = false;
    }

    /// Rows that were on the way wait again, before all others.
    pub(super) fn give_back(&mut self, rows: Vec<Row<T>>) {
        self.waiting_bytes += rows.iter().map(Row::bytes).sum::<usize>();
        for row in rows.into_iter().rev() {
            self.waiting.push_front(row);
        }
    }
}
