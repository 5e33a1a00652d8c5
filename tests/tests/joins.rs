//! A subscription is live when the client is told so.

use anyhow::Result;
use serde_json::json;

use system_tests::{Client, Dev, Kind};

#[tokio::test]
async fn two_hundred_inserts_right_after_subscribed_are_two_hundred_events() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    let project = dev.demo()?;
    let sql = project.sql().await?;
    sql.batch_execute("create table joins (id int primary key)").await?;
    project.enable("joins").await?;
    let client = Client::anon(Kind::ANY, &project).await?;
    for id in 0..200 {
        let filter = format!("id=eq.{id}");
        let topic =
            client.join(vec![json!({"event": "INSERT", "schema": "public", "table": "joins", "filter": filter})])?;
        topic.status("SUBSCRIBED").await?;
        sql.execute("insert into joins values ($1)", &[&id]).await?;
        topic.change("INSERT", &json!({"id": id})).await?;
        topic.leave().await?;
    }
    Ok(())
}
