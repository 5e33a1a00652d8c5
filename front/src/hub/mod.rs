//! What reaches this front from the bus, per project: changes to the bindings that may see them, broadcasts to the members
//! of their topic, gaps to whom they concern.

mod routes;
mod sequence;
mod task;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aura_domain::{Epoch, ProjectId, SourceId, Target};
use aura_wire::{ChannelMessage, GapEnvelope, GapReason};
use serde_json::json;
use tokio::{
    sync::{broadcast, watch},
    time::Instant,
};

use routes::{BindingKey, Routes};
pub(crate) use routes::{Route, Topic};
use sequence::Sequence;
pub(crate) use task::HubRunner;

use crate::sink::{ChannelSink, encode_broadcast, encode_gap};

/// One project's part of this front.
#[derive(Debug)]
pub(crate) struct Hub {
    pub(crate) project: ProjectId,
    source: Mutex<SourceId>,
    routes: Mutex<Routes>,
    /// Whether the bus has registered the subscription to the project's subjects.
    subscribed: watch::Sender<bool>,
    /// Who leads the source, and its count of the project's messages: for the hub's task, which takes it in behind what the
    /// bus sent before.
    led: watch::Sender<Option<Led>>,
    /// What the project's sockets and streams are told to do.
    orders: broadcast::Sender<Order>,
}

/// What a socket or stream has to do.
#[derive(Debug, Clone)]
pub(crate) enum Order {
    /// Verify its tokens again: other ones may be accepted now.
    Recheck,
    /// Close, if it is one of these.
    Disconnect(Arc<Target>),
}

/// Orders that may wait for a connection; one that missed some is closed.
const ORDERS: usize = 16;

/// An epoch, and the `seq` of the project's last message in it; `None` = it wasn't said.
type Led = (Epoch, Option<u64>);

impl Hub {
    fn new(project: ProjectId, source: SourceId) -> Self {
        let (subscribed, led) = (watch::Sender::new(false), watch::Sender::new(None));
        let orders = broadcast::Sender::new(ORDERS);
        Self { project, source: Mutex::new(source), routes: Mutex::default(), subscribed, led, orders }
    }

    /// Whether the bus has registered the hub's subscription, and when that changes.
    pub(crate) fn subscribed(&self) -> watch::Receiver<bool> {
        self.subscribed.subscribe()
    }

    /// What the project's connections are told from now on.
    pub(crate) fn orders(&self) -> broadcast::Receiver<Order> {
        self.orders.subscribe()
    }

    /// The source that serves the project: messages of any other are dropped.
    pub(crate) fn source(&self) -> SourceId {
        *self.source.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_source(&self, source: SourceId) {
        let before = std::mem::replace(&mut *self.source.lock().unwrap_or_else(PoisonError::into_inner), source);
        if before != source {
            // Epochs are a source's own.
            self.led.send_replace(None);
            self.routes().sequence = Sequence::default();
        }
    }

    /// Routes changes to these bindings until the guard is dropped.
    pub(crate) fn bind(self: &Arc<Self>, routes: impl IntoIterator<Item = Route>) -> Bound {
        let mut table = self.routes();
        let keys = routes.into_iter().map(|route| table.add(route)).collect();
        drop(table);
        Bound { hub: Arc::clone(self), keys }
    }

    /// Makes the channel a member of its topic until the guard is dropped.
    pub(crate) fn join(self: &Arc<Self>, topic: Topic, sink: &Arc<ChannelSink>) -> Member {
        self.routes().join(topic.clone(), Arc::clone(sink));
        Member { hub: Arc::clone(self), topic, number: sink.number }
    }

    /// Sends a broadcast to the members of a topic on this front, except the channel numbered `except`.
    pub(crate) fn broadcast(&self, topic: &Topic, message: &ChannelMessage<'_>, except: Option<u64>) {
        let routes = self.routes();
        let mut encoded = HashMap::new();
        for sink in routes.members(topic).iter().filter(|sink| Some(sink.number) != except) {
            let frame =
                encoded.entry(sink.format).or_insert_with(|| encode_broadcast(sink.format, &sink.topic, message));
            if let Some(frame) = frame {
                sink.send(frame.clone());
            }
        }
    }

    /// Tells everybody whom it concerns that changes may be missing.
    pub(crate) fn announce(&self, gap: &GapEnvelope) {
        let concerned = self.routes().concerned(gap);
        for sink in concerned {
            if let Some(message) = not_judgeable(gap).filter(|_| gap.tables.iter().flatten().any(|t| sink.is_news(t))) {
                sink.send(sink.system("postgres_changes", false, &message));
                continue;
            }
            let payload = json!({
                "extension": "postgres_changes", "status": "ok", "message": "Gap: changes may be missing",
                "channel": sink.name(), "gap": {"from": gap.from, "to": gap.to, "reason": gap.reason},
            });
            sink.send(encode_gap(sink.format, &sink.topic, &payload.to_string()));
        }
        metrics::counter!("front_gaps_total").increment(1);
    }

    /// The same for a loss between worker and front, whose ends nobody knows.
    pub(crate) fn announce_loss(&self, reason: GapReason) {
        let source = self.source();
        let gap = GapEnvelope {
            v: 1,
            project: self.project,
            source,
            from: None,
            to: None,
            reason,
            tables: None,
            sub_ids: None,
        };
        self.announce(&gap);
    }

    /// A leader was heard of.
    fn hear(&self, led: Led) {
        self.led.send_if_modified(|known| {
            let fresh = Some(led) >= *known;
            *known = (*known).max(Some(led));
            fresh
        });
    }

    fn take_in(&self, (epoch, last): Led) {
        let sequence = &mut self.routes().sequence;
        sequence.led(epoch);
        if let Some(last) = last {
            sequence.heartbeat(epoch, last, Instant::now());
        }
    }

    /// Whether a worker of this epoch has lost the lease.
    fn is_past(&self, epoch: Epoch) -> bool {
        self.routes().sequence.is_past(epoch)
    }

    /// Once what waits was released.
    fn check_tail(&self, now: Instant) {
        let lost = self.routes().sequence.tail_lost(now);
        if lost {
            self.announce_loss(GapReason::Bus);
        }
    }

    fn routes(&self) -> MutexGuard<'_, Routes> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a client is told of a table whose row security can't be judged on rows of the log (R-RLS-4).
fn not_judgeable(gap: &GapEnvelope) -> Option<String> {
    let [schema, table] = gap.tables.as_ref()?.first().filter(|_| gap.reason == GapReason::NotJudgeable)?;
    Some(format!(
        "not_judgeable: Changes of {schema}.{table} can't be delivered: a row security policy reads what the log does not \
         carry, or writes"
    ))
}

/// Bindings that changes are routed to, until dropped.
#[derive(Debug)]
pub(crate) struct Bound {
    hub: Arc<Hub>,
    keys: Vec<BindingKey>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        let mut routes = self.hub.routes();
        self.keys.iter().for_each(|key| routes.remove(*key));
    }
}

/// A member of a topic, until dropped.
#[derive(Debug)]
pub(crate) struct Member {
    hub: Arc<Hub>,
    topic: Topic,
    number: u64,
}

impl Member {
    pub(crate) fn topic(&self) -> &Topic {
        &self.topic
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.hub.routes().leave(&self.topic, self.number);
    }
}
