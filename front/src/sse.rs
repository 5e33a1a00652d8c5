//! `GET /realtime/v1/sse`: one binding as an event stream.
//!
//! A change is an unnamed event (`EventSource.onmessage`) whose `id:` is its position and whose data is the change object;
//! `system` and `gap` events are named. A comment comes when nothing else did for a while.

use std::{convert::Infallible, sync::Arc};

use aura_kit::{Code, Problem};
use axum::{
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures_util::{FutureExt, future::BoxFuture, stream};
use http::{HeaderMap, header};
use tokio::{
    sync::broadcast::{self, error::RecvError},
    time::{Instant, timeout},
};
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::{
    clock,
    front::Shared,
    hub::Order,
    identity::{Identity, TokenError},
    outbox::{Batch, Ending, Frame, Outbox},
    query::Params,
    request::{Binding, BindingError},
    sink::{ChannelSink, Format},
    socket::ORIGIN,
    subscription::{Registration, Settled},
};

const SUBSCRIBED: &str = "Subscribed to PostgreSQL";

/// Why there is no stream.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error(transparent)]
    Binding(#[from] BindingError),
    /// The worker's word on the binding.
    #[error("{0}")]
    Rejected(String),
    #[error("Try again, another process will answer.")]
    Draining,
    #[error("{}", ORIGIN)]
    Origin,
}

impl StreamError {
    fn code(&self) -> Code {
        match self {
            Self::Token(TokenError::Missing) => Code::MissingCredentials,
            Self::Token(TokenError::Expired { .. }) => Code::TokenExpired,
            Self::Token(TokenError::UnknownProject) => Code::ProjectNotFound,
            Self::Token(TokenError::Unavailable) => Code::PlatformUnavailable,
            Self::Token(TokenError::KeySet) => Code::KeySetUnavailable,
            Self::Token(
                TokenError::MissingClaims | TokenError::Malformed | TokenError::Signature | TokenError::Role,
            ) => Code::InvalidToken,
            Self::Binding(_) | Self::Rejected(_) => Code::InvalidParameter,
            Self::Draining => Code::ShuttingDown,
            Self::Origin => Code::OriginNotAllowed,
        }
    }
}

impl IntoResponse for StreamError {
    fn into_response(self) -> Response {
        let detail = match &self {
            Self::Token(error) => error.at_connect(),
            other => other.to_string(),
        };
        Problem::new(self.code(), detail).into_response()
    }
}

/// `GET /realtime/v1/sse?schema=&table=&filter=&event=`. The answer is held until the binding delivers, as a join's is.
pub(crate) async fn stream(State(shared): State<Arc<Shared>>, query: Params, headers: HeaderMap) -> Response {
    let origins = shared.settings.origins.clone();
    let mut response = match open(shared, &query, &headers).await {
        Ok(stream) => respond(stream),
        Err(error) => error.into_response(),
    };
    origins.write(&headers, response.headers_mut());
    response
}

async fn open(shared: Arc<Shared>, query: &Params, headers: &HeaderMap) -> Result<EventStream, StreamError> {
    if shared.draining() {
        return Err(StreamError::Draining);
    }
    if !shared.settings.origins.allow(headers) {
        return Err(StreamError::Origin);
    }
    let token = bearer(headers).or_else(|| text(headers, "apikey")).or_else(|| query.get("apikey"));
    let token = token.filter(|token| !token.is_empty()).ok_or(TokenError::Missing)?;
    let identity = shared.auth.connect(token).await?;
    // An empty parameter is none: forms and links leave them so.
    let given = |name| query.get(name).filter(|text| !text.is_empty());
    let binding = Binding::new(1, given("schema"), given("table"), given("event"), given("filter"), None)?;
    EventStream::open(shared, identity, token, binding).await
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    text(headers, "authorization")?.strip_prefix("Bearer ").map(str::trim)
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn respond(stream: EventStream) -> Response {
    let body = stream::unfold(stream, |mut stream| async move {
        let bytes = stream.next().await?;
        Some((Ok::<_, Infallible>(bytes), stream))
    });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-store"),
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(body)).into_response()
}

/// One open stream.
struct EventStream {
    shared: Arc<Shared>,
    outbox: Arc<Outbox>,
    sink: Arc<ChannelSink>,
    registration: Registration,
    /// What the registration still waits for.
    settling: Option<BoxFuture<'static, Settled>>,
    /// Of the token.
    identity: Identity,
    token: String,
    orders: broadcast::Receiver<Order>,
    /// When the token is over, seconds since 1970.
    deadline: i64,
    written: usize,
    /// Ends when it is this stream's turn to leave.
    turn: BoxFuture<'static, ()>,
    /// The first word on the binding was said.
    opened: bool,
    ended: bool,
    /// Lets the drain wait for the stream.
    _tracked: TaskTrackerToken,
}

impl EventStream {
    async fn open(shared: Arc<Shared>, identity: Identity, token: &str, binding: Binding) -> Result<Self, StreamError> {
        let hub = shared.hubs.hub(identity.project, identity.source);
        let orders = hub.orders();
        // The key may have been replaced since it was verified.
        let identity = shared.auth.connect(token).await?;
        let limit = shared.settings.queue_bytes;
        let outbox = Arc::new(Outbox::new(limit));
        let topic = "realtime:sse".into();
        let sink = Arc::new(ChannelSink::new(shared.next_channel(), topic, Format::Sse, Arc::clone(&outbox), limit));
        let mut subscribed = hub.subscribed();
        let hold = Instant::now() + shared.settings.join_hold;
        drop(tokio::time::timeout_at(hold, subscribed.wait_for(|subscribed| *subscribed)).await);
        let key = &shared.sub_id_key;
        let registration = Registration::new(&hub, &shared.registrar, key, &identity, &[binding], &sink);
        let settled = tokio::time::timeout_at(hold, registration.settled()).await.ok();
        let (tracked, turn) = (shared.tracker.token(), shared.departure.clone().turn().boxed());
        let mut stream = Self {
            shared,
            outbox,
            sink,
            registration,
            settling: None,
            deadline: clock::deadline(identity.expires),
            identity,
            token: token.to_owned(),
            orders,
            written: 0,
            turn,
            opened: false,
            ended: false,
            _tracked: tracked,
        };
        match settled {
            Some(Settled::Rejected(message)) => return Err(StreamError::Rejected(message)),
            settled => stream.settled(settled),
        }
        Ok(stream)
    }

    /// Says how the binding stands, first of all at the start of the stream.
    fn settled(&mut self, settled: Option<Settled>) {
        let (ok, message) = match settled {
            Some(Settled::Live) => {
                self.settling = Some(self.registration.interrupted(self.shared.settings.interruption).boxed());
                (true, SUBSCRIBED.to_owned())
            }
            Some(Settled::Ended) => return,
            Some(Settled::Waiting(message)) => {
                self.settling = Some(self.registration.live().boxed());
                (false, message)
            }
            Some(Settled::Rejected(message)) => return self.end(&message),
            None | Some(Settled::Interrupted) => {
                self.settling = Some(self.registration.settled().boxed());
                (false, self.registration.not_streaming())
            }
        };
        let system = self.sink.system("postgres_changes", ok, &message);
        if self.opened {
            self.sink.send(system);
        } else {
            self.sink.open([system]);
            self.opened = true;
        }
    }

    /// The next bytes; `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        self.outbox.written(std::mem::take(&mut self.written));
        if self.ended {
            return None;
        }
        loop {
            let step = self.step().await;
            match step {
                Step::Write(batch) => return Some(self.write(batch)),
                Step::Comment => return Some(Bytes::from_static(b":\n\n")),
                Step::Settled(settled) => {
                    self.settling = None;
                    self.settled(Some(settled));
                }
                Step::Expired => {
                    self.end(&format!("Token has expired {} seconds ago", clock::now() - self.identity.expires));
                }
                Step::Ordered(order) => self.obey(order).await,
                Step::Ended => self.end(&TokenError::Signature.to_string()),
                Step::Draining => self.end("Server requested disconnect"),
            }
        }
    }

    /// Ends the stream if it is told so, or if its token is no good any more.
    async fn obey(&mut self, order: Result<Order, RecvError>) {
        match order {
            Ok(Order::Disconnect(target)) if self.identity.is(&target) => self.end("Server requested disconnect"),
            Ok(Order::Disconnect(_)) => {}
            Ok(Order::Recheck) => match self.shared.auth.connect(&self.token).await {
                Ok(identity) => self.identity = identity,
                Err(error) if error.is_final() => self.end(&error.to_string()),
                Err(_) => {}
            },
            // Too many orders at once: whether one was for us isn't known.
            Err(_) => self.end("Server requested disconnect"),
        }
    }

    async fn step(&mut self) -> Step {
        let left = clock::until(self.identity.ends.map_or(self.deadline, |ends| ends.min(self.deadline)));
        let settling = async {
            match &mut self.settling {
                Some(settling) => settling.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            batch = timeout(self.shared.settings.sse_comment, self.outbox.next()) => batch.map_or(Step::Comment, Step::Write),
            settled = settling => Step::Settled(settled),
            () = &mut self.turn, if !self.ended => Step::Draining,
            order = self.orders.recv(), if !self.ended => Step::Ordered(order),
            () = tokio::time::sleep(left), if !self.ended => {
                let now = clock::now();
                match self.identity.has_ended(now) {
                    true => Step::Ended,
                    false if now >= self.deadline => Step::Expired,
                    false => Step::Comment,
                }
            }
        }
    }

    fn write(&mut self, batch: Batch) -> Bytes {
        let mut bytes = Vec::new();
        for frame in &batch.frames {
            self.written += frame.len();
            if let Frame::Text(text) = frame {
                bytes.extend_from_slice(text.as_bytes());
            }
        }
        if batch.ending == Some(Ending::TooSlow)
            && let Frame::Text(text) = self.sink.system("system", false, "Too slow: the queue to this stream is full")
        {
            bytes.extend_from_slice(text.as_bytes());
        }
        self.ended = batch.ending.is_some();
        bytes.into()
    }

    /// Ends the stream with a word.
    fn end(&mut self, message: &str) {
        self.sink.close([self.sink.system("system", false, message)]);
        self.outbox.close(0, "ended");
    }
}

enum Step {
    Write(Batch),
    Comment,
    Settled(Settled),
    Expired,
    /// What stood behind the token is gone.
    Ended,
    Ordered(Result<Order, RecvError>),
    Draining,
}
