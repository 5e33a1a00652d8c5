//! What the api ends although nobody waits for it, and what it leaves alone.

use std::{
    io::ErrorKind,
    net::TcpListener,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aura_domain::{EngineState, Epoch, Lsn, OnDeadline, WorkerId};
use aura_store::{Caller, Ending, NewSource, Plugin, SlotRecreate};
use aura_testkit::{eventually, eventually_some};
use axum::http::{Method, StatusCode};
use serde_json::json;

use crate::{
    harness::{Platform, SOON},
    verbs::BEYOND,
};

/// The zombie watch's period, and what it then takes.
const WATCH: Duration = Duration::from_secs(15);

#[tokio::test]
async fn r_eng_3_an_overdue_stop_is_taken_over_by_another_instance() -> Result<()> {
    let mut platform = Platform::start().await?;
    let slot = platform.slot().await?;
    let (_, epoch) = platform.play_leader("w-1").await?;
    let live = aura_domain::EngineLive { received_lsn: Lsn(0x30), resolved_lsn: Lsn(0x20), ..Default::default() };
    platform.store.set_live(platform.source.id, epoch, &live).await?;
    let _hung = platform.squatter(platform.name_in(epoch)).await?;
    let began = Instant::now();
    let deadline = Duration::from_millis(1500);
    // Whoever asked is gone before the deadline, and so is the instance that took it.
    let impatient = platform.verb("stop", Some(json!({"deadline_ms": 1500})));
    assert!(tokio::time::timeout(Duration::from_millis(300), impatient).await.is_err(), "it lives and may still drain");
    platform.replace_instance().await?;
    assert!(began.elapsed() < deadline, "the machine is too slow for this test");
    let beside = platform.another_instance();
    platform.stopped(deadline + BEYOND).await?;
    assert!(began.elapsed() < deadline + BEYOND && began.elapsed() >= deadline, "{:?}", began.elapsed());
    assert!(!slot.state().await?.context("a slot")?.active);
    let engine = platform.store.engine(platform.source.id).await?.context("an engine")?;
    assert_eq!(engine.epoch, Epoch(epoch.0 + 1), "two instances, one of them took it");
    let report = engine.last_report.context("a report")?;
    assert_eq!((report.epoch, report.slot_released), (epoch, true));
    assert_eq!((report.lsn.received, report.lsn.resolved), (Lsn(0x30), Lsn(0x20)), "as the worker told them last");
    assert!(report.lsn.verified.is_some() && report.drain.overrun, "{report:?}");
    beside.stop().await?;
    platform.stop().await
}

/// What was read of an engine is not what it is any more when its end is to be taken over: the next look isn't far.
#[tokio::test]
async fn r_eng_3_an_end_that_could_not_be_taken_over_is_tried_again_at_once() -> Result<()> {
    let platform = Platform::start().await?;
    let slot = platform.slot().await?;
    let (worker, epoch) = platform.play_leader("w-1").await?;
    let _hung = platform.squatter(platform.name_in(epoch)).await?;
    slot.wait_active(SOON).await?;
    let other = platform.postgres.client("platform").await?;
    let no_wait = Caller { actor: "test", request_id: None };
    platform.store.request_stop(platform.source.id, Duration::from_millis(300), OnDeadline::Force, no_wait).await?;
    // Whoever takes it over waits for this row, and finds that it has changed.
    other.batch_execute("begin; update aura.engines set epoch = epoch + 1, holder = null").await?;
    let waits = "select exists (select from pg_locks where not granted)";
    let waiting = || async { other.query_one(waits, &[]).await.is_ok_and(|row| row.get(0)) };
    eventually(SOON, waiting).await.context("nobody takes it over")?;
    other.batch_execute("commit").await?;
    let began = Instant::now();
    platform.stopped(BEYOND).await.with_context(|| format!("after {worker}"))?;
    assert!(began.elapsed() < BEYOND, "{:?}", began.elapsed());
    assert!(!slot.state().await?.context("a slot")?.active);
    platform.stop().await
}

#[tokio::test]
async fn r_eng_3_abandon_ends_no_process_and_a_later_force_does() -> Result<()> {
    let platform = Platform::start().await?;
    let slot = platform.slot().await?;
    let (_, epoch) = platform.play_leader("w-1").await?;
    let _hung = platform.squatter(platform.name_in(epoch)).await?;
    let pid = slot.wait_active(SOON).await?;
    let began = Instant::now();
    let body = json!({"deadline_ms": 200, "on_deadline": "abandon"});
    let reply = platform.verb("stop", Some(body.clone())).await?;
    assert_eq!((reply.status, &reply.body["state"]), (StatusCode::ACCEPTED, &json!("zombie")), "{}", reply.body);
    assert!(began.elapsed() < BEYOND, "{:?}", began.elapsed());
    let reason = reply.body["reason"].as_str().context("a reason")?;
    assert!(reason.contains(&format!("pid {pid}")) && reason.contains("pg_terminate_backend"), "{reason}");
    assert_eq!(reply.body["operation"]["on_deadline"], "abandon");
    assert_eq!(reply.body["last_report"]["outcome"], "abandoned");
    assert_eq!(platform.verb("stop", Some(body)).await?.status, StatusCode::ACCEPTED, "a second one joins");
    assert_eq!(slot.state().await?.context("a slot")?.pid, Some(pid), "it was left alone");
    let forced = platform.verb("stop", Some(json!({"deadline_ms": 0, "on_deadline": "force"}))).await?;
    assert_eq!((forced.status, &forced.body["outcome"]), (StatusCode::OK, &json!("forced")), "{}", forced.body);
    assert!(!slot.state().await?.context("a slot")?.active);
    platform.stop().await
}

#[tokio::test]
async fn r_eng_7_what_holds_a_stopped_engines_slot_under_our_name_is_ended() -> Result<()> {
    let platform = Platform::start().await?;
    let slot = platform.slot().await?;
    let epoch = platform.store.raise_epoch(platform.source.id).await?;
    assert_eq!(platform.verb("stop", None).await?.status, StatusCode::OK);
    // One that the look-out meets while it starts is ended before it can say so.
    let start = || async { platform.squatter(platform.name_in(epoch)).await.ok() };
    let orphan = eventually_some(WATCH, start).await.context("no orphan")?;
    eventually(WATCH, || async { !orphan.is_connected() }).await.context("the orphan was left")?;
    slot.wait_free(SOON).await?;
    assert_eq!(platform.state().await?, EngineState::Stopped);
    platform.stop().await
}

#[tokio::test]
async fn r_eng_7_a_zombie_of_an_older_epoch_is_ended_when_nobody_leads() -> Result<()> {
    let platform = Platform::start().await?;
    let slot = platform.slot().await?;
    let old = platform.store.raise_epoch(platform.source.id).await?;
    let epoch = platform.store.raise_epoch(platform.source.id).await?;
    let _orphan = platform.squatter(platform.name_in(old)).await?;
    slot.wait_active(SOON).await?;
    let zombie = Ending { state: EngineState::Zombie, reason: Some("pid 1"), report: None };
    platform.store.leave_engine(platform.source.id, epoch, zombie).await?;
    slot.wait_free(WATCH).await?;
    platform.stopped(SOON).await?;
    platform.stop().await
}

/// A port that takes connections and never says a word.
#[tokio::test]
async fn r_eng_1_reads_and_stops_do_not_wait_for_a_source_that_never_answers() -> Result<()> {
    let platform = Platform::start().await?;
    let deaf = TcpListener::bind(("127.0.0.1", 0))?;
    deaf.set_nonblocking(true)?;
    let url = format!("postgres://u:p@127.0.0.1:{}/d", deaf.local_addr()?.port());
    let source = platform
        .store
        .upsert_source(NewSource {
            name: "deaf".to_owned(),
            replication_url: url.into(),
            admin_url: None,
            slot_name: None,
            plugin: Plugin::Auto,
            slot_recreate: SlotRecreate::Auto,
        })
        .await?;
    let (epoch, _) = platform.store.take_engine(source.id, &WorkerId("w".to_owned())).await?;
    platform.store.set_engine_state(source.id, epoch, EngineState::Running, None).await?;
    for path in ["/v1/engines", "/v1/engines/deaf", "/v1/workers", "/v1/engines/deaf/gaps", "/v1/sources/deaf"] {
        assert_eq!(platform.get(path).await?.status, StatusCode::OK, "{path}");
    }
    let asked = deaf.accept().map_err(|error| error.kind());
    assert!(matches!(asked, Err(ErrorKind::WouldBlock)), "the source was asked: {asked:?}");
    let began = Instant::now();
    let call = platform.call(Method::POST, "/v1/engines/deaf/stop").key(&platform.platform_key);
    let reply = call.json(&json!({"deadline_ms": 0})).send().await?;
    assert!(began.elapsed() < BEYOND, "{:?}", began.elapsed());
    assert_eq!(reply.status, StatusCode::ACCEPTED, "{}", reply.body);
    assert_eq!(reply.body["conditions"][0]["condition"], "source_unreachable", "{}", reply.body);
    assert_ne!(reply.body["state"], "stopped", "nobody has seen the slot");
    platform.stop().await
}
