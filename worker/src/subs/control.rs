//! The leader's end of the control protocol (design §9): takes fronts' subscriptions, answers when they are live, and
//! keeps its copy equal to what the fronts have.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::Duration,
};

use aura_bus::{BusError, Message, SharedBus, Subject};
use aura_domain::{Epoch, FrontId, Lsn, ProjectId, SourceId, SubId};
use aura_pgsource::{SourceError, visibility::VisibilityPool};
use aura_wire::control::{Announcement, Heartbeat, Reply, Request, Subscription};
use futures_util::StreamExt as _;
use tokio::{
    sync::{Semaphore, watch},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    admission::{Refusal, admit},
    hearing::Hearing,
    index::{SubscriptionIndex, TableKey},
};
use crate::engine::{registry::Registry, vitals::Vitals};

/// Period of heartbeats in both directions (design §9).
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(5);
/// A front that missed three is gone.
pub(crate) const FRONT_TIMEOUT: Duration = Duration::from_secs(15);
/// Until a reconnect that made a batch fail shows in the bus's state.
const SETTLE: Duration = Duration::from_millis(500);
/// Requests that are worked on at once; a join may have to ask PostgreSQL.
const CONCURRENCY: usize = 32;
/// What checking the subscriptions of one request may take: a front waits 5 s for the answer.
const ADMIT_LIMIT: Duration = Duration::from_secs(3);
/// Subscriptions of one project and request that are checked at once.
const ADMIT_AT_ONCE: usize = 4;

/// Whether the engine streams, and why not.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Streaming {
    pub(crate) on: bool,
    pub(crate) reason: Option<String>,
}

/// See the module. One per lease.
pub(crate) struct Control {
    pub(crate) source: SourceId,
    pub(crate) epoch: Epoch,
    pub(crate) origin: String,
    pub(crate) bus: SharedBus,
    pub(crate) visibility: Arc<VisibilityPool>,
    pub(crate) subscriptions: Arc<RwLock<SubscriptionIndex>>,
    pub(crate) registry: watch::Receiver<Arc<Registry>>,
    pub(crate) streaming: watch::Receiver<Streaming>,
    pub(crate) vitals: Arc<Vitals>,
    /// Last `seq` of each project, by the lanes.
    pub(crate) seqs: Arc<Mutex<HashMap<ProjectId, u64>>>,
    /// Chunks of snapshots that aren't complete.
    pub(crate) partial: Mutex<HashMap<FrontId, (u64, HashSet<SubId>)>>,
    pub(crate) heard: Mutex<Hearing>,
    /// The bus connection, by number, on which every known front has been heard.
    pub(crate) greeted: tokio::sync::Mutex<u64>,
}

impl Control {
    /// Serves fronts until `stop`. `ready` is set once requests can arrive.
    pub(crate) async fn serve(self: Arc<Self>, ready: watch::Sender<bool>, stop: CancellationToken) {
        while !stop.is_cancelled() {
            if let Err(error) = self.serve_once(&ready, &stop).await {
                tracing::warn!(source = %self.source, %error, "can't serve fronts, trying again");
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        }
    }

    async fn serve_once(
        self: &Arc<Self>,
        ready: &watch::Sender<bool>,
        stop: &CancellationToken,
    ) -> Result<(), BusError> {
        let mut requests = self.bus.subscribe(&Subject::source_requests(self.source)).await?;
        let mut heartbeats = self.bus.subscribe(&Subject::front_heartbeats()).await?;
        self.ask_for_snapshots().await;
        ready.send_replace(true);
        let tasks = TaskTracker::new();
        let permits = Arc::new(Semaphore::new(CONCURRENCY));
        let mut permit = None;
        let mut streaming = self.streaming.clone();
        let mut tick = tokio::time::interval(HEARTBEAT);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                // Requests come last: however many wait, fronts hear of us and we of them.
                heartbeat = heartbeats.next() => self.hear(&heartbeat.ok_or(BusError::Disconnected)?).await,
                _ = streaming.changed() => self.announce_state().await,
                _ = tick.tick() => {
                    self.forget_silent_fronts();
                    self.announce_state().await;
                }
                free = Arc::clone(&permits).acquire_owned(), if permit.is_none() => permit = free.ok(),
                request = requests.next(), if permit.is_some() => {
                    let (request, permit) = (request.ok_or(BusError::Disconnected)?, permit.take());
                    let control = Arc::clone(self);
                    tasks.spawn(async move {
                        control.answer(request).await;
                        drop(permit);
                    });
                }
            }
        }
    }

    async fn answer(&self, message: Message) {
        let Some(reply_to) = message.reply else { return };
        let Ok(request) = serde_json::from_slice::<Request>(&message.payload) else {
            metrics::counter!("cdc_control_malformed_total").increment(1);
            return;
        };
        let reply = self.take(request).await;
        let payload = serde_json::to_vec(&reply).expect("a reply has string keys only");
        if let Err(error) = self.bus.publish(Message::new(reply_to, payload)).await {
            // The front asks again.
            tracing::warn!(source = %self.source, %error, "reply to a front not sent");
        }
    }

    async fn take(&self, request: Request) -> Reply {
        match request {
            Request::Join { front, rev, subscriptions } => {
                let unknown = self.index(|index| index.front_state(&front).is_none()) && rev > 1;
                let exceptions = self.admit_all(&front, subscriptions).await;
                self.note_rev(&front, rev);
                self.reply(exceptions, unknown)
            }
            Request::Leave { front, rev, sub_ids } => {
                self.index_mut(|index| index.remove(&front, sub_ids));
                self.note_rev(&front, rev);
                self.reply(Vec::new(), false)
            }
            Request::Snapshot { front, rev, part, parts, subscriptions } => {
                let ids: Vec<_> = subscriptions.iter().map(|subscription| subscription.sub_id).collect();
                let exceptions = self.admit_all(&front, subscriptions).await;
                if let Some(keep) = self.collect(&front, rev, ids, part + 1 == parts) {
                    self.index_mut(|index| {
                        // A join that overtook this snapshot isn't in it.
                        if index.front_state(&front).is_none_or(|(known, _)| known <= rev) {
                            index.retain(&front, &keep);
                        }
                    });
                    self.note_rev(&front, rev);
                }
                self.reply(exceptions, false)
            }
        }
    }

    /// Adds a chunk; the whole set of ids after the last one.
    fn collect(&self, front: &FrontId, rev: u64, ids: Vec<SubId>, last: bool) -> Option<HashSet<SubId>> {
        let mut partial = self.partial.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = partial.entry(front.clone()).or_insert_with(|| (rev, HashSet::new()));
        if entry.0 != rev {
            *entry = (rev, HashSet::new());
        }
        entry.1.extend(ids);
        if last { partial.remove(front).map(|(_, ids)| ids) } else { None }
    }

    /// A request is about all projects of the source, and the front sends it again unless it is answered soon. So whose
    /// checks take long has a time of its own, and is asked about again; the others don't wait for it.
    async fn admit_all(&self, front: &FrontId, subscriptions: Vec<Subscription>) -> Vec<aura_wire::control::Exception> {
        let deadline = Instant::now() + ADMIT_LIMIT;
        let mut projects: HashMap<ProjectId, Vec<Subscription>> = HashMap::new();
        for subscription in subscriptions {
            projects.entry(subscription.spec.project).or_default().push(subscription);
        }
        let admitted = projects.into_values().map(|subscriptions| {
            let admitted = futures_util::stream::iter(subscriptions)
                .map(|subscription| self.admit_until(deadline, front, subscription))
                .buffer_unordered(ADMIT_AT_ONCE);
            admitted.filter_map(std::future::ready).collect::<Vec<_>>()
        });
        futures_util::future::join_all(admitted).await.into_iter().flatten().collect()
    }

    async fn admit_until(
        &self,
        deadline: Instant,
        front: &FrontId,
        subscription: Subscription,
    ) -> Option<aura_wire::control::Exception> {
        let spec = &subscription.spec;
        let questions = (spec.filter.is_some() || spec.select.is_some())
            && !self.index(|index| index.is_active(subscription.sub_id));
        // Late ones aren't even begun: thousands would each ask for the catalogue in vain. What needs no question is done at
        // the first poll.
        let admitted = if questions && Instant::now() >= deadline {
            None
        } else {
            tokio::time::timeout_at(deadline, self.admit_one(front, &subscription)).await.ok()
        };
        let refusal = match admitted {
            Some(admitted) => admitted.err()?,
            None => {
                self.index_mut(|index| index.insert(front, subscription.clone(), None));
                Refusal::Unknown(SourceError::Timeout { what: "checking a subscription", limit: ADMIT_LIMIT })
            }
        };
        Some(refusal.exception(&subscription))
    }

    async fn admit_one(&self, front: &FrontId, subscription: &Subscription) -> Result<(), Refusal> {
        loop {
            if self.index(|index| index.is_active(subscription.sub_id)) {
                self.index_mut(|index| index.insert(front, subscription.clone(), None));
                return Ok(());
            }
            let registry = Arc::clone(&self.registry.borrow());
            let refusal = match admit(subscription, &registry, &self.visibility).await {
                Ok(active) => {
                    self.index_mut(|index| index.insert(front, subscription.clone(), Some(active)));
                    return Ok(());
                }
                Err(fatal @ Refusal::Fatal(_)) => {
                    // It may have been good before: a column's type has changed since.
                    self.index_mut(|index| index.remove(front, [subscription.sub_id]));
                    return Err(fatal);
                }
                Err(refusal) => refusal,
            };
            self.index_mut(|index| index.insert(front, subscription.clone(), None));
            // Whoever registered the table meanwhile may have woken the others before this one was there.
            if Arc::ptr_eq(&registry, &self.registry.borrow()) {
                return Err(refusal);
            }
        }
    }

    /// Subscriptions whose table has been registered begin to deliver; before the api is told that it is active. Answers
    /// the tables that have a subscription which couldn't be checked.
    pub(crate) async fn wake(&self, registry: &Registry) -> HashSet<TableKey> {
        let unknown = Mutex::new(HashSet::new());
        let dormant = futures_util::stream::iter(self.index(SubscriptionIndex::dormant));
        dormant.for_each_concurrent(CONCURRENCY, |waiting| self.wake_one(waiting, registry, &unknown)).await;
        unknown.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    async fn wake_one(&self, waiting: Subscription, registry: &Registry, unknown: &Mutex<HashSet<TableKey>>) {
        let key = TableKey::of(&waiting.spec);
        let unknown = || unknown.lock().unwrap_or_else(PoisonError::into_inner);
        // One try a table: a hanging one may not hold up the others for long.
        if key.as_ref().is_some_and(|key| unknown().contains(key)) {
            return;
        }
        match admit(&waiting, registry, &self.visibility).await {
            Ok(active) => self.index_mut(|index| index.activate(waiting.sub_id, active)),
            Err(Refusal::Unknown(error)) => {
                tracing::warn!(source = %self.source, %error, "a waiting subscription can't be checked now");
                unknown().extend(key);
            }
            Err(_) => {}
        }
    }

    fn reply(&self, exceptions: Vec<aura_wire::control::Exception>, want_snapshot: bool) -> Reply {
        Reply {
            epoch: self.epoch,
            since: self.vitals.received(),
            streaming: self.streaming.borrow().on,
            exceptions,
            want_snapshot,
        }
    }

    fn note_rev(&self, front: &FrontId, rev: u64) {
        self.heard().request(front, Instant::now());
        self.index_mut(|index| {
            let known = index.front_state(front).map_or(0, |(known, _)| known);
            index.set_rev(front, known.max(rev));
        });
    }

    async fn hear(&self, message: &Message) {
        let Ok(heartbeat) = serde_json::from_slice::<Heartbeat>(&message.payload) else { return };
        if heartbeat.leaving {
            self.forget(&heartbeat.front);
            return;
        }
        self.heard().heartbeat(&heartbeat.front, Instant::now());
        let Some(state) = heartbeat.sources.iter().find(|state| state.source == self.source) else { return };
        let known = self.index(|index| index.front_state(&heartbeat.front));
        let equal = known.is_some_and(|(rev, count)| rev == state.rev && count as u64 == state.count);
        if !equal {
            let fronts = Some(vec![heartbeat.front]);
            self.announce(&Announcement::WantSnapshots { source: self.source, epoch: self.epoch, fronts }).await;
        }
    }

    /// R-FRT-4: after a reconnect nothing is published before every known front is back, or has missed three heartbeats;
    /// what a front is sent before the bus has its subscriptions again is lost to it. `failed`: a batch was just not
    /// proved to be received, so a reconnect may be known before it shows.
    pub(crate) async fn await_fronts(&self, failed: bool) {
        let mut greeted = self.greeted.lock().await;
        let mut states = self.bus.state();
        let number = *greeted;
        if failed {
            let renewed = states.wait_for(|state| !state.connected || state.connects > number);
            let _ = tokio::time::timeout(SETTLE, renewed).await;
        }
        let connected = states.wait_for(|state| state.connected).await.map(|state| state.connects);
        let Some(connects) = connected.ok().filter(|connects| *connects > number) else { return };
        let since = Instant::now();
        self.ask_for_snapshots().await;
        while self.unheard_since(since) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        *greeted = connects;
    }

    /// Whether a front with subscriptions isn't back.
    fn unheard_since(&self, since: Instant) -> bool {
        let out = self.heard().not_back_since(since, FRONT_TIMEOUT, Instant::now());
        out.iter().any(|front| self.index(|index| index.front_state(front)).is_some_and(|(_, count)| count > 0))
    }

    fn heard(&self) -> MutexGuard<'_, Hearing> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget_silent_fronts(&self) {
        let silent = self.heard().silent(FRONT_TIMEOUT, Instant::now());
        for front in silent {
            self.forget(&front);
        }
    }

    fn forget(&self, front: &FrontId) {
        self.heard().forget(front);
        self.index_mut(|index| index.forget_front(front));
    }

    /// Tells fronts that the engine begins to read, and with whose subscriptions.
    pub(crate) async fn announce_leader(&self, start: Lsn) {
        let fronts = self.index(SubscriptionIndex::revs);
        self.announce(&Announcement::Leader { source: self.source, epoch: self.epoch, start, fronts }).await;
    }

    /// Makes fronts ask about every binding again: some don't deliver any more, and their clients are to be told why.
    pub(crate) async fn ask_for_snapshots(&self) {
        self.announce(&Announcement::WantSnapshots { source: self.source, epoch: self.epoch, fronts: None }).await;
    }

    /// Tells fronts to ask again about bindings that don't deliver.
    pub(crate) async fn announce_registry(&self) {
        self.announce(&Announcement::RegistryChanged { source: self.source, epoch: self.epoch }).await;
    }

    async fn announce_state(&self) {
        let Streaming { on, reason } = self.streaming.borrow().clone();
        let seqs = self.last_seqs();
        let (source, epoch) = (self.source, self.epoch);
        self.announce(&Announcement::LeaderHeartbeat { source, epoch, streaming: on, reason, seqs }).await;
    }

    fn last_seqs(&self) -> Vec<(ProjectId, u64)> {
        let seqs = self.seqs.lock().unwrap_or_else(PoisonError::into_inner);
        seqs.iter().map(|(project, seq)| (*project, *seq)).collect()
    }

    async fn announce(&self, announcement: &Announcement) {
        let payload = serde_json::to_vec(announcement).expect("an announcement has string keys only");
        let mut message = Message::new(Subject::source_announcements(self.source), payload);
        message.headers.origin = Some(self.origin.clone());
        message.headers.source = Some(self.source);
        message.headers.epoch = Some(self.epoch);
        if let Err(error) = self.bus.publish(message).await {
            tracing::debug!(source = %self.source, %error, "announcement not sent");
        }
    }

    /// Number of fronts whose subscriptions we have.
    pub(crate) fn fronts(&self) -> usize {
        self.index(|index| index.revs().len())
    }

    pub(crate) fn index<T>(&self, read: impl FnOnce(&SubscriptionIndex) -> T) -> T {
        read(&self.subscriptions.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn index_mut<T>(&self, write: impl FnOnce(&mut SubscriptionIndex) -> T) -> T {
        write(&mut self.subscriptions.write().unwrap_or_else(PoisonError::into_inner))
    }
}
