//! The binary.

use std::time::Duration;

use anyhow::Result;
use aura_store::migrate;
use aura_testkit::{Postgres, ProcessOptions, Signal, eventually, http_status};

use crate::harness::SOON;

fn binary() -> ProcessOptions {
    ProcessOptions::new(env!("CARGO_BIN_EXE_aura-api")).env("AURA_LOG", "info")
}

#[tokio::test]
async fn bad_configuration_exits_2_and_says_everything_at_once() -> Result<()> {
    let options = binary().env("AURA_MASTER_KEY", "short").env("AURA_API_LISTEN", "0.0.0.0:1").env("DATABASE_URL", "");
    let process = options.start()?;
    assert_eq!(process.wait(SOON).await?.code(), Some(2));
    for variable in ["DATABASE_URL", "AURA_MASTER_KEY", "AURA_PLATFORM_JWT_SECRET", "AURA_API_LISTEN"] {
        process.line(SOON, |line| line.contains(variable)).await?;
    }
    Ok(())
}

#[tokio::test]
async fn it_refuses_an_unmigrated_database_serves_and_ends_at_sigterm() -> Result<()> {
    let postgres = Postgres::start().await?;
    let url = postgres.create_database("platform").await?;
    let port = aura_testkit::free_port()?;
    let options =
        binary().env("AURA_ENV", "dev").env("DATABASE_URL", &url).env("AURA_API_LISTEN", format!("127.0.0.1:{port}"));
    let early = options.start()?;
    assert_eq!(early.wait(SOON).await?.code(), Some(1));
    early.line(SOON, |line| line.contains("aura-realtime migrate")).await?;
    migrate(&url).await?;
    let process = options.start()?;
    let ready = || async { http_status(port, "/ready").await.is_ok_and(|status| status == 200) };
    eventually(SOON, ready).await?;
    let second = options.start()?;
    assert_eq!(second.wait(SOON).await?.code(), Some(1));
    let taken = format!("127.0.0.1:{port}: the port is taken");
    second.line(SOON, |line| line.contains(&taken)).await?;
    process.signal(Signal::TERM)?;
    // R-SD-3
    assert_eq!(process.wait(Duration::from_secs(1)).await?.code(), Some(0));
    process.line(SOON, |line| line.contains("completed") && line.contains("requests 0 ms, background ")).await?;
    Ok(())
}
