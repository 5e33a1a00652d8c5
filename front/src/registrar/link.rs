use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use aura_bus::{BusError, Message, SharedBus, Subject};
use aura_domain::{FrontId, SourceId, SubId};
use aura_wire::{
    GapReason,
    control::{Announcement, Reply, Request, SourceState, Subscription},
};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, timeout},
};

use super::book::{SourceBook, Status, Step};
use crate::hub::HubRunner;

/// Longest wait for the leader's answer; it may have to ask PostgreSQL about a filter's columns. The reserve is for a bus that ignores the time-out that it was given.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const REQUEST_RESERVE: Duration = Duration::from_secs(1);
/// Between two tries while nobody answers, doubling.
const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(1);

/// Whether a source's engine streams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Streaming {
    /// No leader was heard yet, or not lately.
    Unknown,
    /// It does.
    Yes,
    /// It doesn't; a code of a closed set says why.
    No(Option<String>),
}

/// The way to the leader of one source.
#[derive(Debug)]
pub(crate) struct SourceLink {
    source: SourceId,
    front: FrontId,
    book: Mutex<SourceBook>,
    wake: Notify,
    /// A leader announced itself: what was asked of the one before is asked again.
    leader: Notify,
    streaming: watch::Sender<Streaming>,
    heard: Mutex<Option<Instant>>,
    /// Set by a reconnect of the bus: the coming snapshot's gap has that reason.
    reconnected: Mutex<bool>,
}

impl SourceLink {
    pub(super) fn new(source: SourceId, front: FrontId) -> Self {
        Self {
            source,
            front: front.clone(),
            book: Mutex::new(SourceBook::new(front)),
            wake: Notify::new(),
            leader: Notify::new(),
            streaming: watch::Sender::new(Streaming::Unknown),
            heard: Mutex::default(),
            reconnected: Mutex::default(),
        }
    }

    pub(super) fn acquire(&self, subscription: Subscription) -> (u64, watch::Receiver<Status>) {
        let acquired = self.book().acquire(subscription);
        self.wake();
        acquired
    }

    pub(super) fn release(&self, sub_id: SubId, ticket: u64) {
        self.book().release(sub_id, ticket);
        self.wake();
    }

    pub(super) fn streaming(&self) -> watch::Receiver<Streaming> {
        self.streaming.subscribe()
    }

    pub(super) fn state(&self) -> Option<SourceState> {
        self.book().state().map(|(rev, count)| SourceState { source: self.source, rev, count })
    }

    pub(super) fn wake(&self) {
        self.wake.notify_one();
    }

    /// The bus or we were away: the leader hears everything again, and subscribers of the gap.
    pub(super) fn reconnected(&self) {
        *self.reconnected.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.book().want_snapshot(true);
        self.wake();
    }

    /// A worker announced something about this source.
    pub(super) fn announced(&self, announcement: &Announcement) {
        match announcement {
            Announcement::WantSnapshots { epoch, fronts, .. } => {
                let asked = fronts.as_ref().is_none_or(|fronts| fronts.contains(&self.front));
                let mut book = self.book();
                if book.note_epoch(*epoch) && asked {
                    // Whether something was missed is said when the leader begins to read.
                    book.want_snapshot(false);
                }
                drop(book);
                self.leader.notify_waiters();
            }
            Announcement::Leader { epoch, fronts, .. } => self.book().leader(*epoch, fronts),
            Announcement::RegistryChanged { epoch, .. } => {
                let mut book = self.book();
                if book.note_epoch(*epoch) {
                    book.ask_again();
                }
            }
            Announcement::LeaderHeartbeat { epoch, streaming, reason, .. } => {
                if self.book().note_epoch(*epoch) {
                    self.heard(if *streaming { Streaming::Yes } else { Streaming::No(reason.clone()) });
                }
            }
        }
        self.wake();
    }

    /// A heartbeat's turn: bindings that wait are asked about again.
    pub(super) fn beat(&self) {
        self.book().ask_some_again();
        self.wake();
    }

    fn heard(&self, streaming: Streaming) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.streaming.send_if_modified(|known| {
            let changed = *known != streaming;
            *known = streaming;
            changed
        });
    }

    /// A leader that is silent isn't known to stream.
    pub(super) fn check_leader(&self, now: Instant, silence: Duration) {
        let heard = *self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        if heard.is_none_or(|at| now.duration_since(at) > silence) {
            self.streaming.send_if_modified(|known| std::mem::replace(known, Streaming::Unknown) != Streaming::Unknown);
        }
    }

    /// Sends what the book says, one step at a time, for ever.
    pub(super) async fn run(self: Arc<Self>, bus: SharedBus, hubs: HubRunner) {
        let mut retry = FIRST_RETRY;
        loop {
            let step = self.book().next();
            let Some(step) = step else {
                self.wake.notified().await;
                continue;
            };
            let outcome = tokio::select! {
                outcome = self.send(&bus, &step) => outcome,
                () = self.leader.notified() => continue,
            };
            match outcome {
                Ok(replies) => {
                    retry = FIRST_RETRY;
                    self.answered(&step, &replies, &hubs);
                }
                Err(error) => {
                    tracing::debug!(%error, source = %self.source, "the leader didn't answer");
                    // A wake-up, such as a new leader's announcement, is reason enough to try at once.
                    if timeout(retry, self.wake.notified()).await.is_err() {
                        retry = (retry * 2).min(LAST_RETRY);
                    }
                }
            }
        }
    }

    fn answered(&self, step: &Step, replies: &[Reply], hubs: &HubRunner) {
        let effects = self.book().answered(step, replies);
        if let Some(reply) = replies.last() {
            let reason = match &*self.streaming.borrow() {
                Streaming::No(reason) => reason.clone(),
                _ => None,
            };
            self.heard(if reply.streaming { Streaming::Yes } else { Streaming::No(reason) });
        }
        if effects.gap {
            let bus = std::mem::take(&mut *self.reconnected.lock().unwrap_or_else(PoisonError::into_inner));
            hubs.announce_loss(Some(self.source), if bus { GapReason::Bus } else { GapReason::Failover });
        }
    }

    async fn send(&self, bus: &SharedBus, step: &Step) -> Result<Vec<Reply>, BusError> {
        let mut replies = Vec::with_capacity(step.requests.len());
        for request in &step.requests {
            replies.push(self.request(bus, request).await?);
        }
        Ok(replies)
    }

    async fn request(&self, bus: &SharedBus, request: &Request) -> Result<Reply, BusError> {
        let payload = serde_json::to_vec(request).expect("a request has string keys only");
        let mut message = Message::new(Subject::source_requests(self.source), payload);
        message.headers.origin = Some(self.front.0.clone());
        message.headers.source = Some(self.source);
        let answer = timeout(REQUEST_TIMEOUT + REQUEST_RESERVE, bus.request(message, REQUEST_TIMEOUT));
        let answer = answer.await.map_err(|_| BusError::Timeout(REQUEST_TIMEOUT))??;
        serde_json::from_slice(&answer.payload).map_err(|_| BusError::Refused("the answer is malformed".to_owned()))
    }

    fn book(&self) -> MutexGuard<'_, SourceBook> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
