//! More than one worker: the sources of one that dies are run by another.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use aura_testkit::{eventually, http_status};

use system_tests::{BusTap, PATIENCE, Scene, SplitOptions, Subscriber};

/// `LEASE_DURATION_SECS` of the stage.
const LEASE: Duration = Duration::from_secs(3);

/// R-LEASE-3: a dead worker's sources move within lease + 5 s.
#[tokio::test]
async fn scene_i_a_killed_leaders_successor_speaks_within_the_lease_and_five_seconds() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    let second = scene.split.another_worker()?;
    eventually(PATIENCE, || async { http_status(second.port, "/ready").await.is_ok_and(|status| status == 200) })
        .await?;
    let mut clients = Vec::new();
    for _ in 0..100 {
        clients.push(Subscriber::start(&scene.project, "events").await?);
    }
    let tap = BusTap::start(&scene.split.nats).await?;
    let writer = scene.write(50);
    writer.more(100).await?;
    let led = tap.tapped().iter().filter_map(|one| one.epoch).max().context("somebody leads")?;
    let killed = Instant::now();
    scene.split.worker.process.kill().await?;
    let first = || {
        let tapped = tap.tapped();
        let found = tapped.iter().find(|one| one.epoch > Some(led) && one.id.is_some()).map(|one| one.when);
        async move { found }
    };
    let spoke = aura_testkit::eventually_some(PATIENCE, first).await;
    let spoke = spoke.with_context(|| second.process.lines().join("\n"))? - killed;
    assert!(spoke < LEASE + Duration::from_secs(5), "{spoke:?}: {}", second.process.lines().join("\n"));
    writer.more(100).await?;
    scene.stop_writing(writer).await?;
    scene.arrives().await?;
    for client in clients {
        client.wait(scene.ledger.last()).await?;
        scene.ledger.audit(&client.seen())?;
    }
    Ok(())
}
