use std::{collections::HashMap, pin::pin, sync::Arc, time::Duration};

use aura_wire::phoenix::{Incoming, Version, decode_push, decode_text};
use axum::extract::ws::{Message, WebSocket};
use futures_util::{
    StreamExt,
    future::BoxFuture,
    stream::{FuturesUnordered, SplitStream},
};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use super::{
    channel::{Channel, reply},
    writer,
};
use crate::{
    clock,
    front::Shared,
    hub::{Hub, Order},
    identity::{Identity, TokenError},
    outbox::{Frame, Outbox},
    sink::{Format, encode_system},
    subscription::Settled,
};

/// Longest wait for the bus to register the project's subscription before frames are read.
const SUBSCRIBE_WAIT: Duration = Duration::from_secs(2);
/// After the close frame, what the client gets to answer; with the rest below the 2 s of R-FRT-3.
const CLOSE_WAIT: Duration = Duration::from_secs(1);

/// Close code and reason.
pub(super) type Leave = (u16, &'static str);
/// Another process serves the client.
pub(super) const RESTART: Leave = (1012, "service restart");
/// The socket's key is no longer accepted.
pub(super) const REFUSED: Leave = (1008, "the key is no longer valid");

/// One socket.
pub(super) struct Session {
    pub(super) shared: Arc<Shared>,
    pub(super) version: Version,
    pub(super) hub: Arc<Hub>,
    /// Of the key at connect; serves channels that bring no token of their own.
    pub(super) identity: Identity,
    pub(super) token: String,
    pub(super) outbox: Arc<Outbox>,
    pub(super) channels: HashMap<String, Channel>,
    /// News of registrations that are on their way.
    pub(super) news: FuturesUnordered<BoxFuture<'static, News>>,
}

/// A registration has come further.
#[derive(Debug)]
pub(super) struct News {
    pub(super) topic: String,
    /// [`ChannelSink::number`](crate::sink::ChannelSink) and turn: whose news.
    pub(super) number: u64,
    pub(super) turn: u64,
    /// `None`: nothing was settled in time.
    pub(super) settled: Option<Settled>,
}

/// Serves a socket to its end.
pub(super) async fn run(shared: Arc<Shared>, socket: WebSocket, version: Version, identity: Identity, token: String) {
    metrics::gauge!("front_sockets").increment(1.0);
    let hub = shared.hubs.hub(identity.project, identity.source);
    let mut subscribed = hub.subscribed();
    // With the bus away the joins say so.
    drop(timeout(SUBSCRIBE_WAIT, subscribed.wait_for(|subscribed| *subscribed)).await);
    let outbox = Arc::new(Outbox::new(shared.settings.queue_bytes));
    let (sink, stream) = socket.split();
    let write_timeout = shared.settings.write_timeout;
    let told = [too_slow(version)];
    let mut session = Session {
        shared,
        version,
        hub,
        identity,
        token,
        outbox: Arc::clone(&outbox),
        channels: HashMap::new(),
        news: FuturesUnordered::new(),
    };
    tokio::select! {
        () = session.read(stream) => {}
        () = writer::run(&outbox, sink, write_timeout, &told) => {}
    }
    metrics::gauge!("front_sockets").decrement(1.0);
}

fn too_slow(version: Version) -> Frame {
    let payload = json!({"extension": "system", "status": "error", "message": "Too slow: the queue to this socket is full",
        "channel": "phoenix"});
    encode_system(Format::Socket(version), "phoenix", &payload.to_string())
}

impl Session {
    /// Reads frames, and does what time and the workers bring. Returns when the client is gone.
    async fn read(&mut self, mut stream: SplitStream<WebSocket>) {
        let mut turn = pin!(self.shared.departure.clone().turn());
        let mut orders = self.hub.orders();
        // The key may have been replaced since it was verified.
        let mut leave = self.obey(Ok(Order::Recheck)).await;
        let mut heard = Instant::now();
        loop {
            if let Some((code, reason)) = leave {
                self.disconnect();
                return self.say_goodbye(&mut stream, code, reason).await;
            }
            let idle = heard + self.shared.settings.idle;
            let expiry = self.next_expiry();
            tokio::select! {
                frame = stream.next() => match frame {
                    Some(Ok(Message::Close(_))) | None => return,
                    Some(Ok(message)) => {
                        heard = Instant::now();
                        self.frame(message).await;
                    }
                    // A frame over the limit, or a broken connection.
                    Some(Err(_)) => return self.say_goodbye(&mut stream, 1009, "message too big or malformed").await,
                },
                Some(news) = self.news.next(), if !self.news.is_empty() => self.news(news),
                order = orders.recv() => leave = self.obey(order).await,
                () = sleep(expiry) => leave = self.expire(),
                () = tokio::time::sleep_until(idle) => return self.say_goodbye(&mut stream, 1000, "idle").await,
                () = &mut turn => leave = Some(RESTART),
            }
        }
    }

    /// Closes after what is queued, and gives the client a moment to answer.
    async fn say_goodbye(&mut self, stream: &mut SplitStream<WebSocket>, code: u16, reason: &'static str) {
        self.outbox.close(code, reason);
        let answered = async { while let Some(Ok(_)) = stream.next().await {} };
        // The writer ends the session as soon as the close frame is out; this is for a client that goes first.
        drop(timeout(CLOSE_WAIT, answered).await);
    }

    async fn frame(&mut self, message: Message) {
        match message {
            Message::Text(text) => match decode_text(self.version, &text) {
                Ok(frame) => self.text(frame).await,
                Err(error) => malformed(error),
            },
            Message::Binary(bytes) => match decode_push(&bytes) {
                Ok(push) => self.push(&push).await,
                Err(error) => malformed(error),
            },
            // Answered below us.
            Message::Ping(_) | Message::Pong(_) | Message::Close(_) => {}
        }
    }

    async fn text(&mut self, frame: Incoming<'_>) {
        match (frame.topic.as_str(), frame.event.as_str()) {
            ("phoenix", "heartbeat") => self.answer(&frame, "ok", "{}"),
            (topic, "phx_join") if topic.starts_with("realtime:") => self.join(&frame).await,
            (_, "phx_leave") => self.leave(&frame),
            (topic, _) if !self.channels.contains_key(topic) => {
                self.answer(&frame, "error", r#"{"reason":"unmatched topic"}"#);
            }
            (_, "access_token") => self.access_token(&frame).await,
            (_, "broadcast") => self.broadcast(&frame).await,
            (_, "presence") => self.answer(&frame, "ok", "{}"),
            (_, event) => tracing::debug!(event_bytes = event.len(), "unknown event on a channel"),
        }
    }

    /// Replies to a frame, past the channel's gate.
    pub(super) fn answer(&self, frame: &Incoming<'_>, status: &str, response: &str) {
        let Incoming { join_ref, reference, topic, .. } = frame;
        self.outbox.push(reply(self.version, join_ref, reference, topic, status, response));
    }

    fn leave(&mut self, frame: &Incoming<'_>) {
        self.answer(frame, "ok", "{}");
        if let Some(channel) = self.channels.remove(&frame.topic) {
            channel.close(self.version, []);
        }
    }

    /// Time until the first token is over.
    fn next_expiry(&self) -> Duration {
        let identities = self.channels.values().map(|channel| &channel.identity).chain([&self.identity]);
        let ends = identities.filter_map(|identity| identity.ends);
        let first = self.channels.values().map(|channel| channel.deadline).chain(ends).min();
        first.map_or(Duration::from_secs(3600), clock::until)
    }

    /// Closes channels whose token is over; the socket stays (R-FRT-3), unless its key is gone.
    fn expire(&mut self) -> Option<Leave> {
        let now = clock::now();
        if self.identity.has_ended(now) {
            return Some(REFUSED);
        }
        let ended: Vec<_> =
            self.channels.iter().filter(|(_, c)| c.identity.has_ended(now)).map(|(t, _)| t.clone()).collect();
        for topic in ended {
            self.shut(&topic, &TokenError::Signature);
        }
        let over: Vec<_> = self.channels.iter().filter(|(_, c)| c.deadline <= now).map(|(t, _)| t.clone()).collect();
        for topic in over {
            if let Some(channel) = self.channels.remove(&topic) {
                let seconds = (now - channel.identity.expires).max(0);
                let message = format!("Token has expired {seconds} seconds ago");
                channel.close(self.version, [channel.sink.system("system", false, &message)]);
            }
        }
        None
    }

    /// Tells every channel that we go (supabase-wire.md §1.7; this message has no `channel`).
    fn disconnect(&mut self) {
        let payload = r#"{"extension":"system","status":"ok","message":"Server requested disconnect"}"#;
        for channel in self.channels.values() {
            channel.sink.send(encode_system(Format::Socket(self.version), &channel.sink.topic, payload));
        }
    }
}

fn malformed(error: aura_wire::phoenix::FrameError) {
    metrics::counter!("front_malformed_frames_total").increment(1);
    tracing::debug!(%error, "dropped a malformed frame");
}
