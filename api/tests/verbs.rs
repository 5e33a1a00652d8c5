//! Start, stop, force-close and recreate-slot, with a worker played by the test or none at all.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aura_domain::{DrainReport, EngineReport, EngineState, Epoch, LsnReport, OnDeadline, Outcome, WorkerId};
use aura_pgsource::slot::application_name;
use aura_store::{Caller, Ending};
use aura_testkit::{Shutdown, SlotWatch, Squatter, SquatterOptions, eventually};
use axum::http::{Method, StatusCode};
use futures_util::future::try_join_all;
use serde_json::{Value, json};

use crate::harness::{Platform, Reply, SOON};

pub(crate) const SLOT: &str = "aura_cdc_slot";
/// What a stop may take beyond its deadline (G6).
pub(crate) const BEYOND: Duration = Duration::from_secs(5);

const CALLER: Caller<'static> = Caller { actor: "test", request_id: None };

impl Platform {
    pub(crate) async fn verb(&self, verb: &str, body: Option<Value>) -> Result<Reply> {
        let call = self.call(Method::POST, &format!("/v1/engines/shared/{verb}")).key(&self.platform_key);
        match body {
            Some(body) => call.json(&body).send().await,
            None => call.send().await,
        }
    }

    /// The source's slot, made now.
    pub(crate) async fn slot(&self) -> Result<SlotWatch> {
        self.sql(&format!("select pg_create_logical_replication_slot('{SLOT}', 'wal2json')")).await?;
        self.postgres.slot(SLOT).await
    }

    /// A client that holds the slot under this name, reads nothing and never leaves.
    pub(crate) async fn squatter(&self, application_name: String) -> Result<Squatter> {
        let plugin_options = [("format-version", "2"), ("add-tables", "public.big")];
        Squatter::start(SquatterOptions {
            port: self.postgres.port(),
            login: None,
            database: "app".to_owned(),
            slot: SLOT.to_owned(),
            application_name,
            plugin_options: plugin_options.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
        })
        .await
    }

    /// The name of this source's engine in an epoch.
    pub(crate) fn name_in(&self, epoch: Epoch) -> String {
        application_name(self.source.id, epoch)
    }

    pub(crate) async fn state(&self) -> Result<EngineState> {
        Ok(self.store.engine(self.source.id).await?.context("an engine")?.state)
    }

    /// Waits until the engine is stopped.
    pub(crate) async fn stopped(&self, within: Duration) -> Result<()> {
        let stopped = || async { Box::pin(self.state()).await.is_ok_and(|state| state == EngineState::Stopped) };
        eventually(within, stopped).await
    }
}

pub(crate) fn rungs(report: &Value) -> Vec<&str> {
    report["rungs"].as_array().into_iter().flatten().filter_map(|rung| rung["name"].as_str()).collect()
}

#[tokio::test]
async fn r_eng_3_fifty_stops_at_once_are_one_operation() -> Result<()> {
    let platform = Platform::start().await?;
    let (_, epoch) = platform.play_leader("w-1").await?;
    let (store, source) = (platform.store.clone(), platform.source.id);
    let drained = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&drained);
    let worker = tokio::spawn(async move {
        let stopping =
            || async { matches!(store.engine(source).await, Ok(Some(engine)) if engine.operation.is_some()) };
        Box::pin(eventually(SOON, stopping)).await?;
        count.fetch_add(1, Ordering::Relaxed);
        let report = EngineReport {
            source,
            epoch,
            outcome: Outcome::Drained,
            reason: None,
            drain: DrainReport { admitted: 3, delivered: 3, ..DrainReport::default() },
            lsn: LsnReport::default(),
            rungs: Vec::new(),
            slot_released: true,
            lease_released: true,
        };
        let ending = Ending { state: EngineState::Stopped, reason: None, report: Some(&report) };
        anyhow::Ok(store.leave_engine(source, epoch, ending).await?)
    });
    let replies = try_join_all((0..50).map(|_| platform.verb("stop", None))).await?;
    worker.await??;
    for reply in &replies {
        assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
        assert_eq!((&reply.body["outcome"], &reply.body["drain"]["delivered"]), (&json!("drained"), &json!(3)));
    }
    let client = platform.postgres.client("platform").await?;
    let lines = "select count(distinct after->'operation'->>'id'), count(*) filter (where actor <> 'platform')
        from aura.audit where action = 'engine.stop'";
    let row = client.query_one(lines, &[]).await?;
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (1, 0), "one operation, asked for by the platform key");
    let again = platform.verb("stop", Some(json!({"deadline_ms": 0}))).await?;
    assert_eq!((again.status, &again.body), (StatusCode::OK, &replies[0].body), "stopped already: the last report");
    platform.stop().await
}

#[tokio::test]
async fn r_eng_6_without_a_worker_stop_and_force_close_free_the_slot_themselves() -> Result<()> {
    let platform = Platform::start().await?;
    let slot = platform.slot().await?;
    for (verb, body) in [("stop", Some(json!({"deadline_ms": 1000}))), ("stop", None), ("force-close", None)] {
        let (worker, epoch) = platform.play_leader("w-1").await?;
        platform.fall_silent(&worker).await?;
        let _orphan = platform.squatter(platform.name_in(epoch)).await?;
        let began = Instant::now();
        let reply = platform.verb(verb, body.clone()).await?;
        assert_eq!(reply.status, StatusCode::OK, "{verb} {body:?}: {}", reply.body);
        assert!(began.elapsed() < BEYOND, "nobody drains, so nobody is waited for: {:?}", began.elapsed());
        assert!(!slot.state().await?.context("a slot")?.active);
        assert_eq!((&reply.body["outcome"], &reply.body["slot_released"]), (&json!("forced"), &json!(true)));
        assert_eq!(reply.body["epoch"], epoch.0, "the report is of the run that ended");
        let reason = reply.body["reason"].as_str().context("a reason")?;
        assert!(reason.contains("rows are unknown"), "{reason}");
        assert_eq!(platform.state().await?, EngineState::Stopped);
        let late = platform.store.set_engine_state(platform.source.id, epoch, EngineState::Running, None).await;
        assert!(late.is_err(), "the worker is fenced");
        platform.store.request_start(platform.source.id, CALLER).await?;
    }
    platform.stop().await
}

/// The first terminate only moves it from WalSenderWriteData to ClientWrite; the worker lives and does nothing.
#[tokio::test]
async fn r_eng_4_force_close_frees_a_walsender_that_is_blocked_writing() -> Result<()> {
    let platform = Platform::start().await?;
    platform.sql("create table public.big (id int primary key, text text)").await?;
    let slot = platform.slot().await?;
    platform.sql("insert into public.big select g, repeat('x', 20000000) from generate_series(1, 2) g").await?;
    let (_, epoch) = platform.play_leader("w-1").await?;
    let _hung = platform.squatter(platform.name_in(epoch)).await?;
    let blocked = |state: Option<&aura_testkit::SlotState>| {
        state.and_then(|state| state.wait_event.as_deref()) == Some("WalSenderWriteData")
    };
    slot.wait(SOON, blocked).await?;
    let began = Instant::now();
    let reply = platform.verb("force-close", None).await?;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
    assert!(began.elapsed() < BEYOND, "{:?}", began.elapsed());
    assert_eq!(rungs(&reply.body), ["terminate", "terminate_again", "poll"]);
    assert!(!slot.state().await?.context("a slot")?.active);
    platform.stop().await
}

#[tokio::test]
async fn r_eng_6_what_is_not_ours_is_named_and_never_ended() -> Result<()> {
    let platform = Platform::start().await?;
    let slot = platform.slot().await?;
    let other = platform.squatter("pgstream".to_owned()).await?;
    let pid = slot.wait_active(SOON).await?;
    let replies = try_join_all((0..3).map(|_| platform.verb("force-close", None))).await?;
    for reply in replies {
        assert_eq!((reply.status, reply.code()), (StatusCode::CONFLICT, "slot_in_use_by_other"), "{}", reply.body);
        assert_eq!((&reply.body["pid"], &reply.body["application_name"]), (&json!(pid), &json!("pgstream")));
    }
    let stop = platform.verb("stop", Some(json!({"deadline_ms": 0}))).await?;
    assert_eq!((stop.status, &stop.body["state"]), (StatusCode::ACCEPTED, &json!("zombie")), "{}", stop.body);
    let reason = stop.body["reason"].as_str().context("a reason")?;
    assert!(reason.contains(&pid.to_string()) && reason.contains("pg_terminate_backend"), "{reason}");
    let start = platform.verb("start", None).await?;
    assert_eq!((start.status, start.code()), (StatusCode::CONFLICT, "engine_state_conflict"), "{}", start.body);
    assert_eq!((&start.body["state"], &start.body["legal_verbs"]), (&json!("zombie"), &json!(["stop", "force-close"])));
    assert!(start.body["retry_after_ms"].is_i64() && !start.header("retry-after").is_empty());
    let still = slot.state().await?.context("a slot")?;
    assert_eq!((still.pid, other.is_connected()), (Some(pid), true), "left alone");
    drop(other);
    slot.wait_free(SOON).await?;
    platform.stopped(Duration::from_secs(15)).await.context("the zombie watch sees a free slot")?;
    let engine = platform.get("/v1/engines/shared").await?.body;
    assert!(engine.get("operation").is_none() && engine["last_report"]["slot_released"] == true, "{engine}");
    platform.stop().await
}

#[tokio::test]
async fn r_eng_3_start_answers_when_it_runs_and_says_what_holds_it_up() -> Result<()> {
    let platform = Platform::start().await?;
    let start = || platform.call(Method::POST, "/v1/engines/shared/start").key(&platform.platform_key);
    let nobody = start().header("prefer", "wait=0").send().await?;
    assert_eq!((nobody.status, &nobody.body["desired"]), (StatusCode::ACCEPTED, &json!("running")), "{}", nobody.body);
    assert_eq!(nobody.header("location"), format!("/v1/engines/{}", platform.source.id));
    let (worker, epoch) = platform.play_leader("w-1").await?;
    let running = start().send().await?;
    assert_eq!((running.status, &running.body["state"]), (StatusCode::OK, &json!("running")));
    platform.fall_silent(&worker).await?;
    let dead = start().header("prefer", "wait=0").send().await?;
    assert_eq!(dead.status, StatusCode::ACCEPTED, "a dead worker's word doesn't count");
    let slot = platform.slot().await?;
    let _other = platform.squatter("pgstream".to_owned()).await?;
    let pid = slot.wait_active(SOON).await?;
    let held = start().header("prefer", "wait=0").send().await?;
    assert_eq!((held.status, held.code()), (StatusCode::CONFLICT, "slot_in_use_by_other"), "{}", held.body);
    assert_eq!((&held.body["pid"], &held.body["application_name"]), (&json!(pid), &json!("pgstream")));
    platform.heartbeat(&worker, false).await?;
    platform.store.set_engine_state(platform.source.id, epoch, EngineState::Draining, None).await?;
    let handed_over = start().send().await?;
    assert_eq!((handed_over.status, &handed_over.body["retry_after_ms"]), (StatusCode::CONFLICT, &json!(1000)));
    platform.store.request_stop(platform.source.id, Duration::from_secs(60), OnDeadline::Force, CALLER).await?;
    let refused = start().send().await?;
    assert_eq!((refused.status, refused.code()), (StatusCode::CONFLICT, "engine_state_conflict"));
    let retry = refused.body["retry_after_ms"].as_i64().context("when to come back")?;
    assert!((50_000..=60_000).contains(&retry), "{retry}");
    platform.stop().await
}

#[tokio::test]
async fn r_eng_8_a_new_slot_only_where_the_old_one_is_of_no_use() -> Result<()> {
    let platform = Platform::start().await?;
    let (epoch, _) = platform.store.take_engine(platform.source.id, &WorkerId("w".to_owned())).await?;
    let running = platform.verb("recreate-slot", None).await?;
    assert_eq!((running.status, running.code()), (StatusCode::CONFLICT, "engine_state_conflict"));
    platform.store.set_engine_state(platform.source.id, epoch, EngineState::Failed, Some("slot_lost")).await?;
    let missing = platform.verb("recreate-slot", None).await?;
    assert_eq!(missing.status, StatusCode::ACCEPTED, "{}", missing.body);
    assert_eq!(missing.body["lag"], json!({"bytes": null, "seconds": null, "lost": true}));
    assert!(platform.store.engine(platform.source.id).await?.context("an engine")?.recreate_slot);
    platform.store.new_slot_made(platform.source.id, epoch).await?;
    let _slot = platform.slot().await?;
    let healthy = platform.verb("recreate-slot", None).await?;
    assert_eq!((healthy.status, healthy.code()), (StatusCode::CONFLICT, "slot_not_lost"), "{}", healthy.body);
    assert!(!platform.store.engine(platform.source.id).await?.context("an engine")?.recreate_slot);
    platform.stop().await
}

#[tokio::test]
async fn bodies_are_optional_and_checked() -> Result<()> {
    let platform = Platform::start().await?;
    let bodies = [
        (json!({"deadline_ms": 300_001}), StatusCode::UNPROCESSABLE_ENTITY),
        (json!({"deadline_ms": -1}), StatusCode::UNPROCESSABLE_ENTITY),
        (json!({"deadline": 1}), StatusCode::UNPROCESSABLE_ENTITY),
        (json!({"on_deadline": "shrug"}), StatusCode::UNPROCESSABLE_ENTITY),
        (json!({}), StatusCode::OK),
        (json!({"deadline_ms": 300_000, "on_deadline": "abandon"}), StatusCode::OK),
    ];
    for (body, status) in bodies {
        assert_eq!(platform.verb("stop", Some(body.clone())).await?.status, status, "{body}");
    }
    for verb in ["start", "force-close", "recreate-slot"] {
        assert_eq!(platform.verb(verb, Some(json!({"x": 1}))).await?.code(), "invalid_body", "{verb}");
    }
    let call = platform.call(Method::POST, "/v1/engines/shared/stop").key(&platform.platform_key);
    assert_eq!(call.text("text/plain", "{}").send().await?.code(), "unsupported_media_type");
    let call = platform.call(Method::POST, "/v1/engines/shared/stop");
    assert_eq!(call.send().await?.code(), "missing_credentials");
    platform.stop().await
}

#[tokio::test]
async fn r_eng_3_a_stop_is_503_in_time_while_the_platform_database_is_away() -> Result<()> {
    let mut platform = Platform::start().await?;
    platform.play_leader("w-1").await?;
    platform.postgres.stop(Shutdown::Immediate).await?;
    let began = Instant::now();
    let reply = platform.verb("stop", Some(json!({"deadline_ms": 0}))).await?;
    assert_eq!((reply.status, reply.code()), (StatusCode::SERVICE_UNAVAILABLE, "platform_unavailable"));
    assert!(began.elapsed() < BEYOND, "{:?}", began.elapsed());
    platform.postgres.start_again().await?;
    let back = || async { platform.get("/v1/engines/shared").await.is_ok_and(|reply| reply.status == StatusCode::OK) };
    eventually(SOON, back).await?;
    assert!(platform.get("/v1/engines/shared").await?.body.get("operation").is_none(), "nothing was asked");
    platform.stop().await
}
