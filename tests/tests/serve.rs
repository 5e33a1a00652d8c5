//! The undivided binary on a PostgreSQL that is already there, and what README's curl shows.

use anyhow::Result;
use aura_testkit::{Nats, Postgres, PostgresOptions, ProcessOptions, Signal, eventually, free_port};
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
    // The secrets in there are sealed with a key that another data directory lacks.
    let stranger = Directory::create()?;
    let refused = Dev::command(&stranger, port)?.args(["--once", "--database-url", &url]).start()?;
    assert_eq!(refused.wait(PATIENCE).await?.code(), Some(1));
    refused.line(PATIENCE, |line| line.contains("name that one with --data-dir")).await?;
    Ok(())
}

#[tokio::test]
async fn databases_of_one_server_run_side_by_side_and_are_left_as_they_were() -> Result<()> {
    let postgres = Postgres::start().await?;
    let mut starts = Vec::new();
    for name in ["first", "Second"] {
        let (url, directory) = (postgres.create_database(name).await?, Directory::create()?);
        // The demo's table is the project's own, whatever there is.
        postgres.client(name).await?.batch_execute("create table messages (id int)").await?;
        let process = Dev::command(&directory, free_port()?)?.args(["--json", "--database-url", &url]).start()?;
        process.line(PATIENCE, |line| line.contains(r#""type":"ready""#)).await?;
        starts.push((name, process, directory));
    }
    for (name, process, directory) in &starts {
        let file: Value = serde_json::from_slice(&std::fs::read(directory.0.join("data/dev.json"))?)?;
        let health = format!("{}/health", file["api_url"].as_str().unwrap_or_default());
        assert_eq!(curl("GET", &health, "", None).await?.body["cdc_active"], json!(true), "{name}");
        assert!(!process.lines().iter().any(|line| line.contains(r#""type":"warning""#)), "{:?}", process.lines());
        let url = file["database_url"].as_str().unwrap_or_default();
        let (sql, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
        tokio::spawn(connection);
        let schema: String = sql.query_one("select current_schema()::text", &[]).await?.get(0);
        assert_eq!(schema, file["schema"], "what psql makes there is the project's");
        process.signal(Signal::INT)?;
        process.wait(PATIENCE).await?;
        let settings = "select count(*) from pg_db_role_setting";
        assert_eq!(sql.query_one(settings, &[]).await?.get::<_, i64>(0), 0, "the database keeps its settings");
    }
    Ok(())
}

/// README, "Your own PostgreSQL", word for word.
#[tokio::test]
async fn an_existing_table_in_an_existing_schema_goes_live() -> Result<()> {
    let postgres = Postgres::start().await?;
    let url = postgres.create_database("mine").await?;
    let sql = postgres.client("mine").await?;
    sql.batch_execute("create table orders (id int primary key, title text)").await?;
    let (directory, port) = (Directory::create()?, free_port()?);
    let dev = Dev::command(&directory, port)?.args(["--json", "--database-url", &url]).start()?;
    dev.line(PATIENCE, |line| line.contains(r#""type":"ready""#)).await?;
    let file: Value = serde_json::from_slice(&std::fs::read(directory.0.join("data/dev.json"))?)?;
    let text = |name: &str| file[name].as_str().unwrap_or_default();

    let body = json!({"name": "shop", "schema": "public"});
    let made = curl("POST", &format!("{}/v1/projects", text("api_url")), text("platform_key"), Some(&body)).await?;
    assert_eq!(made.status, 201, "{}", made.body);
    sql.batch_execute("grant select on orders to aura_anon, aura_authenticated, aura_service_role").await?;
    let project = Project::from_answer(&made.body, text("api_url"), text("ws_url"), &url)?;
    project.enable("orders").await?;
    let data = directory.0.join("data").to_string_lossy().into_owned();
    for who in [["--role", "service_role"], ["--role", "anon"], ["--sub", system_tests::ALICE]] {
        let token = ProcessOptions::binary("aura-realtime")?.args(["token", "--data-dir", &data, "--project", "shop"]);
        let lines = token.args(who).start()?.succeeds(PATIENCE).await?;
        let key = lines.first().map(String::as_str).unwrap_or_default();
        let watch = format!("{}/realtime/v1/sse?schema=public&table=orders", project.api_url);
        let header = format!("apikey: {key}");
        let stream =
            ProcessOptions::new("curl").args(["--silent", "--no-buffer", "--header", &header, &watch]).start()?;
        stream.line(PATIENCE, |line| line.contains("Subscribed to PostgreSQL")).await?;
        sql.batch_execute("delete from orders; insert into orders values (1, 'tea')").await?;
        stream.line(PATIENCE, |line| line.contains("INSERT") && line.contains("tea")).await?;
    }
    Ok(())
}

#[tokio::test]
async fn what_dev_makes_in_a_database_can_be_removed() -> Result<()> {
    let postgres = Postgres::start().await?;
    let url = postgres.create_database("mine").await?;
    let sql = postgres.client("mine").await?;
    let left = "select array(select nspname::text from pg_namespace where nspname !~ '^pg_' union all \
         select rolname::text from pg_roles where rolname !~ '^pg_' union all \
         select slot_name::text from pg_replication_slots union all select pubname::text from pg_publication order by 1)";
    let before: Vec<String> = sql.query_one(left, &[]).await?.get(0);
    let (directory, port) = (Directory::create()?, free_port()?);
    let once = ["--once", "--plugin", "pgoutput", "--database-url", &url];
    Dev::command(&directory, port)?.args(once).start()?.succeeds(PATIENCE).await?;
    assert!(sql.query_one(left, &[]).await?.get::<_, Vec<String>>(0).len() > before.len() + 6);
    let script = aura_testkit::repository_root().join("docs/remove.sql");
    let file = script.to_string_lossy();
    let psql = ["--no-psqlrc", "--set", "ON_ERROR_STOP=1", "--single-transaction", "--file", &file, &url];
    ProcessOptions::new("psql").args(psql).start()?.succeeds(PATIENCE).await?;
    assert_eq!(sql.query_one(left, &[]).await?.get::<_, Vec<String>>(0), before);
    Ok(())
}

#[tokio::test]
async fn dev_refuses_a_database_that_cannot_do_before_it_writes() -> Result<()> {
    let postgres = Postgres::start_with(PostgresOptions::default().setting("wal_level", "replica")).await?;
    let url = postgres.create_database("mine").await?;
    let sql = postgres.client("mine").await?;
    let (directory, port) = (Directory::create()?, free_port()?);
    let refused = Dev::command(&directory, port)?.args(["--database-url", &url]).start()?;
    assert_eq!(refused.wait(PATIENCE).await?.code(), Some(1));
    refused.line(PATIENCE, |line| line.contains("ALTER SYSTEM SET wal_level = logical")).await?;
    let nobody = "select count(*) from pg_namespace where nspname in ('aura', 'auth')";
    assert_eq!(sql.query_one(nobody, &[]).await?.get::<_, i64>(0), 0, "nothing was written");
    Ok(())
}

#[tokio::test]
async fn dev_wants_a_superuser() -> Result<()> {
    let postgres = Postgres::start().await?;
    postgres.create_database("mine").await?;
    let sql = postgres.client("mine").await?;
    sql.batch_execute("create role plain login replication createrole password 'x'").await?;
    let (directory, url) = (Directory::create()?, postgres.url_as("plain", "x", "mine"));
    let refused = Dev::command(&directory, free_port()?)?.args(["--database-url", &url]).start()?;
    assert_eq!(refused.wait(PATIENCE).await?.code(), Some(1));
    refused.line(PATIENCE, |line| line.contains("needs a superuser")).await?;
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
