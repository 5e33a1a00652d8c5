use aura_wire::phoenix::Incoming;

use tokio::sync::broadcast::error::RecvError;

use super::session::{Leave, REFUSED, RESTART, Session};
use crate::{clock, hub::Order, identity::TokenError};

/// The project wants the client gone, for now.
const DISCONNECTED: Leave = (1008, "disconnected by the project");

impl Session {
    /// `access_token`: no reply if it is good, `system` error and `phx_close` if not (supabase-wire.md §1.8).
    pub(super) async fn access_token(&mut self, frame: &Incoming<'_>) {
        let payload: serde_json::Value = serde_json::from_str(frame.payload.get()).unwrap_or_default();
        let Some(token) = payload["access_token"].as_str().filter(|token| !token.starts_with("sb_")) else { return };
        let current = self.channels.get(&frame.topic).is_some_and(|channel| channel.token == token);
        if !current && let Err(error) = self.refresh(&frame.topic, token).await {
            self.shut(&frame.topic, &error);
        }
    }

    /// Takes over a verified token. The same person goes on without a gap; for another one the old bindings end at once,
    /// and the new ones are confirmed by a second `system` message.
    async fn refresh(&mut self, topic: &str, token: &str) -> Result<(), TokenError> {
        let identity = self.shared.auth.channel(self.identity.project, token).await?;
        let Some(mut channel) = self.channels.remove(topic) else { return Ok(()) };
        let same = channel.identity.sees_as(&identity);
        channel.deadline = clock::deadline(identity.expires);
        channel.token = token.to_owned();
        channel.identity = identity;
        if !same && !channel.bindings.is_empty() {
            channel.registration = None;
            self.register(&mut channel);
        }
        self.channels.insert(topic.to_owned(), channel);
        Ok(())
    }

    /// Does what the project's connections are told; `Some` = closes the socket.
    pub(super) async fn obey(&mut self, order: Result<Order, RecvError>) -> Option<Leave> {
        match order {
            Ok(Order::Recheck) => self.recheck().await,
            Ok(Order::Disconnect(target)) => {
                let mut identities = self.channels.values().map(|channel| &channel.identity).chain([&self.identity]);
                identities.any(|identity| identity.is(&target)).then_some(DISCONNECTED)
            }
            // Too many orders at once: whether one was for us isn't known.
            Err(_) => Some(RESTART),
        }
    }

    /// Verifies every token again: what is refused now ends.
    async fn recheck(&mut self) -> Option<Leave> {
        match self.shared.auth.channel(self.identity.project, &self.token).await {
            Ok(identity) => self.identity = identity,
            Err(error) if error.is_final() => return Some(REFUSED),
            // Time is the channels' matter, and who doesn't answer is asked again when it is back.
            Err(_) => {}
        }
        let tokens: Vec<_> = self.channels.iter().map(|(topic, one)| (topic.clone(), one.token.clone())).collect();
        for (topic, token) in tokens {
            match self.refresh(&topic, &token).await {
                Err(error) if error.is_final() => self.shut(&topic, &error),
                _ => {}
            }
        }
        None
    }

    /// Ends a channel with an error; the socket stays. That we can't look is no fault of the token: the client joins
    /// again with it, where a close would end its subscription for good.
    pub(super) fn shut(&mut self, topic: &str, error: &TokenError) {
        let Some(channel) = self.channels.remove(topic) else { return };
        let told = [channel.sink.system("system", false, &error.to_string())];
        match error {
            TokenError::Unavailable | TokenError::KeySet => channel.fail(self.version, told),
            _ => channel.close(self.version, told),
        }
    }
}
