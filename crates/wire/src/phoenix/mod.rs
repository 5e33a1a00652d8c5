//! Phoenix frames as Supabase's clients speak them (supabase-wire.md §1.4, §1.5): version 1 is a JSON object, version 2 a
//! JSON array, and version 2 has binary frames for broadcast.

mod binary;
mod text;

pub use binary::{Encoding, UserBroadcast, UserPush, decode_broadcast, decode_push, encode_broadcast};
pub use text::{Incoming, Outgoing, decode_text};

use std::sync::Arc;

/// The version of the wire that a socket speaks, from its `vsn` parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Version {
    /// `1.0.x`, JSON objects.
    V1,
    /// `2.0.x`, JSON arrays and binary broadcast frames.
    V2,
}

impl Version {
    /// Missing is 1.0.0; `~> 1.0.0` and `~> 2.0.0` are known; all else is refused (`None`).
    pub fn from_param(vsn: Option<&str>) -> Option<Self> {
        let Some(vsn) = vsn else { return Some(Self::V1) };
        let mut parts = vsn.split('.');
        let (major, minor, patch) = (parts.next()?, parts.next()?, parts.next()?);
        let plain = parts.next().is_none() && !patch.is_empty() && patch.bytes().all(|b| b.is_ascii_digit());
        match (major, minor) {
            ("1", "0") if plain => Some(Self::V1),
            ("2", "0") if plain => Some(Self::V2),
            _ => None,
        }
    }
}

/// A `ref` or `join_ref` as JSON text, echoed byte for byte: clients compare by identity.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ref(Option<Arc<str>>);

impl Ref {
    /// `null`: what nobody asked for.
    pub const NULL: Self = Self(None);

    /// The reference that a JSON string with this text is.
    pub fn from_text(text: &str) -> Self {
        Self(Some(serde_json::Value::from(text).to_string().into()))
    }

    /// JSON text: a string, a number or `null`.
    pub fn as_json(&self) -> &str {
        self.0.as_deref().unwrap_or("null")
    }

    /// Whether it is `null`.
    pub fn is_null(&self) -> bool {
        self.0.is_none()
    }

    /// From JSON text; `None` when it is neither string, number nor `null`.
    fn from_json(json: &str) -> Option<Self> {
        match json.bytes().next()? {
            b'n' => Some(Self::NULL),
            b'"' | b'-' | b'0'..=b'9' => Some(Self(Some(json.into()))),
            _ => None,
        }
    }
}

/// Why a frame is dropped. The socket stays open (supabase-wire.md §1.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Not the JSON shape of this version.
    #[error("not a message of this version of the protocol")]
    Shape,
    /// A binary frame that is too short for the lengths in its header, or whose names aren't UTF-8.
    #[error("malformed binary frame")]
    Binary,
    /// A kind of binary frame that clients don't send.
    #[error("unknown kind of binary frame {0}")]
    Kind(u8),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_match_as_the_original_does() {
        assert_eq!(Version::from_param(None), Some(Version::V1));
        assert_eq!(Version::from_param(Some("1.0.0")), Some(Version::V1));
        assert_eq!(Version::from_param(Some("2.0.7")), Some(Version::V2));
        for bad in ["", "2", "2.0", "3.0.0", "2.1.0", "2.0.x", "2.0.0.0", "1.0."] {
            assert_eq!(Version::from_param(Some(bad)), None, "{bad}");
        }
    }
}
