use std::sync::Arc;

use aura_wire::phoenix::{Outgoing, Ref, Version};
use tokio::time::Instant;

use crate::{
    hub::Member, identity::Identity, outbox::Frame, request::Binding, sink::ChannelSink, subscription::Registration,
};

/// A topic joined on a socket.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) join_ref: Ref,
    pub(super) sink: Arc<ChannelSink>,
    pub(super) identity: Identity,
    /// The token in use, to tell a refresh from the same again.
    pub(super) token: String,
    /// When the token is over, seconds since 1970.
    pub(super) deadline: i64,
    pub(super) broadcast_self: bool,
    pub(super) broadcast_ack: bool,
    pub(super) bindings: Vec<Binding>,
    pub(super) registration: Option<Registration>,
    /// What is still to be answered.
    pub(super) pending_reply: Option<PendingReply>,
    /// Raised by every registration: news of an earlier one are old.
    pub(super) turn: u64,
    pub(super) member: Member,
}

/// The join's reply while it is held.
#[derive(Debug)]
pub(super) struct PendingReply {
    pub(super) reference: Ref,
    pub(super) response: String,
    pub(super) presence: bool,
    /// Held no longer than this, whatever happens meanwhile: clients give up.
    pub(super) until: Instant,
}

impl Channel {
    /// Answers the join, if that hasn't happened, and says `message` of the subscriptions.
    pub(super) fn settle(&mut self, version: Version, ok: bool, message: &str) {
        let system = self.sink.system("postgres_changes", ok, message);
        match self.pending_reply.take() {
            Some(pending) => {
                let mut frames = pending.frames(version, &self.join_ref, &self.sink.topic);
                frames.push(system);
                self.sink.open(frames);
            }
            None => self.sink.send(system),
        }
    }

    /// Answers the join of a channel without bindings.
    pub(super) fn open(&mut self, version: Version) {
        if let Some(pending) = self.pending_reply.take() {
            self.sink.open(pending.frames(version, &self.join_ref, &self.sink.topic));
        }
    }

    /// Ends the channel: `last`, then `phx_close`, after which a client doesn't join again by itself.
    pub(super) fn close(&self, version: Version, last: impl IntoIterator<Item = Frame>) {
        self.end(version, last, "phx_close", "{}");
    }

    /// Ends the channel: `last`, then `phx_error`, after which a client joins again.
    pub(super) fn fail(&self, version: Version, last: impl IntoIterator<Item = Frame>) {
        self.end(version, last, "phx_error", r#"{"reason":"unavailable"}"#);
    }

    /// The last frame has the join's reference in both slots.
    fn end(&self, version: Version, last: impl IntoIterator<Item = Frame>, event: &str, payload: &str) {
        let end = Outgoing {
            join_ref: &self.join_ref,
            reference: &self.join_ref,
            topic: &self.sink.topic,
            event,
            payload: &[payload],
        };
        self.sink.close(last.into_iter().chain([Frame::text(end.encode(version))]));
    }
}

impl PendingReply {
    fn frames(&self, version: Version, join_ref: &Ref, topic: &str) -> Vec<Frame> {
        let mut frames = vec![reply(version, join_ref, &self.reference, topic, "ok", &self.response)];
        if self.presence {
            let state = Outgoing { join_ref, reference: &Ref::NULL, topic, event: "presence_state", payload: &["{}"] };
            frames.push(Frame::text(state.encode(version)));
        }
        frames
    }
}

/// A `phx_reply`; `response` is a JSON object.
pub(super) fn reply(
    version: Version,
    join_ref: &Ref,
    reference: &Ref,
    topic: &str,
    status: &str,
    response: &str,
) -> Frame {
    let payload = [r#"{"status":""#, status, r#"","response":"#, response, "}"];
    Frame::text(Outgoing { join_ref, reference, topic, event: "phx_reply", payload: &payload }.encode(version))
}
