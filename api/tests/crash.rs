//! `kill -9` in the middle of a toggle: one state within one cycle of the reconciler (R-REG-3).

use std::time::Duration;

use anyhow::{Context, Result};
use aura_auth::{Minter, generate_secret};
use aura_domain::{ProjectId, SqlName};
use aura_store::{MasterKey, NewSource, Plugin, Registration, SlotRecreate, Store, TableRef, migrate};
use aura_testkit::{Postgres, Process, ProcessOptions, eventually, eventually_some, free_port, http_status};
use secrecy::ExposeSecret;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::harness::SOON;

const MASTER: &str = "a master key for tests, 32 bytes or more";
/// A cycle, and the time for which what a request may be busy with is left alone.
const CYCLE: Duration = Duration::from_secs(30);

/// A platform, a table, and an api that is a process.
struct Scene {
    postgres: Postgres,
    store: Store,
    options: ProcessOptions,
    port: u16,
    project: ProjectId,
    schema: SqlName,
    key: String,
}

impl Scene {
    async fn start() -> Result<(Self, Process)> {
        let postgres = Postgres::start().await?;
        let (url, app) = (postgres.create_database("platform").await?, postgres.create_database("app").await?);
        migrate(&url).await?;
        let store = Store::connect(&url, MasterKey::new(MASTER)?).await?;
        let source = NewSource {
            name: "shared".to_owned(),
            replication_url: app.into(),
            admin_url: None,
            slot_name: None,
            plugin: Plugin::Auto,
            slot_recreate: SlotRecreate::Auto,
        };
        store.upsert_source(source).await?;
        let (secret, port) = (generate_secret(), free_port()?);
        let options = ProcessOptions::new(env!("CARGO_BIN_EXE_aura-api"))
            .env("AURA_ENV", "dev")
            .env("DATABASE_URL", &url)
            .env("AURA_MASTER_KEY", MASTER)
            .env("AURA_PLATFORM_JWT_SECRET", secret.expose_secret())
            .env("AURA_API_LISTEN", format!("127.0.0.1:{port}"));
        let api = serve(&options, port).await?;
        let platform_key = Minter::new(&secret).platform_key(Duration::from_secs(3600))?;
        let made = request(port, "POST", "/v1/projects", &platform_key, &json!({"name": "demo"})).await?;
        let text = |name: &str| made[name].as_str().with_context(|| made.to_string());
        let scene = Self {
            project: text("id")?.parse()?,
            schema: SqlName::new(text("schema")?)?,
            key: text("service_role_key")?.to_owned(),
            postgres,
            store,
            options,
            port,
        };
        let sql = format!("create table {}.t (id int primary key)", scene.schema.quoted());
        scene.app().await?.batch_execute(&sql).await?;
        Ok((scene, api))
    }

    async fn again(&self) -> Result<Process> {
        serve(&self.options, self.port).await
    }

    async fn app(&self) -> Result<Client> {
        self.postgres.client("app").await
    }

    /// Holds a lock that an ALTER waits for, as a long reader does.
    async fn reader(&self) -> Result<Client> {
        let reader = self.app().await?;
        reader.batch_execute(&format!("begin; select * from {}.t", self.schema.quoted())).await?;
        Ok(reader)
    }

    /// Sends a PUT, and doesn't wait for its answer.
    fn put(&self, enabled: bool) -> Result<Process> {
        curl(self.port, "PUT", &self.path(), &self.key, &json!({"enabled": enabled})).start()
    }

    fn path(&self) -> String {
        format!("/v1/db/{}/schema/tables/t/realtime", self.project)
    }

    async fn shown(&self) -> Result<Value> {
        request(self.port, "GET", &self.path(), &self.key, &Value::Null).await
    }

    async fn registration(&self) -> Option<Registration> {
        let table = SqlName::new("t").ok()?;
        self.store.registration(TableRef { project: self.project, schema: &self.schema, table: &table }).await.ok()?
    }

    /// Waits for what the platform database says.
    async fn registered(&self, within: Duration, is: impl Fn(&Registration) -> bool) -> Result<Registration> {
        Box::pin(eventually_some(within, || async { self.registration().await.filter(|known| is(known)) })).await
    }

    async fn identity(&self) -> Result<String> {
        let sql = "select relreplident::text from pg_class where oid = $1::text::regclass";
        let row = self.app().await?.query_one(sql, &[&format!("{}.t", self.schema.quoted())]).await?;
        Ok(row.get(0))
    }

    async fn becomes(&self, identity: &str) -> Result<()> {
        Box::pin(eventually(CYCLE, || async { self.identity().await.is_ok_and(|now| now == identity) })).await
    }
}

async fn serve(options: &ProcessOptions, port: u16) -> Result<Process> {
    let api = options.start()?;
    let ready = || async { http_status(port, "/ready").await.is_ok_and(|status| status == 200) };
    eventually(SOON, ready).await.map_err(|error| error.context(api.lines().join("\n")))?;
    Ok(api)
}

fn curl(port: u16, method: &str, path: &str, key: &str, body: &Value) -> ProcessOptions {
    let url = format!("http://127.0.0.1:{port}{path}");
    let curl = ProcessOptions::new("curl").args(["--silent", "--max-time", "30", "--request", method, &url]);
    let curl = curl.args(["--header", &format!("apikey: {key}")]);
    if body.is_null() {
        return curl;
    }
    curl.args(["--header", "content-type: application/json", "--data", &body.to_string()])
}

async fn request(port: u16, method: &str, path: &str, key: &str, body: &Value) -> Result<Value> {
    let lines = curl(port, method, path, key, body).start()?.succeeds(SOON).await?;
    Ok(serde_json::from_str(&lines.join("\n"))?)
}

/// After the kill: GET calls nothing active, and the reconciler of the next process leaves one state.
async fn becomes_one_state(scene: &Scene) -> Result<()> {
    let half = scene.shown().await?;
    assert_eq!((&half["enabled"], &half["status"]), (&json!(true), &json!("pending")), "{half}");
    let known = scene.registered(CYCLE, |known| known.identity_set).await?;
    assert!(known.enabled && known.enabled_at_lsn.is_some());
    assert_eq!(scene.identity().await?, "f");
    assert_eq!(known.previous_identity.map(|previous| previous.kind), Some('d'), "what is restored is known still");
    let _off = scene.put(false)?;
    scene.becomes("d").await
}

#[tokio::test(flavor = "multi_thread")]
async fn case_9_killed_between_registration_and_alter() -> Result<()> {
    let (scene, api) = Scene::start().await?;
    let reader = scene.reader().await?;
    let put = scene.put(true)?;
    scene.registered(SOON, |known| known.enabled).await?;
    api.kill().await?;
    put.wait(SOON).await?;
    assert_eq!(scene.identity().await?, "d");
    reader.batch_execute("rollback").await?;
    let _api = scene.again().await?;
    becomes_one_state(&scene).await
}

#[tokio::test(flavor = "multi_thread")]
async fn case_9_killed_between_alter_and_its_record() -> Result<()> {
    let (scene, api) = Scene::start().await?;
    let reader = scene.reader().await?;
    let put = scene.put(true)?;
    let known = scene.registered(SOON, |known| known.enabled).await?;
    // What the ALTER is recorded in waits for this row; the intent is written already.
    let gate = scene.postgres.client("platform").await?;
    gate.batch_execute("begin").await?;
    gate.query("select from aura.sources where id = $1::text::uuid for update", &[&known.source.to_string()]).await?;
    reader.batch_execute("rollback").await?;
    scene.becomes("f").await?;
    api.kill().await?;
    put.wait(SOON).await?;
    gate.batch_execute("rollback").await?;
    assert!(scene.registration().await.is_some_and(|known| !known.identity_set));
    let _api = scene.again().await?;
    becomes_one_state(&scene).await
}

#[tokio::test(flavor = "multi_thread")]
async fn case_9_killed_between_disabling_and_restoring() -> Result<()> {
    let (scene, api) = Scene::start().await?;
    let _on = scene.put(true)?;
    scene.registered(SOON, |known| known.identity_set).await?;
    let reader = scene.reader().await?;
    let put = scene.put(false)?;
    scene.registered(SOON, |known| !known.enabled).await?;
    api.kill().await?;
    put.wait(SOON).await?;
    assert_eq!(scene.identity().await?, "f");
    reader.batch_execute("rollback").await?;
    let _api = scene.again().await?;
    assert_eq!(scene.shown().await?["status"], "disabled");
    scene.becomes("d").await?;
    scene.registered(CYCLE, |known| known.previous_identity.is_none()).await?;
    Ok(())
}
