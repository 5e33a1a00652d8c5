//! A shard: the projects that hash to it, each a lane of its own, so rows of one project stay in order and a project that
//! hangs holds up nobody else (R-SH-1).

use std::{
    collections::{HashMap, VecDeque},
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, PoisonError},
};

use aura_domain::{Change, ProjectId};
use aura_flow::{Reservation, RowClaim};
use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{
    judge::{Judge, Lane},
    registry::RegisteredTable,
};

/// A row on its way to the bus.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) change: Change,
    pub(crate) table: Arc<RegisteredTable>,
    pub(crate) claim: RowClaim,
    pub(crate) _memory: Reservation,
}

/// Largest batch of one project: enough to make the fixed cost of a check small, small enough to keep latency and memory.
const BATCH_ROWS: usize = 2048;
const BATCH_BYTES: usize = 2 << 20;

/// The intake's end of a shard. Bounded by the engine's memory quota, so a push never waits.
#[derive(Debug, Default)]
pub(crate) struct ShardQueue {
    rows: Mutex<VecDeque<Row>>,
    pushed: Notify,
}

impl ShardQueue {
    /// Hands rows over, in order.
    pub(crate) fn push(&self, rows: &mut Vec<Row>) {
        if !rows.is_empty() {
            self.rows.lock().unwrap_or_else(PoisonError::into_inner).extend(rows.drain(..));
            self.pushed.notify_one();
        }
    }

    fn take(&self) -> VecDeque<Row> {
        std::mem::take(&mut *self.rows.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[derive(Default)]
struct Waiting {
    rows: VecDeque<Row>,
    /// `None` while a batch is in flight.
    lane: Option<Lane>,
    started: bool,
}

/// Runs a shard until `stop`; batches in flight are dropped then, without an ack.
pub(crate) async fn run(
    (number, queue): (usize, Arc<ShardQueue>),
    judge: Arc<Judge>,
    acked: Arc<Notify>,
    stop: CancellationToken,
) {
    let mut waiting: HashMap<ProjectId, Waiting> = HashMap::new();
    let mut in_flight: FuturesUnordered<BoxFuture<'static, (ProjectId, Lane)>> = FuturesUnordered::new();
    loop {
        let project = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            Some((project, lane)) = in_flight.next(), if !in_flight.is_empty() => {
                acked.notify_one();
                waiting.entry(project).or_default().lane = Some(lane);
                Some(project)
            }
            () = queue.pushed.notified() => None,
        };
        let mut ready: Vec<ProjectId> = project.into_iter().collect();
        for row in queue.take() {
            let id = row.table.project.id;
            waiting.entry(id).or_default().rows.push_back(row);
            if !ready.contains(&id) {
                ready.push(id);
            }
        }
        for id in ready {
            if let Some(batch) = waiting.get_mut(&id).and_then(|lane| next_batch(id, lane)) {
                in_flight.push(Box::pin(deliver(Arc::clone(&judge), number, id, batch)));
            }
        }
    }
}

fn next_batch(id: ProjectId, waiting: &mut Waiting) -> Option<(Lane, Vec<Row>)> {
    if waiting.rows.is_empty() {
        return None;
    }
    let lane = if waiting.started { waiting.lane.take()? } else { Lane::new(id) };
    waiting.started = true;
    let mut bytes = 0;
    let fits = |row: &&Row| {
        bytes += row.change.wire_bytes;
        bytes <= BATCH_BYTES
    };
    waiting.rows.front()?.claim.lead();
    // One row always goes, however large it is.
    let rows = waiting.rows.iter().take(BATCH_ROWS).take_while(fits).count().max(1);
    Some((lane, waiting.rows.drain(..rows).collect()))
}

async fn deliver(
    judge: Arc<Judge>,
    shard: usize,
    id: ProjectId,
    (mut lane, rows): (Lane, Vec<Row>),
) -> (ProjectId, Lane) {
    let delivering = AssertUnwindSafe(judge.deliver(&mut lane, &rows)).catch_unwind().await;
    if let Err(panic) = delivering {
        judge.vitals.note_panic(lane.at().unwrap_or(rows[0].change.position));
        std::panic::resume_unwind(panic);
    }
    judge.vitals.delivered(shard, rows.len());
    // The bus has every row, or the loss was announced.
    for row in rows {
        row.claim.ack();
    }
    (id, lane)
}
