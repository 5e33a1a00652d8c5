//! Nothing committed is lost: not while a table is made live under load, not when the worker is killed.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicI64, Ordering},
    time::Duration,
};

use anyhow::{Context, Result};
use aura_testkit::eventually;
use serde_json::{Value, json};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_postgres::Client as Sql;
use tokio_util::sync::CancellationToken;

use system_tests::{Client, Dev, Kind, Ledger, PATIENCE, Scene, Split, SplitOptions, Subscriber};

/// Inserts at a rate until stopped; `committed` is the last id whose commit was answered.
async fn write(sql: Sql, table: &str, per_second: u32, committed: &AtomicI64, stop: CancellationToken) -> Result<()> {
    let statement = sql.prepare(&format!("insert into {table} (id) values ($1)")).await?;
    let mut ticks = interval(Duration::from_secs(1) / per_second);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for id in 1_i64.. {
        if stop.run_until_cancelled(ticks.tick()).await.is_none() {
            break;
        }
        sql.execute(&statement, &[&id]).await?;
        committed.store(id, Ordering::SeqCst);
    }
    Ok(())
}

fn ids(changes: &[Value]) -> Vec<i64> {
    changes.iter().filter_map(|change| change["new"]["id"].as_i64()).collect()
}

#[tokio::test]
async fn p3_09_r_hole_2_no_row_is_missing_after_the_answer_of_a_put_under_load() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    let project = dev.demo()?;
    let sql = project.sql().await?;
    sql.batch_execute("create table events (id bigint primary key)").await?;
    let client = Client::anon(Kind::ANY, &project).await?;
    // Subscribed before the table is live: the rows in question are those from the answer on.
    let topic = client.join(vec![json!({"event": "INSERT", "schema": "public", "table": "events"})])?;
    topic.status("SUBSCRIBED").await?;
    let (committed, stop) = (AtomicI64::new(0), CancellationToken::new());
    let toggling = async {
        eventually(PATIENCE, || async { committed.load(Ordering::SeqCst) > 200 }).await?;
        project.enable("events").await?;
        topic.system("ok").await?;
        let first = committed.load(Ordering::SeqCst) + 1;
        eventually(PATIENCE, || async { committed.load(Ordering::SeqCst) > first + 1000 }).await?;
        stop.cancel();
        Ok::<_, anyhow::Error>(first)
    };
    let (first, ()) = tokio::try_join!(toggling, write(project.sql().await?, "events", 500, &committed, stop.clone()))?;
    let last = committed.load(Ordering::SeqCst);
    eventually(PATIENCE, || async { ids(&topic.changes()).contains(&last) }).await?;
    let seen: BTreeSet<i64> = ids(&topic.changes()).into_iter().collect();
    let missing: Vec<i64> = (first..=last).filter(|id| !seen.contains(id)).collect();
    assert!(missing.is_empty(), "from {first} to {last}: {missing:?}");
    Ok(())
}

/// R-FRT-4: the worker publishes only when the front has its subscriptions again, or its clients would miss the first rows.
#[tokio::test]
async fn g1_rows_committed_while_the_bus_is_down_come_when_it_is_back() -> Result<()> {
    let mut split = Split::start().await?;
    let project = split.project("tenant").await?;
    let sql = project.sql().await?;
    sql.batch_execute("create table events (id bigint primary key)").await?;
    project.enable("events").await?;
    let client = Client::anon(Kind::ANY, &project).await?;
    let topic = client.subscribe(json!({"event": "INSERT", "schema": "public", "table": "events"})).await?;
    sql.batch_execute("insert into events values (1)").await?;
    topic.change("INSERT", &json!({"id": 1})).await?;
    split.nats.kill().await?;
    sql.batch_execute("insert into events select generate_series(2, 500)").await?;
    split.nats.start_again().await?;
    let arrived = eventually(PATIENCE, || async { ids(&topic.changes()).contains(&500) }).await;
    arrived.map_err(|error| error.context(split.logs()))?;
    let seen: BTreeSet<i64> = ids(&topic.changes()).into_iter().collect();
    assert_eq!(seen.len(), 500);
    Ok(())
}

#[tokio::test]
async fn a_table_is_toggled_while_the_bus_is_down() -> Result<()> {
    let mut split = Split::start().await?;
    let project = split.project("tenant").await?;
    let sql = project.sql().await?;
    sql.batch_execute("create table quiet (id bigint primary key)").await?;
    split.nats.kill().await?;
    let answer = project.put("quiet", true).await?;
    assert!(matches!(answer.status, 200 | 202), "{}", answer.body);
    let identity = "select relreplident::text from pg_class where oid = 'quiet'::regclass";
    assert_eq!(sql.query_one(identity, &[]).await?.get::<_, String>(0), "f");
    Ok(())
}

#[tokio::test]
async fn g1_a_killed_worker_loses_no_committed_row_and_keeps_their_order() -> Result<()> {
    let mut split = Split::start().await?;
    let project = split.project("tenant").await?;
    let sql = project.sql().await?;
    sql.batch_execute("create table events (id bigint primary key)").await?;
    project.enable("events").await?;
    let client = Client::anon(Kind::ANY, &project).await?;
    let topic = client.subscribe(json!({"event": "INSERT", "schema": "public", "table": "events"})).await?;
    let (committed, stop) = (AtomicI64::new(0), CancellationToken::new());
    let killing = async {
        for round in 1..=3 {
            eventually(PATIENCE, || async { committed.load(Ordering::SeqCst) > round * 300 }).await?;
            split.worker.process.kill().await?;
            split.start_worker()?;
            split.wait_until_streaming().await?;
        }
        stop.cancel();
        Ok::<_, anyhow::Error>(())
    };
    tokio::try_join!(killing, write(project.sql().await?, "events", 500, &committed, stop.clone()))?;
    let last = committed.load(Ordering::SeqCst);
    let until = Instant::now() + PATIENCE;
    eventually(until - Instant::now(), || async { ids(&topic.changes()).contains(&last) })
        .await
        .map_err(|error| error.context(split.logs()))?;
    let seen = ids(&topic.changes());
    let set: BTreeSet<i64> = seen.iter().copied().collect();
    let missing: Vec<i64> = (1..=last).filter(|id| !set.contains(id)).collect();
    assert!(missing.is_empty(), "of {last}: {} missing, such as {:?}", missing.len(), missing.first());
    // At least once: repeats may come, but what is new comes in order.
    let mut highest = 0;
    for id in seen {
        assert!(id <= highest + 1, "{id} came before {}", highest + 1);
        highest = highest.max(id);
    }
    Ok(())
}

/// G4, R-SH-3, R-RLS-6: a policy that hangs holds up its own project, and not for long.
#[tokio::test]
async fn p3_08_a_policy_that_sleeps_a_minute_holds_up_nobody_else_and_is_passed() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    let sleepy = scene.split.project("sleepy").await?;
    sleepy.table("events").await?;
    let sql = sleepy.sql().await?;
    sql.batch_execute("alter table events enable row level security; create policy slow on events for select using (pg_sleep(60) is not null)").await?;
    let watcher = Subscriber::start(&sleepy, "events").await?;
    let mut account = Ledger::default();
    for _ in 0..10 {
        account.insert(&sql, "events", 10, 0).await?;
        scene.insert(10).await?;
    }
    let end = scene.slot.log_end().await?;
    // Long before anybody gives the policy up.
    scene.subscriber.wait_within(scene.ledger.last(), Duration::from_secs(2)).await?;
    let passed = scene.slot.wait(PATIENCE, |state| state.is_some_and(|state| state.confirmed >= Some(end))).await;
    passed.with_context(|| scene.split.logs())?;
    // The last announcement may still be on its way to the client.
    eventually(PATIENCE, || async { account.audit(&watcher.seen()).is_ok() }).await?;
    let audit = account.audit(&watcher.seen())?;
    assert_eq!((audit.arrived, audit.announced), (0, 100), "{audit:?}");
    scene.all_arrive_without_a_gap().await
}
