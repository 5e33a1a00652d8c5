//! What fronts tell each other on `aura.realtime.<project>.channel.<public|private>.<topic>` (design §9).

use bytes::Bytes;
use serde_json::value::RawValue;

use crate::phoenix::{self, UserBroadcast};

/// First byte of a payload that is JSON text; anything else is a kind 4 frame with an empty topic.
const TEXT: u8 = 1;

/// One broadcast, in the form in which it came from the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelMessage<'a> {
    /// The whole payload object of a `broadcast` event, JSON.
    Text(&'a str),
    /// The body of a binary frame.
    User(UserBroadcast<'a>),
}

/// Bytes on a channel's subject that aren't a broadcast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a channel message")]
pub struct ChannelMessageError;

impl<'a> ChannelMessage<'a> {
    /// The payload on the bus; `None` when the event's name is over the 255 bytes of the binary form.
    pub fn encode(&self) -> Option<Bytes> {
        match self {
            Self::Text(json) => {
                let mut bytes = Vec::with_capacity(1 + json.len());
                bytes.push(TEXT);
                bytes.extend_from_slice(json.as_bytes());
                Some(bytes.into())
            }
            Self::User(body) => phoenix::encode_broadcast("", body).map(Bytes::from),
        }
    }

    /// Reads a payload of the bus. The JSON was checked by who sent it and is checked again, since it is spliced into
    /// frames.
    pub fn decode(payload: &'a [u8]) -> Result<Self, ChannelMessageError> {
        match payload.split_first() {
            Some((&TEXT, json)) => {
                let json = std::str::from_utf8(json).map_err(|_| ChannelMessageError)?;
                if is_object(json) { Ok(Self::Text(json)) } else { Err(ChannelMessageError) }
            }
            _ => phoenix::decode_broadcast(payload).map(|(_, body)| Self::User(body)).map_err(|_| ChannelMessageError),
        }
    }
}

/// Whether a text is exactly one JSON object, so that it can be spliced into a frame.
pub fn is_object(json: &str) -> bool {
    json.trim_start().starts_with('{') && serde_json::from_str::<&RawValue>(json).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::phoenix::Encoding;

    #[test]
    fn both_forms_round_trip() {
        let text = ChannelMessage::Text(r#"{"event":"e","payload":{}}"#);
        assert_eq!(ChannelMessage::decode(&text.encode().expect("text")), Ok(text));
        let body = UserBroadcast { event: "e", metadata: "", encoding: Encoding::Raw, payload: &[0, 255] };
        let user = ChannelMessage::User(body);
        assert_eq!(ChannelMessage::decode(&user.encode().expect("short names")), Ok(user));
    }

    #[test]
    fn what_could_break_a_frame_is_refused() {
        for json in ["", "null", "[]", r#"{"a":1}]"#, r#"{"a":1},"b""#, "{"] {
            let bytes = ChannelMessage::Text(json).encode().expect("text");
            assert_eq!(ChannelMessage::decode(&bytes), Err(ChannelMessageError), "{json}");
        }
        assert!(ChannelMessage::decode(&[4, 9]).is_err());
        assert!(ChannelMessage::decode(&[]).is_err());
    }
}
