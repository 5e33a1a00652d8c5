//! A shard's task: carries the batches that its machine makes, each to the bus or, given up, to an announcement.

use std::{
    collections::{HashMap, VecDeque},
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use aura_domain::{Change, ProjectId};
use aura_flow::{Batch, Job, Outage, Outcome, Shard, ShardGauges, ShardLimits};
use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::{
    judge::{Judge, Lane},
    registry::RegisteredTable,
};

/// What a row on its way is.
#[derive(Debug)]
pub(crate) struct Payload {
    /// Shared with whoever may be asked about it later.
    pub(crate) change: Arc<Change>,
    pub(crate) table: Arc<RegisteredTable>,
}

/// A row on its way to the bus.
pub(crate) type Row = aura_flow::Row<Payload>;

/// Largest batch of one project: enough to make the fixed cost of a check small, small enough to keep latency and memory.
const BATCH_ROWS: usize = 2048;
/// The same in bytes held; R-MEM-9's sizing rule goes by it.
pub(crate) const BATCH_BYTES: usize = 1 << 20;
/// R-ACK-4.
const LINGER: Duration = Duration::from_millis(20);
/// R-FB-6: rows older than this make a project slow, when the log must not grow on.
const SLOW: Duration = Duration::from_secs(10);

/// What the intake tells a shard besides rows.
#[derive(Debug, Default)]
struct Inbox {
    rows: VecDeque<Row>,
    sealing: bool,
    skip_slowest: bool,
    /// Everything so far is to be dropped, and so many rows of this inbox were.
    abandoned: Option<usize>,
}

/// The intake's end of a shard. Bounded by the engine's memory quota, so a push never waits.
#[derive(Debug, Default)]
pub(crate) struct ShardQueue {
    inbox: Mutex<Inbox>,
    told: Notify,
    gauges: Mutex<ShardGauges>,
}

impl ShardQueue {
    /// Hands rows over, in order.
    pub(crate) fn push(&self, rows: &mut Vec<Row>) {
        if !rows.is_empty() {
            self.tell(|inbox| inbox.rows.extend(rows.drain(..)));
        }
    }

    /// Partial batches are sealed from now on, or wait for company again (R-MEM-6).
    pub(crate) fn seal(&self, sealing: bool) {
        self.tell(|inbox| inbox.sealing = sealing);
    }

    /// Gives up on the slowest projects (R-FB-6).
    pub(crate) fn skip_slowest(&self) {
        self.tell(|inbox| inbox.skip_slowest = true);
    }

    /// Drops every row without acknowledging it: it will be read again.
    pub(crate) fn abandon(&self) {
        self.tell(|inbox| {
            let dropped = std::mem::take(&mut inbox.rows).len();
            inbox.abandoned = Some(inbox.abandoned.unwrap_or(0) + dropped);
        });
    }

    /// What the shard held when it last did anything.
    pub(crate) fn gauges(&self) -> ShardGauges {
        *self.gauges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, change: impl FnOnce(&mut Inbox)) {
        change(&mut self.lock());
        self.told.notify_one();
    }

    /// Takes what was told; sealing lasts until it is taken back.
    fn take(&self) -> Inbox {
        let mut inbox = self.lock();
        let sealing = inbox.sealing;
        std::mem::replace(&mut *inbox, Inbox { sealing, ..Inbox::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a shard's task needs.
pub(crate) struct ShardDeps {
    pub(crate) number: usize,
    pub(crate) queue: Arc<ShardQueue>,
    pub(crate) judge: Arc<Judge>,
    pub(crate) acked: Arc<Notify>,
    pub(crate) outages: watch::Receiver<Outage>,
    pub(crate) quota: usize,
    pub(crate) skip_after: Duration,
    /// Batches on the way that make the shard busy.
    pub(crate) busy: usize,
}

/// A batch that has ended.
struct Done {
    project: ProjectId,
    lane: Lane,
    rows: Vec<Row>,
    outcome: Outcome,
}

struct Task {
    deps: ShardDeps,
    machine: Shard<Payload>,
    lanes: HashMap<ProjectId, Lane>,
    in_flight: FuturesUnordered<BoxFuture<'static, Done>>,
    /// Ends the batch of a project.
    cancels: HashMap<ProjectId, CancellationToken>,
}

/// Runs a shard until `stop`; batches in flight are dropped then, without an ack.
pub(crate) async fn run(deps: ShardDeps, stop: CancellationToken) {
    let limits = ShardLimits {
        quota: deps.quota,
        skip_after: deps.skip_after,
        linger: LINGER,
        busy: deps.busy,
        batch_rows: BATCH_ROWS,
        batch_bytes: BATCH_BYTES,
    };
    let mut task = Task {
        deps,
        machine: Shard::new(limits),
        lanes: HashMap::new(),
        in_flight: FuturesUnordered::new(),
        cancels: HashMap::new(),
    };
    let away = task.deps.outages.borrow_and_update().any();
    task.machine.outage(away, Instant::now());
    loop {
        let due = task.machine.due();
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            Some(done) = task.in_flight.next(), if !task.in_flight.is_empty() => task.finish(done),
            () = task.deps.queue.told.notified() => task.told(),
            Ok(()) = task.deps.outages.changed() => {
                let away = task.deps.outages.borrow_and_update().any();
                task.machine.outage(away, Instant::now());
            }
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now).into()), if due.is_some() => {}
        }
        task.proceed();
    }
}

impl Task {
    fn told(&mut self) {
        let (inbox, now) = (self.deps.queue.take(), Instant::now());
        if let Some(dropped) = inbox.abandoned {
            let rows = dropped + self.machine.gauges(now).rows;
            self.deps.judge.vitals.forgotten(self.deps.number, rows);
            self.in_flight.clear();
            self.cancels.clear();
            self.machine.abandon();
        }
        self.machine.seal(inbox.sealing);
        for row in inbox.rows {
            self.machine.push(row, now);
        }
        if inbox.skip_slowest {
            let slow = self.machine.skip_slowest(SLOW, now);
            self.cancel(slow);
        }
    }

    fn finish(&mut self, done: Done) {
        let Done { project, lane, rows, outcome } = done;
        self.cancels.remove(&project);
        self.lanes.insert(project, lane);
        let count = rows.len();
        self.machine.finish(project, rows, outcome, Instant::now());
        if let Outcome::Done { skipped } = outcome {
            let vitals = &self.deps.judge.vitals;
            vitals.skipped(self.deps.number, skipped);
            vitals.delivered(self.deps.number, count - skipped);
            self.deps.acked.notify_one();
        }
    }

    fn cancel(&self, projects: Vec<ProjectId>) {
        for project in projects {
            if let Some(cancel) = self.cancels.get(&project) {
                tracing::warn!(source = %self.deps.judge.control.source, %project, shard = self.deps.number,
                    "a project holds the position up, giving up on its batch");
                cancel.cancel();
            }
        }
    }

    /// Whatever happened, this is what follows.
    fn proceed(&mut self) {
        let now = Instant::now();
        let overdue = self.machine.cancels(now);
        self.cancel(overdue);
        while let Some(batch) = self.machine.start(now) {
            let project = batch.project;
            // A lane whose batch was dropped in mid-air goes on counting where the fronts last heard it.
            let lane = self.lanes.remove(&project).unwrap_or_else(|| self.deps.judge.lane(project));
            let cancel = CancellationToken::new();
            self.cancels.insert(project, cancel.clone());
            self.in_flight.push(Box::pin(carry(Arc::clone(&self.deps.judge), lane, batch, cancel)));
        }
        *self.deps.queue.gauges.lock().unwrap_or_else(PoisonError::into_inner) = self.machine.gauges(now);
    }
}

async fn carry(judge: Arc<Judge>, mut lane: Lane, batch: Batch<Payload>, cancel: CancellationToken) -> Done {
    let Batch { project, job, rows, hot } = batch;
    let outcome = match job {
        Job::Deliver => tokio::select! {
            skipped = deliver(&judge, &mut lane, &rows, hot) => Outcome::Done { skipped },
            () = cancel.cancelled() => Outcome::Cancelled,
        },
        Job::Skip => {
            judge.skip(project, &rows).await;
            Outcome::Done { skipped: rows.len() }
        }
    };
    Done { project, lane, rows, outcome }
}

/// Remembers which row it was that panicked (R-SD-6).
async fn deliver(judge: &Judge, lane: &mut Lane, rows: &[Row], hot: bool) -> usize {
    match AssertUnwindSafe(judge.deliver(lane, rows, hot)).catch_unwind().await {
        Ok(skipped) => skipped,
        Err(panic) => {
            judge.vitals.note_panic(lane.at().unwrap_or(rows[0].body.change.position));
            std::panic::resume_unwind(panic);
        }
    }
}
