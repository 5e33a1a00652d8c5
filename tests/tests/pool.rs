//! More than one worker: the sources of one that dies are run by another.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use aura_testkit::{eventually, http_status};

use system_tests::{BusTap, PATIENCE, Scene, SplitOptions, Subscriber, Writer};

/// `LEASE_DURATION_SECS` of the stage.
const LEASE: Duration = Duration::from_secs(3);

/// R-LEASE-3: a dead worker's sources move within lease + 5 s.
#[tokio::test]
async fn scene_i_a_killed_leaders_successor_speaks_within_the_lease_and_five_seconds() -> Result<()> {
    let scene = Scene::start(SplitOptions::default()).await?;
    let second = scene.split.another_worker()?;
    eventually(PATIENCE, || async { http_status(second.port, "/ready").await.is_ok_and(|status| status == 200) })
        .await?;
    let mut projects = vec![scene.project.clone()];
    for name in ["second", "third"] {
        let project = scene.split.project(name).await?;
        project.table("events").await?;
        projects.push(project);
    }
    let mut clients = Vec::new();
    for number in 0..100 {
        let number = number % projects.len();
        clients.push((number, Subscriber::start(&projects[number], "events").await?));
    }
    let tap = BusTap::start(&scene.split.nats).await?;
    // All at once: what one project's order is, is told apart from the others'.
    let writers: Vec<Writer> = projects.iter().map(|project| Writer::start(project, "events", 50)).collect();
    for writer in &writers {
        writer.more(50).await?;
    }
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
    let mut ledgers = Vec::new();
    for writer in writers {
        writer.more(50).await?;
        ledgers.push(writer.stop().await?);
    }
    for (number, client) in clients {
        client.wait(ledgers[number].last()).await.with_context(|| second.process.lines().join("\n"))?;
        ledgers[number].audit(&client.seen()).with_context(|| format!("project {number}"))?;
    }
    Ok(())
}
