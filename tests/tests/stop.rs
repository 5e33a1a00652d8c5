//! Stops that must end whatever the engine hangs in, and say what became of the rows.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use aura_testkit::{Flow, Signal, SlotState, eventually, http_status};
use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio_postgres::Client;

use system_tests::{BusTap, Ledger, PATIENCE, Scene, SplitOptions, Subscriber};

/// Backends at the source of the worker's login and of the projects' own, the api's looks left out.
async fn backends(scene: &Scene) -> Result<Vec<String>> {
    let ours = "select coalesce(array_agg(usename || ' ' || application_name || ' ' || coalesce(query, '')), '{}')
        from pg_stat_activity where datname = 'app' and (usename = 'worker' or usename like 'p\\_%')
            and application_name not in ('aura-ladder', 'aura-look')";
    Ok(scene.sql.query_one(ours, &[]).await?.get(0))
}

/// `stop` with a deadline of 3 s on an engine that can't drain: within 8 s it answers, truthfully, and the slot is free. Its
/// stream, and with it the last sign of life (peers §4 b), ends within a second of the deadline.
async fn stop_in_time(scene: &Scene) -> Result<Value> {
    scene.split.platform_key().await?;
    let asked = Instant::now();
    let (answer, freed) = tokio::join!(
        scene.split.verb("stop", json!({"deadline_ms": 3000})),
        scene.slot.wait_free(Duration::from_secs(3 + 1)),
    );
    let (answer, took) = (answer?, asked.elapsed());
    freed.with_context(|| format!("{}\n{}", answer.body, scene.split.logs()))?;
    assert_eq!(answer.status, 200, "{}\n{}", answer.body, scene.split.logs());
    assert!(took < Duration::from_secs(8), "{took:?}: {}", answer.body);
    let state = scene.slot.state().await?;
    assert!(state.as_ref().is_some_and(|state| !state.active), "{state:?}");
    let report = answer.body;
    assert_eq!(report["outcome"], "forced", "{report}");
    assert_eq!(report["slot_released"], true, "{report}");
    let drain = &report["drain"];
    let count = |name: &str| drain[name].as_u64().unwrap_or(u64::MAX);
    assert_eq!(count("admitted"), count("delivered") + count("skipped") + count("abandoned"), "{report}");
    assert!(count("abandoned") > 0, "{report}");
    // A check that waits for a lock is ended by its session's limit of 3.5 s: its engine can't sign in any more to end it.
    let left = eventually(Duration::from_secs(4), || async { backends(scene).await.is_ok_and(|left| left.is_empty()) });
    let left = left.await.context(format!("{report}"));
    left.with_context(|| "left over at the source").context(format!("{:?}", backends(scene).await?))?;
    Ok(report)
}

/// What "at once" may take: the supervisor looks, takes the lease, waits for the fronts' subscriptions and connects.
const AT_ONCE: Duration = Duration::from_secs(5);

/// A new start streams at once, and every row arrives.
async fn start_again(scene: &mut Scene) -> Result<()> {
    let asked = Instant::now();
    let answer = scene.split.verb("start", json!({})).await?;
    assert_eq!(answer.status, 200, "{}\n{}", answer.body, scene.split.logs());
    scene.slot.wait_active(AT_ONCE.saturating_sub(asked.elapsed())).await?;
    scene.insert(10).await?;
    scene.subscriber.wait_within(scene.ledger.last(), AT_ONCE.saturating_sub(asked.elapsed())).await?;
    scene.all_arrive().await.map(drop)
}

/// Commits rows to `late`, which another session holds from then on: its lock is queued behind the rows' transaction, so
/// when they are read, it is there.
async fn insert_locked(scene: &Scene, account: &mut Ledger, blocker: &Client, rows: i64) -> Result<()> {
    scene.sql.batch_execute("begin").await?;
    account.insert(&scene.sql, "late", rows, 0).await?;
    let locked = async { Ok(blocker.batch_execute("begin; lock table late in access exclusive mode").await?) };
    let commits = async {
        let waits = "select exists (select from pg_locks where not granted and mode = 'AccessExclusiveLock')";
        let queued = || async { scene.sql.query_one(waits, &[]).await.is_ok_and(|row| row.get(0)) };
        eventually(PATIENCE, queued).await?;
        anyhow::Ok(scene.sql.batch_execute("commit").await?)
    };
    tokio::try_join!(locked, commits).map(drop)
}

/// Another session holds a table that the engine must look at: a consumer that never returns (peers §4 b, d).
#[tokio::test]
async fn scene_a_peers_4_a_stop_behind_a_locked_table_ends_in_time_and_delivers_nothing_after() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.project.guarded_table("late").await?;
    let (late, mut account) = (Subscriber::start(&scene.project, "late").await?, Ledger::default());
    let (tap, blocker) = (BusTap::start(&scene.split.nats).await?, scene.project.sql().await?);
    insert_locked(&scene, &mut account, &blocker, 50).await?;
    let end = scene.slot.log_end().await?;
    scene.slot.wait(PATIENCE, |state| state.is_some_and(|state| state.sent >= Some(end))).await?;
    stop_in_time(&scene).await?;
    let closed = tap.tapped().len();
    blocker.batch_execute("rollback").await?;
    let more = eventually(Duration::from_secs(2), || async { tap.tapped().len() > closed }).await;
    assert!(more.is_err(), "delivered after the stop was answered: {:?}", tap.tapped().last());
    assert_eq!(scene.split.engine().await?["state"], "stopped");
    start_again(&mut scene).await?;
    late.wait(account.last()).await.with_context(|| scene.split.logs())?;
    let audit = account.audit(&late.seen())?;
    assert_eq!(audit.arrived, account.rows(), "{audit:?}");
    Ok(())
}

/// The engine's SQL connections hang in the network, the replication connection is healthy.
#[tokio::test]
async fn scene_a_a_stop_with_frozen_sql_connections_ends_in_time() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().source_proxy()).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.freeze_sql()?;
    scene.insert_read(50).await?;
    let report = stop_in_time(&scene).await?;
    // Its own last words wait for SQL, so somebody else has to end it; behind a locked table it leaves by itself.
    assert!(report["rungs"].as_array().is_some_and(|rungs| !rungs.is_empty()), "{report}");
    scene.source_proxy()?.set(Flow::Open);
    start_again(&mut scene).await
}

/// Nobody waits for rows, and how many are left is said all the same: by its own worker, which ends it by force.
#[tokio::test]
async fn r_eng_3_a_stop_without_a_drain_says_how_many_rows_it_leaves() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().source_proxy()).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.freeze_sql()?;
    scene.insert_read(50).await?;
    scene.split.platform_key().await?;
    let asked = Instant::now();
    let answer = scene.split.verb("stop", json!({"deadline_ms": 0})).await?;
    let (took, report) = (asked.elapsed(), answer.body);
    assert_eq!((answer.status, &report["outcome"]), (200, &json!("forced")), "{report}\n{}", scene.split.logs());
    assert!(took < Duration::from_secs(5), "{took:?}: {report}");
    assert_eq!(report["reason"], Value::Null, "{report}\n{}", scene.split.logs());
    assert!(report["drain"]["abandoned"].as_u64().is_some_and(|rows| rows > 0), "{report}");
    assert!(report["rungs"].as_array().is_some_and(|rungs| !rungs.is_empty()), "{report}");
    scene.slot.wait_free(Duration::from_millis(200)).await?;
    scene.source_proxy()?.set(Flow::Open);
    start_again(&mut scene).await
}

/// Peers §4 (a): a stop that could drain says so, with a position that SQL has verified.
#[tokio::test]
async fn peers_4_a_a_stop_that_drains_says_so_and_repeats_nothing() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    let tap = BusTap::start(&scene.split.nats).await?;
    scene.insert(200).await?;
    let answer = scene.split.verb("stop", json!({})).await?;
    assert_eq!((answer.status, &answer.body["outcome"]), (200, &json!("drained")), "{}", answer.body);
    let report = answer.body;
    let position = |value: &Value| -> Option<u64> {
        let (high, low) = value.as_str()?.split_once('/')?;
        Some(u64::from_str_radix(high, 16).ok()? << 32 | u64::from_str_radix(low, 16).ok()?)
    };
    let verified = position(&report["lsn"]["verified"]).with_context(|| report.to_string())?;
    let state = scene.slot.state().await?.context("the slot stays")?;
    assert!(!state.active && state.confirmed >= Some(verified), "{state:?}: {report}");
    assert_eq!(report["drain"]["abandoned"], 0, "{report}");
    let before = tap.tapped().len();
    start_again(&mut scene).await?;
    let tapped = tap.tapped();
    let again = tapped[before..].iter().find(|one| one.at.is_some_and(|at| at.commit < verified));
    assert!(again.is_none(), "verified, and sent again: {again:?}");
    Ok(())
}

/// Peers §4 (e): whoever is next has the slot as soon as the one before is gone, though that could not drain.
#[tokio::test]
async fn peers_4_e_a_second_worker_gets_the_slot_of_one_that_cannot_drain() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().worker("CDC_DRAIN_TIMEOUT", "4s")).await?;
    let second = scene.split.another_worker()?;
    eventually(PATIENCE, || async { http_status(second.port, "/ready").await.is_ok_and(|status| status == 200) })
        .await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.split.nats.pause()?;
    scene.insert_sent(100).await?;
    let holder = scene.slot.wait_active(PATIENCE).await?;
    scene.split.worker.process.signal(Signal::TERM)?;
    let handed_over = |state: Option<&SlotState>| {
        state.is_some_and(|state| state.active && state.pid.is_some_and(|pid| pid != holder))
    };
    let next = scene.slot.wait(Duration::from_secs(4 + 2), handed_over).await;
    next.with_context(|| format!("{}\n{}", scene.split.logs(), second.process.lines().join("\n")))?;
    scene.split.nats.resume()?;
    // A bus that was stopped tells the new leader of nobody: what the front misses meanwhile, maybe all, is announced.
    let arrived = scene.arrives_again().await;
    arrived.map(drop).with_context(|| second.process.lines().join("\n"))
}

#[tokio::test]
async fn scene_f_fifty_stops_are_one_operation() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.split.platform_key().await?;
    let answers = join_all((0..50).map(|_| scene.split.verb("stop", json!({})))).await;
    for answer in answers {
        let answer = answer?;
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    let platform = scene.split.platform().client("platform").await?;
    // Every change of an operation is in the audit log, its beginning with none before.
    let counted =
        "select count(distinct after->'operation'->>'id'), count(*) filter (where before->'operation' = 'null')
        from aura.audit where action = 'engine.stop' and after->'operation' <> 'null'";
    let counted = platform.query_one(counted, &[]).await?;
    assert_eq!((counted.get::<_, i64>(0), counted.get::<_, i64>(1)), (1, 1), "operations, beginnings");
    start_again(&mut scene).await
}

/// control-plane.md §4.2, 39: the creation of a slot waits for whoever writes, and a stop doesn't wait with it.
#[tokio::test]
async fn scene_f_a_stop_is_legal_while_starting_behind_an_open_transaction() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    assert_eq!(scene.split.verb("stop", json!({})).await?.status, 200);
    scene.sql.execute("select pg_drop_replication_slot('aura_cdc_slot')", &[]).await?;
    let writer = scene.project.sql().await?;
    writer.batch_execute("begin; insert into ballast values (-1, '')").await?;
    assert_eq!(scene.split.verb("start", json!({})).await?.status, 202);
    let waits = eventually(PATIENCE, || async {
        let conditions = scene.split.engine().await.unwrap_or_default()["conditions"].to_string();
        conditions.contains("waiting_for_transactions")
    });
    waits.await.with_context(|| scene.split.logs())?;
    let asked = Instant::now();
    let answer = scene.split.verb("stop", json!({"deadline_ms": 3000})).await?;
    assert_eq!(answer.status, 200, "{}\n{}", answer.body, scene.split.logs());
    assert!(asked.elapsed() < Duration::from_secs(8), "{:?}", asked.elapsed());
    let left =
        eventually(Duration::from_secs(1), || async { backends(&scene).await.is_ok_and(|left| left.is_empty()) });
    left.await.with_context(|| format!("left over: {}", answer.body))?;
    writer.batch_execute("commit").await?;
    start_again(&mut scene).await
}

#[tokio::test]
async fn scene_f_a_start_while_stopping_is_refused() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.split.nats.pause()?;
    scene.insert_sent(10).await?;
    scene.split.platform_key().await?;
    let stop = scene.split.verb("stop", json!({"deadline_ms": 4000}));
    let start = async {
        let stopping = || async { scene.split.engine().await.unwrap_or_default()["operation"].is_object() };
        eventually(PATIENCE, stopping).await?;
        scene.split.verb("start", json!({})).await
    };
    let (stop, start) = tokio::try_join!(stop, start)?;
    assert_eq!(start.status, 409, "{}", start.body);
    assert!(start.body["retry_after_ms"].as_u64().is_some(), "{}", start.body);
    assert_eq!(stop.status, 200, "{}", stop.body);
    scene.split.nats.resume()?;
    start_again(&mut scene).await
}

/// R-SD-4. The bus takes nothing, so the first signal alone would take the whole drain time.
#[tokio::test]
async fn p3_11_a_second_sigterm_ends_the_drain_in_a_second_and_a_half() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.split.nats.pause()?;
    scene.insert_sent(10).await?;
    let worker = &scene.split.worker;
    worker.process.signal(Signal::TERM)?;
    let draining = || async { http_status(worker.port, "/ready").await.is_ok_and(|status| status == 503) };
    eventually(Duration::from_secs(2), draining).await?;
    let second = Instant::now();
    worker.process.signal(Signal::TERM)?;
    worker.process.wait(PATIENCE).await?;
    assert!(second.elapsed() < Duration::from_millis(1500), "{:?}: {}", second.elapsed(), scene.split.logs());
    scene.slot.wait_free(Duration::from_millis(200)).await?;
    scene.split.nats.resume()?;
    scene.split.start_worker()?;
    scene.all_arrive().await.map(drop)
}

/// R-SD-4, R-SD-9, F.10: there is no time to see the slot free. That is no failure, but said; and the lease isn't given back.
#[tokio::test]
async fn p3_11_a_second_sigterm_while_the_source_hangs_is_told_as_what_it_is() -> Result<()> {
    let options = SplitOptions::default().source_proxy().worker("AURA_STRICT_EXIT_CODES", "true");
    let mut scene = Scene::start(options).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.source_proxy()?.set(Flow::Frozen);
    let worker = &scene.split.worker;
    worker.process.signal(Signal::TERM)?;
    let draining = || async { http_status(worker.port, "/ready").await.is_ok_and(|status| status == 503) };
    eventually(Duration::from_secs(2), draining).await?;
    let second = Instant::now();
    worker.process.signal(Signal::TERM)?;
    let code = worker.process.wait(PATIENCE).await?.code();
    assert!(second.elapsed() < Duration::from_millis(1500), "{:?}: {}", second.elapsed(), scene.split.logs());
    assert_eq!(code, Some(3), "its position isn't verified: {}", scene.split.logs());
    let told = worker.process.lines().into_iter().find(|line| line.contains("engine ended"));
    let told = told.with_context(|| scene.split.logs())?;
    assert!(told.contains("slot_released=false lease_released=false"), "{told}");
    scene.source_proxy()?.set(Flow::Open);
    scene.split.start_worker()?;
    scene.insert(1).await?;
    scene.all_arrive().await.map(drop)
}

/// F.11: no new work comes to a process that leaves, and nobody kills it while it does.
#[tokio::test]
async fn p3_15_not_ready_a_tenth_of_a_second_after_sigterm_and_healthy_to_the_end() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default().worker("CDC_DRAIN_TIMEOUT", "4s")).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.split.nats.pause()?;
    scene.insert_sent(10).await?;
    let worker = &scene.split.worker;
    worker.process.signal(Signal::TERM)?;
    let sent = Instant::now();
    let off = || async { http_status(worker.port, "/ready").await.is_ok_and(|status| status == 503) };
    eventually(Duration::from_millis(100), off).await?;
    let mut healthy = 0;
    while worker.process.exited().is_none() {
        let (ready, health) = (http_status(worker.port, "/ready").await, http_status(worker.port, "/health").await);
        match (ready, health) {
            (Ok(ready), Ok(health)) => assert_eq!((ready, health), (503, 200)),
            // This one has met the end.
            _ => break,
        }
        healthy += 1;
    }
    worker.process.wait(Duration::from_secs(1)).await?;
    assert!(healthy > 10 && sent.elapsed() < Duration::from_secs(6), "{healthy} in {:?}", sent.elapsed());
    scene.split.nats.resume()?;
    scene.split.start_worker()?;
    scene.all_arrive().await.map(drop)
}

/// What a worker that leaves waits for in vain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hung {
    /// The server's answer whether somebody may see a row.
    Policy,
    Bus,
    /// All connections to the source, the stream included.
    Source,
}

/// Invariant 14: SIGTERM to a worker that can deliver nothing. It is gone by `drain_timeout` + 2 s, and has accounted for
/// every row that it read; the next one delivers them.
async fn gone_in_time(hung: &[Hung]) -> Result<()> {
    let options = SplitOptions::default().worker("CDC_DRAIN_TIMEOUT", "6s").source_proxy();
    let mut scene = Scene::start(options.postgres("wal_sender_timeout", "3s")).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.project.guarded_table("late").await?;
    let (late, mut account) = (Subscriber::start(&scene.project, "late").await?, Ledger::default());
    let blocker = scene.project.sql().await?;
    if hung.contains(&Hung::Bus) {
        scene.split.nats.pause()?;
    }
    if hung.contains(&Hung::Policy) {
        insert_locked(&scene, &mut account, &blocker, 50).await?;
    } else {
        account.insert(&scene.sql, "late", 50, 0).await?;
    }
    let end = scene.slot.log_end().await?;
    scene.slot.wait(PATIENCE, |state| state.is_some_and(|state| state.sent >= Some(end))).await?;
    let held = || async { scene.split.worker.metric("cdc_shard_rows").await.is_ok_and(|rows| rows == Some(50.0)) };
    eventually(PATIENCE, held).await.with_context(|| scene.split.logs())?;
    if hung.contains(&Hung::Source) {
        scene.source_proxy()?.set(Flow::Frozen);
    }
    let worker = &scene.split.worker.process;
    worker.signal(Signal::TERM)?;
    let asked = Instant::now();
    let code = worker.wait(Duration::from_secs(6 + 2)).await.with_context(|| scene.split.logs())?.code();
    assert!(asked.elapsed() < Duration::from_secs(6 + 2), "{:?}: {}", asked.elapsed(), scene.split.logs());
    assert_eq!(code, Some(0), "the watchdog or a signal ended it: {}", scene.split.logs());
    let lines = worker.lines();
    let ended = lines.iter().find(|line| line.contains("engine ended")).with_context(|| scene.split.logs())?;
    let count = |name: &str| -> Result<u64> {
        let (_, value) = ended.split_once(&format!(" {name}=")).with_context(|| ended.clone())?;
        Ok(value.split(' ').next().unwrap_or_default().parse()?)
    };
    let (admitted, abandoned) = (count("admitted")?, count("abandoned")?);
    assert_eq!(admitted, count("delivered")? + count("skipped")? + abandoned, "{ended}");
    assert_eq!(abandoned, 50, "{ended}");
    scene.source_proxy()?.set(Flow::Open);
    scene.split.nats.resume()?;
    blocker.batch_execute("rollback").await?;
    scene.split.start_worker()?;
    late.wait(account.last()).await.with_context(|| scene.split.logs())?;
    let audit = account.audit(&late.seen())?;
    assert_eq!(audit.arrived + audit.announced, account.rows(), "{audit:?}");
    Ok(())
}

#[tokio::test]
async fn invariant_14_a_process_whose_policies_hang_is_gone_in_time() -> Result<()> {
    gone_in_time(&[Hung::Policy]).await
}

#[tokio::test]
async fn invariant_14_a_process_whose_policies_and_bus_hang_is_gone_in_time() -> Result<()> {
    gone_in_time(&[Hung::Policy, Hung::Bus]).await
}

#[tokio::test]
async fn invariant_14_a_process_whose_bus_and_source_hang_is_gone_in_time() -> Result<()> {
    gone_in_time(&[Hung::Bus, Hung::Source]).await
}

#[tokio::test]
async fn invariant_14_a_process_around_which_everything_hangs_is_gone_in_time() -> Result<()> {
    gone_in_time(&[Hung::Policy, Hung::Bus, Hung::Source]).await
}
