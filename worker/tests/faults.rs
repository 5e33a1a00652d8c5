//! A bus with faults that no real one can be made to have.

use std::{
    sync::{
        Condvar, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use aura_bus::{Bus, BusError, ConnectionState, MemoryBus, Message, Subject, Subscription};
use tokio::sync::{RwLock, watch};

/// Takes everything but changes of the table `refused`, is silent about those of `stuck`, panics over those of `poison`,
/// and takes no batch while it is held.
pub(crate) struct Faulty {
    bus: MemoryBus,
    pub(crate) batches: AtomicUsize,
    /// Held for writing: batches wait, and can be cancelled.
    pub(crate) hold: RwLock<()>,
    /// A batch blocks its thread for as long as this is shut: it can't be cancelled.
    pub(crate) block: Gate,
    /// No batch arrives.
    pub(crate) away: AtomicBool,
    /// Batches that were taken to the end.
    pub(crate) taken: AtomicUsize,
    /// Payload bytes of the largest batch.
    pub(crate) largest: AtomicUsize,
    state: watch::Sender<ConnectionState>,
}

impl Default for Faulty {
    fn default() -> Self {
        let bus = MemoryBus::new();
        let state = watch::Sender::new(*bus.state().borrow());
        Self {
            bus,
            state,
            batches: AtomicUsize::default(),
            hold: RwLock::default(),
            block: Gate::default(),
            away: AtomicBool::default(),
            taken: AtomicUsize::default(),
            largest: AtomicUsize::default(),
        }
    }
}

impl Faulty {
    /// Away, and known to be.
    pub(crate) fn disconnect(&self, away: bool) {
        self.away.store(away, Ordering::SeqCst);
        self.state.send_modify(|state| state.connected = !away);
    }
}

/// Blocks threads.
#[derive(Default)]
pub(crate) struct Gate {
    shut: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    pub(crate) fn shut(&self, shut: bool) {
        *self.shut.lock().expect("no panic") = shut;
        self.opened.notify_all();
    }

    pub(crate) fn pass(&self) {
        let shut = self.shut.lock().expect("no panic");
        drop(self.opened.wait_while(shut, |shut| *shut).expect("no panic"));
    }
}

#[async_trait]
impl Bus for Faulty {
    async fn publish_batch(&self, messages: &[Message]) -> Result<(), BusError> {
        self.batches.fetch_add(1, Ordering::SeqCst);
        let bytes = messages.iter().map(|message| message.payload.len()).sum();
        self.largest.fetch_max(bytes, Ordering::SeqCst);
        self.block.pass();
        let _free = self.hold.read().await;
        if self.away.load(Ordering::SeqCst) {
            return Err(BusError::Disconnected);
        }
        if messages.iter().any(|message| message.subject.as_str().ends_with(".poison")) {
            panic!("as a bug would");
        }
        if messages.iter().any(|message| message.subject.as_str().ends_with(".stuck")) {
            std::future::pending::<()>().await;
        }
        if messages.iter().any(|message| message.subject.as_str().ends_with(".refused")) {
            return Err(BusError::Refused("permissions violation".to_owned()));
        }
        self.taken.fetch_add(1, Ordering::SeqCst);
        self.bus.publish_batch(messages).await
    }

    async fn publish(&self, message: Message) -> Result<(), BusError> {
        self.bus.publish(message).await
    }

    async fn subscribe(&self, subject: &Subject) -> Result<Subscription, BusError> {
        self.bus.subscribe(subject).await
    }

    async fn request(&self, message: Message, timeout: Duration) -> Result<Message, BusError> {
        self.bus.request(message, timeout).await
    }

    fn state(&self) -> watch::Receiver<ConnectionState> {
        self.state.subscribe()
    }

    fn max_payload(&self) -> usize {
        self.bus.max_payload()
    }
}
