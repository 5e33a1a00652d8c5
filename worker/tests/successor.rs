//! A worker that takes over an engine which is to be stopped ends the run of the one before, and says what is known of it
//! (R-ENG-3, R-ENG-7).

use std::time::Duration;

use aura_domain::{EngineState, Epoch, OnDeadline, Outcome};
use aura_store::{Plugin, StartRequest};
use aura_testkit::{Squatter, SquatterOptions, eventually, eventually_some};

use crate::stage::{CALLER, PATIENCE, Running, Stage};

/// What is left of a leader that was killed: its walsender, and its row.
struct Remains {
    stage: Stage,
    walsender: Option<Squatter>,
    epoch: Epoch,
}

impl Remains {
    async fn new() -> anyhow::Result<Self> {
        let stage = Stage::new(Plugin::Auto).await?;
        let leader = stage.run_worker().await;
        let live = eventually_some(PATIENCE, || async {
            let engine = stage.engine().await;
            engine.live.as_ref().is_some_and(|live| live.received_lsn.0 > 0).then_some(engine)
        });
        let epoch = live.await?.epoch;
        leader.kill();
        stage.slot().await.wait_free(PATIENCE).await?;
        let walsender = Squatter::start(SquatterOptions {
            port: stage.postgres.port(),
            login: Some(("aura_worker".into(), "secret".into())),
            database: "app".to_owned(),
            slot: stage.source.slot_name.clone(),
            application_name: format!("aura-cdc:{}:{epoch}", stage.source.id),
            plugin_options: vec![("format-version".to_owned(), "2".to_owned())],
        })
        .await?;
        Ok(Self { stage, walsender: Some(walsender), epoch })
    }

    async fn is_asked_to_stop(&self, on_deadline: OnDeadline) -> anyhow::Result<Running> {
        let stage = &self.stage;
        stage.store.request_stop(stage.source.id, Duration::from_secs(60), on_deadline, CALLER).await?;
        Ok(stage.worker().await)
    }

    fn holds_the_slot(&self) -> bool {
        self.walsender.as_ref().is_some_and(Squatter::is_connected)
    }

    /// One run ends what was left over, and no second one writes over what it said.
    async fn is_over(&self, outcome: Outcome, rungs: &[&str]) -> anyhow::Result<()> {
        let stage = &self.stage;
        let engine = stage.reaches(EngineState::Stopped).await?;
        assert_eq!((engine.operation, engine.holder), (None, None));
        let report = engine.last_report.expect("a report");
        assert_eq!((report.outcome, report.epoch), (outcome, self.epoch), "{report:?}");
        assert!(report.reason.as_ref().is_some_and(|reason| reason.contains("rows are unknown")), "{report:?}");
        assert!(report.lsn.received.0 > 0 && report.lsn.verified.is_some() && report.slot_released, "{report:?}");
        assert_eq!(report.rungs.iter().map(|rung| rung.name.as_str()).collect::<Vec<_>>(), rungs, "{report:?}");
        let started = stage.store.request_start(stage.source.id, CALLER).await?;
        assert_eq!(started, StartRequest::Accepted);
        let next = stage.reaches(EngineState::Running).await?;
        assert_eq!((next.epoch.0, next.last_report), (engine.epoch.0 + 1, Some(report)));
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r_eng_3_a_successor_ends_nobodys_process_where_the_stop_says_abandon() -> anyhow::Result<()> {
    let mut remains = Remains::new().await?;
    let successor = remains.is_asked_to_stop(OnDeadline::Abandon).await?;
    remains.stage.reaches(EngineState::Zombie).await?;
    assert!(remains.holds_the_slot());
    remains.walsender = None;
    remains.is_over(Outcome::Abandoned, &["poll"]).await?;
    successor.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r_eng_3_a_successor_frees_the_slot_and_says_that_the_rows_are_unknown() -> anyhow::Result<()> {
    let remains = Remains::new().await?;
    let successor = remains.is_asked_to_stop(OnDeadline::Force).await?;
    eventually(PATIENCE, || async { !remains.holds_the_slot() }).await?;
    remains.is_over(Outcome::Forced, &["terminate", "poll"]).await?;
    successor.stop().await;
    Ok(())
}
