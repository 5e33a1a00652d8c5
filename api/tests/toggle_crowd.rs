//! Many toggles at once, and those who only read.

use std::time::{Duration, Instant};

use anyhow::Result;
use aura_domain::SqlName;
use aura_store::{Registration, TableRef};
use aura_testkit::eventually;
use axum::http::{Method, StatusCode};
use futures_util::future::try_join_all;
use serde_json::json;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::harness::{Platform, SOON, Tenant, toggle};

async fn registration(platform: &Platform, tenant: &Tenant, table: &str) -> Result<Option<Registration>> {
    let (schema, table) = (SqlName::new(tenant.schema.as_str())?, SqlName::new(table)?);
    Ok(platform.store.registration(TableRef { project: tenant.id, schema: &schema, table: &table }).await?)
}

#[tokio::test(flavor = "multi_thread")]
async fn r_reg_1_50_puts_on_different_tables_at_once_are_all_on() -> Result<()> {
    let platform = Platform::start_without_superuser().await?;
    let tenant = platform.tenant("demo").await?;
    platform.play_worker().await?;
    let tables: Vec<_> = (0..50).map(|n| format!("t{n}")).collect();
    let create = |table: &String| {
        format!("create table s.{table} (id int primary key); alter table s.{table} owner to aura_admin;")
    };
    let sql: String = tables.iter().map(create).collect();
    platform.sql(&sql.replace("s.", &format!("\"{}\".", tenant.schema))).await?;
    let put = |table: &String| {
        let call = platform.call(Method::PUT, &toggle(&tenant, table)).key(&tenant.service);
        call.header("prefer", "wait=20").json(&json!({"enabled": true})).send()
    };
    for reply in try_join_all(tables.iter().map(put)).await? {
        assert_eq!((reply.status, &reply.body["status"]), (StatusCode::OK, &json!("active")), "{}", reply.body);
    }
    for table in &tables {
        assert_eq!(platform.replica_identity(&tenant, table).await?, 'f', "{table}");
    }
    assert_eq!(platform.audited(&tenant, "table.enable").await?, 50);
    let registry = platform.store.registry(platform.source.id).await?;
    assert!(registry.registrations.iter().all(|known| known.enabled && known.identity_set));
    assert_eq!(registry.registrations.len(), 50);
    platform.stop().await
}

/// The slowest of the reads of a table, one after the other until `stop`; a task of its own, so that it measures no other's.
async fn slowest_read(
    platform: &Platform,
    table: String,
    stop: &CancellationToken,
) -> Result<JoinHandle<Result<Duration>>> {
    let (reader, stop) = (platform.postgres.client("app").await?, stop.clone());
    let sql = format!("select count(*) from {table}");
    Ok(tokio::spawn(async move {
        let mut slowest = Duration::ZERO;
        while !stop.is_cancelled() {
            let began = Instant::now();
            reader.batch_execute(&sql).await?;
            slowest = slowest.max(began.elapsed());
        }
        Ok(slowest)
    }))
}

/// An ALTER that waits for a long reader makes everybody behind it wait: for 200 ms at most. Readers of another table show
/// how much of what is measured is the machine's.
#[tokio::test(flavor = "multi_thread")]
async fn n_25_readers_are_never_blocked_for_longer_than_the_lock_time_out() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    platform.play_worker().await?;
    let table = |name: &str| format!("\"{}\".{name}", tenant.schema);
    platform.sql(&format!("create table {} (id int); create table {} (id int)", table("t"), table("other"))).await?;
    let long = platform.postgres.client("app").await?;
    long.batch_execute(&format!("begin; select * from {}", table("t"))).await?;
    // Connecting costs a debug build a second of computing, which is nobody's wait for a lock.
    platform.call(Method::GET, &toggle(&tenant, "t")).key(&tenant.service).send().await?;
    let stop = CancellationToken::new();
    let behind = slowest_read(&platform, table("t"), &stop).await?;
    let beside = slowest_read(&platform, table("other"), &stop).await?;
    let put = platform.call(Method::PUT, &toggle(&tenant, "t")).key(&tenant.service);
    let reply = put.json(&json!({"enabled": true})).send().await?;
    stop.cancel();
    let (behind, beside) = (behind.await??, beside.await??);
    assert_eq!((reply.status, reply.code()), (StatusCode::SERVICE_UNAVAILABLE, "lock_timeout"), "{}", reply.body);
    eprintln!("slowest read behind an ALTER that waits: {behind:?}; of another table: {beside:?}");
    assert!(behind > Duration::from_millis(100), "no ALTER was waited for: {behind:?}");
    assert!(behind < Duration::from_millis(200 + 150) + 2 * beside, "{behind:?}, of another table {beside:?}");
    long.batch_execute("rollback").await?;
    platform.stop().await
}

/// Two processes, one table: whoever turns it off while the other's ALTER waits for its lock has the last word.
#[tokio::test(flavor = "multi_thread")]
async fn r_reg_1_an_alter_that_comes_after_another_process_disabled_is_taken_back() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    platform.sql(&format!("create table \"{}\".t (id int primary key)", tenant.schema)).await?;
    platform.play_worker().await?;
    let beside = platform.another_instance();
    let reader = platform.postgres.client("app").await?;
    reader.batch_execute(&format!("begin; select * from \"{}\".t", tenant.schema)).await?;
    let path = toggle(&tenant, "t");
    let on = platform.call(Method::PUT, &path).key(&tenant.service).json(&json!({"enabled": true})).send();
    let off = async {
        let intent = || async { registration(&platform, &tenant, "t").await.is_ok_and(|known| known.is_some()) };
        Box::pin(eventually(SOON, intent)).await?;
        let off = Platform::call_other(&beside, Method::DELETE, &path).key(&tenant.service).send().await?;
        assert_eq!((off.status, &off.body["enabled"]), (StatusCode::OK, &json!(false)), "{}", off.body);
        reader.batch_execute("rollback").await?;
        anyhow::Ok(())
    };
    let (on, off) = tokio::join!(on, off);
    off?;
    let on = on?;
    assert_eq!((on.status, on.code()), (StatusCode::CONFLICT, "concurrent_change"), "{}", on.body);
    assert_eq!(platform.replica_identity(&tenant, "t").await?, 'd');
    assert!(registration(&platform, &tenant, "t").await?.is_some_and(|known| !known.enabled));
    beside.stop().await?;
    platform.stop().await
}
