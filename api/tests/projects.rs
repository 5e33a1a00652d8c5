//! Tenants.

use anyhow::Result;
use axum::http::{Method, StatusCode};
use serde_json::json;
use uuid::Uuid;

use crate::harness::Platform;

#[tokio::test]
async fn create_answers_keys_once_and_makes_schema_and_roles() -> Result<()> {
    let platform = Platform::start().await?;
    let call = platform.call(Method::POST, "/v1/projects").key(&platform.platform_key);
    let created = call.json(&json!({"name": "demo"})).send().await?;
    assert_eq!(created.status, StatusCode::CREATED, "{}", created.body);
    let id = created.body["id"].as_str().unwrap().to_owned();
    assert_eq!(created.header("location"), format!("/v1/projects/{id}"));
    assert_eq!(created.body["schema"], format!("project_{id}"));
    let client = platform.postgres.client("app").await?;
    let count = "select count(*) from pg_roles where rolname like 'p\\_' || $1 || '\\_%'";
    let roles: i64 = client.query_one(count, &[&id]).await?.get(0);
    assert!(roles >= 4, "anon, authenticated, service_role and the visibility login, not {roles}");
    let shown = platform.call(Method::GET, &format!("/v1/projects/{id}")).key(&platform.platform_key).send().await?;
    assert_eq!((shown.status, &shown.body["name"]), (StatusCode::OK, &json!("demo")));
    for secret in ["anon_key", "service_role_key", "jwt_secret"] {
        assert!(created.body[secret].is_string() && shown.body.get(secret).is_none(), "{secret}");
    }
    platform.stop().await
}

#[tokio::test]
async fn create_refuses_what_is_taken_unknown_or_malformed() -> Result<()> {
    let platform = Platform::start().await?;
    platform.tenant("taken").await?;
    let cases = [
        (json!({"name": "taken"}), StatusCode::CONFLICT, "project_exists"),
        (json!({"name": ""}), StatusCode::UNPROCESSABLE_ENTITY, "invalid_body"),
        (json!({"name": "a\nb"}), StatusCode::UNPROCESSABLE_ENTITY, "invalid_body"),
        (json!({"name": "a", "colour": 1}), StatusCode::UNPROCESSABLE_ENTITY, "invalid_body"),
        (json!({}), StatusCode::UNPROCESSABLE_ENTITY, "invalid_body"),
        (json!({"name": "a", "source": "nowhere"}), StatusCode::NOT_FOUND, "source_not_found"),
        (json!({"name": "a", "schema": "x".repeat(64)}), StatusCode::UNPROCESSABLE_ENTITY, "invalid_name"),
        (json!({"name": "a", "schema": "pg_x"}), StatusCode::UNPROCESSABLE_ENTITY, "system_schema_not_supported"),
    ];
    for (body, status, code) in cases {
        let call = platform.call(Method::POST, "/v1/projects").key(&platform.platform_key).json(&body);
        let reply = call.send().await?;
        assert_eq!((reply.status, reply.code()), (status, code), "{body}");
    }
    let create = |name: &str| json!({"name": name, "schema": "mine"});
    let first = platform.call(Method::POST, "/v1/projects").key(&platform.platform_key).json(&create("a"));
    assert_eq!(first.send().await?.status, StatusCode::CREATED);
    let second = platform.call(Method::POST, "/v1/projects").key(&platform.platform_key).json(&create("b"));
    assert_eq!(second.send().await?.code(), "schema_taken");
    platform.stop().await
}

#[tokio::test]
async fn lists_are_paged_and_unknown_ids_are_404() -> Result<()> {
    let platform = Platform::start().await?;
    for name in ["a", "b", "c"] {
        platform.tenant(name).await?;
    }
    let get = |path: String| platform.call(Method::GET, &path).key(&platform.platform_key).send();
    let mut seen = Vec::new();
    let mut cursor = String::new();
    loop {
        let page = get(format!("/v1/projects?limit=2{cursor}")).await?;
        assert_eq!(page.status, StatusCode::OK, "{}", page.body);
        seen.extend(page.body["items"].as_array().unwrap().iter().map(|item| item["name"].to_string()));
        let Some(next) = page.body["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    seen.sort();
    assert_eq!(seen, ["\"a\"", "\"b\"", "\"c\""]);
    for bad in ["limit=0", "limit=1001", "cursor=%21"] {
        assert_eq!(get(format!("/v1/projects?{bad}")).await?.code(), "invalid_parameter", "{bad}");
    }
    assert_eq!(get("/v1/projects?colour=1".to_owned()).await?.code(), "malformed_request");
    for id in [Uuid::new_v4().to_string(), "x".to_owned()] {
        assert_eq!(get(format!("/v1/projects/{id}")).await?.code(), "project_not_found");
    }
    let engines = get("/v1/engines".to_owned()).await?;
    assert_eq!(engines.body["items"][0]["state"], "stopped");
    let (by_name, by_id) = (get("/v1/engines/shared".to_owned()).await?, engines.body["items"][0]["source"].clone());
    assert_eq!(by_name.body["source"], by_id);
    assert_eq!(get("/v1/engines/nowhere".to_owned()).await?.code(), "source_not_found");
    let sources = get("/v1/sources".to_owned()).await?;
    assert_eq!(sources.body["items"][0]["name"], "shared");
    assert!(!sources.body.to_string().contains("postgres://"), "URLs hold passwords");
    platform.stop().await
}

#[tokio::test]
async fn a_project_whose_set_up_failed_leaves_the_name_free() -> Result<()> {
    let platform = Platform::start().await?;
    platform
        .sql(
            "create function public.refuse() returns event_trigger language plpgsql as
                 $$ begin raise exception 'no'; end $$;
             create event trigger refuse on ddl_command_start when tag in ('CREATE SCHEMA', 'GRANT')
                 execute function public.refuse()",
        )
        .await?;
    let create = || platform.call(Method::POST, "/v1/projects").key(&platform.platform_key).json(&json!({"name": "a"}));
    let refused = create().send().await?;
    assert_eq!((refused.status, refused.code()), (StatusCode::BAD_GATEWAY, "source_error"), "{}", refused.body);
    platform.sql("drop event trigger refuse").await?;
    assert_eq!(create().send().await?.status, StatusCode::CREATED);
    platform.stop().await
}

/// All lists are paged alike: page by page they are what they are at once, and a cursor is of use in its own list only.
#[tokio::test]
async fn every_list_is_paged_alike() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    for name in ["a", "b"] {
        let source = json!({"name": name, "replication_url": "postgres://u:p@127.0.0.1:1/d"});
        platform.as_platform(Method::POST, "/v1/sources", &source).await?;
        platform.tenant(name).await?;
    }
    let rows =
        "insert into aura.workers (id, host, version, max_engines) values ('w1', 'h', '1', 8), ('w2', 'h', '1', 8);
        insert into aura.gaps (source_id, reason, epoch) select id, 'bus', 1 from aura.sources, generate_series(1, 3)";
    platform.postgres.client("platform").await?.batch_execute(rows).await?;
    platform.sql(&format!("create table \"{0}\".t1 (); create table \"{0}\".t2 ()", tenant.schema)).await?;
    let tables = format!("/v1/db/{}/schema/tables", tenant.id);
    let audit = format!("/v1/projects/{}/audit", tenant.id);
    let get = |path: String| {
        let key = if path.contains("/db/") { &tenant.service } else { &platform.platform_key };
        platform.call(Method::GET, &path).key(key).send()
    };
    let lists = [
        "/v1/projects",
        "/v1/sources",
        "/v1/engines",
        "/v1/workers",
        "/v1/engines/shared/gaps",
        "/v1/audit",
        &tables,
        &audit,
    ];
    for (number, list) in lists.iter().enumerate() {
        let whole = get(format!("{list}?limit=1000")).await?;
        assert_eq!((whole.status, &whole.body["next_cursor"]), (StatusCode::OK, &json!(null)), "{list}");
        let (mut seen, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = get(format!("{list}?limit=1{cursor}")).await?;
            let items = page.body["items"].as_array().cloned().unwrap_or_default();
            // The catalogue is walked: that its last table was the last one is seen a page later.
            let end = *list == tables && page.body["next_cursor"].is_null();
            assert!(items.len() == 1 || (end && items.is_empty()), "{list}: {}", page.body);
            seen.extend(items.iter().map(identity));
            let Some(next) = page.body["next_cursor"].as_str() else { break };
            cursor = format!("&cursor={next}");
            let other = lists[(number + 1) % lists.len()];
            let foreign = get(format!("{other}?cursor={next}")).await?;
            // The audit is one log, whoever looks at it.
            assert!(foreign.code() == "invalid_parameter" || other.contains("audit"), "{list}'s cursor in {other}");
        }
        let all: Vec<_> = whole.body["items"].as_array().unwrap().iter().map(identity).collect();
        assert_eq!(seen, all, "{list}");
        for bad in ["limit=0", "limit=1001", "cursor=%21", "cursor="] {
            assert_eq!(get(format!("{list}?{bad}")).await?.code(), "invalid_parameter", "{list} {bad}");
        }
    }
    platform.stop().await
}

/// What doesn't change from one look to the next.
fn identity(item: &serde_json::Value) -> String {
    ["id", "source", "schema", "table", "action"].map(|member| item[member].to_string()).join(" ")
}

/// N18: names that would be patterns or separators on the bus are names as any other.
#[tokio::test]
async fn n_18_names_that_are_patterns_elsewhere_are_names_here() -> Result<()> {
    let platform = Platform::start().await?;
    platform.play_worker().await?;
    let (a, ab) = (platform.tenant("a").await?, platform.tenant("a.b").await?);
    assert_ne!((a.id, &a.schema), (ab.id, &ab.schema));
    for table in ["*", ">", "a.b", "b"] {
        platform.sql(&format!("create table \"{}\".\"{table}\" (id int primary key)", ab.schema)).await?;
        let put = platform.call(Method::PUT, &crate::harness::toggle(&ab, table)).key(&ab.service);
        let put = put.json(&json!({"enabled": true})).send().await?;
        assert_eq!((put.status, &put.body["table"]), (StatusCode::OK, &json!(table)), "{}", put.body);
        let other = platform.call(Method::GET, &crate::harness::toggle(&a, table)).key(&a.service).send().await?;
        assert_eq!(other.code(), "table_not_found", "the other project has none of that name");
    }
    let on = platform.store.registry(platform.source.id).await?.registrations;
    assert_eq!(on.iter().filter(|table| table.project == ab.id && table.enabled).count(), 4);
    platform.stop().await
}
