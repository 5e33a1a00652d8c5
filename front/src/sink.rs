use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aura_domain::Position;
use aura_wire::{
    ChannelMessage, is_object,
    phoenix::{self, Encoding, Outgoing, Ref, UserBroadcast, Version},
};
use serde_json::{json, value::RawValue};

use crate::outbox::{Frame, Outbox};

/// How a channel's messages are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Format {
    /// A socket.
    Socket(Version),
    /// An event stream.
    Sse,
}

/// Where a channel's messages go. Until the join is answered they are held: a client drops what comes before. Shared by
/// the socket, which opens and closes it, and the hub, which sends.
#[derive(Debug)]
pub(crate) struct ChannelSink {
    /// Grows with every channel of the process; puts channels in an order.
    pub(crate) number: u64,
    /// Topic as the client wrote it, with its `realtime:`.
    pub(crate) topic: Arc<str>,
    pub(crate) format: Format,
    outbox: Arc<Outbox>,
    gate: Mutex<Gate>,
    held_limit: usize,
}

#[derive(Debug)]
enum Gate {
    Held(Vec<Frame>, usize),
    Open,
    Closed,
}

impl ChannelSink {
    pub(crate) fn new(number: u64, topic: Arc<str>, format: Format, outbox: Arc<Outbox>, held_limit: usize) -> Self {
        Self { number, topic, format, outbox, gate: Mutex::new(Gate::Held(Vec::new(), 0)), held_limit }
    }

    /// The part of the topic that people see.
    pub(crate) fn name(&self) -> &str {
        self.topic.strip_prefix("realtime:").unwrap_or(&self.topic)
    }

    /// Sends, or holds, or drops if the channel is closed.
    pub(crate) fn send(&self, frame: Frame) {
        match &mut *self.gate() {
            Gate::Closed => {}
            Gate::Open => self.outbox.push(frame),
            Gate::Held(frames, bytes) => {
                *bytes += frame.len();
                if *bytes > self.held_limit {
                    self.outbox.overflow();
                } else {
                    frames.push(frame);
                }
            }
        }
    }

    /// Sends `first`, then what was held, and holds no more.
    pub(crate) fn open(&self, first: impl IntoIterator<Item = Frame>) {
        let mut gate = self.gate();
        if let Gate::Held(frames, _) = &mut *gate {
            let held = std::mem::take(frames);
            first.into_iter().chain(held).for_each(|frame| self.outbox.push(frame));
            *gate = Gate::Open;
        }
    }

    /// Sends `last`, and nothing after it.
    pub(crate) fn close(&self, last: impl IntoIterator<Item = Frame>) {
        let mut gate = self.gate();
        if !matches!(*gate, Gate::Closed) {
            *gate = Gate::Closed;
            last.into_iter().for_each(|frame| self.outbox.push(frame));
        }
    }

    /// A `system` message in this channel's format.
    pub(crate) fn system(&self, extension: &str, ok: bool, message: &str) -> Frame {
        let status = if ok { "ok" } else { "error" };
        let payload = json!({"extension": extension, "status": status, "message": message, "channel": self.name()});
        encode_system(self.format, &self.topic, &payload.to_string())
    }

    /// Whether this channel is to hear of a table by an error (see [`crate::told`]).
    pub(crate) fn is_news(&self, table: &[String; 2]) -> bool {
        self.outbox.told.is_news(&self.topic, table, self.number)
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A push without references, in pieces.
fn push(version: Version, topic: &str, event: &str, payload: &[&str]) -> Frame {
    let frame = Outgoing { join_ref: &Ref::NULL, reference: &Ref::NULL, topic, event, payload };
    Frame::text(frame.encode(version))
}

/// A change for one channel: `data`, which holds the position, too, is spliced, never read.
pub(crate) fn encode_change(format: Format, topic: &str, ids: &[u32], position: Position, data: &str) -> Frame {
    let Format::Socket(version) = format else {
        return sse_event(None, Some(position), data);
    };
    let ids: Vec<_> = ids.iter().map(u32::to_string).collect();
    let head = format!(r#"{{"ids":[{}],"data":"#, ids.join(","));
    push(version, topic, "postgres_changes", &[&head, data, "}"])
}

/// A `system` message with this payload.
pub(crate) fn encode_system(format: Format, topic: &str, payload: &str) -> Frame {
    match format {
        Format::Socket(version) => push(version, topic, "system", &[payload]),
        Format::Sse => sse_event(Some("system"), None, payload),
    }
}

/// A gap; on a socket it is a `system` message with status ok, since a stock client takes an error for a reason to rejoin.
pub(crate) fn encode_gap(format: Format, topic: &str, payload: &str) -> Frame {
    match format {
        Format::Socket(version) => push(version, topic, "system", &[payload]),
        Format::Sse => sse_event(Some("gap"), None, payload),
    }
}

/// One event of an event stream; changes are unnamed, so that `EventSource.onmessage` gets them.
fn sse_event(name: Option<&str>, id: Option<Position>, json: &str) -> Frame {
    let mut text = String::with_capacity(json.len() + 96);
    if let Some(name) = name {
        text.extend(["event: ", name, "\n"]);
    }
    if let Some(id) = id {
        text.extend(["id: ", &id.to_string(), "\n"]);
    }
    // A line break in JSON is blank space between tokens: inside strings it is escaped.
    for line in json.split(['\n', '\r']).filter(|line| !line.is_empty()) {
        text.extend(["data: ", line, "\n"]);
    }
    text.push('\n');
    Frame::text(text)
}

/// A broadcast for a channel; `None` where the format has no way to say it (raw bytes in version 1).
pub(crate) fn encode_broadcast(format: Format, topic: &str, message: &ChannelMessage<'_>) -> Option<Frame> {
    let Format::Socket(version) = format else { return None };
    match message {
        ChannelMessage::Text(payload) => Some(push(version, topic, "broadcast", &[payload])),
        ChannelMessage::User(body) if version == Version::V2 => phoenix::encode_broadcast(topic, body)
            .map(|bytes| Frame::Binary(bytes.into()))
            .or_else(|| encode_user_text(version, topic, body)),
        ChannelMessage::User(body) => encode_user_text(version, topic, body),
    }
}

fn encode_user_text(version: Version, topic: &str, body: &UserBroadcast<'_>) -> Option<Frame> {
    if body.encoding == Encoding::Raw {
        return None;
    }
    let payload: &RawValue = serde_json::from_slice(body.payload).ok()?;
    let event = serde_json::Value::from(body.event).to_string();
    let mut pieces = vec![r#"{"type":"broadcast","event":"#, &event, r#","payload":"#, payload.get()];
    if is_object(body.metadata) {
        pieces.extend([r#","meta":"#, body.metadata]);
    }
    pieces.push("}");
    Some(push(version, topic, "broadcast", &pieces))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sink(outbox: &Arc<Outbox>) -> ChannelSink {
        ChannelSink::new(1, "realtime:room".into(), Format::Socket(Version::V2), Arc::clone(outbox), 100)
    }

    fn text(frame: &Frame) -> &str {
        match frame {
            Frame::Text(text) => text,
            Frame::Binary(_) => panic!("a text frame"),
        }
    }

    #[tokio::test]
    async fn events_wait_for_the_join_reply_and_end_with_the_close() {
        let outbox = Arc::new(Outbox::new(1000));
        let sink = sink(&outbox);
        sink.send(Frame::text("event".to_owned()));
        sink.open([Frame::text("reply".to_owned())]);
        sink.send(Frame::text("second".to_owned()));
        sink.close([Frame::text("closed".to_owned())]);
        sink.send(Frame::text("late".to_owned()));
        let batch = outbox.next().await;
        let order: Vec<_> = batch.frames.iter().map(text).collect();
        assert_eq!(order, ["reply", "event", "second", "closed"]);
    }

    #[test]
    fn changes_are_spliced_in_every_format() {
        let position = "1-00000000016b3748-00000000016b3700-0".parse().expect("a position");
        let data = "{\"type\":\"INSERT\",\n\"record\":{\"n\":1.10}}";
        let change = |format| encode_change(format, "realtime:r", &[1, 3], position, data);
        assert_eq!(
            text(&change(Format::Socket(Version::V2))),
            format!(r#"[null,null,"realtime:r","postgres_changes",{{"ids":[1,3],"data":{data}}}]"#)
        );
        let v1 = change(Format::Socket(Version::V1));
        assert!(serde_json::from_str::<serde_json::Value>(text(&v1)).is_ok_and(|v| v["payload"]["ids"][1] == 3));
        assert_eq!(
            text(&change(Format::Sse)),
            format!("id: {position}\ndata: {{\"type\":\"INSERT\",\ndata: \"record\":{{\"n\":1.10}}}}\n\n")
        );
    }

    #[test]
    fn r_frt_1_a_broadcast_is_binary_for_version_2_and_text_for_version_1() {
        let json = UserBroadcast { event: "cursor", metadata: "", encoding: Encoding::Json, payload: br#"{"x":1}"# };
        let message = ChannelMessage::User(json);
        let v2 = encode_broadcast(Format::Socket(Version::V2), "realtime:room", &message);
        assert!(matches!(v2, Some(Frame::Binary(bytes)) if bytes[0] == 4));
        let v1 = encode_broadcast(Format::Socket(Version::V1), "realtime:room", &message).expect("JSON");
        assert_eq!(
            text(&v1),
            r#"{"topic":"realtime:room","event":"broadcast","payload":{"type":"broadcast","event":"cursor","payload":{"x":1}},"ref":null}"#
        );
        let raw = ChannelMessage::User(UserBroadcast { encoding: Encoding::Raw, ..json });
        assert_eq!(encode_broadcast(Format::Socket(Version::V1), "realtime:room", &raw), None);
    }
}
