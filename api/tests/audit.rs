//! Every operation that changes something leaves exactly one audit entry, with before and after and the request's id, and one
//! that only reads leaves none. By enumeration: an operation that isn't in the table fails the test.

use anyhow::{Context, Result};
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::harness::{Platform, Reply, Tenant, toggle};

/// What an operation leaves behind.
enum Leaves {
    /// It only looks, whatever its method.
    Nothing,
    /// One entry of this action, made with this body. Which of before and after are objects, the other one is null.
    One { action: &'static str, body: Value, before: bool, after: bool },
}

use Leaves::{Nothing, One};

/// In the order in which they are done: what one makes, the next ones use. `{…}` stand for ids.
fn table(orders: &str) -> Vec<(&'static str, &'static str, Leaves)> {
    let one = |action, body, before, after| One { action, body, before, after };
    let orders = json!({"name": "orders", "replication_url": orders});
    vec![
        ("create_project", "/v1/projects", one("project.create", json!({"name": "made"}), false, true)),
        ("update_project", "/v1/projects/{project}", one("project.update", json!({"aud": "users"}), true, true)),
        ("put_table_realtime", "{table}", one("table.enable", json!({"enabled": true}), false, true)),
        ("delete_table_realtime", "{table}", one("table.disable", json!(null), true, true)),
        ("explain_change", "", Nothing),
        ("create_source", "/v1/sources", one("source.create", orders, false, true)),
        ("update_source", "/v1/sources/orders", one("source.update", json!({"slot_recreate": "manual"}), true, true)),
        ("validate_source", "", Nothing),
        ("stop_engine", "/v1/engines/shared/stop", one("engine.stop", json!({"deadline_ms": 0}), true, true)),
        ("start_engine", "/v1/engines/shared/start", one("engine.start", json!({}), true, true)),
        ("force_close_engine", "/v1/engines/orders/force-close", one("engine.force_close", json!({}), true, true)),
        ("recreate_slot", "/v1/engines/shared/recreate-slot", one("engine.recreate_slot", json!({}), true, true)),
        (
            "rotate_keys",
            "/v1/projects/{project}/keys/rotate",
            one("keys.rotate", json!({"roles": ["anon"]}), true, true),
        ),
        (
            "disconnect",
            "/v1/projects/{project}/disconnect",
            one("project.disconnect", json!({"subject": "a"}), false, true),
        ),
        // Who is signed in is this process's own.
        ("create_studio_session", "", Nothing),
        ("delete_studio_session", "", Nothing),
        ("create_inspector_token", "", Nothing),
        ("delete_source", "/v1/sources/orders", one("source.delete", json!(null), true, false)),
        ("delete_project", "/v1/projects/{project}", one("project.delete", json!(null), true, true)),
    ]
}

/// (operation id, method) of everything under `/v1` that isn't a GET.
fn operations() -> Result<Vec<(String, Method)>> {
    let document: Value = serde_json::from_str(&aura_api::document()?)?;
    let mut found = Vec::new();
    for (path, item) in document["paths"].as_object().context("paths")? {
        for (method, operation) in item.as_object().context("an item")? {
            let id = operation["operationId"].as_str().with_context(|| format!("{method} {path}"))?;
            if method != "get" {
                found.push((id.to_owned(), method.to_uppercase().parse()?));
            }
        }
    }
    Ok(found)
}

impl Platform {
    async fn entries(&self, query: &str) -> Result<Vec<Value>> {
        let reply = self.get(&format!("/v1/audit?limit=1000{query}")).await?;
        Ok(reply.body["items"].as_array().with_context(|| reply.body.to_string())?.clone())
    }

    async fn newest(&self) -> Result<i64> {
        Ok(self.entries("").await?.first().and_then(|entry| entry["id"].as_i64()).unwrap_or_default())
    }

    async fn entries_since(&self, id: i64) -> Result<Vec<Value>> {
        let entries = self.entries("").await?;
        Ok(entries.into_iter().filter(|entry| entry["id"].as_i64().is_some_and(|entry| entry > id)).collect())
    }
}

fn is_there(entry: &Value, member: &str) -> bool {
    entry[member].is_object()
}

#[tokio::test]
async fn every_operation_that_changes_something_leaves_one_entry_with_before_and_after() -> Result<()> {
    let platform = Platform::start().await?;
    platform.play_worker().await?;
    let tenant = platform.tenant("demo").await?;
    platform.sql(&format!("create table \"{}\".t (id int primary key)", tenant.schema)).await?;
    let orders = platform.postgres.create_database("orders").await?;
    let (operations, table) = (operations()?, table(&orders));
    for (id, method) in &operations {
        assert!(
            table.iter().any(|(known, ..)| known == id),
            "{method} {id}: say in the table what it leaves in the audit"
        );
    }
    for (number, (id, path, leaves)) in table.iter().enumerate() {
        let method =
            operations.iter().find(|(known, _)| known == id).with_context(|| format!("{id} is gone"))?.1.clone();
        let One { action, body, before, after } = leaves else { continue };
        let path = path.replace("{project}", &tenant.id.to_string()).replace("{table}", &toggle(&tenant, "t"));
        if *id == "recreate_slot" {
            // Only what has failed gets another slot.
            let failed = "update aura.engines set state = 'failed', reason = 'slot_lost', operation_id = null";
            platform.postgres.client("platform").await?.batch_execute(failed).await?;
        }
        let (newest, request) = (platform.newest().await?, format!("req-{number}"));
        let reply = send(&platform, &tenant, method, &path, body, &request).await?;
        assert!(reply.status.is_success(), "{id}: {} {}", reply.status, reply.body);
        let left = platform.entries_since(newest).await?;
        let actions: Vec<_> = left.iter().map(|entry| entry["action"].as_str().unwrap_or_default()).collect();
        assert_eq!(actions, [*action], "{id}");
        let entry = &left[0];
        assert_eq!((is_there(entry, "before"), is_there(entry, "after")), (*before, *after), "{id}: {entry}");
        assert_eq!(entry["request_id"], json!(request), "{id}");
        assert!(entry["actor"].as_str().is_some_and(|actor| !actor.is_empty()), "{id}");
        let text = entry.to_string();
        assert!(!text.contains("postgres://") && !text.contains("eyJ"), "{id}: {text}");
    }
    platform.stop().await
}

async fn send(
    platform: &Platform,
    tenant: &Tenant,
    method: Method,
    path: &str,
    body: &Value,
    request: &str,
) -> Result<Reply> {
    let key = if path.contains("/db/") { &tenant.service } else { &platform.platform_key };
    let call = platform.call(method, path).key(key).header("x-request-id", request);
    if body.is_null() { call.send().await } else { call.json(body).send().await }
}

#[tokio::test]
async fn the_audit_is_paged_and_outlives_its_project() -> Result<()> {
    let platform = Platform::start().await?;
    let (tenant, other) = (platform.tenant("demo").await?, platform.tenant("other").await?);
    let path = format!("/v1/projects/{}", tenant.id);
    for aud in ["a", "b", "c"] {
        let body = json!({"aud": aud});
        platform.call(Method::PATCH, &path).key(&platform.platform_key).json(&body).send().await?;
    }
    let mut seen = Vec::new();
    let mut cursor = String::new();
    loop {
        let page = platform.get(&format!("{path}/audit?limit=2{cursor}")).await?;
        let items = page.body["items"].as_array().with_context(|| page.body.to_string())?.clone();
        seen.extend(items.iter().map(|entry| (entry["action"].clone(), entry["after"]["settings"]["aud"].clone())));
        let Some(next) = page.body["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    let update = json!("project.update");
    let wanted = [("c", &update), ("b", &update), ("a", &update)].map(|(aud, action)| (action.clone(), json!(aud)));
    assert_eq!(seen[..3], wanted, "newest first");
    assert_eq!(seen[3].0, "project.create");
    assert_eq!(seen.len(), 4, "none of the other project's ({})", other.id);
    platform.call(Method::DELETE, &path).key(&platform.platform_key).send().await?;
    assert_eq!(platform.get(&format!("{path}/audit")).await?.code(), "project_not_found");
    let last = platform.entries(&format!("&project={}&action=project.delete", tenant.id)).await?;
    assert_eq!((last.len(), &last[0]["before"]["name"]), (1, &json!("demo")));
    platform.stop().await
}

/// N1: another project's key gets what an unknown project would answer, changes nothing, and is written down.
#[tokio::test]
async fn n_1_another_projects_key_changes_nothing_and_is_written_down() -> Result<()> {
    let platform = Platform::start().await?;
    let (own, other) = (platform.tenant("own").await?, platform.tenant("other").await?);
    platform.sql(&format!("create table \"{}\".t (id int primary key)", own.schema)).await?;
    let unknown = uuid::Uuid::new_v4().to_string();
    let newest = platform.newest().await?;
    let mut replies = Vec::new();
    for id in [own.id.to_string(), unknown.clone()] {
        let path = format!("/v1/db/{id}/schema/tables/t/realtime");
        let put = platform.call(Method::PUT, &path).key(&other.service).json(&json!({"enabled": true}));
        let mut reply = put.send().await?;
        assert_eq!((reply.status, reply.code()), (StatusCode::NOT_FOUND, "project_not_found"));
        reply.headers.remove("x-request-id");
        replies.push((reply.stable_body(), reply.headers));
        let look = platform.call(Method::GET, &path).key(&other.service).send().await?;
        assert_eq!(look.status, StatusCode::NOT_FOUND);
    }
    assert_eq!(replies[0], replies[1], "indistinguishable: body and headers");
    assert_eq!(platform.replica_identity(&own, "t").await?, 'd');
    let left = platform.entries_since(newest).await?;
    let noted: Vec<_> = left.iter().map(|entry| (entry["action"].clone(), entry["project_id"].clone())).collect();
    let refused = json!("access.refused");
    assert_eq!(noted, [(refused.clone(), json!(unknown)), (refused, json!(own.id))], "one for each try to change");
    assert_eq!(left[1]["after"], json!({"key_of": other.id}));
    assert!(left[1]["actor"].as_str().is_some_and(|actor| actor.ends_with("service_role")));
    // A flood of them doesn't flood the audit.
    for _ in 0..40 {
        let put = platform.call(Method::PUT, &toggle(&own, "t")).key(&other.service).json(&json!({"enabled": true}));
        assert_eq!(put.send().await?.status, StatusCode::NOT_FOUND);
    }
    assert_eq!(platform.entries_since(newest).await?.len(), 20);
    platform.stop().await
}

#[tokio::test]
async fn a_text_that_no_database_holds_is_refused_before_anything_is_done() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("shop").await?;
    let key = &platform.platform_key;
    let get = async |path: &str| platform.call(Method::GET, path).key(key).send().await;
    assert_eq!(get("/v1/audit?action=a%00b").await?.code(), "malformed_request");
    assert_eq!(get("/v1/sources/a%00b").await?.code(), "source_not_found");
    // Else they would be gone, and nobody had noted who did it.
    let disconnect = platform.call(Method::POST, &format!("/v1/projects/{}/disconnect", tenant.id)).key(key);
    assert_eq!(disconnect.json(&json!({"subject": "a\0b"})).send().await?.code(), "invalid_body");
    platform.stop().await
}
