//! Force-close frees the slot whatever holds it, with a worker that is dead, stopped or none.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aura_testkit::eventually;
use serde_json::{Value, json};

use system_tests::{PATIENCE, Scene, SplitOptions};

use crate::rivals::{abandon, squat};

/// The slot is free within 5 s of the request, and the answer is a report.
async fn force_close(scene: &Scene) -> Result<Value> {
    scene.split.platform_key().await?;
    let asked = Instant::now();
    let freed = async {
        scene.slot.wait_free(Duration::from_secs(5)).await?;
        anyhow::Ok(asked.elapsed())
    };
    let (answer, freed) = tokio::join!(scene.split.verb("force-close", json!({})), freed);
    let answer = answer?;
    let freed = freed.with_context(|| format!("{}\n{}", answer.body, scene.split.logs()))?;
    assert!(freed < Duration::from_secs(5), "{freed:?}");
    assert_eq!(answer.status, 200, "{}\n{}", answer.body, scene.split.logs());
    assert_eq!(answer.body["slot_released"], true, "{}", answer.body);
    assert_eq!(scene.split.engine().await?["state"], "stopped");
    Ok(answer.body)
}

fn rungs(report: &Value) -> Vec<&str> {
    report["rungs"].as_array().into_iter().flatten().filter_map(|rung| rung["name"].as_str()).collect()
}

/// Starts again with a worker of its own; everything arrives.
async fn goes_on(scene: &mut Scene) -> Result<()> {
    scene.split.start_worker()?;
    let answer = scene.split.verb("start", json!({})).await?;
    assert!(matches!(answer.status, 200 | 202), "{}", answer.body);
    scene.split.wait_until_streaming().await?;
    scene.all_arrive().await.map(drop)
}

/// Condition W of control-plane.md §3.1: blocked in writing, the client's keepalives go on; one terminate isn't enough.
#[tokio::test]
async fn scene_c_a_walsender_blocked_in_writing_is_freed_without_a_worker() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    let name = abandon(&mut scene).await?;
    let squatter = squat(&scene, &name).await?;
    let report = force_close(&scene).await?;
    assert!(rungs(&report).starts_with(&["terminate", "terminate_again"]), "{report}");
    eventually(PATIENCE, || async { !squatter.is_connected() }).await?;
    goes_on(&mut scene).await
}

/// Condition R: the server reads three million rows that the filter leaves out, and sees no socket meanwhile.
#[tokio::test]
async fn scene_c_a_walsender_in_a_filtered_transaction_of_three_million_rows_is_freed() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    let fill = "create table others (id int) with (autovacuum_enabled = off); insert into others select generate_series(1, 3000000)";
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.sql.batch_execute(fill).await?;
    let end = scene.slot.log_end().await?;
    // First it reads the transaction and spills it, then it replays it; it is as far as that when it spills no more.
    let spilled = "select coalesce(sum(spill_count), 0)::int8 from pg_stat_replication_slots";
    let last = Cell::new((0_i64, Instant::now()));
    let replays = eventually(PATIENCE, || async {
        let now = scene.sql.query_one(spilled, &[]).await.map_or(0, |row| row.get(0));
        if now != last.get().0 {
            last.set((now, Instant::now()));
        }
        now > 0 && last.get().1.elapsed() > Duration::from_millis(500)
    });
    replays.await?;
    force_close(&scene).await?;
    let after = scene.slot.state().await?.context("a slot")?;
    assert!(after.confirmed < Some(end), "it was in the middle of the transaction: {after:?}");
    goes_on(&mut scene).await
}

/// R-ENG-6: the worker stands still with its connections open.
#[tokio::test]
async fn r_eng_6_a_stopped_workers_slot_is_freed_and_it_stays_out_when_it_wakes() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    let writer = scene.write(100);
    writer.more(50).await?;
    scene.split.worker.process.pause()?;
    force_close(&scene).await?;
    scene.split.worker.process.resume()?;
    writer.more(100).await?;
    let taken = scene.slot.wait_active(Duration::from_secs(3)).await;
    assert!(taken.is_err(), "force-close sets desired = stopped");
    let answer = scene.split.verb("start", json!({})).await?;
    assert!(matches!(answer.status, 200 | 202), "{}", answer.body);
    scene.split.wait_until_streaming().await?;
    scene.stop_writing(writer).await?;
    scene.all_arrive().await.map(drop)
}

/// R-ENG-6: what isn't ours is named, and never ended.
#[tokio::test]
async fn scene_b_a_strangers_walsender_is_named_and_left_alone_by_force_close() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    abandon(&mut scene).await?;
    let squatter = squat(&scene, "somebody's report").await?;
    let pid = scene.slot.wait_active(PATIENCE).await?;
    let answer = scene.split.verb("force-close", json!({})).await?;
    assert_eq!((answer.status, &answer.body["code"]), (409, &json!("slot_in_use_by_other")), "{}", answer.body);
    assert_eq!((&answer.body["pid"], &answer.body["application_name"]), (&json!(pid), &json!("somebody's report")));
    assert!(squatter.is_connected());
    assert_eq!(scene.slot.wait_active(PATIENCE).await?, pid);
    drop(squatter);
    let stopped = || async { scene.split.engine().await.is_ok_and(|engine| engine["state"] == "stopped") };
    eventually(PATIENCE, stopped).await.with_context(|| scene.split.logs())?;
    goes_on(&mut scene).await
}
