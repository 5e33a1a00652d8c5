use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event, HeaderMap, RequestErrorKind, header::HeaderName};
use async_trait::async_trait;
use tokio::{
    sync::{Mutex, watch},
    time::{Instant, timeout, timeout_at},
};

use crate::{Bus, BusError, ConnectionState, Feed, Headers, Message, Subject, Subscription};

mod publisher;

use publisher::Publisher;

const ORIGIN: HeaderName = HeaderName::from_static("Aura-Origin");
const SOURCE: HeaderName = HeaderName::from_static("Aura-Source");
const EPOCH: HeaderName = HeaderName::from_static("Aura-Epoch");

/// How to reach the server.
#[derive(Debug, Clone)]
pub struct NatsOptions {
    /// One or more `nats://` or `tls://` URLs, separated by commas, with credentials where the server wants some.
    pub url: String,
    /// Shown by the server's monitoring: binary and instance.
    pub name: String,
    /// Patience with the first connection.
    pub connect_timeout: Duration,
    /// Patience with a receipt, and with a full queue (R-ACK-2): well below the drain.
    pub ack_timeout: Duration,
    /// Messages that wait in one subscription before they are dropped and counted.
    pub subscription_capacity: usize,
}

impl NatsOptions {
    /// The defaults of R-ACK-2 for a URL.
    pub fn new(url: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            name: name.into(),
            connect_timeout: Duration::from_secs(5),
            ack_timeout: Duration::from_secs(5),
            subscription_capacity: 64 * 1024,
        }
    }
}

/// The bus on nats-server, core NATS only.
///
/// Two connections: one to publish on and one to subscribe and to ask on. So receipts never queue behind what we
/// receive, and nothing but receipts arrives on the first, which is what makes them exact (see [`publisher`]).
/// Both reconnect for ever, and subscriptions come back by themselves.
#[derive(Debug)]
pub struct NatsBus {
    client: Client,
    /// The publishing connection's handle, for single messages beside the batches.
    outlet: Client,
    publisher: Mutex<Publisher>,
    publishing: Arc<Link>,
    inboxes: AtomicU64,
    state: watch::Sender<ConnectionState>,
    ack_timeout: Duration,
}

/// What is known of one connection.
#[derive(Debug)]
struct Link {
    /// Which of the two it is, for logs.
    role: &'static str,
    connected: watch::Sender<bool>,
    /// Errors that the server reported on it.
    errors: AtomicU64,
    last_error: std::sync::Mutex<String>,
    statistics: OnceLock<Arc<async_nats::Statistics>>,
}

impl Link {
    fn new(role: &'static str) -> Arc<Self> {
        Arc::new(Self {
            role,
            connected: watch::Sender::new(false),
            errors: AtomicU64::new(0),
            last_error: std::sync::Mutex::default(),
            statistics: OnceLock::new(),
        })
    }

    /// Connections made so far.
    fn connects(&self) -> u64 {
        self.statistics.get().map_or(1, |statistics| statistics.connects.load(Ordering::SeqCst))
    }

    fn errors(&self) -> u64 {
        self.errors.load(Ordering::SeqCst)
    }

    /// Called in the order in which things happened on the connection, on another task and a little later.
    fn on(&self, event: &Event, state: &watch::Sender<ConnectionState>) {
        match event {
            Event::Connected => self.connected.send_modify(|connected| *connected = true),
            Event::Disconnected | Event::Closed => self.connected.send_modify(|connected| *connected = false),
            Event::SlowConsumer(_) => state.send_modify(|state| state.slow_consumer += 1),
            Event::ServerError(error) => self.note_error(&error.to_string(), state),
            _ => {}
        }
    }

    fn note_error(&self, error: &str, state: &watch::Sender<ConnectionState>) {
        tracing::warn!(connection = self.role, error, "nats-server reported an error");
        error.clone_into(&mut self.last_error.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        self.errors.fetch_add(1, Ordering::SeqCst);
        if error.to_ascii_lowercase().contains("slow consumer") {
            state.send_modify(|state| state.slow_consumer += 1);
        }
    }

    fn last_error(&self) -> String {
        self.last_error.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}

impl NatsBus {
    /// Connects; an unreachable server is `Disconnected`, wrong credentials are `Refused`. Once connected it never gives
    /// up on its own.
    pub async fn connect(options: NatsOptions) -> Result<Self, BusError> {
        let state = watch::Sender::new(ConnectionState { connected: false, connects: 0, slow_consumer: 0 });
        let (asking, publishing) = (Link::new("subscribe"), Link::new("publish"));
        let links = (Arc::clone(&asking), Arc::clone(&publishing));
        let report = state.clone();
        let refresh = Arc::new(move || {
            let connected = *links.0.connected.borrow() && *links.1.connected.borrow();
            let connects = links.0.connects();
            report.send_if_modified(|state| {
                let changed = (state.connected, state.connects) != (connected, connects);
                (state.connected, state.connects) = (connected, connects);
                changed
            });
        });
        let client = open(&options, &asking, &state, Arc::clone(&refresh)).await?;
        let outlet = open(&options, &publishing, &state, Arc::clone(&refresh)).await?;
        refresh();
        let publisher = Publisher::new(outlet.clone(), Arc::clone(&publishing), options.ack_timeout).await?;
        Ok(Self {
            client,
            outlet,
            publisher: Mutex::new(publisher),
            publishing,
            inboxes: AtomicU64::new(0),
            state,
            ack_timeout: options.ack_timeout,
        })
    }

    fn check(&self, message: &Message) -> Result<(), BusError> {
        if message.payload.len() > self.max_payload() {
            return Err(BusError::Refused("the payload is larger than the bus takes".to_owned()));
        }
        Ok(())
    }

    /// Returns when the server has handled everything that was sent on the subscribing connection: it answers a request
    /// that nobody serves at once, on the same connection, in order.
    async fn settle(&self) -> Result<(), BusError> {
        let nobody = format!("{}.nobody.{}", self.client.new_inbox(), self.inboxes.fetch_add(1, Ordering::Relaxed));
        let request = async_nats::Request::new().timeout(Some(self.ack_timeout));
        match self.client.send_request(nobody, request).await.map_err(|error| error.kind()) {
            Ok(_) | Err(RequestErrorKind::NoResponders) => Ok(()),
            Err(RequestErrorKind::TimedOut) => Err(BusError::Timeout(self.ack_timeout)),
            Err(_) => Err(BusError::Disconnected),
        }
    }
}

async fn open(
    options: &NatsOptions,
    link: &Arc<Link>,
    state: &watch::Sender<ConnectionState>,
    refresh: Arc<impl Fn() + Send + Sync + 'static>,
) -> Result<Client, BusError> {
    let (observed, state) = (Arc::clone(link), state.clone());
    let connect = ConnectOptions::new()
        .name(format!("{} {}", options.name, link.role))
        .client_capacity(256)
        .subscription_capacity(options.subscription_capacity)
        .connection_timeout(options.connect_timeout)
        .request_timeout(Some(options.ack_timeout))
        .ping_interval(Duration::from_secs(10))
        .max_reconnects(None)
        .reconnect_delay_callback(reconnect_delay)
        .event_callback(move |event| {
            observed.on(&event, &state);
            refresh();
            std::future::ready(())
        });
    let servers: Vec<&str> = options.url.split(',').map(str::trim).collect();
    let attempt = timeout(options.connect_timeout, connect.connect(servers));
    let client = attempt.await.map_err(|_| BusError::Disconnected)?.map_err(|error| match error.kind() {
        ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
            BusError::Refused("authorization violation".to_owned())
        }
        ConnectErrorKind::ServerParse => BusError::Refused("not a NATS URL".to_owned()),
        _ => BusError::Disconnected,
    })?;
    // Set at most once per link; connects() says 1 before.
    let _ = link.statistics.set(client.statistics());
    link.connected.send_replace(true);
    Ok(client)
}

/// 0 for the first try, then 50 ms doubling to 2 s, half of it random so that a fleet doesn't come back at once.
fn reconnect_delay(attempt: usize) -> Duration {
    if attempt <= 1 {
        return Duration::ZERO;
    }
    let most = 50_u64.saturating_mul(1 << attempt.min(8)).min(2000);
    Duration::from_millis(most / 2 + random_below(most / 2))
}

/// The hasher's random seed is all the randomness that a jitter needs.
fn random_below(limit: u64) -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(limit) % limit.max(1)
}

/// A message as it came from the server.
pub(crate) fn incoming(message: async_nats::Message) -> Message {
    Message {
        subject: Subject::from_bus(message.subject.into_string()),
        payload: message.payload,
        headers: message.headers.as_ref().map(read_headers).unwrap_or_default(),
        reply: message.reply.map(|reply| Subject::from_bus(reply.into_string())),
    }
}

fn read_headers(map: &HeaderMap) -> Headers {
    Headers {
        origin: map.get(ORIGIN).map(|value| value.as_str().to_owned()),
        source: map.get(SOURCE).and_then(|value| value.as_str().parse().ok()),
        epoch: map.get(EPOCH).and_then(|value| value.as_str().parse().ok()).map(aura_domain::Epoch),
    }
}

fn write_headers(headers: &Headers) -> Option<HeaderMap> {
    if *headers == Headers::default() {
        return None;
    }
    let mut map = HeaderMap::new();
    if let Some(origin) = &headers.origin {
        map.insert(ORIGIN, origin.as_str());
    }
    if let Some(source) = headers.source {
        map.insert(SOURCE, source.to_string());
    }
    if let Some(epoch) = headers.epoch {
        map.insert(EPOCH, epoch.to_string());
    }
    Some(map)
}

/// Puts a message into the connection's queue, waiting for room.
async fn send(client: &Client, message: &Message) -> Result<(), BusError> {
    let subject = message.subject.as_str().to_owned();
    let payload = message.payload.clone();
    let reply = message.reply.as_ref().map(|reply| reply.as_str().to_owned());
    let sent = match (write_headers(&message.headers), reply) {
        (None, None) => client.publish(subject, payload).await,
        (Some(headers), None) => client.publish_with_headers(subject, headers, payload).await,
        (None, Some(reply)) => client.publish_with_reply(subject, reply, payload).await,
        (Some(headers), Some(reply)) => client.publish_with_reply_and_headers(subject, reply, headers, payload).await,
    };
    sent.map_err(|error| match error.kind() {
        async_nats::client::PublishErrorKind::Send => BusError::Disconnected,
        kind => BusError::Refused(kind.to_string()),
    })
}

#[async_trait]
impl Bus for NatsBus {
    async fn publish_batch(&self, messages: &[Message]) -> Result<(), BusError> {
        messages.iter().try_for_each(|message| self.check(message))?;
        if messages.is_empty() {
            return Ok(());
        }
        let deadline = Instant::now() + self.ack_timeout;
        let receipt = async { self.publisher.lock().await.publish(messages).await };
        timeout_at(deadline, receipt).await.unwrap_or(Err(BusError::Timeout(self.ack_timeout)))
    }

    async fn publish(&self, message: Message) -> Result<(), BusError> {
        self.check(&message)?;
        // The queue would keep it for the next connection, when nobody wants it any more.
        if !*self.publishing.connected.borrow() {
            return Err(BusError::Disconnected);
        }
        let sent = timeout(self.ack_timeout, send(&self.outlet, &message)).await;
        sent.unwrap_or(Err(BusError::Timeout(self.ack_timeout)))
    }

    async fn subscribe(&self, subject: &Subject) -> Result<Subscription, BusError> {
        let subscribed = timeout(self.ack_timeout, self.client.subscribe(subject.as_str().to_owned())).await;
        let subscriber = match subscribed {
            Ok(Ok(subscriber)) => subscriber,
            Ok(Err(_)) => return Err(BusError::Refused("not a subject".to_owned())),
            Err(_) => return Err(BusError::Timeout(self.ack_timeout)),
        };
        self.settle().await?;
        Ok(Subscription(Feed::Nats(subscriber)))
    }

    async fn request(&self, message: Message, patience: Duration) -> Result<Message, BusError> {
        self.check(&message)?;
        let mut request = async_nats::Request::new().payload(message.payload).timeout(Some(patience));
        if let Some(headers) = write_headers(&message.headers) {
            request = request.headers(headers);
        }
        let answer = timeout(patience, self.client.send_request(message.subject.as_str().to_owned(), request)).await;
        match answer.map(|answer| answer.map_err(|error| error.kind())) {
            Ok(Ok(answer)) => Ok(incoming(answer)),
            Ok(Err(RequestErrorKind::NoResponders)) => Err(BusError::NoResponders),
            Ok(Err(RequestErrorKind::TimedOut)) | Err(_) => Err(BusError::Timeout(patience)),
            Ok(Err(RequestErrorKind::Other)) => Err(BusError::Disconnected),
            Ok(Err(kind)) => Err(BusError::Refused(kind.to_string())),
        }
    }

    fn state(&self) -> watch::Receiver<ConnectionState> {
        self.state.subscribe()
    }

    fn max_payload(&self) -> usize {
        self.client.max_payload()
    }
}
