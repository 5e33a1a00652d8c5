//! Any legal table name can be made live (R-REG-5).

use anyhow::Result;
use serde_json::json;

use system_tests::{Client, Dev, Kind};

#[tokio::test]
async fn r_reg_5_any_table_name_toggles_and_delivers() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    let project = dev.demo()?;
    let sql = project.sql().await?;
    let longest = "n".repeat(63);
    let names = ["Orders", "we,ird. t'b*l", "quo\"te", "back\\slash", "select", &longest, "🦀 emoji"];
    let client = Client::anon(Kind::ANY, &project).await?;
    for name in names {
        let quoted = format!("\"{}\"", name.replace('"', "\"\""));
        sql.batch_execute(&format!("create table {quoted} (id int primary key)")).await?;
        project.enable(name).await?;
        let topic = client.subscribe(json!({"event": "*", "schema": "public", "table": name})).await?;
        sql.batch_execute(&format!("insert into {quoted} values (1)")).await?;
        let change = topic.change("INSERT", &json!({"id": 1})).await?;
        assert_eq!(change["table"], name);
        assert_eq!(project.put(name, false).await?.status, 200, "{name}");
    }
    Ok(())
}
