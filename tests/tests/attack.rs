//! Tenants' code never runs where it could become us (R-RLS-9).

use anyhow::Result;
use serde_json::json;

use system_tests::{ALICE, Client, Dev, Kind, Project, curl};

#[tokio::test]
async fn r_rls_9_a_policy_that_resets_the_role_reads_nobody_elses_rows() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    let project = dev.demo()?;
    let platform_key = dev.file()?["platform_key"].as_str().unwrap_or_default().to_owned();
    let url = format!("{}/v1/projects", project.api_url);
    let victim = curl("POST", &url, &platform_key, Some(&json!({"name": "victim"}))).await?.body;
    let victim = Project::from_answer(&victim, &project.api_url, &project.ws_url, &project.admin_url)?;
    victim.sql().await?.batch_execute("create table secrets (s text); insert into secrets values ('stolen')").await?;

    let sql = project.sql().await?;
    // The function leaks by deciding visibility: a row is delivered only if the other tenant's table could be read.
    sql.batch_execute(&format!(
        "create function steal() returns boolean language plpgsql as $$
         declare found text;
         begin
           execute 'reset role';
           execute 'select s from \"{}\".secrets' into found;
           return found = 'stolen';
         exception when others then
           return false;
         end $$;
         create table bait (id int primary key, owner uuid);
         alter table bait enable row level security;
         create policy thief on bait for select to aura_authenticated using (id = 1 and steal());
         create policy honest on bait for select to aura_authenticated using (id = 2);",
        victim.schema
    ))
    .await?;
    project.enable("bait").await?;
    let client = Client::user(Kind::ANY, &project, ALICE).await?;
    let topic = client.subscribe(json!({"event": "*", "schema": "public", "table": "bait"})).await?;
    sql.batch_execute(&format!("insert into bait values (1, '{ALICE}'); insert into bait values (2, '{ALICE}')"))
        .await?;
    topic.change("INSERT", &json!({"id": 2})).await?;
    assert!(topic.changes().iter().all(|change| change["new"]["id"] != 1), "the theft succeeded");
    Ok(())
}
