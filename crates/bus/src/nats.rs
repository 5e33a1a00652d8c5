use std::{sync::Arc, time::Duration};

use async_nats::{Client, HeaderMap, RequestErrorKind, header::HeaderName};
use async_trait::async_trait;
use aura_domain::Finding;
use tokio::{
    sync::{Mutex, watch},
    time::{Instant, timeout, timeout_at},
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use crate::{Bus, BusError, ConnectionState, Feed, Headers, Message, Subject, Subscription};

mod address;
mod link;
mod publisher;
mod reporter;

pub use address::url_problems;
use link::Link;
use publisher::Publisher;
use reporter::Reporter;

const ORIGIN: HeaderName = HeaderName::from_static("Aura-Origin");
const SOURCE: HeaderName = HeaderName::from_static("Aura-Source");
const EPOCH: HeaderName = HeaderName::from_static("Aura-Epoch");

/// How to reach the server.
#[derive(Clone)]
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
    /// Where answers come; `_INBOX` by default.
    pub inbox: Option<&'static str>,
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
            inbox: None,
        }
    }
}

/// Without the URL: it may hold credentials.
impl std::fmt::Debug for NatsOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NatsOptions").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The bus on nats-server, core NATS only.
///
/// Two connections: one to publish on and one to subscribe and to ask on. So receipts never queue behind what we
/// receive, and nothing but receipts arrives on the first, which is what makes them exact (see [`publisher`]).
/// Both reconnect for ever, and subscriptions come back by themselves.
#[derive(Debug)]
pub struct NatsBus {
    asking: Arc<Link>,
    publishing: Arc<Link>,
    publisher: Mutex<Publisher>,
    state: watch::Sender<ConnectionState>,
    ack_timeout: Duration,
    tasks: TaskTracker,
    stop: DropGuard,
}

impl NatsBus {
    /// Connects; an unreachable server is `Unreachable`, wrong credentials are `Refused`. Once connected it never gives
    /// up on its own.
    pub async fn connect(options: NatsOptions) -> Result<Self, BusError> {
        let slow_consumer = Arc::default();
        let asking = Link::open(&options, "subscribe", &slow_consumer).await?;
        let publishing = Link::open(&options, "publish", &slow_consumer).await?;
        let publisher = Publisher::new(Arc::clone(&publishing), options.ack_timeout).await?;
        let state = watch::Sender::new(ConnectionState { connected: true, connects: 1, slow_consumer: 0 });
        let stop = CancellationToken::new();
        let reporter = Reporter::new(&asking, &publishing, slow_consumer, state.clone(), options.ack_timeout);
        let tasks = TaskTracker::new();
        tasks.spawn(stop.clone().run_until_cancelled_owned(reporter.run()));
        tasks.close();
        Ok(Self {
            asking,
            publishing,
            publisher: Mutex::new(publisher),
            state,
            ack_timeout: options.ack_timeout,
            tasks,
            stop: stop.drop_guard(),
        })
    }

    /// Ends the bus's own task; dropping the bus does so, too, without waiting.
    pub async fn close(self) {
        drop(self.stop);
        self.tasks.wait().await;
    }

    fn check(&self, message: &Message) -> Result<(), BusError> {
        if message.payload.len() > self.max_payload() {
            return Err(BusError::Refused("the payload is larger than the bus takes".to_owned()));
        }
        Ok(())
    }
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
        if !self.publishing.is_connected() {
            return Err(BusError::Disconnected);
        }
        let sent = timeout(self.ack_timeout, send(self.publishing.client(), &message)).await;
        sent.unwrap_or(Err(BusError::Timeout(self.ack_timeout)))
    }

    async fn subscribe(&self, subject: &Subject) -> Result<Subscription, BusError> {
        let subscribed = timeout(self.ack_timeout, self.asking.client().subscribe(subject.as_str().to_owned())).await;
        let subscriber = match subscribed {
            Ok(Ok(subscriber)) => subscriber,
            Ok(Err(_)) => return Err(BusError::Refused("not a subject".to_owned())),
            Err(_) => return Err(BusError::Timeout(self.ack_timeout)),
        };
        self.asking.settle(self.ack_timeout).await?;
        Ok(Subscription(Feed::Nats(subscriber)))
    }

    async fn request(&self, message: Message, patience: Duration) -> Result<Message, BusError> {
        self.check(&message)?;
        let mut request = async_nats::Request::new().payload(message.payload).timeout(Some(patience));
        if let Some(headers) = write_headers(&message.headers) {
            request = request.headers(headers);
        }
        let answer =
            timeout(patience, self.asking.client().send_request(message.subject.as_str().to_owned(), request)).await;
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
        self.asking.client().max_payload()
    }

    fn is_clustered(&self) -> bool {
        self.asking.client().server_info().cluster.is_some()
    }

    fn findings(&self) -> Vec<Finding> {
        let client = self.publishing.client();
        let (major, minor, patch) = OLDEST;
        preflight(&client.server_info().version, client.is_server_compatible(major, minor, patch), self.max_payload())
    }
}

/// The oldest server that was measured, Debian's.
const OLDEST: (i64, i64, i64) = (2, 9, 0);
/// Fronts send their subscriptions in chunks of 256 KiB and an envelope around them.
const LEAST_PAYLOAD: usize = 320 << 10;
/// The server's default; a larger row is sent reduced (R-BIG-4).
const USUAL_PAYLOAD: usize = 1 << 20;

fn preflight(version: &str, is_new_enough: bool, max_payload: usize) -> Vec<Finding> {
    let mut found = Vec::new();
    if !is_new_enough {
        found.push(Finding::warning("nats_version", format!("NATS {version}"), "use nats-server 2.9 or newer"));
    }
    let evidence = format!("max_payload is {max_payload} bytes");
    if max_payload < LEAST_PAYLOAD {
        let fix = "set max_payload: 1MB in the configuration of nats-server: subscriptions don't fit";
        found.push(Finding::critical("nats_max_payload", evidence, fix));
    } else if max_payload < USUAL_PAYLOAD {
        let fix = "set max_payload: 1MB in the configuration of nats-server: larger rows are sent reduced";
        found.push(Finding::warning("nats_max_payload", evidence, fix));
    }
    found
}

#[cfg(test)]
mod tests {
    use aura_domain::Severity::{Critical, Warning};

    use super::*;

    #[test]
    fn r_eng_9_an_old_server_and_a_small_payload_are_findings() {
        let cases = [
            (true, 1 << 20, vec![]),
            (false, 1 << 20, vec![("nats_version", Warning)]),
            (true, 512 << 10, vec![("nats_max_payload", Warning)]),
            (false, 64 << 10, vec![("nats_version", Warning), ("nats_max_payload", Critical)]),
        ];
        for (is_new_enough, max_payload, expected) in cases {
            let found = preflight("2.8.4", is_new_enough, max_payload);
            let found: Vec<_> = found.into_iter().map(|finding| (finding.code, finding.severity)).collect();
            assert_eq!(found, expected);
        }
    }
}
