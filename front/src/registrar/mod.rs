//! This front's subscriptions at the workers (design §9): soft state that the worker leading a source holds a copy of.

mod book;
mod link;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use aura_bus::{ConnectionState, Message, SharedBus, Subject};
use aura_domain::{Epoch, FrontId, SourceId, SubId};
use aura_wire::{
    GapReason,
    control::{Announcement, Heartbeat, SourceState, Subscription},
};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub(crate) use book::Status;
use link::SourceLink;
pub(crate) use link::Streaming;

use crate::hub::HubRunner;

/// A leader that is silent for so long isn't known to stream: three heartbeats.
const LEADER_SILENCE: Duration = Duration::from_secs(15);
/// After so long without a heartbeat of ours (a stopped process, say) the leaders have forgotten us.
const FORGOTTEN: Duration = Duration::from_secs(15);
const SUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(5);
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(250);

/// Registers subscriptions and keeps the leaders' copies true.
#[derive(Clone)]
pub(crate) struct Registrar {
    inner: Arc<Inner>,
}

struct Inner {
    bus: SharedBus,
    front: FrontId,
    heartbeat: Duration,
    hubs: HubRunner,
    links: Mutex<HashMap<SourceId, Arc<SourceLink>>>,
    tracker: TaskTracker,
    stop: CancellationToken,
}

/// A hold on a subscription, until dropped.
#[derive(Debug)]
pub(crate) struct Held {
    link: Arc<SourceLink>,
    sub_id: SubId,
    ticket: u64,
    status: watch::Receiver<Status>,
}

impl Held {
    /// What the leader says of it, and when that changes.
    pub(crate) fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.link.release(self.sub_id, self.ticket);
    }
}

impl Registrar {
    pub(crate) fn new(
        bus: SharedBus,
        front: FrontId,
        heartbeat: Duration,
        hubs: HubRunner,
        tracker: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        Self { inner: Arc::new(Inner { bus, front, heartbeat, hubs, links: Mutex::default(), tracker, stop }) }
    }

    /// Registers a subscription at the leader of its source. Returns at once; see [`Held::status`].
    pub(crate) fn hold(&self, source: SourceId, subscription: Subscription) -> Held {
        let link = self.link(source);
        let sub_id = subscription.sub_id;
        let (ticket, status) = link.acquire(subscription);
        Held { link, sub_id, ticket, status }
    }

    /// Whether the source's engine streams, and when that changes.
    pub(crate) fn streaming(&self, source: SourceId) -> watch::Receiver<Streaming> {
        self.link(source).streaming()
    }

    fn link(&self, source: SourceId) -> Arc<SourceLink> {
        let mut links = self.inner.links.lock().unwrap_or_else(PoisonError::into_inner);
        let link = links.entry(source).or_insert_with(|| {
            let link = Arc::new(SourceLink::new(source, self.inner.front.clone()));
            let (bus, hubs) = (Arc::clone(&self.inner.bus), self.inner.hubs.clone());
            let (task, stop) = (Arc::clone(&link), self.inner.stop.clone());
            self.inner.tracker.spawn(async move { stop.run_until_cancelled(task.run(bus, hubs)).await });
            link
        });
        Arc::clone(link)
    }

    fn links(&self) -> Vec<Arc<SourceLink>> {
        self.inner.links.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Heartbeats, announcements and the bus's state, until `stop`; then says that the front leaves.
    pub(crate) async fn run(&self) {
        let work = async { tokio::join!(self.listen(), self.beat(), self.watch_bus()) };
        self.inner.stop.run_until_cancelled(work).await;
        self.publish_heartbeat(true).await;
    }

    async fn listen(&self) {
        loop {
            match timeout(SUBSCRIBE_TIMEOUT, self.inner.bus.subscribe(&Subject::all_announcements())).await {
                Ok(Ok(mut subscription)) => {
                    // What was announced before isn't known.
                    self.links().iter().for_each(|link| link.wake());
                    while let Some(message) = subscription.next().await {
                        self.announced(&message);
                    }
                }
                Ok(Err(error)) => tracing::debug!(%error, "can't listen to the workers yet"),
                Err(_) => tracing::debug!("subscribing to the workers timed out"),
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    fn announced(&self, message: &Message) {
        let Ok(announcement) = serde_json::from_slice::<Announcement>(&message.payload) else {
            tracing::warn!("dropped a malformed announcement of a worker");
            return;
        };
        let (source, epoch) = leader(&announcement);
        let seqs = if let Announcement::LeaderHeartbeat { seqs, .. } = &announcement { seqs.as_slice() } else { &[] };
        self.inner.hubs.hear(source, epoch, seqs);
        let link = self.inner.links.lock().unwrap_or_else(PoisonError::into_inner).get(&source).cloned();
        if let Some(link) = link {
            link.announced(&announcement);
        }
    }

    async fn beat(&self) {
        let mut tick = interval(self.inner.heartbeat);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last = Instant::now();
        loop {
            tick.tick().await;
            let now = Instant::now();
            for link in self.links() {
                link.beat();
                link.check_leader(now, LEADER_SILENCE);
                if now.duration_since(last) > FORGOTTEN {
                    link.reconnected();
                }
            }
            last = now;
            self.publish_heartbeat(false).await;
        }
    }

    async fn publish_heartbeat(&self, leaving: bool) {
        let sources = self.links().iter().filter_map(|link| link.state()).collect::<Vec<SourceState>>();
        if sources.is_empty() {
            return;
        }
        let heartbeat = Heartbeat { front: self.inner.front.clone(), sources, leaving };
        let payload = serde_json::to_vec(&heartbeat).expect("a heartbeat has string keys only");
        let mut message = Message::new(Subject::front_heartbeats(), payload);
        message.headers.origin = Some(self.inner.front.0.clone());
        match timeout(PUBLISH_TIMEOUT, self.inner.bus.publish(message)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "heartbeat not sent"),
            Err(_) => tracing::debug!("sending the heartbeat timed out"),
        }
    }

    /// A reconnect or a dropped message is an announced gap (R-FRT-4), and after a reconnect the leaders hear everything
    /// again.
    async fn watch_bus(&self) {
        let mut states = self.inner.bus.state();
        let mut known: ConnectionState = *states.borrow_and_update();
        while states.changed().await.is_ok() {
            let state = *states.borrow_and_update();
            if state.connected && state.connects > known.connects.max(1) {
                self.links().iter().for_each(|link| link.reconnected());
                self.publish_heartbeat(false).await;
            }
            if state.slow_consumer > known.slow_consumer {
                self.inner.hubs.announce_loss(None, GapReason::Bus);
            }
            // A loss of the connection keeps the count of connects, so that the next one is seen.
            known =
                ConnectionState { connects: if state.connected { state.connects } else { known.connects }, ..state };
        }
        // The bus was closed: nothing more to watch until we are stopped.
        std::future::pending::<()>().await;
    }
}

fn leader(announcement: &Announcement) -> (SourceId, Epoch) {
    match announcement {
        Announcement::WantSnapshots { source, epoch, .. }
        | Announcement::Leader { source, epoch, .. }
        | Announcement::RegistryChanged { source, epoch }
        | Announcement::LeaderHeartbeat { source, epoch, .. } => (*source, *epoch),
    }
}
