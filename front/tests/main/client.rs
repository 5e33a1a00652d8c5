use std::time::Duration;

use aura_wire::phoenix::Version;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::{net::TcpStream, time::timeout};
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, connect_async,
    tungstenite::{self, Message},
};

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A socket that speaks one version of the wire.
pub(crate) struct Client {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    version: Version,
}

/// A message in neither version's shape.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Got {
    pub(crate) join_ref: Value,
    pub(crate) reference: Value,
    pub(crate) topic: String,
    pub(crate) event: String,
    pub(crate) payload: Value,
}

impl Client {
    pub(crate) async fn connect(url: &str, version: Version, token: &str) -> Result<Self, tungstenite::Error> {
        let vsn = if version == Version::V1 { "1.0.0" } else { "2.0.0" };
        let (socket, _) = connect_async(format!("{url}?apikey={token}&log_level=info&vsn={vsn}")).await?;
        Ok(Self { socket, version })
    }

    pub(crate) async fn raw(&mut self, message: Message) {
        self.socket.send(message).await.expect("the socket takes it");
    }

    pub(crate) async fn send(&mut self, join_ref: Value, reference: Value, topic: &str, event: &str, payload: Value) {
        let text = match self.version {
            Version::V1 => {
                json!({"topic": topic, "event": event, "payload": payload, "ref": reference, "join_ref": join_ref})
            }
            Version::V2 => json!([join_ref, reference, topic, event, payload]),
        };
        self.raw(Message::Text(text.to_string().into())).await;
    }

    /// Joins with these bindings; the join's reference is `"1"`.
    pub(crate) async fn join(&mut self, topic: &str, bindings: Value) {
        self.join_with(topic, json!({"postgres_changes": bindings}), None).await;
    }

    pub(crate) async fn join_with(&mut self, topic: &str, config: Value, token: Option<&str>) {
        let payload = json!({"config": config, "access_token": token, "version": "test/1"});
        self.send(json!("1"), json!("1"), topic, "phx_join", payload).await;
    }

    /// Joins and waits for the reply and the word that the bindings deliver.
    pub(crate) async fn subscribe(&mut self, topic: &str, bindings: Value) {
        self.join(topic, bindings).await;
        let reply = self.next().await;
        assert_eq!(reply.payload["status"], "ok", "{reply:?}");
        let system = self.next().await;
        assert_eq!(system.payload["message"], "Subscribed to PostgreSQL", "{system:?}");
    }

    /// The next frame, as it is.
    pub(crate) async fn frame(&mut self) -> Option<Message> {
        loop {
            match timeout(PATIENCE, self.socket.next()).await.expect("a frame in time") {
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                Some(Ok(message)) => return Some(message),
                Some(Err(_)) | None => return None,
            }
        }
    }

    /// The next message.
    pub(crate) async fn next(&mut self) -> Got {
        match self.frame().await {
            Some(Message::Text(text)) => read(self.version, &text),
            other => panic!("a text frame, not {other:?}"),
        }
    }

    /// The close frame's code; other frames before it are skipped.
    pub(crate) async fn close_code(&mut self) -> Option<u16> {
        loop {
            match self.frame().await {
                Some(Message::Close(frame)) => return frame.map(|frame| frame.code.into()),
                Some(_) => {}
                None => return None,
            }
        }
    }

    /// Fails if anything but the answer to a heartbeat comes: what was sent before the heartbeat came first.
    pub(crate) async fn expect_nothing(&mut self) {
        self.send(Value::Null, json!("hb"), "phoenix", "heartbeat", json!({})).await;
        let next = self.next().await;
        assert_eq!((next.topic.as_str(), next.reference), ("phoenix", json!("hb")), "{:?}", next.payload);
    }
}

fn read(version: Version, text: &str) -> Got {
    let value: Value = serde_json::from_str(text).expect("JSON");
    let owned = |value: &Value| value.as_str().expect("a string").to_owned();
    match version {
        Version::V1 => {
            let keys: Vec<_> = value.as_object().expect("an object").keys().map(String::as_str).collect();
            assert_eq!(keys, ["event", "payload", "ref", "topic"], "exactly these keys");
            let (topic, event) = (owned(&value["topic"]), owned(&value["event"]));
            Got {
                join_ref: Value::Null,
                reference: value["ref"].clone(),
                topic,
                event,
                payload: value["payload"].clone(),
            }
        }
        Version::V2 => {
            let parts = value.as_array().expect("an array");
            assert_eq!(parts.len(), 5);
            let (topic, event) = (owned(&parts[2]), owned(&parts[3]));
            let [join_ref, reference, payload] = [0, 1, 4].map(|at| parts[at].clone());
            Got { join_ref, reference, topic, event, payload }
        }
    }
}
