//! A source that goes away, comes back, is shut down, throws the slot away, or writes to tables that nobody follows.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use aura_testkit::{Shutdown, SlotState, eventually};
use serde_json::json;
use tokio::time::timeout;
use tokio_postgres::Client;

use system_tests::{Ledger, PATIENCE, Scene, SplitOptions, Subscriber, Worker, curl};

#[tokio::test]
async fn p3_10_a_terminated_walsender_is_followed_by_another_and_nothing_is_lost() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    let writer = scene.write(200);
    for _ in 0..3 {
        let holder = scene.slot.wait_active(PATIENCE).await?;
        writer.more(100).await?;
        scene.slot.terminate().await?;
        let other = |state: Option<&SlotState>| state.is_some_and(|state| state.pid.is_some_and(|pid| pid != holder));
        scene.slot.wait(PATIENCE, other).await.with_context(|| scene.split.logs())?;
    }
    writer.more(100).await?;
    scene.stop_writing(writer).await?;
    scene.all_arrive_without_a_gap().await
}

/// R-LSN-2, R-DEC-5: what others write to tables that nobody follows doesn't pile up.
#[tokio::test]
async fn p3_14_an_idle_slot_follows_a_gigabyte_of_foreign_writes() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().postgres("max_wal_size", "256MB")).await?;
    scene
        .sql
        .batch_execute("create table others (body text); alter table others alter body set storage external")
        .await?;
    let before = scene.slot.log_end().await?;
    for _ in 0..16 {
        let insert = "insert into others select repeat('x', 8000) from generate_series(1, 8000)";
        scene.sql.batch_execute(insert).await?;
        scene.sql.batch_execute("truncate others").await?;
    }
    let end = scene.slot.log_end().await?;
    assert!(end - before > 1 << 30, "{} bytes", end - before);
    let kept = |state: &SlotState| end.saturating_sub(state.restart.unwrap_or(0));
    let follows =
        |state: Option<&SlotState>| state.is_some_and(|state| state.confirmed >= Some(end) && kept(state) < 64 << 20);
    scene.slot.wait(PATIENCE, follows).await?;
    scene.insert(1).await?;
    scene.all_arrive_without_a_gap().await
}

/// Peers §5.1: two commits with nothing in between. Of the first one's end plus one, sent as the position, the server
/// would skip the second.
#[tokio::test]
async fn peers_5_1_adjacent_commits_both_arrive_when_only_the_first_was_confirmed() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    let other = scene.split.project("other").await?;
    other.guarded_table("events").await?;
    let theirs = Subscriber::start(&other, "events").await?;
    let (two, lock) = (other.sql().await?, other.sql().await?);
    let mut adjacent = false;
    for id in 1..=3_i64 {
        let insert = format!("begin; insert into events values ({id})");
        scene.sql.batch_execute(&insert).await?;
        two.batch_execute(&insert).await?;
        // Waits for the second transaction, and then nobody can judge its row: it stays unconfirmed.
        let locked = async { Ok(lock.batch_execute("begin; lock table events in access exclusive mode").await?) };
        let before = scene.slot.log_end().await?;
        let commits = async {
            eventually(PATIENCE, || async { waits_for_lock(&scene.sql).await.unwrap_or(false) }).await?;
            scene.sql.batch_execute("commit").await?;
            anyhow::Ok(two.batch_execute("commit").await?)
        };
        tokio::try_join!(locked, commits)?;
        scene.subscriber.wait(id).await?;
        let moved = |state: Option<&SlotState>| state.is_some_and(|state| state.confirmed > Some(before));
        let confirmed = scene.slot.wait(PATIENCE, moved).await?.and_then(|state| state.confirmed);
        assert_eq!(theirs.count() as i64, id - 1, "it is held back");
        scene.split.worker.process.kill().await?;
        lock.batch_execute("rollback").await?;
        scene.slot.wait_free(PATIENCE).await?;
        scene.split.start_worker()?;
        theirs.wait(id).await.with_context(|| scene.split.logs())?;
        adjacent |= theirs.seen().changes.last().map(|change| change.at.commit) == confirmed;
    }
    assert!(adjacent, "something was always written between the two commits");
    for seen in [scene.subscriber.seen(), theirs.seen()] {
        let ids: Vec<i64> = seen.changes.iter().map(|change| change.id).collect();
        assert_eq!(ids, [1, 2, 3]);
    }
    Ok(())
}

async fn waits_for_lock(sql: &Client) -> Result<bool> {
    let waiting = "select count(*) from pg_locks where not granted and mode = 'AccessExclusiveLock'";
    Ok(sql.query_one(waiting, &[]).await?.get::<_, i64>(0) > 0)
}

/// R-FB-8: a fast shutdown waits for its walsenders, which wait for us. The source comes back, and the worker to it.
async fn fast_shutdown(scene: &mut Scene) -> Result<()> {
    let stopped = timeout(Duration::from_secs(5), scene.split.postgres.stop(Shutdown::Fast)).await;
    stopped.with_context(|| scene.split.logs())??;
    scene.split.postgres.start_again().await?;
    scene.split.wait_until_streaming().await
}

#[tokio::test]
async fn scene_e_a_fast_shutdown_of_a_quiet_source_takes_no_time_and_all_resumes() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().own_platform()).await?;
    scene.insert(3).await?;
    scene.all_arrive().await?;
    scene.confirmed().await?;
    fast_shutdown(&mut scene).await?;
    scene.sql = scene.project.sql().await?;
    scene.insert(3).await?;
    scene.all_arrive_without_a_gap().await
}

#[tokio::test]
async fn scene_e_a_fast_shutdown_of_a_busy_source_takes_no_time_and_all_resumes() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().own_platform()).await?;
    let writer = scene.write(500);
    writer.more(3).await?;
    fast_shutdown(&mut scene).await?;
    writer.more(3).await?;
    scene.stop_writing(writer).await?;
    scene.all_arrive_without_a_gap().await
}

/// The server keeps little for a slot.
fn frugal() -> SplitOptions {
    let options = SplitOptions::default().postgres("max_slot_wal_keep_size", "16MB").postgres("max_wal_size", "64MB");
    options.postgres("min_wal_size", "32MB").own_platform()
}

fn is_lost(state: Option<&SlotState>) -> bool {
    state.is_none_or(|state| state.wal_status.as_deref() == Some("lost"))
}

/// Writes more than the slot may keep while the bus is stopped: the server throws the slot away. The account's first 10 rows are received, the next 10 lost.
async fn overflow(scene: &mut Scene) -> Result<()> {
    scene.insert(10).await?;
    scene.all_arrive().await?;
    scene.split.nats.pause()?;
    scene.insert(10).await?;
    lose(scene).await
}

/// Writes until the server has thrown the slot away.
async fn lose(scene: &Scene) -> Result<()> {
    for _ in 0..40 {
        scene.ballast(500).await?;
        scene.sql.batch_execute("select pg_switch_wal(); checkpoint").await?;
        if is_lost(scene.slot.state().await?.as_ref()) {
            return Ok(());
        }
    }
    anyhow::bail!("the slot survives: {:?}", scene.slot.state().await?)
}

/// How often the slot was made again; nothing is counted before the first time.
async fn recreated(worker: &Worker) -> Result<f64> {
    Ok(worker.metric("cdc_slot_recreated_total").await?.unwrap_or(0.0))
}

/// The slot's loss is one loss: one new slot, soon, and one gap that tells everybody. The worker still reads.
#[tokio::test]
async fn p3_13_an_overflow_while_the_bus_is_stopped_is_one_gap_and_one_new_slot() -> Result<()> {
    let mut scene = Scene::start(frugal()).await?;
    overflow(&mut scene).await?;
    let lost = Instant::now();
    scene.split.nats.resume()?;
    let worker = &scene.split.worker;
    let again = || async { recreated(worker).await.is_ok_and(|count| count >= 1.0) && worker.is_streaming().await };
    eventually(PATIENCE, again).await.with_context(|| scene.split.logs())?;
    assert!(lost.elapsed() < Duration::from_secs(10), "{:?}", lost.elapsed());
    scene.insert(10).await?;
    let audit = scene.arrives().await?;
    assert!(audit.announced <= 10 && audit.gaps == 1, "{audit:?}: {:?}", scene.subscriber.seen().gaps);
    assert_eq!(recreated(&scene.split.worker).await?, 1.0);
    assert_eq!(recorded(&scene, "slot_recreated").await?, 1);
    Ok(())
}

/// Stops the bus and fills the memory until nobody reads any more, then writes more than the slot may keep. The server's
/// next checkpoint must throw the slot away; whoever holds it can't be told, and until it is gone, nothing is decided.
async fn overflow_while_paused(scene: &mut Scene) -> Result<()> {
    let worker = &scene.split.worker;
    let unreserved = |state: &SlotState| state.wal_status.as_deref() == Some("unreserved");
    scene.split.nats.pause()?;
    scene.ledger.insert(&scene.sql, "events", 10, 0).await?;
    scene.ballast(4500).await?;
    let paused = || async { worker.metric("cdc_flow_paused").await.is_ok_and(|on| on == Some(1.0)) };
    eventually(PATIENCE, paused).await.with_context(|| scene.split.logs())?;
    let stuck = |state: Option<&SlotState>| {
        state.is_some_and(|state| {
            state.wait_event.as_deref() == Some("WalSenderWriteData") && !is_lost(Some(state)) && !unreserved(state)
        })
    };
    scene.slot.wait(PATIENCE, stuck).await?;
    // The worker has just looked at the slot: it won't again for as long as it ever waits.
    let safe = || async { worker.metric("cdc_slot_safe_wal_bytes").await.ok().flatten() };
    let before = safe().await;
    eventually(PATIENCE, || async { safe().await != before }).await?;
    for _ in 0..40 {
        scene.ballast(1000).await?;
        scene.sql.batch_execute("select pg_switch_wal()").await?;
        if unreserved(&scene.slot.state().await?.context("the slot is there")?) {
            return Ok(());
        }
    }
    anyhow::bail!("the slot keeps everything: {:?}\n{}", scene.slot.state().await?, scene.split.logs())
}

/// The same while reading is paused, so that the server's word of the loss lies unread in the socket, behind rows: not a
/// byte of the stream says it, only a look at the slot does.
#[tokio::test]
async fn scene_g_an_overflow_while_paused_is_one_gap_and_one_new_slot_within_ten_seconds() -> Result<()> {
    let roomy = SplitOptions::default().postgres("max_slot_wal_keep_size", "64MB").own_platform();
    let mut scene = Scene::start(roomy).await?;
    let other = scene.split.project("other").await?;
    other.table("events").await?;
    let (theirs, their_sql) = (Subscriber::start(&other, "events").await?, other.sql().await?);
    let mut their_ledger = Ledger::default();
    scene.insert(10).await?;
    their_ledger.insert(&their_sql, "events", 10, 0).await?;
    scene.all_arrive().await?;
    theirs.wait(10).await?;
    scene.confirmed().await?;
    their_ledger.insert(&their_sql, "events", 10, 0).await?;
    overflow_while_paused(&mut scene).await?;
    let (worker, lost) = (&scene.split.worker, Instant::now());
    let replaced = async {
        let made = eventually(PATIENCE, || async { recreated(worker).await.is_ok_and(|count| count >= 1.0) }).await;
        made.with_context(|| scene.split.logs())
    };
    let checkpoint = async { Ok(scene.sql.batch_execute("checkpoint").await?) };
    tokio::try_join!(replaced, checkpoint)?;
    // The new slot didn't need the bus; who is told of it does.
    scene.split.nats.resume()?;
    eventually(PATIENCE, || worker.is_streaming()).await.with_context(|| scene.split.logs())?;
    assert!(lost.elapsed() < Duration::from_secs(10), "{:?}\n{}", lost.elapsed(), scene.split.logs());
    scene.insert(10).await?;
    their_ledger.insert(&their_sql, "events", 10, 0).await?;
    theirs.wait(their_ledger.last()).await.with_context(|| scene.split.logs())?;
    for audit in [scene.arrives().await?, their_ledger.audit(&theirs.seen())?] {
        assert!((20..=30).contains(&audit.arrived) && audit.arrived + audit.announced == 30, "{audit:?}");
    }
    for seen in [scene.subscriber.seen(), theirs.seen()] {
        let told = seen.gaps.iter().filter(|gap| gap.reason == "slot_recreated").count();
        // R-FB-6 may have given up on rows just before.
        let others = seen.gaps.iter().find(|gap| !matches!(gap.reason.as_str(), "slot_recreated" | "skipped"));
        assert!(told == 1 && others.is_none(), "{:?}\n{}", seen.gaps, scene.split.logs());
    }
    assert_eq!(recreated(&scene.split.worker).await?, 1.0);
    assert_eq!(recorded(&scene, "slot_recreated").await?, 1);
    Ok(())
}

/// Losses of a reason in the source's list.
async fn recorded(scene: &Scene, reason: &str) -> Result<usize> {
    let url = format!("{}/v1/engines/shared/gaps", scene.split.api_url);
    let gaps = curl("GET", &url, scene.split.platform_key().await?, None).await?.body;
    let items = gaps["items"].as_array().with_context(|| gaps.to_string())?;
    Ok(items.iter().filter(|gap| gap["reason"] == reason).count())
}

/// R-ENG-8, `slot_recreate=manual`: nothing is made without being asked, and everybody is told.
#[tokio::test]
async fn p3_13_with_manual_re_creation_the_engine_waits_for_an_operator() -> Result<()> {
    let mut scene = Scene::start(frugal().worker("CDC_SLOT_RECREATE", "manual")).await?;
    overflow(&mut scene).await?;
    scene.split.nats.resume()?;
    let failed = || async {
        let engine = scene.split.engine().await.unwrap_or_default();
        engine["state"] == "failed" && engine["reason"].as_str().is_some_and(|reason| reason.starts_with("slot_lost"))
    };
    eventually(PATIENCE, failed).await.with_context(|| scene.split.logs())?;
    assert!(!scene.split.worker.is_streaming().await);
    assert_eq!(scene.split.engine().await?["lag"]["lost"], true);
    assert!(is_lost(scene.slot.state().await?.as_ref()), "it is still the lost one");
    let answer = scene.split.verb("recreate-slot", json!({})).await?;
    assert!(matches!(answer.status, 200 | 202), "{}", answer.body);
    eventually(PATIENCE, || scene.split.worker.is_streaming()).await.with_context(|| scene.split.logs())?;
    scene.insert(10).await?;
    let audit = scene.arrives().await?;
    assert!(audit.announced <= 10 && audit.gaps == 1, "{audit:?}: {:?}", scene.subscriber.seen().gaps);
    Ok(())
}

/// Nobody runs it, and its slot keeps the log until the server throws it away: both are shown all the time.
#[tokio::test]
async fn r_eng_8_a_stopped_engine_shows_what_its_slot_keeps_and_when_that_is_lost() -> Result<()> {
    let scene = Scene::start(frugal()).await?;
    let answer = scene.split.verb("stop", json!({})).await?;
    assert_eq!(answer.status, 200, "{}", answer.body);
    // What is left of the segment counts.
    scene.sql.batch_execute("select pg_switch_wal()").await?;
    scene.ballast(200).await?;
    let grown = || async {
        let engine = scene.split.engine().await.unwrap_or_default();
        let bytes = |of: &str, what: &str| engine[of][what].as_u64().unwrap_or_default();
        bytes("lag", "bytes") > 1 << 20 && bytes("slot", "retained_bytes") > 1 << 20 && engine["state"] == "stopped"
    };
    eventually(PATIENCE, grown).await.with_context(|| scene.split.logs())?;
    lose(&scene).await?;
    let lost = || async {
        scene.split.engine().await.unwrap_or_default()["lag"] == json!({"bytes": null, "seconds": null, "lost": true})
    };
    eventually(PATIENCE, lost).await.with_context(|| scene.split.logs())?;
    assert_eq!(scene.split.engine().await?["slot"]["wal_status"], "lost");
    Ok(())
}
