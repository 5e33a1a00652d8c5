//! A client of our own realtime socket, speaking what any client speaks.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::{
    net::TcpStream,
    time::{Instant, Interval, MissedTickBehavior, interval_at, timeout},
};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async, tungstenite::Message};

/// The server closes a socket that says nothing for 60 s; stock clients say something every 25 s.
const HEARTBEAT: Duration = Duration::from_secs(20);
/// A join reply comes within 8 s.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);
/// On loopback.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const TOPIC: &str = "realtime:aura-dev";

/// A joined channel.
pub(crate) struct Subscriber {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    heartbeat: Interval,
}

/// What a channel tells.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Told {
    /// `data` of a change.
    Change(Value),
    /// Payload of a `system` message.
    System(Value),
}

impl Subscriber {
    /// Connects and joins a channel with one binding; returns when the server has replied to the join.
    pub(crate) async fn join(ws_url: &str, key: &str, binding: Value) -> Result<Self> {
        let url = format!("{ws_url}/websocket?apikey={key}&vsn=1.0.0");
        let (socket, _) = timeout(CONNECT_TIMEOUT, connect_async(url)).await?.context("can't open the socket")?;
        let mut heartbeat = interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut subscriber = Self { socket, heartbeat };
        let config = json!({"broadcast": {}, "presence": {}, "postgres_changes": [binding]});
        subscriber.send("phx_join", TOPIC, json!({"config": config, "access_token": key})).await?;
        timeout(JOIN_TIMEOUT, subscriber.joined()).await.context("no reply to the join")??;
        Ok(subscriber)
    }

    async fn send(&mut self, event: &str, topic: &str, payload: Value) -> Result<()> {
        let frame = json!({"topic": topic, "event": event, "payload": payload, "ref": "1", "join_ref": "1"});
        Ok(self.socket.send(Message::text(frame.to_string())).await?)
    }

    async fn joined(&mut self) -> Result<()> {
        loop {
            let frame = self.frame().await?;
            if frame["event"] != "phx_reply" {
                continue;
            }
            if frame["payload"]["status"] != "ok" {
                bail!("the join was refused: {}", frame["payload"]["response"]["reason"]);
            }
            return Ok(());
        }
    }

    /// The next change or system message. Cancel-safe but for a heartbeat that may be cut.
    pub(crate) async fn next(&mut self) -> Result<Told> {
        loop {
            let mut frame = self.frame().await?;
            match frame["event"].as_str() {
                Some("postgres_changes") => return Ok(Told::Change(frame["payload"]["data"].take())),
                Some("system") => return Ok(Told::System(frame["payload"].take())),
                Some("phx_close" | "phx_error") => bail!("the server closed the channel"),
                _ => {}
            }
        }
    }

    async fn frame(&mut self) -> Result<Value> {
        loop {
            let message = tokio::select! {
                message = self.socket.next() => message.context("the server closed the socket")??,
                _ = self.heartbeat.tick() => {
                    self.send("heartbeat", "phoenix", json!({})).await?;
                    continue;
                }
            };
            match message {
                Message::Text(text) => return Ok(serde_json::from_str(&text)?),
                Message::Close(_) => bail!("the server closed the socket"),
                _ => {}
            }
        }
    }
}
