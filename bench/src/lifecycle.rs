//! How long an engine takes to stop, to drain, and to be replaced: by another worker, or on a new slot.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aura_testkit::{Signal, eventually, eventually_some, http_status};
use serde_json::{Value, json};
use system_tests::{BusTap, Scene, SplitOptions};

use crate::summary;

/// What takes longer has hung.
const LIMIT: Duration = Duration::from_secs(120);
/// As disks and networks count.
const MEGABYTE: f64 = 1_000_000.0;

/// All figures of this module, one by one.
pub(crate) async fn run(rounds: u32) -> Result<Vec<Value>> {
    Ok(vec![
        idle_stop(rounds).await?,
        idle_exit(rounds).await?,
        drain().await?,
        takeover(rounds, 3).await?,
        takeover(rounds, 15).await?,
        slot_loss(rounds).await?,
    ])
}

/// From the request to the answer, which comes after the slot was seen inactive.
async fn idle_stop(rounds: u32) -> Result<Value> {
    let scene = Scene::start(SplitOptions::default()).await?;
    scene.split.platform_key().await?;
    let mut took = Vec::new();
    for _ in 0..rounds {
        let began = Instant::now();
        let answer = scene.split.verb("stop", json!({})).await?;
        took.push(milliseconds(began));
        ensure!(answer.status == 200 && answer.body["outcome"] == "drained", "{}", answer.body);
        ensure!(scene.slot.state().await?.is_some_and(|slot| !slot.active), "the slot is held");
        let answer = scene.split.verb("start", json!({})).await?;
        ensure!(answer.status == 200, "{}", answer.body);
    }
    Ok(json!({"figure": "stop_of_an_idle_engine", "took": summary(took)}))
}

/// From SIGTERM to the end of the process.
async fn idle_exit(rounds: u32) -> Result<Value> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    let mut took = Vec::new();
    for _ in 0..rounds {
        let began = Instant::now();
        scene.split.worker.process.signal(Signal::TERM)?;
        let status = scene.split.worker.process.wait(LIMIT).await?;
        took.push(milliseconds(began));
        ensure!(status.success(), "{status}");
        scene.split.start_worker()?;
        scene.split.wait_until_streaming().await?;
    }
    Ok(json!({"figure": "sigterm_of_an_idle_worker", "took": summary(took)}))
}

/// 200 MB, as the quota counts them, wait for a bus that stands still; it goes on when the stop is asked for.
async fn drain() -> Result<Value> {
    let options = SplitOptions::default().worker("CDC_MEMORY_QUOTA", "3GiB");
    let scene = Scene::start(options).await?;
    scene.split.platform_key().await?;
    scene.split.nats.pause()?;
    scene.ballast(26_000).await?;
    let end = scene.slot.log_end().await?;
    scene.slot.wait(LIMIT, |slot| slot.is_some_and(|slot| slot.sent >= Some(end))).await?;
    let used = || async { scene.split.worker.metric("cdc_flow_used_bytes").await?.context("nothing is held") };
    eventually(LIMIT, || async { used().await.is_ok_and(|used| used >= 200.0 * MEGABYTE) })
        .await
        .context("less was read than 200 MB")?;
    let held = used().await?;
    scene.split.nats.resume()?;
    let began = Instant::now();
    let answer = scene.split.verb("stop", json!({"deadline_ms": 60_000})).await?;
    let seconds = began.elapsed().as_secs_f64();
    ensure!(answer.status == 200 && answer.body["outcome"] == "drained", "{}", answer.body);
    let phases = &answer.body["drain"]["phases"];
    Ok(json!({
        "figure": "drain", "held_mb": (held / MEGABYTE).round(), "seconds": (seconds * 1000.0).round() / 1000.0,
        "mb_per_second": (held / MEGABYTE / seconds).round(), "phases": phases,
    }))
}

/// From `kill -9` of the leader, under load and with a standby, to the first change that its successor publishes.
async fn takeover(rounds: u32, lease: u32) -> Result<Value> {
    let options = SplitOptions::default().worker("LEASE_DURATION_SECS", &lease.to_string());
    let mut scene = Scene::start(options).await?;
    let tap = BusTap::start(&scene.split.nats).await?;
    let writer = scene.write(50);
    let mut took = Vec::new();
    for _ in 0..rounds {
        let standby = scene.split.another_worker()?;
        eventually(LIMIT, || async { http_status(standby.port, "/ready").await.is_ok_and(|status| status == 200) })
            .await?;
        writer.more(50).await?;
        let led = tap.tapped().iter().filter_map(|one| one.epoch).max().context("nobody leads")?;
        let killed = Instant::now();
        scene.split.worker.process.kill().await?;
        let first = || {
            let tapped = tap.tapped();
            let found = tapped.iter().find(|one| one.epoch > Some(led) && one.id.is_some()).map(|one| one.when);
            async move { found }
        };
        let spoke = eventually_some(LIMIT, first).await.context("the successor is silent")?;
        took.push((spoke - killed).as_secs_f64() * 1000.0);
        scene.split.worker = standby;
    }
    scene.stop_writing(writer).await?;
    let audit = scene.arrives().await?;
    ensure!(audit.arrived + audit.announced == scene.ledger.rows(), "{audit:?}");
    Ok(json!({"figure": "kill_9_to_first_event_of_the_successor", "lease_seconds": lease, "took": summary(took)}))
}

/// From the moment at which SQL shows the slot lost to a new one that streams, gap announced.
async fn slot_loss(rounds: u32) -> Result<Value> {
    let options = SplitOptions::default().own_platform().postgres("max_slot_wal_keep_size", "16MB");
    let options = options.postgres("max_wal_size", "64MB").postgres("min_wal_size", "32MB");
    let mut took = Vec::new();
    // One is made again at most three times an hour.
    for _ in 0..rounds {
        let scene = Scene::start(options.clone()).await?;
        scene.split.nats.pause()?;
        let lost = || async {
            let slot = scene.slot.state().await.ok().flatten();
            slot.is_none_or(|slot| slot.wal_status.as_deref() == Some("lost"))
        };
        while !lost().await {
            scene.ballast(500).await?;
            scene.sql.batch_execute("select pg_switch_wal(); checkpoint").await?;
        }
        let began = Instant::now();
        scene.split.nats.resume()?;
        let again = |slot: &aura_testkit::SlotState| slot.active && slot.wal_status.as_deref() != Some("lost");
        scene.slot.wait(LIMIT, |slot| slot.is_some_and(again)).await?;
        eventually(LIMIT, || scene.split.worker.is_streaming()).await?;
        took.push(milliseconds(began));
        eventually(LIMIT, || async { scene.subscriber.seen().gaps.len() == 1 }).await.context("no gap")?;
    }
    Ok(json!({"figure": "slot_loss_to_streaming", "took": summary(took)}))
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}
