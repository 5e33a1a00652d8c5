//! Unmodified Supabase clients see what their identity may see.

use anyhow::Result;
use serde_json::{Value, json};

use system_tests::{ALICE, BOB, Client, Dev, Kind, Project, Split};

/// Everything about a table from before it is live until after it is not.
async fn life_of_a_table(kind: Kind, project: &Project) -> Result<()> {
    let sql = project.sql().await?;
    sql.batch_execute("create table todos (id int primary key, title text, done boolean default false)").await?;
    sql.batch_execute("insert into todos values (1, 'before', false)").await?;
    project.enable("todos").await?;
    let client = Client::anon(kind, project).await?;
    let all = client.subscribe(json!({"event": "*", "schema": "public", "table": "todos"})).await?;
    let filtered = json!({"event": "*", "schema": "public", "table": "todos", "filter": "id=eq.3"});
    let third = client.subscribe(filtered).await?;

    sql.batch_execute("insert into todos values (2, 'two', false), (3, 'three', true)").await?;
    let insert = all.change("INSERT", &json!({"id": 3})).await?;
    let row = json!({"id": 3, "title": "three", "done": true});
    assert_eq!((&insert["new"], &insert["schema"]), (&row, &json!("public")));

    sql.batch_execute("update todos set title = 'drei' where id = 3").await?;
    let update = all.change("UPDATE", &json!({"id": 3})).await?;
    assert_eq!(update["new"]["title"], "drei");
    assert_eq!(update["old"], row, "the whole old row, thanks to REPLICA IDENTITY FULL");

    sql.batch_execute("delete from todos where id = 3").await?;
    let delete = third.change("DELETE", &json!({"id": 3})).await?;
    assert_eq!(delete["old"]["title"], "drei");
    assert!(all.changes().iter().all(|change| change["new"]["id"] != 1), "nothing from before the PUT");
    assert!(third.changes().iter().all(|change| change["new"]["id"] != 2), "nothing that the filter excludes");

    // A second table stays live, so that what doesn't arrive has been overtaken.
    sql.batch_execute("create table beacon (id int primary key)").await?;
    project.enable("beacon").await?;
    let beacon = client.subscribe(json!({"event": "*", "schema": "public", "table": "beacon"})).await?;
    assert_eq!(project.put("todos", false).await?.status, 200);
    sql.batch_execute("insert into todos values (4, 'after', false); insert into beacon values (1)").await?;
    beacon.change("INSERT", &json!({"id": 1})).await?;
    assert!(all.changes().iter().all(|change| change["new"]["id"] != 4), "nothing after enabled: false");
    Ok(())
}

/// Two end users each get only what their policy shows, also when a row moves from one to the other.
async fn two_users(kind: Kind, project: &Project) -> Result<()> {
    let sql = project.sql().await?;
    sql.batch_execute(
        "create table notes (id int primary key, owner uuid not null, body text);
         alter table notes enable row level security;
         create policy own on notes for select to aura_authenticated using (owner = auth.uid());",
    )
    .await?;
    project.enable("notes").await?;
    let binding = json!({"event": "*", "schema": "public", "table": "notes"});
    let (alice, bob) = tokio::try_join!(Client::user(kind, project, ALICE), Client::user(kind, project, BOB))?;
    let (alice, bob) = tokio::try_join!(alice.subscribe(binding.clone()), bob.subscribe(binding.clone()))?;

    sql.batch_execute(&format!(
        "insert into notes values (1, '{ALICE}', 'mine'), (2, '{BOB}', 'mine');
         update notes set owner = '{BOB}', body = 'yours' where id = 1;
         delete from notes where id = 1;
         insert into notes values (3, '{ALICE}', 'last'), (4, '{BOB}', 'last')"
    ))
    .await?;
    alice.change("INSERT", &json!({"id": 3})).await?;
    bob.change("INSERT", &json!({"id": 4})).await?;

    assert_eq!(story(&alice.changes()), ["INSERT 1", "INSERT 3"]);
    assert_eq!(story(&bob.changes()), ["INSERT 2", "UPDATE 1", "DELETE 1", "INSERT 4"]);
    let moved = &bob.changes()[1];
    assert_eq!(moved["new"]["body"], "yours");
    assert!(moved["old"].get("body").is_none(), "the old owner's contents never go to the new owner: {moved}");
    assert_eq!(bob.changes()[2]["old"]["body"], "yours");
    Ok(())
}

fn story(changes: &[Value]) -> Vec<String> {
    let line = |change: &Value| {
        let id = if change["type"] == "DELETE" { &change["old"]["id"] } else { &change["new"]["id"] };
        format!("{} {id}", change["type"].as_str().unwrap_or_default())
    };
    changes.iter().map(line).collect()
}

#[tokio::test]
async fn r_frt_1_javascript_2_109_follows_a_table() -> Result<()> {
    life_of_a_table(Kind::Js("2.109.0"), &Dev::start(&[]).await?.demo()?).await
}

#[tokio::test]
async fn r_frt_1_javascript_2_119_follows_a_table() -> Result<()> {
    life_of_a_table(Kind::Js("2.119.1"), &Dev::start(&[]).await?.demo()?).await
}

#[tokio::test]
async fn r_frt_1_python_follows_a_table() -> Result<()> {
    life_of_a_table(Kind::Python, &Dev::start(&[]).await?.demo()?).await
}

#[tokio::test]
async fn r_rls_1_alice_and_bob_see_their_own() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    two_users(Kind::ANY, &dev.demo()?).await
}

#[tokio::test]
async fn r_rls_1_alice_and_bob_see_their_own_in_python() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    two_users(Kind::Python, &dev.demo()?).await
}

#[tokio::test]
async fn the_production_binaries_serve_every_client() -> Result<()> {
    let split = Split::start().await?;
    for (number, kind) in Kind::ALL.into_iter().enumerate() {
        let project = split.project(&format!("tenant-{number}")).await?;
        life_of_a_table(kind, &project).await.map_err(|error| error.context(split.logs()))?;
        two_users(kind, &project).await.map_err(|error| error.context(split.logs()))?;
    }
    Ok(())
}
