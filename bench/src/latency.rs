//! Commit → socket: from the moment the writer has its commit answered to the moment a subscriber's WebSocket has the
//! event, next to commit → line of `pg_recvlogical`, for the same commits.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use system_tests::{Project, Split};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    time::{MissedTickBehavior, interval, timeout},
};
use tokio_tungstenite::tungstenite::Message;

use crate::{peer, summary};

const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) async fn run(changes: u32, rate: u32) -> Result<Value> {
    let split = Split::start().await?;
    let project = split.project("bench").await?;
    let sql = project.sql().await?;
    sql.batch_execute("create table item (id bigint primary key, owner uuid, body text, ts timestamptz)").await?;
    project.enable("item").await?;
    sql.execute("select pg_create_logical_replication_slot('peer', 'wal2json')", &[]).await?;
    let table = format!("{}.item", project.schema.replace('-', "\\-"));
    let child = peer::lines(peer::recvlogical(&project.admin_url, "peer", &table, "-")?)?;
    let lines = tokio::spawn(read_lines(child, changes));
    let socket = tokio::spawn(read_socket(subscribe(&project).await?, changes));

    let insert = "insert into item values ($1, gen_random_uuid(), repeat('x', 100), now())";
    let statement = sql.prepare(insert).await?;
    let mut ticks = interval(Duration::from_secs(1) / rate);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut committed = HashMap::new();
    for id in 0..i64::from(changes) {
        ticks.tick().await;
        sql.execute(&statement, &[&id]).await?;
        committed.insert(id, Instant::now());
    }
    let (socket, lines) = (timeout(PATIENCE, socket).await???, timeout(PATIENCE, lines).await???);
    Ok(json!({
        "figure": "commit_to_socket", "rate": rate, "row_security": false, "subscribers": 1,
        "aura": summary(differences(&committed, &socket)),
        "pg_recvlogical": summary(differences(&committed, &lines)),
    }))
}

fn differences(committed: &HashMap<i64, Instant>, arrived: &HashMap<i64, Instant>) -> Vec<f64> {
    let pairs = arrived.iter().filter_map(|(id, at)| committed.get(id).map(|commit| (at, commit)));
    // An event can arrive before the writer has its answer; that is no time travel, it counts as zero.
    pairs.map(|(at, commit)| at.saturating_duration_since(*commit).as_secs_f64() * 1000.0).collect()
}

type Socket = tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<tokio::net::TcpStream>>;

async fn subscribe(project: &Project) -> Result<Socket> {
    let url = format!("{}/websocket?apikey={}&vsn=2.0.0", project.ws_url, project.anon_key);
    let (mut socket, _) = tokio_tungstenite::connect_async(url).await?;
    let config = json!({"config": {"postgres_changes": [{"event": "*", "schema": "public", "table": "item"}]}});
    let join = json!(["1", "1", "realtime:bench", "phx_join", config]);
    socket.send(Message::text(join.to_string())).await?;
    loop {
        let message = timeout(PATIENCE, socket.next()).await?.context("the socket was closed")??;
        if message.to_text()?.contains("Subscribed to PostgreSQL") {
            return Ok(socket);
        }
    }
}

async fn read_socket(mut socket: Socket, changes: u32) -> Result<HashMap<i64, Instant>> {
    let mut arrived = HashMap::new();
    while arrived.len() < changes as usize {
        let message = timeout(PATIENCE, socket.next()).await?.context("the socket was closed")??;
        let at = Instant::now();
        let frame: Value = serde_json::from_str(message.to_text()?)?;
        if let Some(id) = frame[4]["data"]["record"]["id"].as_i64() {
            arrived.insert(id, at);
        }
    }
    Ok(arrived)
}

async fn read_lines(mut child: tokio::process::Child, changes: u32) -> Result<HashMap<i64, Instant>> {
    let mut lines = BufReader::new(child.stdout.take().context("no pipe")?).lines();
    let mut arrived = HashMap::new();
    while arrived.len() < changes as usize {
        let line = timeout(PATIENCE, lines.next_line()).await??.context("pg_recvlogical ended")?;
        let at = Instant::now();
        let change: Value = serde_json::from_str(&line)?;
        if change["action"] == "I" {
            arrived.insert(change["columns"][0]["value"].as_i64().context("no id")?, at);
        }
    }
    child.kill().await?;
    Ok(arrived)
}
