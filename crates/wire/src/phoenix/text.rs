use serde::Deserialize;
use serde_json::value::RawValue;

use super::{FrameError, Ref, Version};

/// A text frame of a client.
#[derive(Debug)]
pub struct Incoming<'a> {
    /// Reference of the join that the message belongs to.
    pub join_ref: Ref,
    /// Reference that the reply echoes.
    pub reference: Ref,
    /// Topic, with its `realtime:`.
    pub topic: String,
    /// Event.
    pub event: String,
    /// Payload, unread.
    pub payload: &'a RawValue,
}

/// A text frame to a client.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing<'a> {
    /// Reference of the channel's join, or null; version 1 leaves it out.
    pub join_ref: &'a Ref,
    /// Reference of the message that this answers, or null.
    pub reference: &'a Ref,
    /// Topic, with its `realtime:`.
    pub topic: &'a str,
    /// Event.
    pub event: &'a str,
    /// JSON text of the payload in pieces, so that a change can be spliced in without another copy. Never `null`: a
    /// stock client throws on it.
    pub payload: &'a [&'a str],
}

/// Version 1. `ref` must be there, but may be null; a `&RawValue` tells the two apart.
#[derive(Deserialize)]
struct ObjectFrame<'a> {
    topic: String,
    event: String,
    #[serde(borrow)]
    payload: &'a RawValue,
    #[serde(borrow, rename = "ref")]
    reference: &'a RawValue,
    #[serde(borrow, default)]
    join_ref: Option<&'a RawValue>,
}

/// Reads a text frame of a client.
pub fn decode_text(version: Version, text: &str) -> Result<Incoming<'_>, FrameError> {
    match version {
        Version::V1 => decode_object(text),
        Version::V2 => decode_array(text),
    }
}

fn decode_object(text: &str) -> Result<Incoming<'_>, FrameError> {
    let frame: ObjectFrame<'_> = serde_json::from_str(text).map_err(|_| FrameError::Shape)?;
    Ok(Incoming {
        join_ref: frame.join_ref.map_or(Ok(Ref::NULL), read_ref)?,
        reference: read_ref(frame.reference)?,
        topic: frame.topic,
        event: frame.event,
        payload: frame.payload,
    })
}

/// Extra elements are tolerated.
fn decode_array(text: &str) -> Result<Incoming<'_>, FrameError> {
    let parts: Vec<&RawValue> = serde_json::from_str(text).map_err(|_| FrameError::Shape)?;
    let [join_ref, reference, topic, event, payload, ..] = parts[..] else { return Err(FrameError::Shape) };
    Ok(Incoming {
        join_ref: read_ref(join_ref)?,
        reference: read_ref(reference)?,
        topic: read_string(topic)?,
        event: read_string(event)?,
        payload,
    })
}

fn read_ref(raw: &RawValue) -> Result<Ref, FrameError> {
    Ref::from_json(raw.get()).ok_or(FrameError::Shape)
}

fn read_string(raw: &RawValue) -> Result<String, FrameError> {
    serde_json::from_str(raw.get()).map_err(|_| FrameError::Shape)
}

impl Outgoing<'_> {
    /// The frame's text.
    pub fn encode(&self, version: Version) -> String {
        let payload: usize = self.payload.iter().map(|piece| piece.len()).sum();
        let mut out = String::with_capacity(payload + self.topic.len() + self.event.len() + 96);
        match version {
            Version::V1 => self.write_object(&mut out),
            Version::V2 => self.write_array(&mut out),
        }
        out
    }

    fn write_object(&self, out: &mut String) {
        out.push_str(r#"{"topic":"#);
        push_json_string(out, self.topic);
        out.push_str(r#","event":"#);
        push_json_string(out, self.event);
        out.push_str(r#","payload":"#);
        out.extend(self.payload.iter().copied());
        out.push_str(r#","ref":"#);
        out.push_str(self.reference.as_json());
        out.push('}');
    }

    fn write_array(&self, out: &mut String) {
        out.push('[');
        out.push_str(self.join_ref.as_json());
        out.push(',');
        out.push_str(self.reference.as_json());
        out.push(',');
        push_json_string(out, self.topic);
        out.push(',');
        push_json_string(out, self.event);
        out.push(',');
        out.extend(self.payload.iter().copied());
        out.push(']');
    }
}

/// Most names need no escape, so the common case is a copy.
fn push_json_string(out: &mut String, text: &str) {
    if text.bytes().any(|byte| byte < 0x20 || byte == b'"' || byte == b'\\') {
        out.push_str(&serde_json::Value::from(text).to_string());
    } else {
        out.push('"');
        out.push_str(text);
        out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOIN_V1: &str = r#"{"topic":"realtime:room","event":"phx_join","payload":{},"ref":"1","join_ref":"1"}"#;
    const JOIN_V2: &str = r#"["3","4","realtime:room","phx_join",{"config":{}}]"#;

    #[test]
    fn r_frt_1_reads_both_versions() {
        let join = decode_text(Version::V1, JOIN_V1).expect("version 1");
        assert_eq!((join.topic.as_str(), join.event.as_str(), join.payload.get()), ("realtime:room", "phx_join", "{}"));
        assert_eq!((join.reference.as_json(), join.join_ref.as_json()), (r#""1""#, r#""1""#));
        let join = decode_text(Version::V2, JOIN_V2).expect("version 2");
        assert_eq!((join.topic.as_str(), join.payload.get()), ("realtime:room", r#"{"config":{}}"#));
        assert_eq!((join.reference.as_json(), join.join_ref.as_json()), (r#""4""#, r#""3""#));
    }

    #[test]
    fn python_sends_a_null_ref_and_needs_one_back() {
        let text = r#"{"topic":"phoenix","event":"heartbeat","payload":{},"ref":null}"#;
        let beat = decode_text(Version::V1, text).expect("a heartbeat");
        assert!(beat.reference.is_null() && beat.join_ref.is_null());
        let missing = r#"{"topic":"phoenix","event":"heartbeat","payload":{}}"#;
        assert_eq!(decode_text(Version::V1, missing).err(), Some(FrameError::Shape));
    }

    #[test]
    fn malformed_text_is_an_error_of_the_frame() {
        for text in ["", "x", "{}", "[]", r#"[1,2,"t"]"#, r#"[null,null,1,"e",{}]"#, r#"[{},null,"t","e",{}]"#] {
            assert_eq!(decode_text(Version::V2, text).err(), Some(FrameError::Shape), "{text}");
            assert_eq!(decode_text(Version::V1, text).err(), Some(FrameError::Shape), "{text}");
        }
        assert!(decode_text(Version::V2, r#"[null,"1","t","e",{},"extra"]"#).is_ok(), "extra elements are tolerated");
    }

    #[test]
    fn r_frt_1_writes_both_versions() {
        let (join_ref, reference) = (Ref::from_text("3"), Ref::from_text("4"));
        let reply = Outgoing {
            join_ref: &join_ref,
            reference: &reference,
            topic: "realtime:a\"b",
            event: "phx_reply",
            payload: &[r#"{"status":"ok","#, r#""response":{}}"#],
        };
        assert_eq!(reply.encode(Version::V2), r#"["3","4","realtime:a\"b","phx_reply",{"status":"ok","response":{}}]"#);
        assert_eq!(
            reply.encode(Version::V1),
            r#"{"topic":"realtime:a\"b","event":"phx_reply","payload":{"status":"ok","response":{}},"ref":"4"}"#
        );
        let push = Outgoing { join_ref: &Ref::NULL, reference: &Ref::NULL, ..reply };
        assert!(push.encode(Version::V2).starts_with("[null,null,"));
        assert!(push.encode(Version::V1).ends_with(r#","ref":null}"#));
    }
}
