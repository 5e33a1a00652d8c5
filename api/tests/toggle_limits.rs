//! The toggle under locks, crowds and crashes.

use std::time::{Duration, Instant};

use anyhow::Result;
use aura_store::{NewRegistration, RegistrationMode, RegistrationStatus, ReplicaIdentity, TableRef};
use aura_testkit::eventually;
use axum::http::{Method, StatusCode};
use futures_util::future::join_all;
use serde_json::json;

use crate::harness::{Platform, Reply, SOON, Tenant, toggle};

async fn start() -> Result<(Platform, Tenant)> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    platform.sql(&format!("create table \"{}\".t (id int primary key)", tenant.schema)).await?;
    Ok((platform, tenant))
}

async fn put(platform: &Platform, tenant: &Tenant, enabled: bool) -> Result<Reply> {
    let call = platform.call(Method::PUT, &toggle(tenant, "t")).key(&tenant.service);
    call.json(&json!({"enabled": enabled})).send().await
}

#[tokio::test]
async fn r_reg_3_a_lock_is_waited_for_3_s_and_its_holder_named() -> Result<()> {
    let (platform, tenant) = start().await?;
    platform.play_worker().await?;
    let reader = platform.postgres.client("app").await?;
    reader.batch_execute(&format!("begin; select * from \"{}\".t", tenant.schema)).await?;
    let pid: i32 = reader.query_one("select pg_backend_pid()", &[]).await?.get(0);
    let started = Instant::now();
    // A crowd: who queued behind the ALTER that gave up doesn't wait for 3 s of its own.
    let crowd = join_all((0..20).map(|_| put(&platform, &tenant, true))).await;
    let took = started.elapsed();
    // Twenty waits of 3 s in a row would be a minute; a loaded machine needs some of the rest.
    assert!((Duration::from_secs(3)..Duration::from_secs(15)).contains(&took), "{took:?}");
    for reply in crowd {
        let reply = reply?;
        assert_eq!((reply.status, reply.code()), (StatusCode::SERVICE_UNAVAILABLE, "lock_timeout"));
        assert_eq!((&reply.body["blocking_pid"], &reply.body["retryable"]), (&json!(pid), &json!(true)));
        assert_eq!(reply.header("retry-after"), "1");
    }
    let shown = platform.call(Method::GET, &toggle(&tenant, "t")).key(&tenant.service).send().await?;
    assert_eq!((&shown.body["status"], &shown.body["enabled"]), (&json!("pending"), &json!(true)), "never half active");
    reader.batch_execute("rollback").await?;
    assert_eq!(put(&platform, &tenant, true).await?.status, StatusCode::OK);
    platform.stop().await
}

#[tokio::test]
async fn a_locked_table_is_disabled_all_the_same() -> Result<()> {
    let (platform, tenant) = start().await?;
    platform.play_worker().await?;
    put(&platform, &tenant, true).await?;
    let reader = platform.postgres.client("app").await?;
    reader.batch_execute(&format!("begin; select * from \"{}\".t", tenant.schema)).await?;
    let off = put(&platform, &tenant, false).await?;
    assert_eq!((off.status, &off.body["enabled"]), (StatusCode::OK, &json!(false)));
    let codes: Vec<_> =
        off.body["warnings"].as_array().unwrap().iter().map(|warning| warning["code"].clone()).collect();
    assert!(codes.contains(&json!("identity_not_restored")), "{codes:?}");
    reader.batch_execute("rollback").await?;
    put(&platform, &tenant, false).await?;
    assert_eq!(platform.replica_identity(&tenant, "t").await?, 'd');
    platform.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn r_reg_1_200_parallel_puts_cause_one_alter() -> Result<()> {
    let (platform, tenant) = start().await?;
    platform.play_worker().await?;
    platform
        .sql(
            "create table public.alters (at timestamptz);
             create function public.count_alter() returns event_trigger language plpgsql security definer as
                 $$ begin insert into public.alters values (now()); end $$;
             create event trigger count_alter on ddl_command_end when tag in ('ALTER TABLE')
                 execute function public.count_alter()",
        )
        .await?;
    let crowd = join_all((0..200).map(|_| put(&platform, &tenant, true))).await;
    for reply in crowd {
        let reply = reply?;
        assert_eq!((reply.status, &reply.body["status"]), (StatusCode::OK, &json!("active")), "{}", reply.body);
    }
    let client = platform.postgres.client("app").await?;
    let alters: i64 = client.query_one("select count(*) from public.alters", &[]).await?.get(0);
    assert_eq!(alters, 1);
    assert_eq!(platform.audited(&tenant, "table.enable").await?, 1);
    platform.stop().await
}

#[tokio::test]
async fn r_reg_3_the_reconciler_finishes_what_a_crash_left_before_the_alter() -> Result<()> {
    let (platform, tenant) = start().await?;
    let client = platform.postgres.client("app").await?;
    let oid = "select c.oid::int8 from pg_class c join pg_namespace n on n.oid = relnamespace
        where nspname = $1 and relname = 't'";
    let oid: i64 = client.query_one(oid, &[&tenant.schema]).await?.get(0);
    let (schema, table) = (aura_domain::SqlName::new(tenant.schema.as_str())?, aura_domain::SqlName::new("t")?);
    let intent = NewRegistration {
        table: TableRef { project: tenant.id, schema: &schema, table: &table },
        source: platform.source.id,
        oid: u32::try_from(oid)?,
        mode: RegistrationMode::Auto,
        identity: Some(&ReplicaIdentity { kind: 'd', index: None }),
        partitions: &[],
        actor: "a process that crashed",
        request_id: None,
    };
    let known = platform.store.enable_table(intent).await?;
    assert!(!known.identity_set && known.status == RegistrationStatus::Pending);
    let finished = || async {
        let latest = platform.store.registration_by_id(known.id).await;
        latest.is_ok_and(|latest| latest.is_some_and(|latest| latest.identity_set && latest.enabled_at_lsn.is_some()))
    };
    Box::pin(eventually(2 * SOON, finished)).await?;
    assert_eq!(platform.replica_identity(&tenant, "t").await?, 'f');
    platform.stop().await
}

#[tokio::test]
async fn an_unreachable_source_is_503_and_says_nothing_about_it() -> Result<()> {
    let (platform, tenant) = start().await?;
    let client = platform.postgres.client("postgres").await?;
    client.batch_execute("alter database app rename to gone").await.or_else(|_| anyhow::Ok(()))?;
    client
        .batch_execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = 'app'; alter database app rename to gone")
        .await?;
    let reply = put(&platform, &tenant, true).await?;
    assert!(reply.status.is_server_error(), "{}", reply.status);
    assert!(!reply.body.to_string().contains("app"), "{}", reply.body);
    platform.stop().await
}

#[tokio::test]
async fn r_reg_4_without_superuser_own_tables_toggle_and_others_name_the_sql_for_their_owner() -> Result<()> {
    let platform = Platform::start_without_superuser().await?;
    platform.play_worker().await?;
    let tenant = platform.tenant("demo").await?;
    let foreign = "create role somebody; create table s.t (id int primary key); alter table s.t owner to somebody;
        create table s.ours (id int); alter table s.ours owner to aura_admin";
    platform.sql(&foreign.replace("s.", &format!("\"{}\".", tenant.schema))).await?;
    let refused = put(&platform, &tenant, true).await?;
    assert_eq!((refused.status, refused.code()), (StatusCode::CONFLICT, "not_table_owner"), "{}", refused.body);
    assert!(platform.store.registry(platform.source.id).await?.registrations.is_empty(), "no intent was written");
    platform.sql(refused.body["sql"].as_str().unwrap()).await?;
    assert_eq!(put(&platform, &tenant, true).await?.status, StatusCode::OK, "what is FULL needs no ALTER");
    assert_eq!(put(&platform, &tenant, false).await?.status, StatusCode::OK);
    assert_eq!(platform.replica_identity(&tenant, "t").await?, 'f', "it was FULL before us");
    let ours = platform.call(Method::PUT, &toggle(&tenant, "ours")).key(&tenant.service);
    assert_eq!(ours.json(&json!({"enabled": true})).send().await?.status, StatusCode::OK);
    assert_eq!(platform.replica_identity(&tenant, "ours").await?, 'f');
    platform.stop().await
}
