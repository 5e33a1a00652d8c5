//! A subscriber that costs little and forgets nothing: one WebSocket, one table, everything that arrived in order.

use std::{
    fmt,
    str::FromStr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use aura_testkit::eventually;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::{net::TcpStream, task::JoinHandle, time::timeout};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, tungstenite::Message};

use crate::{PATIENCE, Project};

/// A front gives a socket up that says nothing for longer than this, twice.
const HEARTBEAT: Duration = Duration::from_secs(10);

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// Where a change is, of its wire form `g-<16 hex>-<16 hex>-n`; ordered as the parts are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct At {
    /// Generation.
    pub generation: u32,
    /// Commit LSN.
    pub commit: u64,
    change: u64,
    n: u32,
}

impl FromStr for At {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let parts: Vec<&str> = text.split('-').collect();
        let [generation, commit, change, n] = parts[..] else { bail!("not a position: {text}") };
        let hex = |part| u64::from_str_radix(part, 16);
        Ok(Self { generation: generation.parse()?, commit: hex(commit)?, change: hex(change)?, n: n.parse()? })
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:x}-{:x}-{}", self.generation, self.commit, self.change, self.n)
    }
}

/// A change that arrived.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// `id` of the row, the old one's of a delete.
    pub id: i64,
    /// Which change.
    pub at: At,
    /// When.
    pub when: Instant,
}

/// A loss that was announced.
#[derive(Debug, Clone)]
pub struct Announcement {
    /// First position that may be missing; `None` = unknown.
    pub from: Option<At>,
    /// Last position that may be missing; `None` = up to the announcement.
    pub to: Option<At>,
    /// Why.
    pub reason: String,
    /// When.
    pub when: Instant,
}

/// Everything that arrived.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// Changes, in the order of their arrival.
    pub changes: Vec<Arrival>,
    /// Announced losses.
    pub gaps: Vec<Announcement>,
    /// Other `system` messages.
    pub said: Vec<Value>,
    /// The server has closed the socket.
    pub closed: bool,
}

/// A subscriber; it leaves when dropped.
pub struct Subscriber {
    seen: Arc<Mutex<Seen>>,
    reader: JoinHandle<Result<()>>,
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Subscriber {
    /// Subscribes to all changes of a table of `public` with the anon key, and waits until the server says that it is live.
    pub async fn start(project: &Project, table: &str) -> Result<Self> {
        Self::start_as(project, table, None).await
    }

    /// The same with an end user's token.
    pub async fn start_as(project: &Project, table: &str, token: Option<&str>) -> Result<Self> {
        let url = format!("{}/websocket?apikey={}&vsn=2.0.0", project.ws_url, project.anon_key);
        let (mut socket, _) = timeout(PATIENCE, tokio_tungstenite::connect_async(url)).await??;
        let binding = json!({"event": "*", "schema": "public", "table": table});
        let join = json!(["1", "1", "realtime:scene", "phx_join",
            {"config": {"postgres_changes": [binding]}, "access_token": token}]);
        socket.send(Message::text(join.to_string())).await?;
        let seen = Arc::new(Mutex::new(Seen::default()));
        let reader = tokio::spawn(read(socket, Arc::clone(&seen)));
        let subscriber = Self { seen, reader };
        let live = || async {
            subscriber.locked().said.iter().any(|said| said["message"].as_str() == Some("Subscribed to PostgreSQL"))
        };
        eventually(PATIENCE, live).await.with_context(|| format!("not live: {:?}", subscriber.seen()))?;
        Ok(subscriber)
    }

    /// All that has arrived so far.
    pub fn seen(&self) -> Seen {
        self.locked().clone()
    }

    /// Number of changes that have arrived so far.
    pub fn count(&self) -> usize {
        self.locked().changes.len()
    }

    /// Waits until the row has arrived.
    pub async fn wait(&self, id: i64) -> Result<()> {
        self.wait_within(id, PATIENCE).await
    }

    /// The same with another limit.
    pub async fn wait_within(&self, id: i64, within: Duration) -> Result<()> {
        // What was looked at before isn't looked at again.
        let mut looked = 0;
        let arrived = eventually(within, || {
            let seen = self.locked();
            let found = seen.changes[looked..].iter().any(|change| change.id == id);
            looked = seen.changes.len();
            async move { found }
        });
        arrived.await.with_context(|| {
            let seen = self.seen();
            let last = seen.changes.last().map(|change| change.id);
            let (changes, closed) = (seen.changes.len(), seen.closed);
            format!("{id} didn't arrive; {changes} changes, the last is {last:?}; closed: {closed}; {:?}", seen.gaps)
        })
    }

    fn locked(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn read(mut socket: Socket, seen: Arc<Mutex<Seen>>) -> Result<()> {
    let mut heartbeat = tokio::time::interval(HEARTBEAT);
    loop {
        let message = tokio::select! {
            message = socket.next() => message,
            _ = heartbeat.tick() => {
                socket.send(Message::text(r#"[null,"h","phoenix","heartbeat",{}]"#)).await?;
                continue;
            }
        };
        let when = Instant::now();
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        match message {
            Some(Ok(Message::Text(text))) => note(&mut seen, &serde_json::from_str(&text)?, when)?,
            Some(Ok(Message::Close(_)) | Err(_)) | None => {
                seen.closed = true;
                return Ok(());
            }
            Some(Ok(_)) => {}
        }
    }
}

/// Of `[join_ref, ref, topic, event, payload]`.
fn note(seen: &mut Seen, frame: &Value, when: Instant) -> Result<()> {
    let payload = &frame[4];
    let position = |value: &Value| value.as_str().map(str::parse).transpose();
    match frame[3].as_str() {
        Some("postgres_changes") => {
            let data = &payload["data"];
            let row = if data["type"] == "DELETE" { &data["old_record"] } else { &data["record"] };
            let id = row["id"].as_i64().with_context(|| format!("no id in {data}"))?;
            let at = position(&data["position"])?.with_context(|| format!("no position in {data}"))?;
            seen.changes.push(Arrival { id, at, when });
        }
        Some("system") if payload["gap"].is_object() => {
            let gap = &payload["gap"];
            let reason = gap["reason"].as_str().unwrap_or_default().to_owned();
            seen.gaps.push(Announcement { from: position(&gap["from"])?, to: position(&gap["to"])?, reason, when });
        }
        Some("system") => seen.said.push(payload.clone()),
        _ => {}
    }
    Ok(())
}
