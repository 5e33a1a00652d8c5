//! A PostgreSQL without wal2json (design §5.1).

use anyhow::Result;
use aura_testkit::Postgres;
use serde_json::json;

use system_tests::{Client, Dev, Kind, PATIENCE, curl};

#[tokio::test]
async fn without_wal2json_dev_falls_back_and_says_how_to_get_it() -> Result<()> {
    let programs = Postgres::programs_without_wal2json()?;
    let dev = Dev::start(&["--pg-bin", &programs.to_string_lossy()]).await?;
    dev.process.line(PATIENCE, |line| line.contains("apt-get install") && line.contains("wal2json")).await?;
    let project = dev.demo()?;
    let sql = project.sql().await?;
    sql.batch_execute("create table t (id int primary key, v text)").await?;
    project.enable("t").await?;
    let client = Client::anon(Kind::ANY, &project).await?;
    let topic = client.subscribe(json!({"event": "*", "schema": "public", "table": "t"})).await?;
    sql.batch_execute("insert into t values (1, 'x')").await?;
    let change = topic.change("INSERT", &json!({"id": 1})).await?;
    assert_eq!(change["new"], json!({"id": 1, "v": "x"}));
    Ok(())
}

#[tokio::test]
async fn forced_to_a_missing_wal2json_it_says_so_everywhere() -> Result<()> {
    let programs = Postgres::programs_without_wal2json()?;
    let dev = Dev::start(&["--pg-bin", &programs.to_string_lossy(), "--plugin", "wal2json"]).await?;
    dev.process.line(PATIENCE, |line| line.contains("apt-get install") && line.contains("wal2json")).await?;
    let failed = "no changes are delivered: the engine is failed (plugin_missing)";
    dev.process.line(PATIENCE, |line| line.contains(failed)).await?;
    let project = dev.demo()?;
    let health = curl("GET", &format!("{}/health", project.api_url), "", None).await?;
    assert_eq!(health.body["cdc_active"], json!(false), "{health:?}");
    let client = Client::anon(Kind::ANY, &project).await?;
    let topic = client.join(vec![json!({"event": "*", "schema": "public", "table": "messages"})])?;
    topic.status("SUBSCRIBED").await?;
    topic.system("error").await?;
    Ok(())
}
