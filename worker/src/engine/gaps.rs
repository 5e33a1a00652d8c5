//! Losses that must be told (G8): each waits here until the bus has taken its announcement, however long the bus is away.
//! Until then the rows concerned hold the confirmed position back, and a new generation isn't entered, so that whoever
//! comes after a crash meets them again.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use aura_bus::{Headers, Message, Subject};
use aura_domain::{Position, ProjectId};
use aura_flow::Admission;
use aura_store::{NewGap, Store, StoreError};
use aura_wire::{GapEnvelope, GapReason};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::vitals::Vitals;
use crate::subs::control::Control;

/// First and longest pause between two tries to publish.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// A loss.
#[derive(Debug)]
pub(super) struct Loss {
    pub(super) project: ProjectId,
    pub(super) reason: GapReason,
    /// The client's schema and table; `None` = all of the project.
    pub(super) table: Option<[String; 2]>,
    /// First and last position; unknown = everything up to now.
    pub(super) range: Option<(Position, Position)>,
    /// Rows that are acknowledged once it is announced.
    pub(super) claims: Vec<Admission>,
    /// Nothing of the new generation is remembered before it is announced.
    pub(super) opens_generation: bool,
}

/// Losses that are still to be announced.
#[derive(Debug, Default)]
pub(super) struct Gaps {
    pending: Mutex<VecDeque<Loss>>,
    changed: Notify,
}

impl Gaps {
    /// Never waits. One more of the same kind joins the one that waits.
    pub(super) fn add(&self, loss: Loss) {
        let mut pending = self.lock();
        // The first one may be on its way to the bus.
        let same = |known: &&mut Loss| known.covers(&loss);
        match pending.iter_mut().skip(1).find(same) {
            Some(known) => known.join(loss),
            None => pending.push_back(loss),
        }
        self.changed.notify_waiters();
    }

    /// Whether the present generation's gap is announced.
    pub(super) fn generation_is_open(&self) -> bool {
        !self.lock().iter().any(|loss| loss.opens_generation)
    }

    fn front(&self, control: &Control) -> Option<Message> {
        self.lock().front().map(|loss| loss.message(control))
    }

    fn done(&self, vitals: &Vitals) -> Option<Loss> {
        let mut loss = self.lock().pop_front()?;
        for claim in loss.claims.drain(..) {
            // Whoever sees it done with also sees the position pass it.
            let shard = claim.shard();
            claim.ack();
            vitals.skipped(shard, 1);
        }
        self.changed.notify_waiters();
        Some(loss)
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Loss>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the present generation's gap is announced.
    pub(super) async fn generation_opened(&self) {
        loop {
            let changed = self.changed.notified();
            if self.generation_is_open() {
                return;
            }
            changed.await;
        }
    }
}

impl Loss {
    /// A loss of unknown extent.
    pub(super) fn up_to_now(project: ProjectId, reason: GapReason, table: Option<[String; 2]>) -> Self {
        Self { project, reason, table, range: None, claims: Vec::new(), opens_generation: false }
    }

    fn covers(&self, other: &Self) -> bool {
        let unknown = self.range.is_none() && other.range.is_none();
        unknown && (self.project, self.reason, &self.table) == (other.project, other.reason, &other.table)
    }

    fn join(&mut self, other: Self) {
        self.claims.extend(other.claims);
        self.opens_generation |= other.opens_generation;
    }

    pub(super) fn message(&self, control: &Control) -> Message {
        let (source, epoch, project) = (control.source, control.epoch, self.project);
        let gap = GapEnvelope {
            v: 1,
            project,
            source,
            from: self.range.map(|(from, _)| from),
            to: self.range.map(|(_, to)| to),
            reason: self.reason,
            tables: self.table.clone().map(|table| vec![table]),
            sub_ids: None,
        };
        let mut message = Message::new(Subject::gap(project), gap.encode());
        message.headers = Headers { origin: Some(control.origin.clone()), source: Some(source), epoch: Some(epoch) };
        message
    }
}

/// The gap's word, as clients and operators see it.
pub(super) fn word(reason: GapReason) -> String {
    serde_json::to_value(reason).ok().and_then(|word| word.as_str().map(str::to_owned)).unwrap_or_default()
}

/// The task that announces and records.
pub(super) struct Announcer {
    pub(super) gaps: Arc<Gaps>,
    pub(super) control: Arc<Control>,
    pub(super) vitals: Arc<Vitals>,
    pub(super) acked: Arc<Notify>,
    pub(super) store: Store,
    pub(super) stop: CancellationToken,
}

impl Announcer {
    /// Runs until `stop`.
    pub(super) async fn run(self) {
        let stop = self.stop.clone();
        stop.run_until_cancelled(self.announce()).await;
    }

    async fn announce(&self) {
        loop {
            let added = self.gaps.changed.notified();
            let Some(message) = self.gaps.front(&self.control) else {
                added.await;
                continue;
            };
            publish(&self.control, message).await;
            if let Some(loss) = self.gaps.done(&self.vitals) {
                self.acked.notify_one();
                record(&self.control, &self.store, &loss).await;
            }
        }
    }
}

/// Publishes the announcement until the bus has it, however long that takes: what nobody was told of is never acknowledged
/// (G8). A bus that refuses even that is a stall like any other.
pub(super) async fn publish(control: &Control, message: Message) {
    let (mut pause, longest) = PAUSE;
    let mut failed = false;
    let batch = [message];
    loop {
        control.await_fronts(failed).await;
        match control.bus.publish_batch(&batch).await {
            Ok(()) => return,
            Err(error) => {
                tracing::warn!(source = %control.source, %error, "gap not announced, trying again");
                failed = true;
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}

/// For operators; the clients know already. A generation's is recorded when it is entered.
pub(super) async fn record(control: &Control, store: &Store, loss: &Loss) {
    if loss.opens_generation {
        return;
    }
    let (source, epoch) = (control.source, control.epoch);
    let (from, to) = loss.range.unzip();
    let reason = word(loss.reason);
    let gap = NewGap { source, project: Some(loss.project), from, to, reason: &reason };
    match store.record_gap(epoch, gap).await {
        Ok(()) | Err(StoreError::Fenced) => {}
        Err(error) => tracing::warn!(%source, %error, "gap not recorded"),
    }
}
