//! A bus that takes nothing, or not everything: the worker stops reading, keeps its slot, loses nothing and goes on by itself.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result};
use aura_testkit::{Flow, Signal, eventually};
use tokio_postgres::Client as Sql;

use system_tests::{BusTap, Ledger, PATIENCE, QUOTA, Scene, SplitOptions, Subscriber, Writer, peak};

/// Of 8 KB: more than an engine's default share of the memory quota holds (32 MiB).
const BALLAST: i64 = 6000;

/// A second is a long time to hear nothing.
fn impatient() -> SplitOptions {
    SplitOptions::default().postgres("wal_sender_timeout", "1s")
}

/// Stops the bus and commits more than the quota holds, between rows that somebody waits for; until the server is stuck in
/// writing, since nobody reads any more.
async fn fill(scene: &mut Scene) -> Result<()> {
    scene.split.nats.pause()?;
    scene.insert(100).await?;
    scene.ballast(BALLAST).await?;
    scene.insert(100).await?;
    let stuck = scene
        .slot
        .wait(PATIENCE, |state| state.is_some_and(|state| state.wait_event.as_deref() == Some("WalSenderWriteData")));
    stuck.await.map(drop).with_context(|| scene.split.logs())
}

/// A number that the worker shows from its first stream on.
async fn shown(scene: &Scene, name: &str) -> Result<f64> {
    scene.split.worker.metric(name).await?.with_context(|| format!("{name} isn't shown"))
}

async fn is_paused(scene: &Scene) -> Result<bool> {
    Ok(shown(scene, "cdc_flow_paused").await? > 0.0)
}

async fn wait_paused(scene: &Scene, within: Duration, wanted: bool) -> Result<()> {
    let waited = eventually(within, || async { is_paused(scene).await.is_ok_and(|paused| paused == wanted) });
    waited.await.with_context(|| scene.split.logs())
}

/// Pauses of reading, rows that waited for room left out; nothing is counted before the first.
async fn pauses(scene: &Scene) -> Result<f64> {
    let mut sum = 0.0;
    for reason in ["quota", "bus"] {
        let label = format!("reason=\"{reason}\"");
        sum += scene.split.worker.metric_of("cdc_flow_pause_total", &label).await?.unwrap_or(0.0);
    }
    Ok(sum)
}

/// Lets the bus go on; every row must arrive, and no loss may be announced.
async fn finish(scene: &mut Scene) -> Result<()> {
    scene.split.nats.resume()?;
    scene.insert(10).await?;
    scene.all_arrive_without_a_gap().await
}

/// When the statuses of this time were sent that the server has had from the holder, in seconds of the epoch.
async fn statuses(sql: &Sql, holder: i32, time: Duration) -> Vec<f64> {
    let said = Mutex::new(Vec::new());
    let last = "select extract(epoch from reply_time)::float8 from pg_stat_replication where pid = $1::int4";
    let never = eventually(time, || async {
        let at = sql.query_one(last, &[&holder]).await.ok().and_then(|row| row.get::<_, Option<f64>>(0));
        let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
        if at.is_some() && said.last() != at.as_ref() {
            said.extend(at);
        }
        false
    });
    drop(never.await);
    said.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// R-FB-2: while paused nothing is read, and the server still hears from us (flow-control.md E1: else it ends us).
#[tokio::test]
async fn p3_01_paused_for_five_timeouts_nothing_is_lost() -> Result<()> {
    let mut scene = Scene::start(impatient()).await?;
    let holder = scene.slot.wait_active(PATIENCE).await?;
    fill(&mut scene).await?;
    let five = 5 * Duration::from_secs(1);
    let lost =
        scene.slot.wait(five, |state| state.is_none_or(|state| state.pid != Some(holder) || state.flush.is_none()));
    let (lost, said) = tokio::join!(lost, statuses(&scene.sql, holder, five));
    assert!(lost.is_err(), "the slot changed hands, or flush_lsn was NULL");
    // One is due each quarter of the time-out, by the clock of who sends it; a busy machine may be late by another.
    let gaps: Vec<f64> = said.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.len() >= 10 && gaps.iter().all(|gap| *gap <= 0.5), "{gaps:?}");
    assert!(is_paused(&scene).await?);
    finish(&mut scene).await?;
    assert_eq!(scene.slot.wait_active(PATIENCE).await?, holder, "one session all along");
    Ok(())
}

/// Invariant 15, flow-control.md E4: a close with unread bytes in the socket throws the last status away, so the worker
/// must have seen by SQL that it counts.
#[tokio::test]
async fn p3_02_paused_then_sigterm_verifies_the_position_e4() -> Result<()> {
    // Advances are rare, one in 5 s, so that the last one tells something new.
    let options = SplitOptions::default().worker("CDC_ADVANCE_INTERVAL_MS", "5000").worker("CDC_DRAIN_TIMEOUT", "4s");
    let mut scene = Scene::start(options.postgres("wal_sender_timeout", "20s")).await?;
    let tap = BusTap::start(&scene.split.nats).await?;
    scene.insert(1).await?;
    scene.confirmed().await?;
    // The next status is 5 s away.
    scene.insert(100).await?;
    let received = scene.slot.log_end().await?;
    scene.all_arrive().await?;
    fill(&mut scene).await?;
    let before = scene.slot.state().await?.context("the slot is there")?;
    assert!(before.confirmed < Some(received), "the scene took too long: {before:?}");
    scene.split.worker.process.signal(Signal::TERM)?;
    scene.split.worker.process.wait(PATIENCE).await?;
    scene.slot.wait_free(Duration::from_secs(1)).await?;
    let confirmed = scene.slot.state().await?.and_then(|state| state.confirmed).context("the slot stays")?;
    assert!(confirmed >= received, "received by the bus: {received}, confirmed: {confirmed}");
    scene.split.start_worker()?;
    finish(&mut scene).await?;
    let tapped = tap.tapped();
    let again = tapped.iter().find(|one| one.epoch > Some(1) && one.at.is_some_and(|at| at.commit < confirmed));
    assert!(again.is_none(), "confirmed, and sent again: {again:?}");
    Ok(())
}

/// R-ACK-1, flow-control.md E10: a bus that takes bytes and answers nothing has received nothing.
#[tokio::test]
async fn p3_06_a_stopped_bus_confirms_nothing_and_the_worker_resumes_by_itself() -> Result<()> {
    let mut scene = Scene::start(impatient()).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.split.nats.pause()?;
    let before = scene.slot.log_end().await?;
    assert_eq!((is_paused(&scene).await?, pauses(&scene).await?), (false, 0.0));
    fill(&mut scene).await?;
    wait_paused(&scene, PATIENCE, true).await?;
    // R-MEM-4, R-MEM-3: at 0.80 of the quota, and never more than a row above it.
    let (used, quota) = (shown(&scene, "cdc_flow_used_bytes").await?, shown(&scene, "cdc_flow_quota_bytes").await?);
    assert!((0.80 * quota..quota + 64e3).contains(&used), "{used} of {quota}");
    let advanced = |state: Option<&aura_testkit::SlotState>| state.is_none_or(|state| state.confirmed > Some(before));
    let advanced = scene.slot.wait(Duration::from_secs(2), advanced).await;
    assert!(advanced.is_err(), "what nobody has received was confirmed");
    assert!(is_paused(&scene).await?, "it went on though the bus takes nothing");
    finish(&mut scene).await?;
    wait_paused(&scene, PATIENCE, false).await?;
    scene.confirmed().await?;
    assert!(pauses(&scene).await? >= 1.0 && shown(&scene, "cdc_flow_paused_seconds_total").await? >= 1.0);
    assert_eq!(scene.split.worker.metric("cdc_flow_resume_by_tick_total").await?, Some(0.0), "a wake-up was lost");
    Ok(())
}

/// R-ACK-3: what was handed to the bus and not proved comes again.
#[tokio::test]
async fn p3_07_a_bus_killed_between_publish_and_receipt_gets_it_again() -> Result<()> {
    let mut scene = Scene::start(impatient()).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    // It takes what is published, and dies before it says so.
    scene.split.nats.pause()?;
    scene.insert(200).await?;
    let read = scene.slot.log_end().await?;
    eventually(PATIENCE, || async { shown(&scene, "cdc_received_lsn").await.is_ok_and(|lsn| lsn >= read as f64) })
        .await?;
    scene.split.nats.kill().await?;
    scene.insert(200).await?;
    scene.split.nats.start_again().await?;
    // What the dying server had received and not yet passed on to the front is lost there, and announced.
    scene.arrives_again().await.map(drop)
}

/// Peers §5.2: a timer that confirms what was only received loses it. The bus answers nothing for three keepalive periods,
/// the worker is killed, and the next one delivers everything.
#[tokio::test]
async fn peers_5_2_nothing_is_confirmed_while_the_consumer_is_blocked() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().postgres("wal_sender_timeout", "2s")).await?;
    scene.split.nats.pause()?;
    scene.insert(5).await?;
    let first = scene.slot.log_end().await?;
    for _ in 0..7 {
        scene.insert(5).await?;
    }
    let confirmed = |state: Option<&aura_testkit::SlotState>| state.is_none_or(|state| state.confirmed >= Some(first));
    let confirmed = scene.slot.wait(Duration::from_millis(1500), confirmed).await;
    assert!(confirmed.is_err(), "nobody has received anything");
    scene.split.worker.process.kill().await?;
    scene.split.nats.resume()?;
    scene.split.start_worker()?;
    scene.all_arrive().await.map(drop)
}

/// R-ACK-1: the receipt of a batch counts only on the connection on which the whole batch went.
#[tokio::test]
async fn scene_h_a_connection_reset_in_mid_batch_gives_no_false_receipt() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().bus_proxy()).await?;
    let writer = scene.write(500);
    for _ in 0..5 {
        writer.more(100).await?;
        scene.bus_proxy()?.set(Flow::Reset);
        writer.more(20).await?;
        scene.bus_proxy()?.set(Flow::Open);
    }
    writer.more(100).await?;
    scene.stop_writing(writer).await?;
    // The front has a connection of its own, which was never lost.
    scene.all_arrive_without_a_gap().await
}

/// R-ACK-1: a message that the server refuses was not received, whatever came back behind it.
#[tokio::test]
async fn scene_h_a_refused_publish_gives_no_false_receipt() -> Result<()> {
    let mut scene =
        Scene::start(SplitOptions::default().worker_refused(&["aura.realtime.*.changes.*.refused"])).await?;
    scene.project.table("refused").await?;
    let (watcher, mut account) = (Subscriber::start(&scene.project, "refused").await?, Ledger::default());
    scene.insert(10).await?;
    scene.all_arrive().await?;
    account.insert(&scene.sql, "refused", 10, 0).await?;
    let told = eventually(PATIENCE, || async { account.audit(&watcher.seen()).is_ok() }).await;
    told.with_context(|| scene.split.logs())?;
    let audit = account.audit(&watcher.seen())?;
    assert_eq!((audit.arrived, audit.announced), (0, 10), "{audit:?}");
    scene.insert(10).await?;
    scene.all_arrive().await?;
    scene.confirmed().await.map(drop)
}

/// A minute without the bus, under load.
#[tokio::test]
async fn scene_h_a_minute_without_the_bus_costs_no_memory_and_no_row() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    let mut others = Vec::new();
    for _ in 0..4 {
        others.push(Subscriber::start(&scene.project, "events").await?);
    }
    let (writer, ballast) = (scene.write(50), Writer::start_wide(&scene.project, "ballast", 100, 8000));
    writer.more(50).await?;
    let worker = scene.split.worker.process.pid();
    let away = tokio::time::Instant::now() + Duration::from_secs(60);
    scene.split.nats.kill().await?;
    wait_paused(&scene, Duration::from_secs(55), true).await?;
    let paused = tokio::time::Instant::now();
    tokio::time::sleep_until(away).await;
    assert!(is_paused(&scene).await?);
    let paused = paused.elapsed().as_secs_f64();
    scene.split.nats.start_again().await?;
    writer.more(100).await?;
    ballast.stop().await?;
    scene.stop_writing(writer).await?;
    scene.arrives_again().await?;
    for other in others {
        other.wait(scene.ledger.last()).await?;
        scene.ledger.audit(&other.seen())?;
    }
    scene.confirmed().await?;
    wait_paused(&scene, PATIENCE, false).await?;
    assert!(pauses(&scene).await? >= 1.0);
    // Whole seconds are counted.
    let counted = shown(&scene, "cdc_flow_paused_seconds_total").await?;
    assert!(counted >= paused - 1.0, "{counted} s of at least {paused} s");
    // Of the whole scene, catching up included.
    let most = peak(worker)?;
    assert!(most <= QUOTA + (64 << 20), "{most} bytes");
    Ok(())
}
