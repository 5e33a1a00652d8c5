//! The contract of `aura-realtime dev` (design §5).

use std::{fs, os::unix::fs::PermissionsExt, path::Path, time::Duration};

use anyhow::Result;
use aura_testkit::{Signal, children_of, eventually, free_port, is_running};
use serde_json::{Value, json};

use system_tests::{Client, Dev, Directory, Kind, PATIENCE, curl};

#[tokio::test]
async fn once_tells_the_time_to_the_first_event() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    dev.process.signal(Signal::INT)?;
    dev.process.wait(PATIENCE).await?;
    // With an existing data directory.
    let lines = Dev::command(&dev.directory, dev.port)?.arg("--once").start()?.succeeds(PATIENCE).await?;
    let text = lines.iter().find_map(|line| line.strip_prefix("first event in ")).unwrap_or_default();
    let milliseconds: u64 = text.trim_end_matches(" ms").parse()?;
    assert!(milliseconds < 5000, "{lines:?}");
    Ok(())
}

#[tokio::test]
async fn an_interrupt_drains_and_leaves_nothing() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    let client = Client::anon(Kind::ANY, &dev.demo()?).await?;
    client.subscribe(json!({"event": "*", "schema": "public", "table": "messages"})).await?;
    let family = children_of(dev.process.pid());
    assert!(family.len() > 3, "the database and its processes: {family:?}");
    dev.process.signal(Signal::INT)?;
    let status = dev.process.wait(Duration::from_secs(15)).await?;
    assert!(status.success(), "{status}: {:?}", dev.process.lines());
    assert!(!family.iter().any(|pid| is_running(*pid)), "the database is stopped before we end");
    Ok(())
}

#[tokio::test]
async fn a_kill_leaves_no_child_and_the_next_start_works() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    let family = children_of(dev.process.pid());
    assert!(!family.is_empty());
    dev.process.kill().await?;
    eventually(Duration::from_secs(10), || async { !family.iter().any(|pid| is_running(*pid)) }).await?;
    let again = Dev::command(&dev.directory, dev.port)?.arg("--once").start()?;
    again.succeeds(PATIENCE).await.map(drop)
}

#[tokio::test]
async fn a_second_dev_says_who_runs_and_a_taken_port_is_named() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    let second = Dev::command(&dev.directory, free_port()?)?.start()?;
    assert!(!second.wait(PATIENCE).await?.success());
    second.line(PATIENCE, |line| line.contains(&format!("pid {}", dev.process.pid()))).await?;
    let elsewhere = Directory::create()?;
    let third = Dev::command(&elsewhere, dev.port)?.start()?;
    assert!(!third.wait(PATIENCE).await?.success());
    third
        .line(PATIENCE, |line| {
            line.contains(&dev.port.to_string()) && line.contains("taken; choose another with --port")
        })
        .await?;
    assert!(!elsewhere.0.join("data").exists(), "nothing is made for a port that is taken");
    assert!(is_running(dev.process.pid()), "the first one doesn't mind");
    Ok(())
}

#[tokio::test]
async fn its_file_has_what_a_client_needs_and_is_private() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    let data = dev.directory.0.join("data");
    let mode = |name: &str| fs::metadata(data.join(name)).map(|data| data.permissions().mode() & 0o777);
    assert_eq!((mode("")?, mode("dev.json")?), (0o700, 0o600));
    let file = dev.file()?;
    for name in ["api_url", "ws_url", "studio_url", "database_url", "platform_database_url", "project_id"] {
        assert!(file[name].is_string(), "{name}");
    }
    for name in ["project_ref", "anon_key", "service_role_key", "platform_key", "jwt_secret"] {
        assert!(file[name].is_string(), "{name}");
    }
    assert_eq!(file["pid"], dev.process.pid());
    let origin = file["api_url"].as_str().unwrap_or_default();
    for path in ["/health", "/metrics", "/docs", "/openapi.json", "/studio"] {
        assert_eq!(curl("GET", &format!("{origin}{path}"), "", None).await?.status, 200, "{path}");
    }
    let health = curl("GET", &format!("{origin}/health"), "", None).await?;
    assert_eq!(health.body["cdc_active"], json!(true), "{health:?}");
    Ok(())
}

#[tokio::test]
async fn the_demo_writes_while_somebody_watches() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    let project = dev.demo()?;
    let sql = project.sql().await?;
    let client = Client::anon(Kind::ANY, &project).await?;
    let messages = client.subscribe(json!({"event": "INSERT", "schema": "public", "table": "messages"})).await?;
    eventually(PATIENCE, || async { messages.changes().len() >= 2 }).await?;
    assert!(messages.changes().iter().all(|change| change["new"]["private"] == false), "anon sees nothing private");
    // And they are shown with their time.
    let line = dev.process.line(PATIENCE, |line| line.contains(r#""type":"event""#)).await?;
    let event: Value = serde_json::from_str(&line)?;
    assert!(event["commit_to_socket_ms"].as_i64().is_some_and(|ms| (0..5000).contains(&ms)), "{event}");
    let count: i64 = sql.query_one("select count(*) from messages", &[]).await?.get(0);
    assert!(count >= 2);
    Ok(())
}

#[tokio::test]
async fn a_directory_that_the_database_user_cannot_reach_puts_the_cluster_elsewhere() -> Result<()> {
    let directory = Directory::create()?;
    fs::set_permissions(&directory.0, fs::Permissions::from_mode(0o700))?;
    let once = Dev::command(&directory, free_port()?)?.arg("--once").start()?;
    let lines = once.succeeds(PATIENCE).await?;
    let said = lines.iter().find(|line| line.contains("/var/lib/aura/"));
    // Only root has another user to run the database as.
    let root = fs::metadata("/proc/self").map(|data| std::os::unix::fs::MetadataExt::uid(&data))? == 0;
    assert_eq!(said.is_some(), root, "{lines:?}");
    if let Some(cluster) = said.and_then(|line| line.split_whitespace().find(|word| word.starts_with("/var/lib/aura/")))
    {
        fs::remove_dir_all(Path::new(cluster.trim_end_matches(':')).parent().unwrap())?;
    }
    Ok(())
}
