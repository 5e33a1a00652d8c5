//! Sources: made, checked, changed and deleted.

use anyhow::{Context, Result};
use aura_domain::SourceId;
use aura_testkit::{Postgres, Shutdown};
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::harness::{Platform, Reply};

impl Platform {
    async fn send(&self, method: Method, path: &str, body: &Value) -> Result<Reply> {
        self.call(method, path).key(&self.platform_key).json(body).send().await
    }

    /// A source in a database of its own.
    async fn orders(&self) -> Result<Reply> {
        let url = self.postgres.create_database("orders").await?;
        self.send(Method::POST, "/v1/sources", &json!({"name": "orders", "replication_url": url})).await
    }

    async fn stop_engine(&self, source: &str) -> Result<()> {
        let stop = self.send(Method::POST, &format!("/v1/engines/{source}/stop"), &json!({"deadline_ms": 0})).await?;
        anyhow::ensure!(stop.status == StatusCode::OK, "{}", stop.body);
        Ok(())
    }

    async fn slots(&self) -> Result<Vec<String>> {
        let client = self.postgres.client("postgres").await?;
        let rows = client.query("select slot_name::text from pg_replication_slots", &[]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }
}

#[tokio::test]
async fn a_source_gets_an_engine_and_projects_and_shows_no_secret() -> Result<()> {
    let platform = Platform::start().await?;
    let created = platform.orders().await?;
    assert_eq!(created.status, StatusCode::CREATED, "{}", created.body);
    let id: SourceId = created.body["id"].as_str().context("an id")?.parse()?;
    assert_eq!(created.header("location"), format!("/v1/sources/{id}"));
    assert_eq!(created.body["slot_name"], aura_pgsource::slot::slot_name(id), "R-ENG-8: cluster-wide, so its own");
    assert_eq!((&created.body["plugin"], &created.body["slot_recreate"]), (&json!("auto"), &json!("auto")));
    assert_eq!((&created.body["database"], &created.body["has_admin_url"]), (&json!("orders"), &json!(false)));
    for path in ["/v1/sources", "/v1/sources/orders", &format!("/v1/sources/{id}")] {
        let text = platform.get(path).await?.body.to_string();
        assert!(text.contains("orders") && !text.contains("secret") && !text.contains("postgres://"), "{text}");
    }
    let engine = platform.get("/v1/engines/orders").await?.body;
    assert_eq!((&engine["source"], &engine["desired"]), (&json!(id), &json!("running")));
    let again = json!({"name": "orders", "replication_url": "postgres://u@h/d"});
    assert_eq!(platform.send(Method::POST, "/v1/sources", &again).await?.code(), "source_exists");
    let project = platform.send(Method::POST, "/v1/projects", &json!({"name": "p", "source": "orders"})).await?;
    assert_eq!((project.status, &project.body["source"]), (StatusCode::CREATED, &json!(id)), "{}", project.body);
    let schema = project.body["schema"].as_str().context("a schema")?.to_owned();
    let there = "select from pg_namespace where nspname = $1";
    assert!(platform.postgres.client("orders").await?.query_opt(there, &[&schema]).await?.is_some());
    assert!(platform.postgres.client("app").await?.query_opt(there, &[&schema]).await?.is_none());
    let audit = "select action, before::text, after::text from aura.audit where target = $1";
    let rows = platform.postgres.client("platform").await?.query(audit, &[&id.to_string()]).await?;
    assert_eq!(rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>(), ["source.create"]);
    assert!(!rows[0].get::<_, String>(2).contains("postgres://"), "the audit holds no URL");
    platform.stop().await
}

#[tokio::test]
async fn what_a_source_must_be_is_said_without_repeating_it() -> Result<()> {
    let platform = Platform::start().await?;
    let with = |member: &str, value: Value| {
        let mut body = json!({"name": "a", "replication_url": "postgres://u:hunter2@h/d"});
        body[member] = value;
        body
    };
    let bodies = [
        with("replication_url", json!("mysql://u:hunter2@h/d")),
        with("replication_url", json!("postgres://hunter2 h:x/d")),
        with("admin_url", json!("postgres:///d?password=hunter2")),
        with("name", json!("a b")),
        with("name", json!("")),
        with("name", json!("0191d0a0-0000-7000-8000-000000000001")),
        with("slot_name", json!("Upper")),
        with("slot_name", json!("x".repeat(64))),
        with("plugin", json!("decoderbufs")),
        with("colour", json!(1)),
    ];
    for body in bodies {
        let reply = platform.send(Method::POST, "/v1/sources", &body).await?;
        assert_eq!((reply.status, reply.code()), (StatusCode::UNPROCESSABLE_ENTITY, "invalid_body"), "{body}");
        assert!(!reply.body.to_string().contains("hunter2"), "{}", reply.body);
    }
    assert_eq!(platform.get("/v1/sources").await?.body["items"].as_array().map(Vec::len), Some(1));
    platform.stop().await
}

#[tokio::test]
async fn r_eng_9_a_source_is_checked_before_it_is_saved_and_after() -> Result<()> {
    let platform = Platform::start().await?;
    platform
        .sql("create role cdc login password 'pw'; create role boss login password 'pw'; revoke all on pg_stats, pg_stats_ext, pg_stats_ext_exprs from public")
        .await?;
    let body = json!({
        "name": "new", "replication_url": platform.postgres.url_as("cdc", "pw", "app"),
        "admin_url": platform.postgres.url_as("boss", "pw", "app")
    });
    let found = |reply: &Reply| {
        let list = reply.body["findings"].as_array().cloned().unwrap_or_default();
        list.iter().map(|one| format!("{} {}", one["code"], one["severity"]).replace('"', "")).collect::<Vec<_>>()
    };
    let poor = platform.send(Method::POST, "/v1/sources?dry_run=true", &body).await?;
    assert_eq!((poor.status, &poor.body["ok"]), (StatusCode::OK, &json!(false)), "{}", poor.body);
    let expected = [
        "no_replication_attribute critical",
        "no_create_role warning",
        "no_create_schema warning",
        "cannot_signal warning",
    ];
    assert_eq!(found(&poor), expected, "{}", poor.body);
    assert_eq!(poor.body["findings"][0]["fix"], "ALTER ROLE \"cdc\" REPLICATION");
    assert_eq!(poor.body["findings"][2]["fix"], "GRANT CREATE ON DATABASE app TO \"boss\"");
    assert_eq!(platform.get("/v1/sources/new").await?.code(), "source_not_found", "nothing was saved");
    platform.sql("alter role cdc replication; grant cdc to boss; alter role boss createrole; grant create on database app to boss").await?;
    assert_eq!(platform.send(Method::POST, "/v1/sources", &body).await?.status, StatusCode::CREATED);
    let call = platform.call(Method::POST, "/v1/sources/new/validate").key(&platform.platform_key);
    let good = call.send().await?;
    assert_eq!((good.status, &good.body), (StatusCode::OK, &json!({"ok": true, "findings": []})));
    let nowhere =
        json!({"replication_url": format!("postgres://u:hunter2@127.0.0.1:{}/d", aura_testkit::free_port()?)});
    let as_if = platform.send(Method::POST, "/v1/sources/new/validate", &nowhere).await?;
    assert_eq!(found(&as_if)[0], "unreachable critical", "{}", as_if.body);
    assert!(!as_if.body.to_string().contains("hunter2"));
    platform.stop().await
}

#[tokio::test]
async fn a_patch_tells_absent_from_null_and_spares_a_running_engine() -> Result<()> {
    let platform = Platform::start().await?;
    let created = platform.orders().await?;
    let id: SourceId = created.body["id"].as_str().context("an id")?.parse()?;
    let patch = async |body: Value| platform.send(Method::PATCH, "/v1/sources/orders", &body).await;
    let admin = platform.postgres.url_as("boss", "pw", "orders");
    let any_time = patch(json!({"admin_url": admin, "slot_recreate": "manual"})).await?;
    assert_eq!(any_time.status, StatusCode::OK, "{}", any_time.body);
    assert_eq!((&any_time.body["has_admin_url"], &any_time.body["slot_recreate"]), (&json!(true), &json!("manual")));
    assert_eq!(patch(json!({})).await?.body["has_admin_url"], true, "absent stays");
    let back = patch(json!({"admin_url": null, "slot_recreate": null})).await?;
    assert_eq!((&back.body["has_admin_url"], &back.body["slot_recreate"]), (&json!(false), &json!("auto")));
    for body in [json!({"slot_name": "other"}), json!({"plugin": "pgoutput"}), json!({"replication_url": admin})] {
        let refused = patch(body.clone()).await?;
        assert_eq!((refused.status, refused.code()), (StatusCode::CONFLICT, "engine_state_conflict"), "{body}");
        assert!(refused.body["legal_verbs"].as_array().is_some_and(|verbs| verbs.contains(&json!("stop"))));
    }
    assert_eq!(patch(json!({"plugin": "auto"})).await?.status, StatusCode::OK, "it is so already");
    platform.stop_engine("orders").await?;
    let changed = patch(json!({"slot_name": "other", "plugin": "pgoutput", "replication_url": admin})).await?;
    assert_eq!((&changed.body["slot_name"], &changed.body["plugin"]), (&json!("other"), &json!("pgoutput")));
    let default = patch(json!({"slot_name": null, "plugin": null})).await?;
    assert_eq!(default.body["slot_name"], aura_pgsource::slot::slot_name(id));
    assert_eq!(patch(json!({"replication_url": null})).await?.status, StatusCode::OK, "null is its stored value");
    assert_eq!(patch(json!({"name": "x"})).await?.code(), "invalid_body", "a name stays");
    let stored = platform.store.source(id).await?.context("a source")?;
    assert!(secrecy_contains(&stored.replication_url, "boss"));
    platform.stop().await
}

fn secrecy_contains(url: &secrecy::SecretString, text: &str) -> bool {
    secrecy::ExposeSecret::expose_secret(url).contains(text)
}

#[tokio::test]
async fn deleting_takes_back_what_we_made_and_nothing_else() -> Result<()> {
    let platform = Platform::start().await?;
    let created = platform.orders().await?;
    let (id, slot) = (created.body["id"].clone(), created.body["slot_name"].as_str().context("a slot")?.to_owned());
    let delete = async |path: &str| platform.call(Method::DELETE, path).key(&platform.platform_key).send().await;
    let orders = platform.postgres.client("orders").await?;
    let make = format!("select pg_create_logical_replication_slot('{slot}', 'pgoutput')");
    orders.batch_execute(&format!("create publication {slot}")).await?;
    orders.batch_execute(&make).await?;
    let running = delete("/v1/sources/orders").await?;
    assert_eq!((running.status, running.code()), (StatusCode::CONFLICT, "engine_state_conflict"));
    let project = platform.send(Method::POST, "/v1/projects", &json!({"name": "p", "source": "orders"})).await?;
    for (path, state) in [("/v1/sources/orders?force=true", "running"), ("/v1/sources/orders", "stopped")] {
        if state == "stopped" {
            platform.stop_engine("orders").await?;
        }
        let used = delete(path).await?;
        assert_eq!(platform.get("/v1/engines/orders").await?.body["desired"], state, "a refusal ends no engine");
        assert_eq!(
            (used.status, used.code(), &used.body["projects"]),
            (StatusCode::CONFLICT, "source_in_use", &json!(1))
        );
    }
    assert!(platform.slots().await?.contains(&slot), "nothing was touched");
    platform.store.discard_project(project.body["id"].as_str().context("an id")?.parse()?, "test").await?;
    let deleted = delete("/v1/sources/orders").await?;
    assert_eq!(deleted.status, StatusCode::OK, "{}", deleted.body);
    let dropped = json!({"name": slot, "fate": "dropped"});
    assert_eq!(deleted.body, json!({"source": id, "slot": dropped, "publication": dropped}));
    assert!(!platform.slots().await?.contains(&slot));
    assert_eq!(orders.query("select from pg_publication", &[]).await?.len(), 0);
    assert_eq!(platform.get("/v1/engines/orders").await?.code(), "source_not_found");
    let foreign = json!({"name": "orders", "replication_url": platform.postgres.url("orders"), "slot_name": "theirs"});
    assert_eq!(platform.send(Method::POST, "/v1/sources", &foreign).await?.status, StatusCode::CREATED);
    orders.batch_execute("select pg_create_logical_replication_slot('theirs', 'pgoutput')").await?;
    let kept = delete("/v1/sources/orders?force=true").await?;
    assert_eq!((kept.status, &kept.body["slot"]), (StatusCode::OK, &json!({"name": "theirs", "fate": "kept"})));
    assert_eq!(platform.slots().await?, ["theirs"]);
    platform.stop().await
}

#[tokio::test]
async fn a_source_that_is_gone_can_be_deleted_by_force() -> Result<()> {
    let platform = Platform::start().await?;
    let mut elsewhere = Postgres::start().await?;
    let body = json!({"name": "gone", "replication_url": elsewhere.url("postgres")});
    assert_eq!(platform.send(Method::POST, "/v1/sources", &body).await?.status, StatusCode::CREATED);
    platform.stop_engine("gone").await?;
    elsewhere.stop(Shutdown::Immediate).await?;
    let delete = async |path: &str| platform.call(Method::DELETE, path).key(&platform.platform_key).send().await;
    let polite = delete("/v1/sources/gone").await?;
    assert_eq!((polite.status, polite.code()), (StatusCode::SERVICE_UNAVAILABLE, "source_unreachable"));
    let forced = delete("/v1/sources/gone?force=true").await?;
    assert_eq!((forced.status, &forced.body["slot"]["fate"]), (StatusCode::OK, &json!("unknown")), "{}", forced.body);
    assert_eq!(platform.get("/v1/sources/gone").await?.code(), "source_not_found");
    platform.stop().await
}
