//! How the binaries shut down, with requests in flight and without.

use std::time::{Duration, Instant};

use anyhow::Result;
use aura_testkit::{Process, Signal, eventually, http_status};
use serde_json::json;
use system_tests::{PATIENCE, Split, curl};

/// Sends SIGTERM and expects that within 100 ms the process isn't ready any more, and still healthy (P.3, 15).
async fn begins_to_drain(process: &Process, port: u16) -> Result<()> {
    process.signal(Signal::TERM)?;
    let off = || async { http_status(port, "/ready").await.is_ok_and(|status| status == 503) };
    eventually(Duration::from_millis(100), off).await?;
    assert_eq!(http_status(port, "/health").await?, 200);
    Ok(())
}

#[tokio::test]
async fn r_sd_api_and_front_finish_what_is_in_flight_unless_hurried() -> Result<()> {
    let split = Split::start().await?;
    let project = split.project("shop").await?;
    project.sql().await?.batch_execute("create table slow (id int primary key)").await?;
    // Without a worker a toggle waits 5 s for the filter, and a stream 8 s for its first word.
    split.worker.process.kill().await?;
    let (waiting, url) = (project.clone(), project.api_url.clone());
    let toggle = tokio::spawn(async move { waiting.put("slow", true).await });
    let stream =
        format!("{}/sse?schema=public&table=slow&apikey={}", split.ws_url.replacen("ws", "http", 1), project.anon_key);
    let stream = tokio::spawn(async move { curl("GET", &stream, "", None).await });
    let registered = async || {
        let list = format!("{url}/v1/db/{}/schema/tables?enabled=true", project.id);
        curl("GET", &list, &project.service_key, None).await.is_ok_and(|answer| answer.body["items"] != json!([]))
    };
    eventually(PATIENCE, registered).await?;

    begins_to_drain(&split.api, split.api_port).await?;
    begins_to_drain(&split.front, split.front_port).await?;
    let refused = curl("GET", &format!("{url}/v1/projects"), &project.service_key, None).await?;
    assert_eq!((refused.status, &refused.body["code"]), (503, &json!("shutting_down")));

    let hurried = Instant::now();
    split.front.signal(Signal::TERM)?;
    assert_eq!(split.front.wait(PATIENCE).await?.code(), Some(0), "{}", split.logs());
    assert!(hurried.elapsed() < Duration::from_millis(1500), "R-SD-4: {:?}", hurried.elapsed());
    assert_ne!(stream.await?.map_or(0, |answer| answer.status), 200, "it was cut");

    assert_eq!(toggle.await??.status, 202, "the request in flight was finished");
    assert_eq!(split.api.wait(Duration::from_secs(2)).await?.code(), Some(0), "{}", split.logs());
    Ok(())
}

#[tokio::test]
async fn r_sd_3_idle_binaries_are_gone_in_a_second() -> Result<()> {
    let split = Split::start().await?;
    for process in [&split.front, &split.api, &split.worker.process] {
        let sent = Instant::now();
        process.signal(Signal::TERM)?;
        assert_eq!(process.wait(PATIENCE).await?.code(), Some(0), "{}", split.logs());
        assert!(sent.elapsed() < Duration::from_secs(1), "{:?}: {:#?}", sent.elapsed(), process.lines());
    }
    Ok(())
}
