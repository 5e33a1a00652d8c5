//! The `postgres_changes` bindings of a channel or event stream, from what the client asked for to live.

use std::{sync::Arc, time::Duration};

use aura_domain::{SubIdKey, SubscriptionSpec};
use aura_wire::control::Subscription;
use futures_util::{FutureExt as _, future};
use tokio::{sync::watch, time::timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

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
    /// Ends whoever follows the registration.
    alive: DropGuard,
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
    /// The engine hasn't streamed for a while.
    Interrupted,
    /// The registration is gone.
    Ended,
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
        let alive = CancellationToken::new().drop_guard();
        Self { _bound: bound, held, streaming, subscribed: hub.subscribed(), alive }
    }

    /// Resolves when the leader has answered for all bindings and, if all are good, the engine streams.
    pub(crate) fn settled(&self) -> impl Future<Output = Settled> + Send + use<> {
        self.follow(|status| *status != Status::Pending)
    }

    /// Resolves when all bindings deliver and the engine streams, or one was rejected.
    pub(crate) fn live(&self) -> impl Future<Output = Settled> + Send + use<> {
        self.follow(|status| matches!(status, Status::Live | Status::Rejected(_)))
    }

    fn follow(&self, last: fn(&Status) -> bool) -> impl Future<Output = Settled> + Send + use<> {
        let statuses: Vec<_> = self.held.iter().map(Held::status).collect();
        let (mut streaming, subscribed) = (self.streaming.clone(), self.subscribed.clone());
        let settled = async move {
            match worst(future::join_all(statuses.into_iter().map(|status| decided(status, last))).await) {
                Settled::Live => {
                    decided(subscribed, |subscribed| *subscribed).await;
                    becomes(&mut streaming, true).await;
                    Settled::Live
                }
                other => other,
            }
        };
        self.while_alive(settled)
    }

    /// Resolves when the engine has not streamed for `limit`.
    pub(crate) fn interrupted(&self, limit: Duration) -> impl Future<Output = Settled> + Send + use<> {
        let mut streaming = self.streaming.clone();
        let rejected = self.rejected();
        let interrupted = async move {
            loop {
                becomes(&mut streaming, false).await;
                if timeout(limit, becomes(&mut streaming, true)).await.is_err() {
                    return Settled::Interrupted;
                }
            }
        };
        self.while_alive(async move {
            tokio::select! {
                settled = rejected => settled,
                settled = interrupted => settled,
            }
        })
    }

    /// Resolves when a binding that was good is rejected: a column that its filter asks for has another type now.
    fn rejected(&self) -> impl Future<Output = Settled> + Send + use<> {
        let is_rejected = |status: &Status| matches!(status, Status::Rejected(_));
        let all: Vec<_> = self.held.iter().map(|held| decided(held.status(), is_rejected).boxed()).collect();
        async move {
            if all.is_empty() {
                return future::pending().await;
            }
            worst(vec![future::select_all(all).await.0])
        }
    }

    /// What follows a registration ends with it, or clients that join and leave would pile it up.
    fn while_alive<F>(&self, outcome: F) -> impl Future<Output = Settled> + Send + use<F>
    where
        F: Future<Output = Settled> + Send,
    {
        let token = self.alive.token().clone();
        async move { token.run_until_cancelled(outcome).await.unwrap_or(Settled::Ended) }
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

/// Waits until the engine streams, or doesn't.
async fn becomes(streaming: &mut watch::Receiver<Streaming>, wanted: bool) {
    if streaming.wait_for(|streaming| (*streaming == Streaming::Yes) == wanted).await.is_err() {
        future::pending::<()>().await;
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
