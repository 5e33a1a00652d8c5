//! What is shown of engines and workers.

use anyhow::{Context, Result};
use aura_domain::{
    Condition, ConditionNote, EngineLive, EngineState, Epoch, FlowLive, Lag, Lsn, Position, SlotLive, WorkerId,
};
use aura_store::{NewGap, NewWorker};
use axum::http::{Method, StatusCode};
use serde_json::json;

use crate::harness::{Platform, Reply};

impl Platform {
    /// Says that a worker lives.
    pub(crate) async fn heartbeat(&self, worker: &WorkerId, draining: bool) -> Result<()> {
        let beat = NewWorker { id: worker, host: "host-1", version: "0.1.0", max_engines: 8, draining };
        Ok(self.store.heartbeat(beat).await?)
    }

    /// Says that a worker has been silent for an hour.
    pub(crate) async fn fall_silent(&self, worker: &WorkerId) -> Result<()> {
        let sql = "update aura.workers set heartbeat_at = heartbeat_at - interval '1 hour' where id = $1";
        let client = self.postgres.client("platform").await?;
        client.execute(sql, &[&worker.0]).await.map(drop).context("silent")
    }

    /// A worker that lives, runs the engine, and does nothing else.
    pub(crate) async fn play_leader(&self, name: &str) -> Result<(WorkerId, Epoch)> {
        let worker = WorkerId(name.to_owned());
        self.heartbeat(&worker, false).await?;
        let (epoch, _) = self.store.take_engine(self.source.id, &worker).await?;
        self.store.set_engine_state(self.source.id, epoch, EngineState::Running, None).await?;
        Ok((worker, epoch))
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Reply> {
        self.call(Method::GET, path).key(&self.platform_key).send().await
    }
}

#[tokio::test]
async fn an_engine_shows_what_its_worker_says_and_who_that_is() -> Result<()> {
    let platform = Platform::start().await?;
    let idle = platform.get("/v1/engines/shared").await?.body;
    assert_eq!((&idle["state"], &idle["lease"], &idle["lag"]), (&json!("stopped"), &json!(null), &json!(null)));
    assert_eq!(
        idle["slot"],
        json!({"name": "aura_cdc_slot", "wal_status": null, "safe_wal_bytes": null,
        "active_pid": null, "retained_bytes": null, "confirmed_lsn": null})
    );
    assert!(idle.get("operation").is_none());
    let (worker, epoch) = platform.play_leader("w-1").await?;
    let since = "2026-01-01T00:00:00.000000Z".to_owned();
    let live = EngineLive {
        conditions: vec![ConditionNote { condition: Condition::Paused, since, detail: Some("quota".to_owned()) }],
        slot: SlotLive { wal_status: Some("reserved".to_owned()), active_pid: Some(7), ..SlotLive::default() },
        flow: FlowLive { used_bytes: 10, quota_bytes: 20, pauses: 2, ..FlowLive::default() },
        lag: Lag { bytes: Some(42), seconds: Some(1.5), lost: false },
        tables: 3,
        holes: 1,
        confirmed_lsn: Lsn(0x10),
        ..EngineLive::default()
    };
    platform.store.set_live(platform.source.id, epoch, &live).await?;
    let shown = platform.get("/v1/engines/shared").await?.body;
    assert_eq!(shown["conditions"][0]["condition"], "paused");
    assert_eq!(shown["lag"], json!({"bytes": 42, "seconds": 1.5, "lost": false}));
    assert_eq!((&shown["filter"]["tables"], &shown["filter"]["holes"]), (&json!(3), &json!(1)));
    assert_eq!((&shown["slot"]["confirmed_lsn"], &shown["slot"]["active_pid"]), (&json!("0/10"), &json!(7)));
    assert_eq!((&shown["flow"]["used_bytes"], &shown["flow"]["pauses"]), (&json!(10), &json!(2)));
    assert_eq!((&shown["lease"]["holder"], &shown["lease"]["alive"]), (&json!("w-1"), &json!(true)));
    assert_eq!(platform.get("/v1/engines").await?.body["items"][0]["lag"], shown["lag"]);
    platform.fall_silent(&worker).await?;
    assert_eq!(platform.get("/v1/engines/shared").await?.body["lease"]["alive"], false);
    platform.stop().await
}

#[tokio::test]
async fn r_lease_3_the_pool_is_listed_with_its_engines() -> Result<()> {
    let platform = Platform::start().await?;
    let (first, _) = platform.play_leader("w-1").await?;
    platform.heartbeat(&WorkerId("w-2".to_owned()), true).await?;
    let list = platform.get("/v1/workers").await?.body;
    let source = platform.source.id.to_string();
    let seen: Vec<_> = list["items"]
        .as_array()
        .context("a list")?
        .iter()
        .map(|worker| {
            (worker["id"].clone(), worker["alive"].clone(), worker["draining"].clone(), worker["engines"].clone())
        })
        .collect();
    let expected = [
        (json!("w-1"), json!(true), json!(false), json!([source])),
        (json!("w-2"), json!(true), json!(true), json!([])),
    ];
    assert_eq!(seen, expected);
    platform.fall_silent(&first).await?;
    assert_eq!(platform.get("/v1/workers").await?.body["items"][0]["alive"], false);
    platform.stop().await
}

#[tokio::test]
async fn g8_losses_are_listed_newest_first_and_paged() -> Result<()> {
    let platform = Platform::start().await?;
    let (source, epoch) = (platform.source.id, platform.store.raise_epoch(platform.source.id).await?);
    let position: Position = "1-00000000016b3748-00000000016b3700-0".parse()?;
    for from in [None, Some(position), None] {
        let gap = NewGap { source, project: None, from, to: None, reason: "slot_recreated" };
        platform.store.record_gap(epoch, gap).await?;
    }
    let first = platform.get("/v1/engines/shared/gaps?limit=2").await?;
    assert_eq!(first.status, StatusCode::OK, "{}", first.body);
    assert_eq!(first.body["items"][1]["from"], position.to_string());
    assert_eq!(first.body["items"][1]["reason"], "slot_recreated");
    let cursor = first.body["next_cursor"].as_str().context("there is more")?;
    let second = platform.get(&format!("/v1/engines/{source}/gaps?limit=2&cursor={cursor}")).await?.body;
    assert_eq!((second["items"].as_array().map(Vec::len), &second["next_cursor"]), (Some(1), &json!(null)));
    assert!(second["items"][0]["id"].as_i64() < first.body["items"][1]["id"].as_i64());
    assert_eq!(platform.get("/v1/engines/shared/gaps?cursor=x").await?.code(), "invalid_parameter");
    assert_eq!(platform.get("/v1/engines/nowhere/gaps").await?.code(), "source_not_found");
    platform.stop().await
}
