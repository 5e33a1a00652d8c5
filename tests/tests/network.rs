//! What lies between the worker and its source fails: resets, proxies that tell nobody, links that swallow everything.
//! Conditions S, P and H of control-plane.md §3.1; W and R are in `force`.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use aura_testkit::{Flow, SlotState, eventually};
use serde_json::json;

use system_tests::{PATIENCE, Scene, SplitOptions};

fn streams(said: &str) -> bool {
    said.contains("replication\0")
}

async fn stops_and_starts(scene: &mut Scene, within: Duration) -> Result<()> {
    scene.split.platform_key().await?;
    let asked = Instant::now();
    let answer = scene.split.verb("stop", json!({"deadline_ms": 3000})).await?;
    let took = asked.elapsed();
    assert_eq!(answer.status, 200, "{}\n{}", answer.body, scene.split.logs());
    assert!(took < within, "{took:?}: {}", answer.body);
    let state = scene.slot.state().await?.context("the slot stays")?;
    assert!(!state.active, "{state:?}");
    scene.source_proxy()?.set(Flow::Open);
    let answer = scene.split.verb("start", json!({})).await?;
    assert_eq!(answer.status, 200, "{}\n{}", answer.body, scene.split.logs());
    scene.insert(10).await?;
    scene.all_arrive_without_a_gap().await
}

/// Condition S: nothing to do, nothing in the way.
#[tokio::test]
async fn lab_s_an_idle_engine_stops_in_a_second() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().source_proxy()).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    stops_and_starts(&mut scene, Duration::from_secs(1)).await
}

/// Condition P: our close never gets to the server; only the server itself can end its process.
#[tokio::test]
async fn lab_p_a_stop_behind_a_proxy_that_tells_nobody_frees_the_slot() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().source_proxy()).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.source_proxy()?.set_where(Flow::Deaf, streams);
    stops_and_starts(&mut scene, Duration::from_secs(8)).await
}

/// Condition H: neither side hears anything more of the other.
#[tokio::test]
async fn lab_h_a_stop_on_a_half_open_stream_frees_the_slot() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().source_proxy()).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.source_proxy()?.set_where(Flow::Blackhole, streams);
    stops_and_starts(&mut scene, Duration::from_secs(8)).await
}

/// Condition H once more: the server gives the stream up after its time-out, and no word of that arrives.
#[tokio::test]
async fn lab_h_a_half_open_stream_is_noticed_and_replaced() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().postgres("wal_sender_timeout", "1s").source_proxy()).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    let holder = scene.slot.wait_active(PATIENCE).await?;
    scene.source_proxy()?.set_present(Flow::Blackhole, streams);
    scene.insert(10).await?;
    scene.slot.wait(PATIENCE, |state| state.is_some_and(|state| !state.active)).await?;
    let other = |state: Option<&SlotState>| state.is_some_and(|state| state.active && state.pid != Some(holder));
    scene.slot.wait(PATIENCE, other).await.with_context(|| scene.split.logs())?;
    scene.all_arrive_without_a_gap().await
}

/// control-plane.md §4.1, 4: a reset of the replication connection alone.
#[tokio::test]
async fn case_4_a_reset_of_the_stream_is_followed_by_another_and_nothing_is_lost() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().source_proxy()).await?;
    let writer = scene.write(200);
    for _ in 0..3 {
        let holder = scene.slot.wait_active(PATIENCE).await?;
        writer.more(50).await?;
        scene.source_proxy()?.set_where(Flow::Reset, streams);
        scene.slot.wait(PATIENCE, |state| state.is_some_and(|state| state.pid != Some(holder))).await?;
        scene.source_proxy()?.set(Flow::Open);
        scene.slot.wait_active(PATIENCE).await.with_context(|| scene.split.logs())?;
    }
    writer.more(50).await?;
    scene.stop_writing(writer).await?;
    scene.all_arrive_without_a_gap().await
}

/// control-plane.md §4.1, 15: both of the engine's connections are ended by an administrator, and both come back.
#[tokio::test]
async fn case_15_after_all_its_backends_were_terminated_stream_and_slot_metrics_come_back() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    let writer = scene.write(100);
    writer.more(50).await?;
    let all = "select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name like 'aura-cdc:%'";
    assert!(scene.sql.query_one(all, &[]).await?.get::<_, i64>(0) >= 2);
    writer.more(100).await?;
    scene.stop_writing(writer).await?;
    scene.all_arrive().await?;
    scene.confirmed().await?;
    let slot = || async { scene.split.engine().await.unwrap_or_default()["slot"]["active_pid"].is_i64() };
    eventually(PATIENCE, slot).await.with_context(|| scene.split.logs())
}
