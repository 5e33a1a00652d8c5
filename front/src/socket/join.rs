use std::{sync::Arc, time::Duration};

use aura_wire::phoenix::{Incoming, Ref};
use futures_util::FutureExt;
use serde_json::json;
use tokio::time::{Instant, timeout};

use super::{
    channel::{Channel, PendingReply, reply},
    session::{News, Session},
};
use crate::{
    clock,
    hub::Topic,
    identity::{Identity, TokenError},
    request::JoinRequest,
    sink::{ChannelSink, Format},
    subscription::{Registration, Settled},
};

/// What a client learns once its bindings deliver.
const SUBSCRIBED: &str = "Subscribed to PostgreSQL";
/// Longest topic in bytes, without `realtime:` (design §9).
const TOPIC_BYTES: usize = 255;

/// Why a join is refused (supabase-wire.md §2.3).
#[derive(Debug, thiserror::Error)]
enum JoinError {
    #[error("TopicNameRequired: You must provide a topic name")]
    NoTopic,
    #[error("TopicNameTooLong: A topic has at most {TOPIC_BYTES} bytes")]
    LongTopic,
    #[error("ChannelRateLimitReached: Too many channels")]
    Channels,
    #[error("BindingLimitReached: Too many postgres_changes on one channel")]
    Bindings,
    #[error("Unauthorized: You do not have permissions to read from this Channel topic: {0}")]
    Private(String),
    #[error("{code}: {error}", code = .error.code())]
    Token {
        #[from]
        error: TokenError,
    },
}

impl Session {
    /// `phx_join`. A second one for a topic closes the first channel.
    pub(super) async fn join(&mut self, frame: &Incoming<'_>) {
        if let Some(old) = self.channels.remove(&frame.topic) {
            old.close(self.version, []);
        }
        if let Err(error) = self.try_join(frame).await {
            let response = json!({"reason": error.to_string()}).to_string();
            self.answer(frame, "error", &response);
        }
    }

    async fn try_join(&mut self, frame: &Incoming<'_>) -> Result<(), JoinError> {
        let name = frame.topic.strip_prefix("realtime:").unwrap_or_default();
        match name.len() {
            0 => return Err(JoinError::NoTopic),
            n if n > TOPIC_BYTES => return Err(JoinError::LongTopic),
            _ => {}
        }
        if self.channels.len() >= self.shared.settings.channels {
            return Err(JoinError::Channels);
        }
        let request = JoinRequest::parse(frame.payload.get());
        if request.postgres_changes.len() > self.shared.settings.bindings {
            return Err(JoinError::Bindings);
        }
        let (identity, token) = self.channel_identity(request.token.as_deref()).await?;
        if request.private {
            // Fails closed as long as nobody judges the policies on realtime.messages.
            return Err(JoinError::Private(name.to_owned()));
        }
        let mut channel = self.channel(frame, &request, identity, token);
        match request.bindings() {
            Ok(bindings) if bindings.is_empty() => channel.open(self.version),
            Ok(bindings) => {
                channel.bindings = bindings;
                self.register(&mut channel);
            }
            Err(error) => channel.settle(self.version, false, &error.to_string()),
        }
        self.channels.insert(frame.topic.clone(), channel);
        Ok(())
    }

    /// The channel's own token, or the key that the socket came with.
    async fn channel_identity(&mut self, token: Option<&str>) -> Result<(Identity, String), TokenError> {
        match token.filter(|token| *token != self.token) {
            Some(token) => Ok((self.shared.auth.channel(self.identity.project, token).await?, token.to_owned())),
            // Verified again: keys are revoked and expire while the socket lives.
            None => Ok((self.shared.auth.channel(self.identity.project, &self.token).await?, self.token.clone())),
        }
    }

    fn channel(&self, frame: &Incoming<'_>, request: &JoinRequest, identity: Identity, token: String) -> Channel {
        let (number, topic) = (self.shared.next_channel(), Arc::<str>::from(frame.topic.as_str()));
        let limit = self.shared.settings.queue_bytes;
        let outbox = Arc::clone(&self.outbox);
        let sink = Arc::new(ChannelSink::new(number, topic, Format::Socket(self.version), outbox, limit));
        let member = self.hub.join(Topic { private: request.private, name: sink.name().into() }, &sink);
        let pending = PendingReply {
            reference: frame.reference.clone(),
            response: request.echo(),
            presence: request.presence,
            until: Instant::now() + self.shared.settings.join_hold,
        };
        Channel {
            join_ref: if frame.join_ref.is_null() { frame.reference.clone() } else { frame.join_ref.clone() },
            sink,
            deadline: clock::deadline(identity.expires),
            identity,
            token,
            broadcast_self: request.broadcast_self,
            broadcast_ack: request.broadcast_ack,
            bindings: Vec::new(),
            registration: None,
            pending_reply: Some(pending),
            turn: 0,
            member,
        }
    }

    /// Registers the channel's bindings for its identity and follows what becomes of them.
    pub(super) fn register(&mut self, channel: &mut Channel) {
        let Session { shared, hub, .. } = self;
        let key = &shared.sub_id_key;
        let registration =
            Registration::new(hub, &shared.registrar, key, &channel.identity, &channel.bindings, &channel.sink);
        channel.turn += 1;
        // A new token doesn't prolong the hold of the reply.
        let left =
            channel.pending_reply.as_ref().map(|pending| pending.until.saturating_duration_since(Instant::now()));
        self.follow(channel, registration.settled(), Some(left.unwrap_or(self.shared.settings.join_hold)));
        channel.registration = Some(registration);
    }

    /// Queues the outcome, or the lack of one after `limit`, as news.
    fn follow(
        &self,
        channel: &Channel,
        outcome: impl Future<Output = Settled> + Send + 'static,
        limit: Option<Duration>,
    ) {
        let (topic, number, turn) = (channel.sink.topic.to_string(), channel.sink.number, channel.turn);
        let news = async move {
            let settled = match limit {
                Some(limit) => timeout(limit, outcome).await.ok(),
                None => Some(outcome.await),
            };
            News { topic, number, turn, settled }
        };
        self.news.push(news.boxed());
    }

    /// A registration has come further.
    pub(super) fn news(&mut self, news: News) {
        let Some(mut channel) = self.channels.remove(&news.topic) else { return };
        if channel.sink.number == news.number && channel.turn == news.turn {
            self.registered(&mut channel, news.settled);
        }
        self.channels.insert(news.topic, channel);
    }

    fn registered(&self, channel: &mut Channel, settled: Option<Settled>) {
        let Some(registration) = &channel.registration else { return };
        match settled {
            Some(Settled::Live) => {
                self.follow(channel, registration.interrupted(self.shared.settings.interruption), None);
                channel.settle(self.version, true, SUBSCRIBED);
            }
            Some(Settled::Ended) => {}
            Some(Settled::Rejected(message)) => {
                // One bad binding fails the whole set, as in the original.
                channel.registration = None;
                channel.settle(self.version, false, &message);
            }
            Some(Settled::Waiting(message)) => {
                self.follow(channel, registration.live(), None);
                channel.settle(self.version, false, &message);
            }
            None | Some(Settled::Interrupted) => {
                self.follow(channel, registration.settled(), None);
                let message = registration.not_streaming();
                channel.settle(self.version, false, &message);
            }
        }
    }

    /// A reply on a channel that may already be gone.
    pub(super) fn acknowledge(&self, join_ref: &Ref, reference: &Ref, topic: &str) {
        self.outbox.push(reply(self.version, join_ref, reference, topic, "ok", "{}"));
    }
}
