//! Losses that must be told (G8): each waits here until the bus has taken its announcement, however long the bus is away.
//! Until then the rows concerned hold the confirmed position back, and a new generation isn't entered, so that whoever
//! comes after a crash meets them again.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use aura_bus::{BusError, Headers, Message, Subject};
use aura_domain::{Position, ProjectId};
use aura_flow::Admission;
use aura_store::{NewGap, Store, StoreError};
use aura_wire::{GapEnvelope, GapReason};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::{
    queues::{Queues, Turn},
    vitals::Vitals,
};
use crate::subs::control::Control;

/// Gaps that may wait to be recorded.
pub(super) const RECORDS: usize = 1024;

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
    /// Who waits for the announcement; nobody else knows of the loss, so it is dropped with him.
    pub(super) told: Option<oneshot::Sender<()>>,
}

/// The bus has refused a project's announcement for too long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) project: ProjectId,
    /// The bus's words.
    pub(super) reason: String,
}

/// Losses that are still to be announced.
#[derive(Debug, Default)]
pub(super) struct Gaps {
    pending: Mutex<Queues>,
    changed: Notify,
    /// See [`Self::stalled`].
    refused: watch::Sender<Option<Refusal>>,
}

impl Gaps {
    /// Never waits. One more of the same kind joins the one that waits.
    pub(super) fn add(&self, loss: Loss) {
        self.lock().add(loss);
        self.changed.notify_waiters();
    }

    /// Returns when the bus has taken the announcement.
    pub(super) async fn announce(&self, loss: Loss) {
        let (told, heard) = oneshot::channel();
        self.add(Loss { told: Some(told), ..loss });
        if heard.await.is_err() {
            // Abandoned, and so is whoever asks.
            std::future::pending::<()>().await;
        }
    }

    /// Whether the present generation's gap is announced.
    pub(super) fn generation_is_open(&self) -> bool {
        self.lock().generation_is_open()
    }

    /// What the bus refuses now, for however long.
    pub(super) fn refusal(&self) -> Option<Refusal> {
        self.lock().refusal()
    }

    /// Waits until the bus has refused an announcement for longer than the limit: a stall like any other (R-SH-5).
    pub(super) async fn stalled(&self) -> Refusal {
        let mut refused = self.refused.subscribe();
        let found = refused.wait_for(Option::is_some).await.map(|found| found.clone());
        match found {
            Ok(Some(refusal)) => refusal,
            _ => std::future::pending().await,
        }
    }

    /// The rows that are out are dropped and read again, and their losses found again. What nobody reads again is still
    /// announced.
    pub(super) fn abandon(&self, vitals: &Vitals) {
        let claims = self.lock().abandon();
        claims.iter().for_each(|claim| vitals.forgotten(claim.shard(), 1));
        self.refused.send_replace(None);
        self.changed.notify_waiters();
    }

    fn taken(&self, project: ProjectId, vitals: &Vitals) -> Option<Loss> {
        let mut loss = self.lock().taken(project)?;
        for claim in loss.claims.drain(..) {
            // Whoever sees it done with also sees the position pass it.
            let shard = claim.shard();
            claim.ack();
            vitals.skipped(shard, 1);
        }
        loss.told.take().map(|told| told.send(()));
        self.refused.send_if_modified(|refused| refused.take_if(|refusal| refusal.project == project).is_some());
        self.changed.notify_waiters();
        Some(loss)
    }

    fn failed(&self, project: ProjectId, error: BusError, limit: Duration) {
        let now = Instant::now();
        match error {
            BusError::Refused(reason) => {
                if self.lock().refused(project, reason.clone(), now) >= limit {
                    self.refused.send_replace(Some(Refusal { project, reason }));
                }
            }
            BusError::Disconnected | BusError::Unreachable(_) => self.lock().failed(project, true, now),
            BusError::Timeout(_) | BusError::NoResponders => self.lock().failed(project, false, now),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queues> {
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
        Self { project, reason, table, range: None, claims: Vec::new(), opens_generation: false, told: None }
    }

    pub(super) fn covers(&self, other: &Self) -> bool {
        let shared = self.told.is_none() && other.told.is_none();
        shared && (self.reason, self.range, &self.table) == (other.reason, other.range, &other.table)
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.told.as_ref().is_none_or(|told| !told.is_closed())
    }

    pub(super) fn join(&mut self, other: Self) {
        self.claims.extend(other.claims);
        self.opens_generation |= other.opens_generation;
    }

    fn message(&self, control: &Control) -> Message {
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
pub(crate) fn word(reason: GapReason) -> String {
    serde_json::to_value(reason).ok().and_then(|word| word.as_str().map(str::to_owned)).unwrap_or_default()
}

/// The task that announces.
pub(super) struct Announcer {
    pub(super) gaps: Arc<Gaps>,
    pub(super) control: Arc<Control>,
    pub(super) vitals: Arc<Vitals>,
    pub(super) acked: Arc<Notify>,
    /// What was announced, for the [`Recorder`].
    pub(super) announced: mpsc::Sender<Loss>,
    /// R-SH-5.
    pub(super) stall_limit: Duration,
    pub(super) stop: CancellationToken,
}

impl Announcer {
    /// Runs until `stop`.
    pub(super) async fn run(self) {
        let stop = self.stop.clone();
        stop.run_until_cancelled(self.announce()).await;
    }

    /// Tries each announcement until the bus has it, however long that takes: what nobody was told of is never
    /// acknowledged (G8). A bus that refuses even that is a stall like any other.
    async fn announce(&self) {
        let mut failed = false;
        loop {
            let changed = self.gaps.changed.notified();
            match self.turn() {
                Ok((project, message)) => failed = self.publish(project, message, failed).await,
                Err(until) => tokio::select! {
                    () = changed => {}
                    () = tokio::time::sleep_until(until.unwrap_or_else(Instant::now).into()), if until.is_some() => {}
                },
            }
        }
    }

    /// What to try now, or until when to wait.
    fn turn(&self) -> Result<(ProjectId, Message), Option<Instant>> {
        let mut queues = self.gaps.lock();
        match queues.turn(Instant::now()) {
            Turn::Project(project) => match queues.front(project) {
                Some(loss) => Ok((project, loss.message(&self.control))),
                None => Err(None),
            },
            Turn::Wait(until) => Err(until),
        }
    }

    /// One try; answers whether the connection may be a new one before this is known.
    async fn publish(&self, project: ProjectId, message: Message, failed: bool) -> bool {
        self.control.await_fronts(failed).await;
        if let Err(error) = self.control.bus.publish_batch(&[message]).await {
            tracing::warn!(source = %self.control.source, %project, %error, "gap not announced, trying again");
            // Whoever waits for the fronts holds up everybody's batches: not for a refusal.
            let may_be_new = !matches!(error, BusError::Refused(_));
            self.gaps.failed(project, error, self.stall_limit);
            return may_be_new;
        }
        if let Some(loss) = self.gaps.taken(project, &self.vitals) {
            self.acked.notify_one();
            if self.announced.try_send(loss).is_err() {
                tracing::warn!(source = %self.control.source, %project, "gap not recorded, too many wait for it");
            }
        }
        false
    }
}

/// The task that records what was announced, beside the announcer: a platform database that hangs must not hold it up.
pub(super) struct Recorder {
    pub(super) control: Arc<Control>,
    pub(super) store: Store,
    pub(super) stop: CancellationToken,
}

impl Recorder {
    /// Runs until `stop`.
    pub(super) async fn run(self, mut announced: mpsc::Receiver<Loss>) {
        let record = async {
            while let Some(loss) = announced.recv().await {
                record(&self.control, &self.store, &loss).await;
            }
        };
        self.stop.run_until_cancelled(record).await;
    }
}

/// For operators; the clients know already. A generation's is recorded when it is entered.
async fn record(control: &Control, store: &Store, loss: &Loss) {
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
