//! A partitioned table is live like any other (R-REG-4).

use anyhow::Result;
use serde_json::json;
use system_tests::{Client, Dev, Kind};

#[tokio::test]
async fn r_reg_4_a_partitioned_table_streams_under_its_name() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    let project = dev.demo()?;
    let sql = project.sql().await?;
    sql.batch_execute(
        "create table visits (day date, id int, who text, primary key (day, id)) partition by range (day);
         create table visits_may partition of visits for values from ('2026-05-01') to ('2026-06-01');
         create table visits_june partition of visits for values from ('2026-06-01') to ('2026-07-01')",
    )
    .await?;
    project.enable("visits").await?;
    let client = Client::anon(Kind::ANY, &project).await?;
    let filtered = json!({"event": "*", "schema": "public", "table": "visits", "filter": "who=eq.ann"});
    let topic = client.subscribe(filtered).await?;
    sql.batch_execute("insert into visits values ('2026-05-03', 1, 'bob'), ('2026-06-03', 2, 'ann')").await?;
    let ann = json!({"day": "2026-06-03", "id": 2, "who": "ann"});
    let change = topic.change("INSERT", &ann).await?;
    assert_eq!((&change["schema"], &change["table"]), (&json!("public"), &json!("visits")));
    sql.batch_execute("delete from visits").await?;
    let deleted = topic.change("DELETE", &ann).await?;
    assert_eq!(deleted["table"], "visits");
    Ok(())
}
