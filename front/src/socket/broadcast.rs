use std::time::Duration;

use aura_bus::{Message, Subject};
use aura_wire::{
    ChannelMessage, is_object,
    phoenix::{Encoding, Incoming, Ref, UserPush},
};

use super::session::Session;
use crate::hub::Topic;

const PUBLISH_TIMEOUT: Duration = Duration::from_secs(2);

impl Session {
    /// `broadcast` as text.
    pub(super) async fn broadcast(&mut self, frame: &Incoming<'_>) {
        let payload = frame.payload.get();
        // Clients look into the payload, so anything but an object would break them.
        if payload.starts_with('{') {
            let Incoming { join_ref, reference, topic, .. } = frame;
            self.relay(topic, join_ref, reference, &ChannelMessage::Text(payload)).await;
        }
    }

    /// A binary broadcast, kind 3.
    pub(super) async fn push(&mut self, push: &UserPush<'_>) {
        let body = &push.broadcast;
        let json = |text: &[u8]| serde_json::from_slice::<&serde_json::value::RawValue>(text).is_ok();
        let sound = (body.metadata.is_empty() || is_object(body.metadata))
            && (body.encoding == Encoding::Raw || json(body.payload));
        // Receivers parse both, and a stock client throws on what doesn't parse.
        if sound {
            self.relay(push.topic, &push.join_ref, &push.reference, &ChannelMessage::User(*body)).await;
        }
    }

    async fn relay(&mut self, topic: &str, join_ref: &Ref, reference: &Ref, message: &ChannelMessage<'_>) {
        let Some(channel) = self.channels.get(topic) else {
            let response = r#"{"reason":"unmatched topic"}"#;
            self.outbox.push(super::channel::reply(self.version, join_ref, reference, topic, "error", response));
            return;
        };
        if channel.identity.read_only {
            let response = r#"{"reason":"This token is read-only"}"#;
            self.outbox.push(super::channel::reply(self.version, join_ref, reference, topic, "error", response));
            return;
        }
        let except = (!channel.broadcast_self).then_some(channel.sink.number);
        let acknowledged = channel.broadcast_ack;
        let members = channel.member.topic().clone();
        self.hub.broadcast(&members, message, except);
        self.publish(&members, message).await;
        if acknowledged {
            self.acknowledge(join_ref, reference, topic);
        }
    }

    /// To the other fronts, at most once.
    async fn publish(&mut self, topic: &Topic, message: &ChannelMessage<'_>) {
        let subject = Subject::channel(self.hub.project, topic.private, &topic.name);
        let (Ok(subject), Some(payload)) = (subject, message.encode()) else { return };
        let mut message = Message::new(subject, payload);
        message.headers.origin = Some(self.shared.settings.front_id.0.clone());
        match tokio::time::timeout(PUBLISH_TIMEOUT, self.shared.bus.publish(message)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "a broadcast reached only this front"),
            Err(_) => tracing::debug!("publishing a broadcast timed out"),
        }
    }
}
