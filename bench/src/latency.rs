//! Commit → socket: from the moment the writer has its commit answered to the moment a subscriber's WebSocket has the
//! event, next to commit → line of `pg_recvlogical`, for the same commits.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use system_tests::{Split, Subscriber};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    time::{MissedTickBehavior, interval, timeout},
};

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
    let subscriber = Subscriber::start(&project, "item").await?;

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
    subscriber.wait(i64::from(changes) - 1).await?;
    let socket = subscriber.seen().changes.iter().map(|change| (change.id, change.when)).collect();
    let lines = timeout(PATIENCE, lines).await???;
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
