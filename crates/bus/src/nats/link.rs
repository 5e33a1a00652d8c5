//! One connection, and what is known of it.

use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError, atomic::Ordering},
    time::Duration,
};

use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event, RequestErrorKind, connection::State};
use tokio::{sync::watch, time::timeout};

use super::{NatsOptions, address::Address};
use crate::BusError;

/// Messages between us and the socket, outside every quota of ours (R-MEM-10).
const CLIENT_CAPACITY: usize = 256;

/// Two unanswered ones mean that the server is gone without a word.
const PING_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Link {
    /// Set once, right after connecting.
    client: OnceLock<Client>,
    /// Which of the two it is, for logs.
    role: &'static str,
    /// False from a loss until the next connection. Told a little late: see [`Link::is_connected`].
    connected: watch::Sender<bool>,
    /// Number of errors that the server reported on it.
    errors: watch::Sender<u64>,
    last_error: Mutex<String>,
    /// Of both connections.
    slow_consumer: Arc<watch::Sender<u64>>,
}

impl Link {
    pub(super) async fn open(
        options: &NatsOptions,
        role: &'static str,
        slow_consumer: &Arc<watch::Sender<u64>>,
    ) -> Result<Arc<Self>, BusError> {
        let link = Arc::new(Self {
            client: OnceLock::new(),
            role,
            connected: watch::Sender::new(true),
            errors: watch::Sender::new(0),
            last_error: Mutex::default(),
            slow_consumer: Arc::clone(slow_consumer),
        });
        let address = Address::parse(&options.url)?;
        // Weak: async-nats keeps the callback as long as a handle of the connection exists, and the link holds one.
        let observer = Arc::downgrade(&link);
        let connect = connect_options(options, role, &address).event_callback(move |event| {
            if let Some(link) = observer.upgrade() {
                link.on(&event);
            }
            std::future::ready(())
        });
        let places = address.servers.join(", ");
        let attempt = timeout(options.connect_timeout, connect.connect(address.servers));
        let late = |_| BusError::Unreachable(format!("{places}: no answer within {:?}", options.connect_timeout));
        let client = attempt.await.map_err(late)?.map_err(|error| match error.kind() {
            ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
                BusError::Refused("authorization violation".to_owned())
            }
            _ => BusError::Unreachable(format!("{places}: {error}")),
        })?;
        link.client.get_or_init(|| client);
        Ok(link)
    }

    pub(super) fn client(&self) -> &Client {
        self.client.get().expect("open() sets it before it hands the link out")
    }

    /// Whether the connection stands, as far as both the connection and the events about it say.
    pub(super) fn is_connected(&self) -> bool {
        self.client().connection_state() == State::Connected && *self.connected.borrow()
    }

    /// Changes of [`Link::is_connected`]; a loss and return in quick succession wakes, too.
    pub(super) fn changes(&self) -> watch::Receiver<bool> {
        self.connected.subscribe()
    }

    /// Connections made so far, counted before anything is read from a new one.
    pub(super) fn connects(&self) -> u64 {
        self.client().statistics().connects.load(Ordering::SeqCst)
    }

    /// Bytes read so far, counted before they are acted on.
    pub(super) fn bytes_read(&self) -> u64 {
        self.client().statistics().in_bytes.load(Ordering::SeqCst)
    }

    pub(super) fn errors(&self) -> u64 {
        *self.errors.borrow()
    }

    /// Waits until there are more errors than `known`; false = none in time.
    pub(super) async fn more_errors(&self, known: u64, patience: Duration) -> bool {
        let mut errors = self.errors.subscribe();
        matches!(timeout(patience, errors.wait_for(|errors| *errors != known)).await, Ok(Ok(_)))
    }

    pub(super) fn last_error(&self) -> String {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns when the server has handled everything that was sent before on this connection: it answers a request that
    /// nobody serves at once, on the same connection, in order.
    pub(super) async fn settle(&self, patience: Duration) -> Result<(), BusError> {
        let nobody = format!("{}.nobody", self.client().new_inbox());
        let request = async_nats::Request::new().timeout(Some(patience));
        let answer = timeout(patience, self.client().send_request(nobody, request)).await;
        match answer.map(|answer| answer.map_err(|error| error.kind())) {
            Ok(Ok(_) | Err(RequestErrorKind::NoResponders)) => Ok(()),
            Err(_) | Ok(Err(RequestErrorKind::TimedOut)) => Err(BusError::Timeout(patience)),
            Ok(Err(_)) => Err(BusError::Disconnected),
        }
    }

    /// Called in the order in which things happened on the connection, on a task of async-nats and a little later.
    fn on(&self, event: &Event) {
        match event {
            Event::Connected => self.connected.send_modify(|connected| *connected = true),
            Event::Disconnected | Event::Closed => self.connected.send_modify(|connected| *connected = false),
            Event::SlowConsumer(_) => self.slow_consumer.send_modify(|count| *count += 1),
            Event::ServerError(error) => self.note_error(&error.to_string()),
            _ => {}
        }
    }

    fn note_error(&self, error: &str) {
        tracing::warn!(connection = self.role, error, "nats-server reported an error");
        error.clone_into(&mut self.last_error.lock().unwrap_or_else(PoisonError::into_inner));
        self.errors.send_modify(|errors| *errors += 1);
        if error.to_ascii_lowercase().contains("slow consumer") {
            self.slow_consumer.send_modify(|count| *count += 1);
        }
    }
}

fn connect_options(options: &NatsOptions, role: &str, address: &Address) -> ConnectOptions {
    let signed_in = address.sign_in(ConnectOptions::new());
    let addressed = match options.inbox {
        Some(prefix) => signed_in.custom_inbox_prefix(prefix),
        None => signed_in,
    };
    addressed
        .name(format!("{} {role}", options.name))
        .client_capacity(CLIENT_CAPACITY)
        .subscription_capacity(options.subscription_capacity)
        .connection_timeout(options.connect_timeout)
        .request_timeout(Some(options.ack_timeout))
        .ping_interval(PING_INTERVAL)
        .max_reconnects(None)
        .reconnect_delay_callback(reconnect_delay)
}

/// 0 for the first try, then 100 ms doubling to 2 s, half of it random so that a fleet doesn't come back at once.
fn reconnect_delay(attempt: usize) -> Duration {
    if attempt <= 1 {
        return Duration::ZERO;
    }
    let most = (25_u64 << attempt.min(8)).min(2000);
    Duration::from_millis(most / 2 + random_below(most / 2))
}

/// The hasher's random seed is all the randomness that a jitter needs.
fn random_below(limit: u64) -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(limit) % limit.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reconnecting_backs_off_to_two_seconds() {
        assert_eq!(reconnect_delay(1), Duration::ZERO);
        for attempt in 2..100 {
            let delay = reconnect_delay(attempt);
            assert!(delay >= Duration::from_millis(50) && delay <= Duration::from_secs(2), "{attempt}: {delay:?}");
        }
        assert!((0..50).map(|_| reconnect_delay(50)).collect::<std::collections::HashSet<_>>().len() > 1, "jitter");
    }
}
