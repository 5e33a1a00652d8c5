use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use tokio::sync::{mpsc, watch};

use crate::{Bus, BusError, ConnectionState, Feed, Message, Subject, Subscription};

/// nats-server's default, so that what passes in development passes in production.
const MAX_PAYLOAD: usize = 1024 * 1024;

/// Messages that wait in one subscription; async-nats' own number.
const SUBSCRIPTION_CAPACITY: usize = 64 * 1024;

/// The bus of the undivided binary: the semantics of NATS within one process, no server.
#[derive(Debug)]
pub struct MemoryBus {
    subscribers: Mutex<Vec<Subscriber>>,
    capacity: usize,
    inboxes: AtomicU64,
    state: watch::Sender<ConnectionState>,
}

#[derive(Debug)]
struct Subscriber {
    pattern: Subject,
    queue: mpsc::Sender<Message>,
}

impl Default for MemoryBus {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryBus {
    /// A bus of its own.
    pub fn new() -> Self {
        Self::with_capacity(SUBSCRIPTION_CAPACITY)
    }

    /// A bus whose subscriptions hold so many messages before they drop.
    pub fn with_capacity(messages: usize) -> Self {
        let state = ConnectionState { connected: true, connects: 1, slow_consumer: 0 };
        Self {
            subscribers: Mutex::default(),
            capacity: messages.max(1),
            inboxes: AtomicU64::new(0),
            state: watch::Sender::new(state),
        }
    }

    /// Hands copies to all that match; never waits. Returns how many there were.
    fn deliver(&self, message: &Message) -> usize {
        let mut slow = 0;
        let mut matched = 0;
        self.lock().retain(|subscriber| {
            if !subscriber.pattern.matches(&message.subject) {
                return true;
            }
            match subscriber.queue.try_send(message.clone()) {
                Ok(()) => matched += 1,
                Err(mpsc::error::TrySendError::Full(_)) => (matched, slow) = (matched + 1, slow + 1),
                Err(mpsc::error::TrySendError::Closed(_)) => return false,
            }
            true
        });
        if slow > 0 {
            self.state.send_modify(|state| state.slow_consumer += slow);
        }
        matched
    }

    /// A panic elsewhere leaves the list as good as it was.
    fn lock(&self) -> MutexGuard<'_, Vec<Subscriber>> {
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, pattern: Subject) -> Subscription {
        let (queue, messages) = mpsc::channel(self.capacity);
        let mut subscribers = self.lock();
        subscribers.retain(|subscriber| !subscriber.queue.is_closed());
        subscribers.push(Subscriber { pattern, queue });
        Subscription(Feed::Memory(messages))
    }
}

fn check(message: &Message) -> Result<(), BusError> {
    if message.payload.len() > MAX_PAYLOAD {
        return Err(BusError::Refused("the payload is larger than the bus takes".to_owned()));
    }
    Ok(())
}

#[async_trait]
impl Bus for MemoryBus {
    async fn publish_batch(&self, messages: &[Message]) -> Result<(), BusError> {
        messages.iter().try_for_each(check)?;
        for message in messages {
            self.deliver(message);
        }
        Ok(())
    }

    async fn publish(&self, message: Message) -> Result<(), BusError> {
        check(&message)?;
        self.deliver(&message);
        Ok(())
    }

    async fn subscribe(&self, subject: &Subject) -> Result<Subscription, BusError> {
        Ok(self.add(subject.clone()))
    }

    async fn request(&self, mut message: Message, timeout: Duration) -> Result<Message, BusError> {
        check(&message)?;
        let inbox = Subject::from_bus(format!("_INBOX.memory.{}", self.inboxes.fetch_add(1, Ordering::Relaxed)));
        let mut answers = self.add(inbox.clone());
        message.reply = Some(inbox);
        if self.deliver(&message) == 0 {
            return Err(BusError::NoResponders);
        }
        match tokio::time::timeout(timeout, answers.next()).await {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(BusError::Disconnected),
            Err(_) => Err(BusError::Timeout(timeout)),
        }
    }

    fn state(&self) -> watch::Receiver<ConnectionState> {
        self.state.subscribe()
    }

    fn max_payload(&self) -> usize {
        MAX_PAYLOAD
    }
}
