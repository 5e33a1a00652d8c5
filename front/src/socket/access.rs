use aura_wire::phoenix::Incoming;

use super::session::Session;
use crate::{clock, identity::TokenError};

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

    /// Ends a channel with an error; the socket stays. That we can't look is no fault of the token: the client joins
    /// again with it, where a close would end its subscription for good.
    fn shut(&mut self, topic: &str, error: &TokenError) {
        let Some(channel) = self.channels.remove(topic) else { return };
        let told = [channel.sink.system("system", false, &error.to_string())];
        match error {
            TokenError::Unavailable => channel.fail(self.version, told),
            _ => channel.close(self.version, told),
        }
    }
}
