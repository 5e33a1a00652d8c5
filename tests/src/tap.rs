//! Everything that passes the bus, as any NATS client may see it.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aura_testkit::Nats;
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpStream, tcp::OwnedReadHalf, tcp::OwnedWriteHalf},
    task::JoinHandle,
    time::timeout,
};

use crate::At;

/// A healthy server answers at once.
const PATIENCE: Duration = Duration::from_secs(10);

/// A change or a gap on the bus.
#[derive(Debug, Clone)]
pub struct Tapped {
    /// Subject.
    pub subject: String,
    /// `Aura-Epoch`.
    pub epoch: Option<i64>,
    /// Position of a change.
    pub at: Option<At>,
    /// `id` of a change's new row.
    pub id: Option<i64>,
    /// The payload.
    pub payload: Value,
    /// When.
    pub when: Instant,
}

/// A subscriber to all changes and gaps; it leaves when dropped, and ends with the server.
pub struct BusTap {
    tapped: Arc<Mutex<Vec<Tapped>>>,
    reader: JoinHandle<Result<()>>,
}

impl Drop for BusTap {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl BusTap {
    /// Connects, and is sure to be subscribed.
    pub async fn start(nats: &Nats) -> Result<Self> {
        let (read, mut write) = TcpStream::connect(("127.0.0.1", nats.port())).await?.into_split();
        let mut lines = BufReader::new(read);
        let connect = r#"CONNECT {"verbose":false,"headers":true,"user":"aura-front","pass":"aura-front"}"#;
        write.write_all(format!("{connect}\r\n").as_bytes()).await?;
        write.write_all(b"SUB aura.realtime.*.changes.> 1\r\nSUB aura.realtime.*.gap 2\r\nPING\r\n").await?;
        let subscribed = async {
            let mut line = String::new();
            while !line.starts_with("PONG") {
                line.clear();
                anyhow::ensure!(lines.read_line(&mut line).await? > 0, "nats-server closed the connection");
            }
            Ok(())
        };
        timeout(PATIENCE, subscribed).await??;
        let tapped = Arc::default();
        let reader = tokio::spawn(read_messages(lines, write, Arc::clone(&tapped)));
        Ok(Self { tapped, reader })
    }

    /// All that has passed so far.
    pub fn tapped(&self) -> Vec<Tapped> {
        self.tapped.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn read_messages(
    mut lines: BufReader<OwnedReadHalf>,
    mut write: OwnedWriteHalf,
    tapped: Arc<Mutex<Vec<Tapped>>>,
) -> Result<()> {
    let mut line = String::new();
    while lines.read_line(&mut line).await? > 0 {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.first().copied() {
            Some("PING") => write.write_all(b"PONG\r\n").await?,
            // `MSG <subject> <sid> [reply] <bytes>`, `HMSG <subject> <sid> [reply] <head bytes> <bytes>`.
            Some(kind @ ("MSG" | "HMSG")) => {
                let number = |index: usize| words.get(words.len() - index).and_then(|word| word.parse::<usize>().ok());
                let (size, head) = (number(1).context("no size")?, number(2).filter(|_| kind == "HMSG").unwrap_or(0));
                let mut message = vec![0; size + 2];
                lines.read_exact(&mut message).await?;
                let entry = entry(words[1], &message[..head], &message[head..size])?;
                tapped.lock().unwrap_or_else(PoisonError::into_inner).push(entry);
            }
            _ => {}
        }
        line.clear();
    }
    Ok(())
}

fn entry(subject: &str, head: &[u8], payload: &[u8]) -> Result<Tapped> {
    let head = String::from_utf8_lossy(head);
    let header = |line: &str| line.to_ascii_lowercase().strip_prefix("aura-epoch:").and_then(|v| v.trim().parse().ok());
    let payload: Value = serde_json::from_slice(payload)?;
    Ok(Tapped {
        subject: subject.to_owned(),
        epoch: head.lines().find_map(header),
        at: payload["position"].as_str().map(str::parse).transpose()?,
        id: payload["data"]["record"]["id"].as_i64(),
        payload,
        when: Instant::now(),
    })
}
