//! The worker's own `/engine` routes (R-SEC-7).

use std::time::{Duration, Instant};

use aura_auth::{KEY_LIFETIME, Minter};
use aura_domain::{Desired, EngineState, WorkerId};
use aura_store::Plugin;
use aura_testkit::eventually;
use axum::{
    body::{Body, to_bytes},
    http::{Request, StatusCode, header},
};
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::stage::{PATIENCE, PLATFORM_SECRET, Running, Stage};

const JSON: &str = "application/json";

struct Call<'a> {
    path: &'a str,
    key: Option<&'a str>,
    content_type: Option<&'a str>,
    body: &'a str,
}

async fn call(worker: &Running, call: Call<'_>) -> anyhow::Result<(StatusCode, Value)> {
    let mut request = Request::post(call.path);
    if let Some(key) = call.key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    if let Some(kind) = call.content_type {
        request = request.header(header::CONTENT_TYPE, kind);
    }
    let answer = worker.routes.clone().oneshot(request.body(Body::from(call.body.to_owned()))?).await?;
    let status = answer.status();
    let body = to_bytes(answer.into_body(), 1 << 20).await?;
    Ok((status, serde_json::from_slice(&body)?))
}

fn platform_key(secret: &str) -> anyhow::Result<String> {
    Ok(Minter::new(&secret.into()).platform_key(KEY_LIFETIME)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn r_sec_7_the_engine_routes_take_a_platform_key_and_json_only() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    let worker = stage.run_worker().await;
    let (good, forged) = (platform_key(PLATFORM_SECRET)?, platform_key("another secret that is long enough")?);
    for verb in ["start", "stop", "force-close"] {
        let path = format!("/engine/shared/{verb}");
        let of = |key, content_type, body| Call { path: &path, key, content_type, body };
        let refused = [
            (of(None, Some(JSON), "{}"), 401, "missing_credentials"),
            (of(Some("x"), Some(JSON), "{}"), 401, "invalid_token"),
            (of(Some(&forged), Some(JSON), "{}"), 401, "invalid_token"),
            (of(Some(&good), None, "{}"), 415, "unsupported_media_type"),
            (of(Some(&good), Some("text/plain"), "{}"), 415, "unsupported_media_type"),
            (of(Some(&good), Some(JSON), "{"), 400, "malformed_request"),
            (of(Some(&good), Some(JSON), r#"{"no": 1}"#), 422, "invalid_body"),
            (of(Some(&good), Some(JSON), "[]"), 422, "invalid_body"),
        ];
        for (request, status, code) in refused {
            let (answered, problem) = call(&worker, request).await?;
            assert_eq!((answered.as_u16(), &problem["code"]), (status, &json!(code)), "{verb} {problem}");
        }
        let unknown = format!("/engine/nobody/{verb}");
        let request = Call { path: &unknown, key: Some(&good), content_type: Some(JSON), body: "" };
        assert_eq!(call(&worker, request).await?.0, StatusCode::NOT_FOUND, "{verb}");
    }
    assert_eq!(stage.engine().await.desired, Desired::Running, "nobody was let in");
    stage.reaches(EngineState::Running).await?;
    worker.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_eng_3_the_worker_stops_and_starts_its_engine_when_asked_itself() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    let worker = stage.run_worker().await;
    let key = platform_key(PLATFORM_SECRET)?;
    let id = stage.source.id.to_string();
    let of = |path: &'static str, body| Call { path, key: Some(&key), content_type: Some(JSON), body };
    let (status, stopped) = call(&worker, of("/engine/shared/stop", r#"{"deadline_ms": 5000}"#)).await?;
    assert_eq!((status, &stopped["state"], &stopped["source"]), (StatusCode::OK, &json!("stopped"), &json!(id)));
    assert_eq!(stopped["last_report"]["outcome"], "drained", "{stopped}");
    let (status, started) = call(&worker, of("/engine/shared/start", "")).await?;
    assert_eq!((status, &started["state"]), (StatusCode::OK, &json!("running")));
    let (status, forced) = call(&worker, of("/engine/shared/force-close", "{}")).await?;
    assert_eq!((status, &forced["last_report"]["outcome"]), (StatusCode::OK, &json!("forced")), "{forced}");
    assert_eq!(stage.engine().await.desired, Desired::Stopped);
    worker.stop().await;
    Ok(())
}

/// A worker that died left `running` behind, and nobody can have the lease.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_1_a_start_is_not_done_while_nobody_that_lives_runs_the_engine() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    let (epoch, _) = stage.store.take_engine(stage.source.id, &WorkerId("dead".to_owned())).await?;
    stage.store.set_engine_state(stage.source.id, epoch, EngineState::Running, None).await?;
    let lock = stage.postgres.client("platform").await?;
    lock.batch_execute("begin; lock aura.leases in access exclusive mode").await?;
    let worker = stage.worker().await;
    let key = platform_key(PLATFORM_SECRET)?;
    let start = || Call { path: "/engine/shared/start", key: Some(&key), content_type: Some(JSON), body: "" };
    let (status, shown) = call(&worker, start()).await?;
    assert_eq!((status, &shown["state"]), (StatusCode::ACCEPTED, &json!("running")), "{shown}");
    lock.batch_execute("commit").await?;
    eventually(PATIENCE, || async { worker.status.cdc_active() }).await?;
    let (status, shown) = call(&worker, start()).await?;
    assert_eq!((status, &shown["state"]), (StatusCode::OK, &json!("running")), "{shown}");
    worker.stop().await;
    Ok(())
}

/// Force-close acts on what runs here before it asks anybody.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_6_force_close_needs_no_platform_database() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    let worker = stage.run_worker().await;
    let slot = stage.slot().await;
    slot.wait_active(PATIENCE).await?;
    let lock = stage.postgres.client("platform").await?;
    lock.batch_execute("begin; lock aura.engines, aura.sources, aura.leases in access exclusive mode").await?;
    let began = Instant::now();
    let key = platform_key(PLATFORM_SECRET)?;
    let request = Call { path: "/engine/shared/force-close", key: Some(&key), content_type: Some(JSON), body: "" };
    let (answer, freed) = tokio::join!(call(&worker, request), slot.wait_free(Duration::from_secs(3)));
    freed?;
    let (status, problem) = answer?;
    assert_eq!((status.as_u16(), &problem["code"]), (503, &json!("platform_unavailable")), "{problem}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    lock.batch_execute("commit").await?;
    worker.stop().await;
    Ok(())
}
