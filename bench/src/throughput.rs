//! Rows per second of the worker, read to receipt by the bus, next to `pg_recvlogical > /dev/null` with the same options
//! on the same WAL: a backlog of single-row transactions, each side in turn.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aura_testkit::Signal;
use serde_json::{Value, json};
use system_tests::Split;
use tokio_postgres::Client;

use crate::peer;

/// A run that takes longer has hung.
const LIMIT: Duration = Duration::from_secs(120);

pub(crate) async fn run(rows: u32, rounds: u32) -> Result<Value> {
    let mut split = Split::start().await?;
    let project = split.project("bench").await?;
    let sql = project.sql().await?;
    sql.batch_execute(SETUP).await?;
    project.enable("item").await?;
    stop_worker(&mut split).await?;
    sql.execute("select pg_copy_logical_replication_slot('aura_cdc_slot', 'base')", &[]).await?;
    sql.batch_execute(&format!("call gen({rows})")).await?;
    let end: String = sql.query_one("select pg_current_wal_flush_lsn()::text", &[]).await?.get(0);
    // Both sides read up to here, and the worker's last row is before it.
    sql.batch_execute("select pg_logical_emit_message(false, 'bench', 'end')").await?;

    let table = format!("{}.item", project.schema.replace('-', "\\-"));
    let (mut peer, mut worker) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        peer.push(f64::from(rows) / run_peer(&sql, &project.admin_url, &table, &end).await?);
        worker.push(f64::from(rows) / run_worker(&mut split, &sql, &end, rows).await?);
    }
    let (peer_median, worker_median) = (median(&peer), median(&worker));
    Ok(json!({
        "figure": "rows_per_second", "transactions": rows, "rows_per_transaction": 1, "row_security": false,
        "aura": rounded(&worker), "pg_recvlogical": rounded(&peer),
        "ratio_of_medians": (worker_median / peer_median * 1000.0).round() / 1000.0,
    }))
}

/// A narrow row, as the decoding limits were measured with; INSERT : UPDATE : DELETE = 2 : 1 : 1.
const SETUP: &str = "
    create table item (id bigint primary key, owner uuid, body text, ts timestamptz);
    create procedure gen(n int) language plpgsql as $$
    begin
        for i in 1..n loop
            case i % 4
                when 1, 2 then insert into item values (i, gen_random_uuid(), repeat('x', 100), clock_timestamp());
                when 3 then update item set body = repeat('y', 100) where id = i - 2;
                else delete from item where id = i - 2;
            end case;
            commit;
        end loop;
    end $$";

async fn stop_worker(split: &mut Split) -> Result<()> {
    split.worker.process.signal(Signal::TERM)?;
    split.worker.process.wait(Duration::from_secs(30)).await.map(drop)
}

async fn run_peer(sql: &Client, url: &str, table: &str, end: &str) -> Result<f64> {
    sql.execute("select pg_copy_logical_replication_slot('base', 'peer')", &[]).await?;
    let mut command = peer::recvlogical(url, "peer", table, "/dev/null")?;
    let began = Instant::now();
    let status = tokio::time::timeout(LIMIT, command.args(["--endpos", end]).status()).await??;
    let seconds = began.elapsed().as_secs_f64();
    ensure!(status.success(), "pg_recvlogical failed: {status}");
    sql.execute("select pg_drop_replication_slot('peer')", &[]).await?;
    Ok(seconds)
}

/// Seconds from the walsender's start to the confirmation of the last row, which is the bus's receipt of it.
async fn run_worker(split: &mut Split, sql: &Client, end: &str, rows: u32) -> Result<f64> {
    sql.batch_execute(
        "select pg_drop_replication_slot('aura_cdc_slot');
         select pg_copy_logical_replication_slot('base', 'aura_cdc_slot')",
    )
    .await?;
    let platform = split.postgres.client("platform").await?;
    platform.batch_execute("delete from aura.source_positions").await?;
    let before = split.nats.received().await?;
    split.start_worker()?;
    let state = "select active, coalesce(confirmed_flush_lsn >= $1::text::pg_lsn, false)
                 from pg_replication_slots where slot_name = 'aura_cdc_slot'";
    let statement = sql.prepare(state).await?;
    let deadline = Instant::now() + LIMIT;
    let mut began = None;
    loop {
        let row = sql.query_one(&statement, &[&end]).await?;
        if row.get(0) {
            began.get_or_insert_with(Instant::now);
        }
        if row.get(1) {
            break;
        }
        ensure!(Instant::now() < deadline, "the worker doesn't catch up: {}", split.logs());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let seconds = began.context("the slot was never active")?.elapsed().as_secs_f64();
    let received = split.nats.received().await? - before;
    ensure!(received >= u64::from(rows), "the bus has received {received} messages, not one for each of {rows} rows");
    stop_worker(split).await?;
    Ok(seconds)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn rounded(values: &[f64]) -> Vec<f64> {
    values.iter().map(|value| value.round()).collect()
}
