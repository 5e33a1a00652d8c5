//! The bus between workers and fronts: NATS, or in-process for the undivided binary, behind one [`Bus`] trait. The only
//! crate that knows async-nats.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use aura_domain::{Epoch, Finding, SourceId};
pub use aura_wire::{Subject, control::Disconnect};
use bytes::Bytes;
use futures_util::{FutureExt as _, StreamExt as _};

mod memory;
mod nats;

pub use memory::MemoryBus;
pub use nats::{NatsBus, NatsOptions, url_problems};

/// A shared handle of a bus.
pub type SharedBus = Arc<dyn Bus>;

/// A message, both directions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Where it goes or came from.
    pub subject: Subject,
    /// Payload.
    pub payload: Bytes,
    /// `Aura-Origin`, `Aura-Source`, `Aura-Epoch`.
    pub headers: Headers,
    /// Where an answer goes; set by [`Bus::request`].
    pub reply: Option<Subject>,
}

/// The headers that we know.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Headers {
    /// `Aura-Origin`: the sending component instance; a front ignores its own.
    pub origin: Option<String>,
    /// `Aura-Source`.
    pub source: Option<SourceId>,
    /// `Aura-Epoch`.
    pub epoch: Option<Epoch>,
}

impl Message {
    /// A message without headers or reply subject.
    pub fn new(subject: Subject, payload: impl Into<Bytes>) -> Self {
        Self { subject, payload: payload.into(), headers: Headers::default(), reply: None }
    }
}

/// Why the bus didn't do it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BusError {
    /// Not connected, or the connection was lost in between. Whatever was published may or may not have arrived.
    #[error("the bus is not connected")]
    Disconnected,
    /// The first connection failed; the text has the servers, without credentials, and the cause.
    #[error("can't connect to {0}")]
    Unreachable(String),
    /// No receipt or answer in time.
    #[error("the bus did not answer within {0:?}")]
    Timeout(Duration),
    /// Nobody listens on the subject of a request.
    #[error("nobody answers there")]
    NoResponders,
    /// The server refused it (permission, payload too large, …). Publishing the same again won't help.
    #[error("the bus refused the message: {0}")]
    Refused(String),
}

/// What a front must know about the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionState {
    /// Connected now.
    pub connected: bool,
    /// Connections made since the start: a rise means messages may have been missed in between.
    pub connects: u64,
    /// Times that the server or client dropped messages of ours since we were too slow.
    pub slow_consumer: u64,
}

/// Publish and subscribe, at most once, plus a receipt for batches (R-ACK-1).
#[async_trait]
pub trait Bus: Send + Sync + 'static {
    /// Publishes all, in order, and returns when the bus has received all of them. On an error some may have arrived: the
    /// caller publishes the whole batch again. Not cancel-safe in that sense.
    ///
    /// Proof of receipt (R-ACK-1): a message to an own inbox behind the batch came back on the same connection, the
    /// connect count is what it was before the first publish, and the server reported no error in between.
    async fn publish_batch(&self, messages: &[Message]) -> Result<(), BusError>;

    /// Publishes one, at most once.
    async fn publish(&self, message: Message) -> Result<(), BusError>;

    /// Subscribes; returns when the bus has registered it, so that whatever is published after is received. Survives
    /// reconnects. Dropping the subscription ends it.
    async fn subscribe(&self, subject: &Subject) -> Result<Subscription, BusError>;

    /// Publishes `message` with a fresh reply subject and awaits one answer.
    async fn request(&self, message: Message, timeout: Duration) -> Result<Message, BusError>;

    /// The connection's state and its changes.
    fn state(&self) -> tokio::sync::watch::Receiver<ConnectionState>;

    /// Largest payload in bytes that the bus takes.
    fn max_payload(&self) -> usize;

    /// Receipt proves that the server which we are connected to has a message; in a cluster a front's may not have it yet,
    /// and never get it.
    fn is_clustered(&self) -> bool {
        false
    }

    /// What is not as it should be with the server that is connected (R-ENG-9): `nats_version`, `nats_max_payload`.
    fn findings(&self) -> Vec<Finding> {
        Vec::new()
    }
}

/// Messages of one [`Bus::subscribe`]. The queue is bounded; what doesn't fit is dropped and counted in
/// [`ConnectionState::slow_consumer`].
#[derive(Debug)]
pub struct Subscription(Feed);

#[derive(Debug)]
enum Feed {
    Memory(tokio::sync::mpsc::Receiver<Message>),
    Nats(async_nats::Subscriber),
}

impl Subscription {
    /// The next message; `None` when the bus was closed. Cancel-safe.
    pub async fn next(&mut self) -> Option<Message> {
        match &mut self.0 {
            Feed::Memory(queue) => queue.recv().await,
            Feed::Nats(subscriber) => subscriber.next().await.map(nats::incoming),
        }
    }

    /// The next message if there is one now.
    pub fn try_next(&mut self) -> Option<Message> {
        match &mut self.0 {
            Feed::Memory(queue) => queue.try_recv().ok(),
            Feed::Nats(subscriber) => subscriber.next().now_or_never().flatten().map(nats::incoming),
        }
    }
}
