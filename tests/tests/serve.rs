//! The undivided binary on a PostgreSQL that is already there, and what README's curl shows.

use anyhow::Result;
use aura_testkit::{Nats, Postgres, ProcessOptions, Signal, eventually, free_port};
use serde_json::{Value, json};
use system_tests::{Dev, Directory, PATIENCE, Project, curl};

/// Follows a table as server-sent events, as README does, and answers the lines of the first change.
async fn first_event(project: &Project) -> Result<Value> {
    let sql = project.sql().await?;
    sql.batch_execute("create table streamed (id int primary key, v text)").await?;
    project.enable("streamed").await?;
    let url = format!("{}/realtime/v1/sse?schema=public&table=streamed", project.api_url);
    let header = format!("apikey: {}", project.anon_key);
    let stream = ProcessOptions::new("curl").args(["--silent", "--no-buffer", "--header", &header, &url]).start()?;
    // The first word says that the stream is live.
    stream.line(PATIENCE, |line| line.contains("Subscribed to PostgreSQL")).await?;
    sql.batch_execute("insert into streamed values (1, 'x')").await?;
    let line = stream.line(PATIENCE, |line| line.starts_with("data:") && line.contains("INSERT")).await?;
    stream.line(PATIENCE, |line| line.starts_with("id:")).await?;
    Ok(serde_json::from_str(line.trim_start_matches("data:"))?)
}

#[tokio::test]
async fn a_table_streams_to_curl() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    let event = first_event(&dev.demo()?).await?;
    let data = if event["data"].is_object() { &event["data"] } else { &event };
    assert_eq!((&data["type"], &data["record"]), (&json!("INSERT"), &json!({"id": 1, "v": "x"})));
    Ok(())
}

#[tokio::test]
async fn dev_runs_on_an_existing_database_and_on_nats() -> Result<()> {
    let (postgres, nats) = tokio::try_join!(Postgres::start(), Nats::start())?;
    let url = postgres.create_database("mine").await?;
    let (directory, port) = (Directory::create()?, free_port()?);
    let once = Dev::command(&directory, port)?.args(["--once", "--database-url", &url, "--nats-url", &nats.url()]);
    let lines = once.start()?.succeeds(PATIENCE).await?;
    assert!(lines.iter().any(|line| line.starts_with("first event in ")), "{lines:?}");
    assert!(!directory.0.join("data/postgres").exists(), "no cluster of its own");
    Ok(())
}

#[tokio::test]
async fn serve_refuses_an_unmigrated_database_and_drains_on_sigterm() -> Result<()> {
    let postgres = Postgres::start().await?;
    let (platform, app) = (postgres.create_database("platform").await?, postgres.create_database("app").await?);
    let origin = format!("127.0.0.1:{}", free_port()?);
    let serve = ProcessOptions::binary("aura-realtime")?
        .arg("serve")
        .env("DATABASE_URL", &platform)
        .env("POSTGRES_REPLICATION_URL", &app)
        .env("NATS_URL", "memory:")
        .env("AURA_LISTEN", &origin)
        .env("AURA_MASTER_KEY", "a master key of the system tests, long enough")
        .env("AURA_PLATFORM_JWT_SECRET", "a platform secret of the system tests, long enough");
    let refused = serve.start()?;
    assert_eq!(refused.wait(PATIENCE).await?.code(), Some(1));
    refused.line(PATIENCE, |line| line.contains("aura-realtime migrate")).await?;

    let migrate = ProcessOptions::binary("aura-realtime")?.arg("migrate").env("DATABASE_URL", &platform);
    migrate.start()?.succeeds(PATIENCE).await?;
    migrate.start()?.succeeds(PATIENCE).await?;
    let serving = serve.start()?;
    let active = eventually(PATIENCE, || async {
        let health = curl("GET", &format!("http://{origin}/health"), "", None).await;
        health.is_ok_and(|answer| answer.body["cdc_active"] == true)
    });
    active.await.map_err(|error| error.context(serving.lines().join("\n")))?;
    serving.signal(Signal::TERM)?;
    assert!(serving.wait(PATIENCE).await?.success(), "{:?}", serving.lines());
    let slot = "select active from pg_replication_slots";
    let active: bool = postgres.client("app").await?.query_one(slot, &[]).await?.get(0);
    assert!(!active, "the slot is let go before the process ends");
    Ok(())
}

#[tokio::test]
async fn production_refuses_to_start_without_its_secrets() -> Result<()> {
    let serve = ProcessOptions::binary("aura-realtime")?.arg("serve").env("DATABASE_URL", "postgres://127.0.0.1:1/x");
    let refused = serve.start()?;
    assert_eq!(refused.wait(PATIENCE).await?.code(), Some(2), "bad configuration");
    for name in ["AURA_MASTER_KEY", "AURA_PLATFORM_JWT_SECRET"] {
        refused.line(PATIENCE, |line| line.contains(name)).await?;
    }
    Ok(())
}
