//! The `postgres_changes` bindings of a channel or event stream, from what the client asked for to live.

use std::sync::Arc;

use aura_domain::{SubIdKey, SubscriptionSpec};
use aura_wire::control::Subscription;
use futures_util::future;
use tokio::sync::watch;

use crate::{
    hub::{Bound, Hub, Route},
    identity::Identity,
    registrar::{Held, Registrar, Status, Streaming},
    request::Binding,
    sink::ChannelSink,
};

/// Bindings that are routed here and registered at the leader, until dropped.
#[derive(Debug)]
pub(crate) struct Registration {
    _bound: Bound,
    held: Vec<Held>,
    streaming: watch::Receiver<Streaming>,
    subscribed: watch::Receiver<bool>,
}

/// How the bindings of a channel stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Settled {
    /// All deliver, and the engine streams.
    Live,
    /// A table isn't registered; the text is for the client.
    Waiting(String),
    /// One can never deliver; the text is for the client.
    Rejected(String),
}

impl Registration {
    /// Registers the bindings for this identity. Their ids are 1, 2, … in the order of the request.
    pub(crate) fn new(
        hub: &Arc<Hub>,
        registrar: &Registrar,
        key: &SubIdKey,
        identity: &Identity,
        bindings: &[Binding],
        sink: &Arc<ChannelSink>,
    ) -> Self {
        let subscriptions: Vec<_> = bindings.iter().map(|binding| subscription(key, identity, binding)).collect();
        let routes = bindings.iter().zip(&subscriptions).map(|(binding, subscription)| Route {
            sink: Arc::clone(sink),
            id: binding.id,
            sub_id: subscription.sub_id,
            twin: subscription.twin,
            schema: binding.schema.clone(),
            table: binding.table.clone(),
        });
        // First the route, then the leader, so that the first change finds its way.
        let bound = hub.bind(routes);
        let held =
            subscriptions.into_iter().map(|subscription| registrar.hold(identity.source, subscription)).collect();
        let streaming = registrar.streaming(identity.source);
        Self { _bound: bound, held, streaming, subscribed: hub.subscribed() }
    }

    /// Resolves when the leader has answered for all bindings and, if all are good, the engine streams. Independent of
    /// the registration's life.
    pub(crate) fn settled(&self) -> impl Future<Output = Settled> + Send + use<> {
        let statuses: Vec<_> = self.held.iter().map(Held::status).collect();
        let (streaming, subscribed) = (self.streaming.clone(), self.subscribed.clone());
        async move {
            let answers =
                future::join_all(statuses.into_iter().map(|status| decided(status, |s| *s != Status::Pending)));
            match worst(answers.await) {
                Settled::Live => {
                    decided(subscribed, |subscribed| *subscribed).await;
                    decided(streaming, |streaming| *streaming == Streaming::Yes).await;
                    Settled::Live
                }
                other => other,
            }
        }
    }

    /// Resolves when all bindings deliver or one was rejected.
    pub(crate) fn live(&self) -> impl Future<Output = Settled> + Send + use<> {
        let statuses: Vec<_> = self.held.iter().map(Held::status).collect();
        let streaming = self.streaming.clone();
        async move {
            let last = |status: &Status| matches!(status, Status::Live | Status::Rejected(_));
            let answers = future::join_all(statuses.into_iter().map(|status| decided(status, last)));
            match worst(answers.await) {
                Settled::Live => {
                    decided(streaming, |streaming| *streaming == Streaming::Yes).await;
                    Settled::Live
                }
                other => other,
            }
        }
    }

    /// Why the engine doesn't stream, in a word for the client.
    pub(crate) fn not_streaming(&self) -> String {
        match &*self.streaming.borrow() {
            Streaming::No(Some(reason)) => format!("not_streaming: {reason}"),
            _ => "not_streaming".to_owned(),
        }
    }
}

fn subscription(key: &SubIdKey, identity: &Identity, binding: &Binding) -> Subscription {
    let spec = SubscriptionSpec {
        project: identity.project,
        schema: binding.schema.clone(),
        table: binding.table.clone(),
        event: binding.event,
        filter: binding.filter.clone(),
        select: binding.select.clone(),
        role: identity.role.clone(),
        claims: identity.claims.clone(),
    };
    Subscription { sub_id: key.sub_id(&spec), twin: key.twin(&spec), spec }
}

/// The first value that is as wanted; waits for ever when there will be none.
async fn decided<T: Clone>(mut receiver: watch::Receiver<T>, wanted: impl FnMut(&T) -> bool) -> T {
    let value = receiver.wait_for(wanted).await.map(|value| value.clone());
    match value {
        Ok(value) => value,
        Err(_) => future::pending().await,
    }
}

fn worst(statuses: Vec<Status>) -> Settled {
    let mut waiting = None;
    for status in statuses {
        match status {
            Status::Rejected(message) => return Settled::Rejected(message),
            Status::Waiting(message) => waiting = waiting.or(Some(message)),
            Status::Live | Status::Pending => {}
        }
    }
    waiting.map_or(Settled::Live, Settled::Waiting)
}
