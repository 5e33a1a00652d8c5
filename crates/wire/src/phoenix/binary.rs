use super::{FrameError, Ref};

const KIND_USER_PUSH: u8 = 3;
const KIND_USER_BROADCAST: u8 = 4;

/// How a broadcast's payload is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// Bytes.
    Raw,
    /// JSON text.
    Json,
}

impl Encoding {
    fn from_byte(byte: u8) -> Self {
        if byte == 1 { Self::Json } else { Self::Raw }
    }
}

/// Client → server, kind 3.
#[derive(Debug, PartialEq, Eq)]
pub struct UserPush<'a> {
    /// Reference of the channel's join.
    pub join_ref: Ref,
    /// Reference that an acknowledgement echoes.
    pub reference: Ref,
    /// Topic, with its `realtime:`.
    pub topic: &'a str,
    /// What is broadcast.
    pub broadcast: UserBroadcast<'a>,
}

/// What a client broadcasts: the body of kinds 3 and 4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UserBroadcast<'a> {
    /// The application's event.
    pub event: &'a str,
    /// JSON object, or empty.
    pub metadata: &'a str,
    /// Of the payload.
    pub encoding: Encoding,
    /// The payload.
    pub payload: &'a [u8],
}

/// Reads a client's binary frame.
pub fn decode_push(frame: &[u8]) -> Result<UserPush<'_>, FrameError> {
    match frame.first() {
        Some(&KIND_USER_PUSH) => decode_user_push(&frame[1..]),
        Some(&kind) => Err(FrameError::Kind(kind)),
        None => Err(FrameError::Binary),
    }
}

fn decode_user_push(frame: &[u8]) -> Result<UserPush<'_>, FrameError> {
    let (header, mut rest) = frame.split_first_chunk::<6>().ok_or(FrameError::Binary)?;
    let [join_ref, reference, topic, event, metadata, encoding] = *header;
    let (join_ref, reference) = (take(&mut rest, join_ref)?, take(&mut rest, reference)?);
    let (topic, event) = (take(&mut rest, topic)?, take(&mut rest, event)?);
    let metadata = take(&mut rest, metadata)?;
    let broadcast = UserBroadcast { event, metadata, encoding: Encoding::from_byte(encoding), payload: rest };
    Ok(UserPush { join_ref: optional_ref(join_ref), reference: optional_ref(reference), topic, broadcast })
}

/// Reads a kind 4 frame: its topic and body.
pub fn decode_broadcast(frame: &[u8]) -> Result<(&str, UserBroadcast<'_>), FrameError> {
    let (header, mut rest) = frame.split_first_chunk::<5>().ok_or(FrameError::Binary)?;
    let [kind, topic, event, metadata, encoding] = *header;
    if kind != KIND_USER_BROADCAST {
        return Err(FrameError::Kind(kind));
    }
    let (topic, event) = (take(&mut rest, topic)?, take(&mut rest, event)?);
    let metadata = take(&mut rest, metadata)?;
    Ok((topic, UserBroadcast { event, metadata, encoding: Encoding::from_byte(encoding), payload: rest }))
}

fn take<'a>(rest: &mut &'a [u8], len: u8) -> Result<&'a str, FrameError> {
    let (text, tail) = rest.split_at_checked(usize::from(len)).ok_or(FrameError::Binary)?;
    *rest = tail;
    std::str::from_utf8(text).map_err(|_| FrameError::Binary)
}

fn optional_ref(text: &str) -> Ref {
    if text.is_empty() { Ref::NULL } else { Ref::from_text(text) }
}

/// A kind 4 frame; `None` when a name is over the 255 bytes that its length field can say (send text instead).
pub fn encode_broadcast(topic: &str, broadcast: &UserBroadcast<'_>) -> Option<Vec<u8>> {
    let UserBroadcast { event, metadata, encoding, payload } = broadcast;
    let mut frame = Vec::with_capacity(5 + topic.len() + event.len() + metadata.len() + payload.len());
    frame.push(KIND_USER_BROADCAST);
    for text in [topic, event, metadata] {
        frame.push(u8::try_from(text.len()).ok()?);
    }
    frame.push(u8::from(*encoding == Encoding::Json));
    for bytes in [topic.as_bytes(), event.as_bytes(), metadata.as_bytes(), payload] {
        frame.extend_from_slice(bytes);
    }
    Some(frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames that realtime-js 2.119.1 sent (supabase-wire.md §1.5).
    const PUSH_JSON: &str = "0301010d060001 3137 7265616c74696d653a726f6f6d 637572736f72 7b2278223a317d";
    const PUSH_RAW: &str = "0301010d030000 3138 7265616c74696d653a726f6f6d 726177 0102ff";
    const BROADCAST: &str = "040d060a01 7265616c74696d653a726f6f6d 637572736f72 7b226964223a2261227d 7b2278223a317d";

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: String = hex.chars().filter(|c| *c != ' ').collect();
        (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hex")).collect()
    }

    #[test]
    fn r_frt_1_reads_what_the_client_sends() {
        let frame = bytes(PUSH_JSON);
        let push = decode_push(&frame).expect("kind 3");
        assert_eq!(
            (push.join_ref.as_json(), push.reference.as_json(), push.topic),
            (r#""1""#, r#""7""#, "realtime:room")
        );
        let body = UserBroadcast { event: "cursor", metadata: "", encoding: Encoding::Json, payload: br#"{"x":1}"# };
        assert_eq!(push.broadcast, body);
        let frame = bytes(PUSH_RAW);
        let push = decode_push(&frame).expect("kind 3");
        let body = UserBroadcast { event: "raw", metadata: "", encoding: Encoding::Raw, payload: &[1, 2, 255] };
        assert_eq!(push.broadcast, body);
    }

    #[test]
    fn r_frt_1_writes_what_the_client_reads() {
        let body = UserBroadcast {
            event: "cursor",
            metadata: r#"{"id":"a"}"#,
            encoding: Encoding::Json,
            payload: br#"{"x":1}"#,
        };
        assert_eq!(encode_broadcast("realtime:room", &body), Some(bytes(BROADCAST)));
        assert_eq!(decode_broadcast(&bytes(BROADCAST)), Ok(("realtime:room", body)));
        assert_eq!(encode_broadcast(&"x".repeat(256), &body), None, "the length would not fit");
    }

    #[test]
    fn every_truncation_is_an_error_and_no_panic() {
        let frame = bytes(PUSH_JSON);
        let names_end = frame.len() - br#"{"x":1}"#.len();
        for len in 0..names_end {
            assert!(decode_push(&frame[..len]).is_err(), "{len}");
        }
        assert_eq!(decode_push(&[0, 1, 2]).err(), Some(FrameError::Kind(0)));
    }
}
