//! Whose the table is: by name, by OID, by owner.

use anyhow::Result;
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::harness::{Platform, Reply, Tenant, toggle};

async fn put(platform: &Platform, tenant: &Tenant, table: &str, body: Value) -> Result<Reply> {
    platform.call(Method::PUT, &toggle(tenant, table)).key(&tenant.service).json(&body).send().await
}

async fn get(platform: &Platform, tenant: &Tenant, table: &str) -> Result<Reply> {
    platform.call(Method::GET, &toggle(tenant, table)).key(&tenant.service).send().await
}

async fn sql(platform: &Platform, tenant: &Tenant, sql: &str) -> Result<()> {
    platform.sql(&sql.replace("s.", &format!("\"{}\".", tenant.schema))).await
}

#[tokio::test]
async fn case_17_a_renamed_table_keeps_its_state_and_a_new_one_of_the_name_is_off() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    platform.play_worker().await?;
    sql(&platform, &tenant, "create table s.a (id int primary key)").await?;
    put(&platform, &tenant, "a", json!({"enabled": true})).await?;
    sql(&platform, &tenant, "alter table s.a rename to a_old").await?;
    let gone = get(&platform, &tenant, "a").await?;
    assert_eq!((&gone.body["status"], gone.status), (&json!("missing"), StatusCode::OK));
    assert!(gone.body["reason"].as_str().unwrap_or_default().contains("a_old"), "{}", gone.body);
    sql(&platform, &tenant, "create table s.a (id int primary key, secret text)").await?;
    let new = get(&platform, &tenant, "a").await?;
    assert_eq!((&new.body["enabled"], &new.body["status"]), (&json!(false), &json!("disabled")), "{}", new.body);
    assert!(new.body["reason"].as_str().unwrap_or_default().contains("a_old"), "it says why: {}", new.body);
    let old = get(&platform, &tenant, "a_old").await?;
    assert_eq!((&old.body["enabled"], &old.body["table"]), (&json!(true), &json!("a_old")), "{}", old.body);
    assert_eq!(old.body["status"], "pending", "not active under a name that the filter doesn't have");

    // Either is one registration, whichever is asked for first.
    let on = put(&platform, &tenant, "a", json!({"enabled": true})).await?;
    assert_eq!((on.status, &on.body["status"]), (StatusCode::OK, &json!("active")), "{}", on.body);
    let old = put(&platform, &tenant, "a_old", json!({"enabled": true})).await?;
    assert_eq!((old.status, &old.body["status"]), (StatusCode::OK, &json!("active")), "{}", old.body);
    let registry = platform.store.registry(platform.source.id).await?;
    let names: Vec<_> = registry.registrations.iter().map(|known| known.table.as_str()).collect();
    assert_eq!((names.len(), names.contains(&"a"), names.contains(&"a_old")), (2, true, true), "{names:?}");
    assert_eq!(platform.audited(&tenant, "table.enable").await?, 2);
    assert_eq!(put(&platform, &tenant, "a_old", json!({"enabled": false})).await?.status, StatusCode::OK);
    assert_eq!(platform.replica_identity(&tenant, "a_old").await?, 'd');
    assert_eq!(platform.replica_identity(&tenant, "a").await?, 'f');
    platform.stop().await
}

#[tokio::test]
async fn r_reg_2_a_renamed_table_is_turned_off_under_its_new_name() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    platform.play_worker().await?;
    sql(&platform, &tenant, "create table s.a (id int primary key)").await?;
    put(&platform, &tenant, "a", json!({"enabled": true})).await?;
    sql(&platform, &tenant, "alter table s.a rename to b").await?;
    let off = put(&platform, &tenant, "b", json!({"enabled": false})).await?;
    assert_eq!((off.status, &off.body["enabled"]), (StatusCode::OK, &json!(false)), "{}", off.body);
    assert_eq!(platform.replica_identity(&tenant, "b").await?, 'd');
    assert!(platform.store.registry(platform.source.id).await?.registrations.iter().all(|known| !known.enabled));
    platform.stop().await
}

#[tokio::test]
async fn case_15_in_manual_mode_the_owner_alters_and_we_only_look() -> Result<()> {
    let platform = Platform::start_without_superuser().await?;
    platform.play_worker().await?;
    let tenant = platform.tenant("demo").await?;
    sql(&platform, &tenant, "create role dba; create table s.t (id int primary key); alter table s.t owner to dba")
        .await?;
    let manual = || json!({"enabled": true, "mode": "manual"});
    let refused = put(&platform, &tenant, "t", manual()).await?;
    let told = (refused.status, refused.code());
    assert_eq!(told, (StatusCode::CONFLICT, "replica_identity_not_full"), "{}", refused.body);
    assert!(platform.store.registry(platform.source.id).await?.registrations.is_empty(), "no intent was written");
    platform.sql(refused.body["sql"].as_str().unwrap_or_default()).await?;
    let on = put(&platform, &tenant, "t", manual()).await?;
    assert_eq!((on.status, &on.body["mode"], &on.body["status"]), (StatusCode::OK, &json!("manual"), &json!("active")));
    sql(&platform, &tenant, "alter table s.t replica identity default").await?;
    let drifted = get(&platform, &tenant, "t").await?;
    assert_eq!((&drifted.body["drift"], &drifted.body["mode"]), (&json!(true), &json!("manual")));
    // Who says nothing about the mode leaves it as it is.
    let again = put(&platform, &tenant, "t", json!({"enabled": true})).await?;
    assert_eq!(again.code(), "replica_identity_not_full", "{}", again.body);
    platform.sql(again.body["sql"].as_str().unwrap_or_default()).await?;
    assert_eq!(put(&platform, &tenant, "t", json!({"enabled": true})).await?.body["drift"], false);
    assert_eq!(put(&platform, &tenant, "t", json!({"enabled": false})).await?.status, StatusCode::OK);
    assert_eq!(platform.replica_identity(&tenant, "t").await?, 'f', "its owner has set it");
    let mixed = put(&platform, &tenant, "t", json!({"enabled": false, "mode": "manual"})).await?;
    assert_eq!((mixed.status, mixed.code()), (StatusCode::UNPROCESSABLE_ENTITY, "invalid_body"));
    platform.stop().await
}

/// Also where we could alter it.
#[tokio::test]
async fn r_reg_4_manual_mode_alters_nothing_and_auto_takes_over() -> Result<()> {
    let platform = Platform::start().await?;
    platform.play_worker().await?;
    let tenant = platform.tenant("demo").await?;
    sql(&platform, &tenant, "create table s.t (id int primary key)").await?;
    let manual = || json!({"enabled": true, "mode": "manual"});
    assert_eq!(put(&platform, &tenant, "t", manual()).await?.code(), "replica_identity_not_full");
    assert_eq!(platform.replica_identity(&tenant, "t").await?, 'd');
    sql(&platform, &tenant, "alter table s.t replica identity full").await?;
    let on = put(&platform, &tenant, "t", manual()).await?;
    let auto = put(&platform, &tenant, "t", json!({"enabled": true, "mode": "auto"})).await?;
    assert_eq!((auto.status, &auto.body["mode"]), (StatusCode::OK, &json!("auto")), "{}", auto.body);
    assert_ne!(on.header("etag"), auto.header("etag"), "the mode is a desired field");
    assert_eq!(platform.audited(&tenant, "table.enable").await?, 2);
    sql(&platform, &tenant, "alter table s.t replica identity nothing").await?;
    assert_eq!(put(&platform, &tenant, "t", json!({"enabled": true})).await?.body["replica_identity"], "full");
    platform.stop().await
}

/// N3: what isn't a table's name, or is one that looks like something else.
#[tokio::test]
async fn n_3_odd_names_are_refused_with_a_code_or_quoted() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    platform.play_worker().await?;
    sql(&platform, &tenant, "create table s.x (id int); create sequence s.seq; create table s.\"a.b\" (id int)")
        .await?;
    let odd = "messages\"; drop table x;--";
    sql(&platform, &tenant, &format!("create table s.\"{}\" (id int)", odd.replace('"', "\"\""))).await?;
    for name in [odd, "a.b"] {
        let on = put(&platform, &tenant, name, json!({"enabled": true})).await?;
        assert_eq!((on.status, on.body["table"].as_str()), (StatusCode::OK, Some(name)), "{}", on.body);
    }
    assert_eq!(platform.replica_identity(&tenant, "x").await?, 'd', "it is there still");
    let log = platform.postgres.log().join("\n");
    assert!(!log.contains("drop table x;--\" ("), "nothing broke out of its quotes");
    let cases = [
        ("nothing\"; drop table x;--", StatusCode::NOT_FOUND, "table_not_found"),
        ("../../x", StatusCode::NOT_FOUND, "table_not_found"),
        ("%00", StatusCode::NOT_FOUND, "table_not_found"),
        ("\0", StatusCode::UNPROCESSABLE_ENTITY, "invalid_name"),
        ("pg_class", StatusCode::NOT_FOUND, "table_not_found"),
        ("seq", StatusCode::NOT_FOUND, "table_not_found"),
        (&"x".repeat(64), StatusCode::UNPROCESSABLE_ENTITY, "invalid_name"),
    ];
    for (name, status, code) in cases {
        for reply in
            [put(&platform, &tenant, name, json!({"enabled": true})).await?, get(&platform, &tenant, name).await?]
        {
            assert_eq!((reply.status, reply.code()), (status, code), "{name}");
        }
    }
    for path in ["..%2f", "%2e%2e", "a%2fb"] {
        let path = format!("/v1/db/{}/schema/tables/{path}/realtime", tenant.id);
        let reply =
            platform.call(Method::PUT, &path).key(&tenant.service).json(&json!({"enabled": true})).send().await?;
        assert_eq!((reply.status, reply.code()), (StatusCode::NOT_FOUND, "table_not_found"), "{path}");
    }
    platform.stop().await
}
