//! A transaction that is larger than all the memory it may use (R-BIG).

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use aura_testkit::Signal;

use system_tests::{PATIENCE, QUOTA, Scene, SplitOptions, peak};

/// Rows whose text alone is ten times the quota.
const ROWS: i64 = 5600;
const WIDE: i32 = 60_000;
/// A debug build on a busy machine.
const LONG: Duration = Duration::from_secs(90);

/// One transaction: rows that somebody watches, ten times the quota, rows that somebody watches.
async fn commit(scene: &mut Scene) -> Result<()> {
    scene.sql.batch_execute("begin").await?;
    scene.insert(100).await?;
    assert!(ROWS.cast_unsigned() * u64::from(WIDE.cast_unsigned()) >= 10 * QUOTA);
    scene.ballast_of(ROWS, WIDE).await?;
    scene.insert(100).await?;
    Ok(scene.sql.batch_execute("commit").await?)
}

#[tokio::test]
async fn p3_03_a_transaction_of_ten_times_the_quota_flows_through() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().postgres("wal_sender_timeout", "3s")).await?;
    let holder = scene.slot.wait_active(PATIENCE).await?;
    let worker = scene.split.worker.process.pid();
    let before = peak(worker)?;
    commit(&mut scene).await?;
    scene.subscriber.wait_within(scene.ledger.last(), LONG).await.with_context(|| scene.split.logs())?;
    scene.all_arrive_without_a_gap().await?;
    scene.confirmed().await?;
    assert_eq!(scene.slot.wait_active(PATIENCE).await?, holder, "one session all along");
    let grown = peak(worker)? - before;
    assert!(grown < QUOTA + QUOTA / 4 + (64 << 20), "{grown} bytes more than before");
    Ok(())
}

/// flow-control.md E7: a polite end inside a transaction would take as long as the rest of it.
#[tokio::test]
async fn p3_04_sigterm_inside_a_large_transaction_ends_soon_and_frees_the_slot() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    commit(&mut scene).await?;
    // Its first rows are here, the rest is on its way.
    scene.subscriber.wait(1).await?;
    let sent = Instant::now();
    scene.split.worker.process.signal(Signal::TERM)?;
    let status = scene.split.worker.process.wait(PATIENCE).await?;
    let took = sent.elapsed();
    assert_eq!(status.code(), Some(0), "{}", scene.split.logs());
    // What was read is delivered, at most the quota; that alone takes a debug build a second or two.
    assert!(took < Duration::from_secs(5), "{took:?}: {}", scene.split.logs());
    let state = scene.slot.state().await?.context("the slot stays")?;
    assert!(!state.active, "{state:?}");
    scene.split.start_worker()?;
    scene.subscriber.wait_within(scene.ledger.last(), LONG).await.with_context(|| scene.split.logs())?;
    scene.all_arrive().await.map(drop)
}
