//! Ends that somebody tries to break: by asking again, by killing whoever is at it, and by taking the database away.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use aura_testkit::{Flow, Shutdown, eventually};
use futures_util::future::join_all;
use serde_json::{Value, json};
use system_tests::{Answer, PATIENCE, Scene, SplitOptions, curl};

/// A scene whose rows can't be delivered, nor its engine end by itself.
async fn stuck(options: SplitOptions) -> Result<Scene> {
    let mut scene = Scene::start(options.source_proxy()).await?;
    scene.insert(1).await?;
    scene.all_arrive().await?;
    scene.freeze_sql()?;
    scene.insert_sent(50).await?;
    scene.split.platform_key().await?;
    Ok(scene)
}

/// Sends a verb once the stop is open.
async fn while_stopping(scene: &Scene, verb: &str, body: Value) -> Result<(Answer, Duration)> {
    let open = || async { scene.split.engine().await.unwrap_or_default()["operation"].is_object() };
    eventually(PATIENCE, open).await?;
    let asked = Instant::now();
    let answer = scene.split.verb(verb, body).await?;
    Ok((answer, asked.elapsed()))
}

async fn goes_on(scene: &mut Scene) -> Result<()> {
    scene.source_proxy()?.set(Flow::Open);
    let answer = scene.split.verb("start", json!({})).await?;
    assert!(matches!(answer.status, 200 | 202), "{}", answer.body);
    scene.split.wait_until_streaming().await?;
    scene.all_arrive().await.map(drop)
}

fn has_abandoned(report: &Value) -> bool {
    report["drain"]["abandoned"].as_u64().is_some_and(|rows| rows > 0)
}

/// Whoever has waited with the longer deadline hears the same.
#[tokio::test]
async fn r_eng_3_a_shorter_deadline_and_a_force_close_tighten_a_stop_for_all_who_wait() -> Result<()> {
    for (verb, body) in [("stop", json!({"deadline_ms": 1000})), ("force-close", json!({}))] {
        let mut scene = stuck(SplitOptions::default()).await?;
        let first = scene.split.verb("stop", json!({"deadline_ms": 60000, "on_deadline": "abandon"}));
        let (first, (second, took)) = tokio::try_join!(first, while_stopping(&scene, verb, body))?;
        assert_eq!((first.status, second.status), (200, 200), "{} {}", first.body, second.body);
        assert_eq!(first.body, second.body);
        assert!(took < Duration::from_secs(1 + 5), "{verb} {took:?}");
        assert!(has_abandoned(&second.body), "{verb} {}", second.body);
        goes_on(&mut scene).await?;
    }
    Ok(())
}

/// Every answer wakes all who wait, at every instance.
#[tokio::test]
async fn r_eng_3_a_crowd_at_two_instances_is_answered_in_time() -> Result<()> {
    let mut scene = stuck(SplitOptions::default()).await?;
    let (_other, url) = scene.split.another_api().await?;
    let key = scene.split.platform_key().await?;
    let urls = [&scene.split.api_url, &url].map(|origin| format!("{origin}/v1/engines/shared/stop"));
    let terms = [json!({"deadline_ms": 0}), json!({"deadline_ms": 300, "on_deadline": "abandon"}), json!({})];
    let asked = Instant::now();
    let answers = join_all((0..50).map(|n| curl("POST", &urls[n % 2], key, Some(&terms[n % 3])))).await;
    // Fifty processes are to be started on the way.
    let took = asked.elapsed();
    assert!(took < Duration::from_secs(2 + 5), "{took:?}: {answers:?}\n{}", scene.split.logs());
    let mut reports = Vec::new();
    for answer in answers {
        let answer = answer?;
        assert_eq!(answer.status, 200, "{}", answer.body);
        reports.push(answer.body);
    }
    assert!(reports.iter().all(|report| *report == reports[0]), "{reports:#?}");
    goes_on(&mut scene).await
}

/// The worker stands still, and so does what would end its engine: the next one goes on.
#[tokio::test]
async fn r_eng_3_when_the_instance_that_ends_an_engine_dies_another_goes_on() -> Result<()> {
    let mut scene = stuck(SplitOptions::default()).await?;
    let (other, url) = scene.split.another_api().await?;
    // Whoever comes to end it hangs at the proxy now.
    scene.source_proxy()?.set_where(Flow::Frozen, |said| !said.contains("replication\0"));
    scene.split.worker.process.pause()?;
    scene.split.api.pause()?;
    let key = scene.split.platform_key().await?.to_owned();
    let stop = json!({"deadline_ms": 500});
    let asking =
        tokio::spawn(async move { curl("POST", &format!("{url}/v1/engines/shared/stop"), &key, Some(&stop)).await });
    let platform = scene.split.platform().client("platform").await?;
    let state = "select state from aura.engines";
    let taken =
        || async { platform.query_one(state, &[]).await.is_ok_and(|row| row.get::<_, &str>(0) == "force_closing") };
    eventually(PATIENCE, taken).await?;
    other.kill().await?;
    assert!(asking.await?.is_err(), "it died with the request");
    scene.split.api.resume()?;
    let asked = Instant::now();
    let joined = scene.split.verb("stop", json!({"deadline_ms": 0})).await?;
    assert_eq!(joined.status, 200, "{}\n{}", joined.body, scene.split.logs());
    assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
    assert!(
        joined.body["reason"].as_str().is_some_and(|reason| reason.contains("rows are unknown")),
        "{}",
        joined.body
    );
    assert!(scene.slot.state().await?.is_some_and(|slot| !slot.active), "{}", joined.body);
    scene.split.worker.process.resume()?;
    goes_on(&mut scene).await
}

/// The database is away for a moment while the engine drains: the deadline holds, and the rows are counted.
#[tokio::test]
async fn r_eng_3_a_restart_of_the_platform_database_stops_no_stop() -> Result<()> {
    // No lease runs out meanwhile.
    let options = SplitOptions::default().own_platform().worker("LEASE_DURATION_SECS", "15");
    let mut scene = stuck(options).await?;
    let (key, url) =
        (scene.split.platform_key().await?.to_owned(), format!("{}/v1/engines/shared/stop", scene.split.api_url));
    let asked = Instant::now();
    let stop = tokio::spawn(async move { curl("POST", &url, &key, Some(&json!({"deadline_ms": 4000}))).await });
    let open = || async { scene.split.engine().await.unwrap_or_default()["operation"].is_object() };
    eventually(PATIENCE, open).await?;
    scene.split.platform_mut().restart(Shutdown::Fast).await?;
    // Who waits is answered in time; 503 says that nobody knows.
    assert!(matches!(stop.await??.status, 200 | 202 | 503));
    assert!(asked.elapsed() < Duration::from_secs(4 + 5), "{:?}", asked.elapsed());
    let stopped = || async { scene.split.engine().await.is_ok_and(|engine| engine["state"] == "stopped") };
    eventually(PATIENCE, stopped).await.with_context(|| scene.split.logs())?;
    let report = scene.split.engine().await?["last_report"].clone();
    assert!(has_abandoned(&report), "{report}");
    goes_on(&mut scene).await
}

/// Nothing runs, so nothing is to be told of it: what the last run did stays.
#[tokio::test]
async fn r_eng_6_a_force_close_of_a_stopped_engine_keeps_the_last_runs_report() -> Result<()> {
    let mut scene = Scene::start(SplitOptions::default()).await?;
    scene.insert(20).await?;
    scene.all_arrive().await?;
    let stopped = scene.split.verb("stop", json!({})).await?;
    assert_eq!((stopped.status, &stopped.body["outcome"]), (200, &json!("drained")), "{}", stopped.body);
    for _ in 0..3 {
        let forced = scene.split.verb("force-close", json!({})).await?;
        assert_eq!(forced.status, 200, "{}\n{}", forced.body, scene.split.logs());
        for part in ["epoch", "outcome", "reason", "drain"] {
            assert_eq!(forced.body[part], stopped.body[part], "{part}: {}\n{}", forced.body, scene.split.logs());
        }
    }
    Ok(())
}
