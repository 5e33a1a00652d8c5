use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use aura_bus::{Message, SharedBus, Subject, Subscription};
use aura_domain::{Epoch, FrontId, ProjectId, SourceId};
use aura_wire::{ChannelMessage, GapEnvelope, GapReason, IncomingChange, decode_token};
use futures_util::FutureExt as _;
use tokio::{
    task::unconstrained,
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    Hub, Order, Topic,
    sequence::{Released, Sequence, Verdict},
};

/// Between two tries to subscribe, and longest wait for the bus to register it.
const RETRY: Duration = Duration::from_millis(250);
const SUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(5);
/// Period of the checks for a lost tail and for hubs that nobody uses any more.
const TICK: Duration = Duration::from_secs(1);
/// A hub without sockets stays for so many ticks, since clients that reload come back at once.
const LINGER_TICKS: u32 = 10;

/// Makes hubs and runs their tasks.
#[derive(Clone)]
pub(crate) struct HubRunner {
    inner: Arc<Inner>,
}

struct Inner {
    bus: SharedBus,
    front: FrontId,
    hubs: Mutex<HashMap<ProjectId, Arc<Hub>>>,
    /// The last leader that was heard of, for hubs that come later.
    epochs: Mutex<HashMap<SourceId, Epoch>>,
    tracker: TaskTracker,
    stop: CancellationToken,
}

impl HubRunner {
    pub(crate) fn new(bus: SharedBus, front: FrontId, tracker: TaskTracker, stop: CancellationToken) -> Self {
        Self { inner: Arc::new(Inner { bus, front, hubs: Mutex::default(), epochs: Mutex::default(), tracker, stop }) }
    }

    /// The project's hub. It lives while somebody holds it.
    pub(crate) fn hub(&self, project: ProjectId, source: SourceId) -> Arc<Hub> {
        let mut hubs = self.inner.hubs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hub) = hubs.get(&project) {
            hub.set_source(source);
            return Arc::clone(hub);
        }
        let hub = Arc::new(Hub::new(project, source));
        hubs.insert(project, Arc::clone(&hub));
        drop(hubs);
        if let Some(epoch) = self.inner.epochs.lock().unwrap_or_else(PoisonError::into_inner).get(&source) {
            hub.hear((*epoch, None));
        }
        let prefix = format!("aura.realtime.{project}.");
        let task = HubTask { inner: Arc::clone(&self.inner), hub: Arc::clone(&hub), prefix };
        self.inner.tracker.spawn(task.run());
        hub
    }

    /// Every hub that exists now.
    fn all(&self) -> Vec<Arc<Hub>> {
        self.inner.hubs.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Tells the connections of a project, or of all, what to do.
    pub(crate) fn order(&self, project: Option<ProjectId>, order: &Order) {
        for hub in self.all().iter().filter(|hub| project.is_none_or(|project| hub.project == project)) {
            // Nobody is connected just now.
            let _ = hub.orders.send(order.clone());
        }
    }

    /// Everybody may have missed something, or everybody of one source.
    pub(crate) fn announce_loss(&self, source: Option<SourceId>, reason: GapReason) {
        for hub in self.all() {
            if source.is_none_or(|source| hub.source() == source) {
                // What comes next has a seq that the announced loss explains.
                hub.routes().sequence.forget();
                hub.announce_loss(reason);
            }
        }
    }

    /// A worker says that it leads the source, and what it counts.
    pub(crate) fn hear(&self, source: SourceId, epoch: Epoch, seqs: &[(ProjectId, u64)]) {
        let before = {
            let mut epochs = self.inner.epochs.lock().unwrap_or_else(PoisonError::into_inner);
            let known = epochs.entry(source).or_insert(epoch);
            std::mem::replace(known, epoch.max(*known))
        };
        if epoch < before {
            metrics::counter!("front_bus_dropped_total", "reason" => "past_epoch").increment(1);
            tracing::warn!(%source, %epoch, newest = %before, "a leader of a past epoch speaks, nothing of it is delivered");
        }
        if before < epoch && self.inner.bus.is_clustered() {
            // The old leader's last messages have reached its server, and maybe not ours; it doesn't count them any more.
            self.announce_loss(Some(source), GapReason::Failover);
        }
        for hub in self.all().into_iter().filter(|hub| hub.source() == source) {
            let last = seqs.iter().find(|(project, _)| *project == hub.project).map(|(_, last)| *last);
            hub.hear((epoch, last));
        }
    }
}

struct HubTask {
    inner: Arc<Inner>,
    hub: Arc<Hub>,
    /// Of the project's subjects.
    prefix: String,
}

impl HubTask {
    async fn run(self) {
        let stop = self.inner.stop.clone();
        stop.run_until_cancelled(self.serve()).await;
        self.hub.subscribed.send_replace(false);
    }

    async fn serve(&self) {
        loop {
            let subscription = self.subscribe().await;
            // Whoever bound before we listened may have missed something.
            let late = self.hub.routes().has_bindings();
            self.hub.subscribed.send_replace(true);
            if late {
                self.hub.announce_loss(GapReason::Bus);
            }
            if self.receive(subscription).await == Unused::Yes {
                return;
            }
            self.hub.subscribed.send_replace(false);
        }
    }

    async fn subscribe(&self) -> Subscription {
        let subject = Subject::project_tree(self.hub.project);
        loop {
            match timeout(SUBSCRIBE_TIMEOUT, self.inner.bus.subscribe(&subject)).await {
                Ok(Ok(subscription)) => return subscription,
                Ok(Err(error)) => tracing::debug!(%error, project = %self.hub.project, "can't subscribe yet"),
                Err(_) => tracing::debug!(project = %self.hub.project, "subscribing timed out"),
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn receive(&self, mut subscription: Subscription) -> Unused {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut idle, mut led) = (0, self.hub.led.subscribe());
        led.mark_changed();
        loop {
            tokio::select! {
                biased;
                message = subscription.next() => match message {
                    Some(message) => self.message(&message),
                    None => return Unused::No,
                },
                Ok(()) = led.changed() => {
                    let heard = *led.borrow_and_update();
                    // What the bus sent before it may have come since the queue was looked at: an older leader's last words,
                    // of which it was told that they are received.
                    while let Some(message) = unconstrained(subscription.next()).now_or_never() {
                        let Some(message) = message else { return Unused::No };
                        self.message(&message);
                    }
                    if let Some(led) = heard {
                        self.before(led.0);
                        self.hub.take_in(led);
                    }
                }
                _ = tick.tick() => {
                    let now = Instant::now();
                    self.release(|sequence| sequence.release(now));
                    self.hub.check_tail(now);
                    idle = if self.in_use() { 0 } else { idle + 1 };
                    if idle > LINGER_TICKS && self.retire() {
                        return Unused::Yes;
                    }
                }
            }
        }
    }

    /// Somebody beyond the map and this task holds the hub.
    fn in_use(&self) -> bool {
        Arc::strong_count(&self.hub) > 2
    }

    /// Takes the hub out of the map, unless somebody took it in the meantime.
    fn retire(&self) -> bool {
        let mut hubs = self.inner.hubs.lock().unwrap_or_else(PoisonError::into_inner);
        !self.in_use() && hubs.remove(&self.hub.project).is_some()
    }

    fn message(&self, message: &Message) {
        let rest = message.subject.as_str().strip_prefix(&self.prefix).unwrap_or_default();
        let mut tokens = rest.split('.');
        let outcome = match (tokens.next(), tokens.next(), tokens.next(), tokens.next()) {
            (Some("changes"), Some(_), Some(_), None) => self.change(message),
            (Some("gap"), None, ..) => self.gap(message),
            (Some("channel"), Some(kind), Some(topic), None) => self.channel(message, kind, topic),
            _ => Err("unknown_subject"),
        };
        if let Err(reason) = outcome {
            metrics::counter!("front_bus_dropped_total", "reason" => reason).increment(1);
            tracing::warn!(project = %self.hub.project, reason, "dropped a message of the bus");
        }
    }

    fn change(&self, message: &Message) -> Result<(), &'static str> {
        let change = IncomingChange::decode(&message.payload).map_err(|_| "malformed")?;
        let epoch = message.headers.epoch.ok_or("no_epoch")?;
        if change.project != self.hub.project {
            return Err("foreign_project");
        }
        let source = self.hub.source();
        if change.source != source || message.headers.source.is_some_and(|named| named != source) {
            return Err("foreign_source");
        }
        self.before(epoch);
        let (verdict, now) = (self.hub.routes().sequence.message(epoch, change.seq), Instant::now());
        match verdict {
            Verdict::Next => self.deliver(&change),
            Verdict::Ahead => {
                self.hub.routes().sequence.hold(change.seq, message.clone(), message.payload.len(), now);
            }
            Verdict::Repeat => {}
        }
        self.release(|sequence| sequence.release(now));
        Ok(())
    }

    fn deliver(&self, change: &IncomingChange<'_>) {
        let messages = self.hub.routes().deliver(change);
        metrics::counter!("front_changes_sent_total").increment(messages as u64);
    }

    /// Delivers what waited for others.
    fn release(&self, next: impl Fn(&mut Sequence<Message>) -> Option<Released<Message>>) {
        loop {
            let Some(released) = next(&mut self.hub.routes().sequence) else { return };
            if released.after_loss {
                self.hub.announce_loss(GapReason::Bus);
            }
            // It was decoded before it was held.
            if let Ok(change) = IncomingChange::decode(&released.message.payload) {
                self.deliver(&change);
            }
        }
    }

    /// Before anything of an epoch: what waits for messages of an older one waits in vain.
    fn before(&self, epoch: Epoch) {
        if self.hub.routes().sequence.is_new(epoch) {
            self.release(Sequence::release_all);
        }
    }

    fn gap(&self, message: &Message) -> Result<(), &'static str> {
        let gap: GapEnvelope = serde_json::from_slice(&message.payload).map_err(|_| "malformed")?;
        if gap.project != self.hub.project {
            return Err("foreign_project");
        }
        if gap.source != self.hub.source() {
            return Err("foreign_source");
        }
        if message.headers.epoch.is_some_and(|epoch| self.hub.is_past(epoch)) {
            return Ok(());
        }
        self.hub.announce(&gap);
        Ok(())
    }

    fn channel(&self, message: &Message, kind: &str, topic: &str) -> Result<(), &'static str> {
        if message.headers.origin.as_deref() == Some(&*self.inner.front.0) {
            return Ok(());
        }
        let name = decode_token(topic).ok_or("malformed")?;
        let topic = Topic { private: kind == "private", name: name.into() };
        let broadcast = ChannelMessage::decode(&message.payload).map_err(|_| "malformed")?;
        self.hub.broadcast(&topic, &broadcast, None);
        Ok(())
    }
}

#[derive(PartialEq, Eq)]
enum Unused {
    Yes,
    No,
}
