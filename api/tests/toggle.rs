//! What PUT, GET and DELETE of a table's realtime state do.

use anyhow::Result;
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::harness::{Platform, Reply, Tenant, toggle};

pub(crate) async fn put(platform: &Platform, tenant: &Tenant, table: &str, enabled: bool) -> Result<Reply> {
    let call = platform.call(Method::PUT, &toggle(tenant, table)).key(&tenant.service);
    call.json(&json!({"enabled": enabled})).send().await
}

pub(crate) async fn get(platform: &Platform, tenant: &Tenant, table: &str) -> Result<Reply> {
    platform.call(Method::GET, &toggle(tenant, table)).key(&tenant.service).send().await
}

async fn start(table: &str) -> Result<(Platform, Tenant)> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    platform.sql(&format!("create table \"{}\".{table} (id int primary key, body text)", tenant.schema)).await?;
    Ok((platform, tenant))
}

#[tokio::test]
async fn put_answers_200_once_the_worker_covers_the_table() -> Result<()> {
    let (platform, tenant) = start("messages").await?;
    let before = get(&platform, &tenant, "messages").await?;
    assert_eq!((before.status, &before.body["status"]), (StatusCode::OK, &json!("disabled")));
    assert_eq!((&before.body["enabled"], &before.body["replica_identity"]), (&json!(false), &json!("default")));
    platform.play_worker().await?;
    let on = put(&platform, &tenant, "messages", true).await?;
    assert_eq!((on.status, &on.body["status"]), (StatusCode::OK, &json!("active")), "{}", on.body);
    assert_eq!(on.body["schema"], "public");
    assert_eq!(on.body["replica_identity"], "full");
    assert_eq!(on.body["rls"], json!({"enabled": false, "policies": 0}));
    assert_eq!(on.body["warnings"][0]["code"], "rls_disabled");
    assert!(on.body["active_since_lsn"].is_string() && on.body["updated_at"].is_string());
    assert!(on.body["updated_by"].as_str().unwrap().ends_with(" service_role"));
    assert_eq!(platform.replica_identity(&tenant, "messages").await?, 'f');
    let shown = get(&platform, &tenant, "messages").await?;
    assert_eq!((shown.body, shown.headers["etag"].clone()), (on.body, on.headers["etag"].clone()));
    platform.stop().await
}

#[tokio::test]
async fn put_answers_202_while_no_worker_covers_the_table() -> Result<()> {
    let (platform, tenant) = start("messages").await?;
    // The same place is shown where to look, schema included.
    let path = toggle(&tenant, "messages") + "?schema=public";
    let call = platform.call(Method::PUT, &path).key(&tenant.service).header("prefer", "wait=0");
    let reply = call.json(&json!({"enabled": true})).send().await?;
    assert_eq!((reply.status, &reply.body["status"]), (StatusCode::ACCEPTED, &json!("pending")));
    assert_eq!(reply.header("location"), path);
    assert_eq!(reply.header("retry-after"), "1");
    assert_eq!(reply.body["active_since_lsn"], Value::Null);
    assert_eq!(platform.replica_identity(&tenant, "messages").await?, 'f', "the ALTER needs no worker");
    platform.play_worker().await?;
    assert_eq!(put(&platform, &tenant, "messages", true).await?.status, StatusCode::OK);
    platform.stop().await
}

#[tokio::test]
async fn delete_and_put_false_restore_the_identity_and_wait_for_the_engine() -> Result<()> {
    let (platform, tenant) = start("messages").await?;
    let index = format!(
        "create unique index by_id on \"{0}\".messages (id); alter table \"{0}\".messages replica identity using index by_id",
        tenant.schema
    );
    platform.sql(&index).await?;
    let call = platform.call(Method::PUT, &toggle(&tenant, "messages")).key(&tenant.service).header("prefer", "wait=0");
    call.json(&json!({"enabled": true})).send().await?;
    assert_eq!(platform.replica_identity(&tenant, "messages").await?, 'f');
    let call = platform.call(Method::DELETE, &toggle(&tenant, "messages")).key(&tenant.service);
    let off = call.header("prefer", "wait=0").send().await?;
    assert_eq!(
        (off.status, &off.body["status"]),
        (StatusCode::ACCEPTED, &json!("disabled")),
        "no engine has applied it"
    );
    assert_eq!(platform.replica_identity(&tenant, "messages").await?, 'i');
    platform.play_worker().await?;
    for _ in 0..2 {
        let again = put(&platform, &tenant, "messages", false).await?;
        assert_eq!((again.status, &again.body["enabled"]), (StatusCode::OK, &json!(false)));
    }
    assert_eq!(platform.audited(&tenant, "table.disable").await?, 1, "a PUT that changes nothing isn't audited");
    platform.stop().await
}

#[tokio::test]
async fn an_identity_that_somebody_changed_meanwhile_is_left_alone() -> Result<()> {
    let (platform, tenant) = start("messages").await?;
    platform.play_worker().await?;
    put(&platform, &tenant, "messages", true).await?;
    platform.sql(&format!("alter table \"{}\".messages replica identity nothing", tenant.schema)).await?;
    assert_eq!(put(&platform, &tenant, "messages", false).await?.status, StatusCode::OK);
    assert_eq!(platform.replica_identity(&tenant, "messages").await?, 'n');
    platform.stop().await
}

#[tokio::test]
async fn r_reg_1_get_shows_drift_and_put_repairs_it() -> Result<()> {
    let (platform, tenant) = start("messages").await?;
    platform.play_worker().await?;
    let first = put(&platform, &tenant, "messages", true).await?;
    let lsn = first.body["active_since_lsn"].clone();
    assert_eq!(first.body["drift"], false);
    platform.sql(&format!("alter table \"{}\".messages replica identity default", tenant.schema)).await?;
    let drifted = get(&platform, &tenant, "messages").await?;
    assert_eq!((&drifted.body["drift"], &drifted.body["replica_identity"]), (&json!(true), &json!("default")));
    assert_eq!(drifted.header("etag"), first.header("etag"), "nobody changed the desired state");
    let repaired = put(&platform, &tenant, "messages", true).await?;
    assert_eq!((repaired.status, &repaired.body["drift"]), (StatusCode::OK, &json!(false)));
    assert_eq!(repaired.body["active_since_lsn"], lsn, "a repair doesn't move it");
    assert_eq!(platform.replica_identity(&tenant, "messages").await?, 'f');
    assert_eq!(platform.audited(&tenant, "table.repair").await?, 1);
    assert_eq!(platform.audited(&tenant, "table.enable").await?, 1);
    platform.stop().await
}

#[tokio::test]
async fn r_reg_2_a_table_created_again_is_missing_until_it_is_enabled_again() -> Result<()> {
    let (platform, tenant) = start("messages").await?;
    platform.play_worker().await?;
    put(&platform, &tenant, "messages", true).await?;
    platform.sql(&format!("drop table \"{}\".messages", tenant.schema)).await?;
    let dropped = get(&platform, &tenant, "messages").await?;
    assert_eq!((&dropped.body["status"], &dropped.body["replica_identity"]), (&json!("missing"), &Value::Null));
    platform.sql(&format!("create table \"{}\".messages (id int)", tenant.schema)).await?;
    assert_eq!(get(&platform, &tenant, "messages").await?.body["status"], "missing");
    let again = put(&platform, &tenant, "messages", true).await?;
    assert_eq!((again.status, &again.body["status"]), (StatusCode::OK, &json!("active")));
    platform.sql(&format!("drop table \"{}\".messages", tenant.schema)).await?;
    assert_eq!(put(&platform, &tenant, "messages", true).await?.code(), "table_not_found");
    assert_eq!(put(&platform, &tenant, "messages", false).await?.status, StatusCode::OK, "off works without the table");
    platform.stop().await
}

#[tokio::test]
async fn r_reg_5_any_legal_name_toggles() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    platform.play_worker().await?;
    let long = "x".repeat(63);
    for name in ["Orders", "we,ird. t'b*l", "quo\"te", "back\\slash", "select", &long, "🦀 crab", "a/b?c#d%20"] {
        let quoted = name.replace('"', "\"\"");
        platform.sql(&format!("create table \"{}\".\"{quoted}\" (id int primary key)", tenant.schema)).await?;
        let on = put(&platform, &tenant, name, true).await?;
        assert_eq!((on.status, on.body["table"].as_str()), (StatusCode::OK, Some(name)), "{}", on.body);
        assert_eq!(platform.replica_identity(&tenant, name).await?, 'f', "{name}");
        assert_eq!(put(&platform, &tenant, name, false).await?.status, StatusCode::OK, "{name}");
        assert_eq!(platform.replica_identity(&tenant, name).await?, 'd', "{name}");
    }
    let unknown = put(&platform, &tenant, "orders", true).await?;
    assert_eq!(unknown.code(), "table_not_found", "names are case-sensitive");
    let detail = unknown.body["detail"].as_str().unwrap_or_default();
    assert!(detail.contains(&tenant.schema.to_string()), "it names the schema where it looked: {detail}");
    assert_eq!(put(&platform, &tenant, &"x".repeat(64), true).await?.code(), "invalid_name");
    assert_eq!(put(&platform, &tenant, "a\0b", true).await?.code(), "invalid_name");
    let path = format!("/v1/db/{}/schema/tables/%FF/realtime", tenant.id);
    let reply = platform.call(Method::PUT, &path).key(&tenant.service).json(&json!({"enabled": true})).send().await?;
    assert_eq!((reply.status, reply.code()), (StatusCode::BAD_REQUEST, "malformed_request"));
    platform.stop().await
}

#[tokio::test]
async fn r_reg_4_what_has_no_change_stream_is_422() -> Result<()> {
    let (platform, tenant) = start("messages").await?;
    let sql = "create view s.v as select 1; create materialized view s.m as select 1; create unlogged table s.u (i int);
        create foreign data wrapper w; create server f foreign data wrapper w; create foreign table s.ft (i int) server f";
    platform.sql(&sql.replace("s.", &format!("\"{}\".", tenant.schema))).await?;
    let cases = [
        ("v", "view_not_supported"),
        ("m", "view_not_supported"),
        ("u", "unlogged_table_not_supported"),
        ("ft", "foreign_table_not_supported"),
    ];
    for (table, code) in cases {
        let reply = put(&platform, &tenant, table, true).await?;
        assert_eq!((reply.status, reply.code()), (StatusCode::UNPROCESSABLE_ENTITY, code), "{table}");
    }
    for (schema, status, code) in [
        ("pg_catalog", StatusCode::UNPROCESSABLE_ENTITY, "system_schema_not_supported"),
        ("auth", StatusCode::UNPROCESSABLE_ENTITY, "system_schema_not_supported"),
        ("nowhere", StatusCode::NOT_FOUND, "schema_not_found"),
    ] {
        let path = format!("{}?schema={schema}", toggle(&tenant, "messages"));
        let reply =
            platform.call(Method::PUT, &path).key(&tenant.service).json(&json!({"enabled": true})).send().await?;
        assert_eq!((reply.status, reply.code()), (status, code), "{schema}");
    }
    assert!(platform.store.registry(platform.source.id).await?.registrations.is_empty(), "no intent was written");
    platform.stop().await
}

#[tokio::test]
async fn bodies_and_queries_are_checked_before_anything_runs() -> Result<()> {
    let (platform, tenant) = start("messages").await?;
    let path = toggle(&tenant, "messages");
    let bodies = [
        ("application/json", "{\"enabled\": true, \"x\": 1}", StatusCode::UNPROCESSABLE_ENTITY, "invalid_body"),
        ("application/json", "[true]", StatusCode::UNPROCESSABLE_ENTITY, "invalid_body"),
        ("application/json", "{\"enabled\": \"yes\"}", StatusCode::UNPROCESSABLE_ENTITY, "invalid_body"),
        ("application/json", "{}", StatusCode::UNPROCESSABLE_ENTITY, "invalid_body"),
        ("application/json", "{\"enabled\":", StatusCode::BAD_REQUEST, "malformed_request"),
        ("text/plain", "{\"enabled\": true}", StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type"),
    ];
    for (content_type, body, status, code) in bodies {
        let reply = platform.call(Method::PUT, &path).key(&tenant.service).text(content_type, body).send().await?;
        assert_eq!((reply.status, reply.code()), (status, code), "{body}");
        assert!(reply.body["request_id"].is_string() && reply.body["retryable"].is_boolean());
    }
    let huge = format!("{{\"enabled\": true, \"x\": \"{}\"}}", "x".repeat(2 << 20));
    let reply = platform.call(Method::PUT, &path).key(&tenant.service).text("application/json", &huge).send().await?;
    assert_eq!(reply.status, StatusCode::PAYLOAD_TOO_LARGE);
    let reply = platform.call(Method::PUT, &format!("{path}?dryrun=true")).key(&tenant.service);
    assert_eq!(reply.json(&json!({"enabled": true})).send().await?.code(), "malformed_request");
    assert_eq!(platform.replica_identity(&tenant, "messages").await?, 'd');
    platform.stop().await
}

#[tokio::test]
async fn if_match_names_the_version_that_a_change_is_based_on() -> Result<()> {
    let (platform, tenant) = start("messages").await?;
    platform.play_worker().await?;
    let off = get(&platform, &tenant, "messages").await?.header("etag").to_owned();
    let put_if = |etag: String, enabled: bool| {
        let call = platform.call(Method::PUT, &toggle(&tenant, "messages")).key(&tenant.service);
        call.header("if-match", &etag).json(&json!({"enabled": enabled})).send()
    };
    let refused = put_if("\"other\"".to_owned(), true).await?;
    assert_eq!((refused.status, refused.code()), (StatusCode::PRECONDITION_FAILED, "precondition_failed"));
    assert_eq!(put_if("*".to_owned(), true).await?.status, StatusCode::PRECONDITION_FAILED, "nothing exists yet");
    assert_eq!(platform.replica_identity(&tenant, "messages").await?, 'd');
    let on = put_if(off.clone(), true).await?;
    assert_eq!(on.status, StatusCode::OK);
    assert_eq!(put_if(off, false).await?.status, StatusCode::PRECONDITION_FAILED, "somebody else was faster");
    assert_eq!(put_if(on.header("etag").to_owned(), false).await?.status, StatusCode::OK);
    platform.stop().await
}

#[tokio::test]
async fn a_dry_run_shows_the_plan_and_does_nothing() -> Result<()> {
    let (platform, tenant) = start("messages").await?;
    let path = format!("{}?dry_run=true", toggle(&tenant, "messages"));
    let dry = |enabled: bool| {
        platform.call(Method::PUT, &path).key(&tenant.service).json(&json!({"enabled": enabled})).send()
    };
    let plan = dry(true).await?;
    assert_eq!((plan.status, plan.body["plan"].as_array().unwrap().len()), (StatusCode::OK, 2), "{}", plan.body);
    assert!(plan.body["plan"][1].as_str().unwrap().contains("REPLICA IDENTITY FULL"));
    assert_eq!(platform.replica_identity(&tenant, "messages").await?, 'd');
    assert!(platform.store.registry(platform.source.id).await?.registrations.is_empty());
    platform.play_worker().await?;
    put(&platform, &tenant, "messages", true).await?;
    assert_eq!(dry(true).await?.body["plan"], json!([]), "nothing left to do");
    assert_eq!(dry(false).await?.body["plan"].as_array().unwrap().len(), 2);
    assert_eq!(platform.replica_identity(&tenant, "messages").await?, 'f');
    platform.stop().await
}

#[tokio::test]
async fn r_reg_7_warnings_name_what_to_look_at() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    let wide: String = (0..60).map(|n| format!(", c{n} int")).collect();
    let sql = format!("create table s.bare (i int{wide}); alter table s.bare enable row level security");
    platform.sql(&sql.replace("s.", &format!("\"{}\".", tenant.schema))).await?;
    let reply = get(&platform, &tenant, "bare").await?;
    let codes: Vec<_> =
        reply.body["warnings"].as_array().unwrap().iter().map(|warning| warning["code"].clone()).collect();
    assert_eq!(codes, ["rls_without_policy", "no_primary_key", "write_amplification"]);
    platform.stop().await
}

#[tokio::test]
async fn r_reg_7_policies_that_let_nobody_see_a_row_are_told_apart() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    let sql = "create table s.t (id int primary key, filler text); alter table s.t enable row level security;
        create policy less on s.t as restrictive for select using (id > 0)";
    platform.sql(&sql.replace("s.", &format!("\"{}\".", tenant.schema))).await?;
    let codes = async || {
        let reply = get(&platform, &tenant, "t").await?;
        let warnings = reply.body["warnings"].as_array().cloned().unwrap_or_default();
        let word = |warning: &Value| warning["code"].as_str().unwrap_or_default().to_owned();
        anyhow::Ok(warnings.iter().map(word).collect::<Vec<_>>())
    };
    assert_eq!(codes().await?, ["rls_only_restrictive"]);
    let others = "create role editors; create policy more on s.t for select to editors using (true)";
    platform.sql(&others.replace("s.t", &format!("\"{}\".t", tenant.schema))).await?;
    assert_eq!(codes().await?, ["policies_for_other_roles"]);
    let ours = "alter policy more on s.t to aura_authenticated;
        insert into s.t select n, (select string_agg(md5(i::text), '') from generate_series(1, 45) i)
            from generate_series(1, 100) n; analyze s.t";
    platform.sql(&ours.replace("s.t", &format!("\"{}\".t", tenant.schema))).await?;
    assert_eq!(codes().await?, ["write_amplification"]);
    platform.stop().await
}

#[tokio::test]
async fn r_reg_7_a_project_may_refuse_tables_without_row_security() -> Result<()> {
    let (platform, tenant) = start("messages").await?;
    platform.play_worker().await?;
    let admin = platform.postgres.client("platform").await?;
    admin.batch_execute("update aura.projects set settings = '{\"require_rls\": true}'").await?;
    let refused = put(&platform, &tenant, "messages", true).await?;
    assert_eq!((refused.status, refused.code()), (StatusCode::CONFLICT, "row_security_required"), "{}", refused.body);
    assert_eq!(platform.replica_identity(&tenant, "messages").await?, 'd');
    let secure = format!("alter table \"{}\".messages enable row level security", tenant.schema);
    platform.sql(&secure).await?;
    assert_eq!(put(&platform, &tenant, "messages", true).await?.status, StatusCode::OK);
    platform.stop().await
}

/// Which tables are on, in one call: 500 of them, 30 on, one of these gone.
#[tokio::test]
async fn case_19_the_list_says_which_tables_are_on_and_how_they_are() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    let tables: String = (0..500).map(|n| format!("create table s.t{n:03} (id int primary key);")).collect();
    platform.sql(&tables.replace("s.", &format!("\"{}\".", tenant.schema))).await?;
    let on: Vec<_> = (0..30).map(|n| format!("t{:03}", n * 16)).collect();
    platform.play_worker().await?;
    for table in &on {
        assert_eq!(put(&platform, &tenant, table, true).await?.status, StatusCode::OK);
    }
    let Some(engine) = platform.store.engine(platform.source.id).await? else { anyhow::bail!("no engine") };
    let first = platform.store.registry(platform.source.id).await?.registrations[0].clone();
    platform.store.saw_events(platform.source.id, engine.epoch, &[(first.id, 86_400.0)]).await?;
    let drop =
        format!("drop table \"{0}\".t016; drop table \"{0}\".t032; create table \"{0}\".t032 (id int)", tenant.schema);
    platform.sql(&drop).await?;
    let list = |query: &str| {
        let path = format!("/v1/db/{}/schema/tables?{query}", tenant.id);
        platform.call(Method::GET, &path).key(&tenant.service).send()
    };
    let enabled = list("enabled=true").await?;
    let items = enabled.body["items"].as_array().cloned().unwrap_or_default();
    let names: Vec<_> = items.iter().filter_map(|item| item["table"].as_str()).collect();
    assert_eq!((names, &enabled.body["next_cursor"]), (on.iter().map(String::as_str).collect(), &Value::Null));
    let statuses: Vec<_> = items[..4].iter().map(|item| item["status"].as_str().unwrap_or_default()).collect();
    assert_eq!(statuses, ["active", "missing", "missing", "active"], "one is gone, one is another table now");
    assert_eq!(items[0]["last_event_at"], "1970-01-02T00:00:00.000000Z");
    assert!(items.iter().all(|item| item.get("lag").is_some()), "{}", items[0]);
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = list(&format!("limit=37{cursor}")).await?;
        let items = page.body["items"].as_array().cloned().unwrap_or_default();
        seen.extend(items.iter().filter_map(|item| item["table"].as_str().map(str::to_owned)));
        let Some(next) = page.body["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!(seen, (0..500).map(|n| format!("t{n:03}")).collect::<Vec<_>>(), "each once, what is gone in its place");
    platform.stop().await
}

#[tokio::test]
async fn r_rls_4_a_policy_that_can_t_be_judged_on_the_log_is_warned_of() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    let schema = format!("\"{}\"", tenant.schema);
    let sql = "set search_path = SCHEMA; create table guarded (id int primary key, double int generated always as (2 * id) stored);
         alter table guarded enable row level security; create sequence counter;
         create function noted() returns bool language plpgsql as 'begin insert into guarded values (1); return true; end';
         create function looked() returns bool language plpgsql as 'begin return true; end';
         create policy a_system on guarded for select using (ctid is not null);
         create policy b_counts on guarded for select using (nextval('counter') > 0);
         create policy c_notes on guarded using (noted());
         create policy d_looks on guarded for select using (looked() and id > 0);
         create policy e_doubles on guarded for select using (double > 2);
         create policy f_checks on guarded for insert with check (ctid is not null)";
    platform.sql(&sql.replace("SCHEMA", &schema)).await?;
    platform.play_worker().await?;
    let warned = async || {
        let reply = put(&platform, &tenant, "guarded", true).await?;
        let warnings = reply.body["warnings"].as_array().cloned().unwrap_or_default();
        let policies = warnings.iter().filter(|warning| warning["code"] == "policy_not_judgeable");
        let messages: Vec<_> =
            policies.map(|warning| warning["message"].as_str().unwrap_or_default().to_owned()).collect();
        let codes: Vec<_> =
            warnings.iter().map(|warning| warning["code"].as_str().unwrap_or_default().to_owned()).collect();
        anyhow::Ok((codes, messages))
    };
    let named = |messages: &[String]| {
        let names: Vec<_> = messages.iter().filter_map(|text| text.split('"').nth(1).map(str::to_owned)).collect();
        names
    };
    let (codes, messages) = warned().await?;
    assert_eq!(named(&messages), ["a_system", "b_counts", "c_notes"], "{messages:?}");
    assert!(messages[0].contains("system column") && messages[1].contains("may write"), "{messages:?}");
    assert!(!codes.contains(&"no_select_privilege".to_owned()), "{codes:?}");
    // With pgoutput the log has no generated column.
    platform.sql("select pg_create_logical_replication_slot('aura_cdc_slot', 'pgoutput')").await?;
    assert_eq!(named(&warned().await?.1), ["a_system", "b_counts", "c_notes", "e_doubles"]);
    platform.sql("select pg_drop_replication_slot('aura_cdc_slot')").await?;
    // Nobody but the back end may read it.
    let revoke = "revoke select on SCHEMA.guarded from public, aura_anon, aura_authenticated, \"p_ID_anon\", \"p_ID_authenticated\"";
    platform.sql(&revoke.replace("SCHEMA", &schema).replace("ID", &tenant.id.to_string())).await?;
    let (codes, _) = warned().await?;
    assert!(codes.contains(&"no_select_privilege".to_owned()), "{codes:?}");
    platform.stop().await
}

#[tokio::test]
async fn the_list_shows_all_tables_by_page_and_filter() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    platform.play_worker().await?;
    for table in ["a", "b", "c", "Messages", "view_of"] {
        platform.sql(&format!("create table \"{}\".\"{table}\" (id int primary key)", tenant.schema)).await?;
    }
    put(&platform, &tenant, "b", true).await?;
    let list = |query: &str| {
        let path = format!("/v1/db/{}/schema/tables?{query}", tenant.id);
        platform.call(Method::GET, &path).key(&tenant.service).send()
    };
    let names = |reply: &Reply| {
        let items = reply.body["items"].as_array().cloned().unwrap_or_default();
        items.iter().map(|item| item["table"].as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>()
    };
    let all = list("").await?;
    assert_eq!(names(&all), ["Messages", "a", "b", "c", "view_of"], "{}", all.body);
    assert_eq!((&all.body["next_cursor"], &all.body["items"][2]["status"]), (&Value::Null, &json!("active")));
    assert_eq!(names(&list("enabled=true").await?), ["b"]);
    assert_eq!(names(&list("q=ESS").await?), ["Messages"]);
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = list(&format!("enabled=false&limit=2{cursor}")).await?;
        seen.extend(names(&page));
        let Some(next) = page.body["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!(seen, ["Messages", "a", "c", "view_of"]);
    assert_eq!(list("schema=nowhere").await?.code(), "schema_not_found");
    platform.stop().await
}
