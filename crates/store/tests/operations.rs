use std::time::Duration;

use aura_domain::{
    Desired, DrainReport, EngineLive, EngineReport, EngineState, Generation, Lsn, LsnReport, OnDeadline, OperationKind,
    Outcome, Position, WorkerId,
};
use aura_store::{Ending, NewWorker, SignalListener, StartRequest, StopRequest, StoreError};

use crate::{CALLER, Platform, platform};

fn worker(name: &str) -> WorkerId {
    WorkerId(name.to_owned())
}

fn operation(request: StopRequest) -> (aura_store::Operation, bool) {
    match request {
        StopRequest::Accepted { operation, joined } => (operation, joined),
        StopRequest::Already(engine) => panic!("stopped already: {engine:?}"),
    }
}

async fn stop(platform: &Platform, ms: u64, on_deadline: OnDeadline) -> (aura_store::Operation, bool) {
    let request = platform.store.request_stop(platform.source, Duration::from_millis(ms), on_deadline, CALLER);
    operation(request.await.expect("written"))
}

async fn desired(platform: &Platform) -> Desired {
    platform.store.engine(platform.source).await.expect("read").expect("it exists").desired
}

#[tokio::test]
async fn r_eng_3_a_second_stop_joins_and_only_tightens() {
    let platform = platform().await;
    let store = &platform.store;
    let (epoch, _) = store.take_engine(platform.source, &worker("w")).await.expect("taken");
    store.set_engine_state(platform.source, epoch, EngineState::Running, None).await.expect("written");
    let (first, joined) = stop(&platform, 60_000, OnDeadline::Abandon).await;
    assert!(!joined && first.remaining_ms > 50_000 && first.on_deadline == OnDeadline::Abandon);
    assert_eq!(desired(&platform).await, Desired::Stopped);
    let (longer, joined) = stop(&platform, 300_000, OnDeadline::Abandon).await;
    assert!(joined && longer.id == first.id && longer.remaining_ms <= 60_000, "{longer:?}");
    let (tighter, _) = stop(&platform, 5_000, OnDeadline::Force).await;
    assert!(tighter.id == first.id && tighter.remaining_ms <= 5_000 && tighter.on_deadline == OnDeadline::Force);
    let forced = store.request_force_close(platform.source, CALLER).await.expect("written");
    let (forced, joined) = operation(forced);
    assert!(joined && forced.id == first.id && forced.remaining_ms <= 0);
    assert_eq!(forced.kind, OperationKind::ForceClose);
    let start = store.request_start(platform.source, CALLER).await.expect("answered");
    assert!(
        matches!(start, StartRequest::Refused { state: EngineState::Running, retry_after_ms: Some(_) }),
        "{start:?}"
    );
}

#[tokio::test]
async fn r_eng_3_a_stop_that_joins_and_changes_nothing_wakes_nobody() {
    let platform = platform().await;
    platform.store.take_engine(platform.source, &worker("w")).await.expect("taken");
    let mut listener = platform.store.listen().await.expect("listening");
    let told = async |listener: &mut SignalListener| {
        tokio::time::timeout(Duration::from_millis(300), listener.next()).await.is_ok_and(|signal| signal.is_ok())
    };
    stop(&platform, 60_000, OnDeadline::Force).await;
    assert!(told(&mut listener).await);
    stop(&platform, 70_000, OnDeadline::Abandon).await;
    assert!(!told(&mut listener).await);
    stop(&platform, 50_000, OnDeadline::Force).await;
    assert!(told(&mut listener).await);
}

#[tokio::test]
async fn r_eng_1_the_end_of_a_run_closes_the_operation_and_is_fenced() {
    let platform = platform().await;
    let store = &platform.store;
    let (epoch, _) = store.take_engine(platform.source, &worker("w")).await.expect("taken");
    store.set_live(platform.source, epoch, &EngineLive { holes: 3, ..EngineLive::default() }).await.expect("written");
    let engine = store.engine(platform.source).await.expect("read").expect("it exists");
    assert_eq!((engine.holder, engine.live.map(|live| live.holes)), (Some(worker("w")), Some(3)));
    stop(&platform, 1_000, OnDeadline::Force).await;
    let report = EngineReport {
        source: platform.source,
        epoch,
        outcome: Outcome::Drained,
        reason: None,
        drain: DrainReport::default(),
        lsn: LsnReport { verified: Some(Lsn(7)), ..LsnReport::default() },
        rungs: Vec::new(),
        slot_released: true,
        lease_released: true,
    };
    let zombie = Ending { state: EngineState::Zombie, reason: Some("pid 1"), report: None };
    store.leave_engine(platform.source, epoch, zombie).await.expect("written");
    let engine = store.engine(platform.source).await.expect("read").expect("it exists");
    assert!(
        engine.operation.is_some() && engine.holder.is_none() && engine.live.is_none(),
        "open until the slot is free"
    );
    let stopped = Ending { state: EngineState::Stopped, reason: None, report: Some(&report) };
    store.leave_engine(platform.source, epoch, stopped.clone()).await.expect("written");
    let engine = store.engine(platform.source).await.expect("read").expect("it exists");
    assert_eq!(
        (engine.state, engine.operation, engine.last_report),
        (EngineState::Stopped, None, Some(report.clone()))
    );
    let again = store.request_stop(platform.source, Duration::ZERO, OnDeadline::Force, CALLER).await.expect("answered");
    assert!(matches!(again, StopRequest::Already(_)), "{again:?}");
    let force = operation(store.request_force_close(platform.source, CALLER).await.expect("answered")).0;
    assert_eq!(force.kind, OperationKind::ForceClose, "a slot may be held although the row says that it isn't");
    let late = store.raise_epoch(platform.source).await.expect("raised");
    let fenced = store.leave_engine(platform.source, epoch, stopped.clone()).await;
    assert!(matches!(fenced, Err(StoreError::Fenced)), "{fenced:?}");
    store.leave_engine(platform.source, late, stopped).await.expect("the api's own epoch");
    assert_eq!(store.request_start(platform.source, CALLER).await.expect("answered"), StartRequest::Accepted);
    assert_eq!(desired(&platform).await, Desired::Running);
}

#[tokio::test]
async fn r_eng_6_only_one_takes_an_end_over_and_the_worker_is_fenced() {
    let platform = platform().await;
    let store = &platform.store;
    let (epoch, _) = store.take_engine(platform.source, &worker("w")).await.expect("taken");
    store.set_engine_state(platform.source, epoch, EngineState::Running, None).await.expect("written");
    store.set_live(platform.source, epoch, &EngineLive::default()).await.expect("written");
    stop(&platform, 0, OnDeadline::Force).await;
    let overdue = store.engine(platform.source).await.expect("read").expect("it exists");
    let take = || store.take_end(&overdue, EngineState::ForceClosing, None);
    let (first, second) = tokio::join!(take(), take());
    let taken = [first.expect("answered"), second.expect("answered")];
    assert_eq!(taken.iter().flatten().count(), 1, "{taken:?}");
    let engine = store.engine(platform.source).await.expect("read").expect("it exists");
    assert_eq!((engine.state, engine.holder, engine.epoch.0), (EngineState::ForceClosing, None, epoch.0 + 1));
    assert!(engine.live.is_some() && engine.operation.is_some(), "open, and the run's last words are kept");
    let late = store.set_engine_state(platform.source, epoch, EngineState::Stopped, None).await;
    assert!(matches!(late, Err(StoreError::Fenced)), "{late:?}");
}

/// What came of an operation is told from what was before it by their times.
#[tokio::test]
async fn r_eng_6_a_clock_that_goes_back_turns_nothing_round() {
    let platform = platform().await;
    let store = &platform.store;
    let (epoch, _) = store.take_engine(platform.source, &worker("w")).await.expect("taken");
    stop(&platform, 0, OnDeadline::Force).await;
    let client = platform.postgres.client("platform").await.expect("a superuser");
    let later = "update aura.engines set operation_started_at = operation_started_at + interval '1 h'";
    client.batch_execute(later).await.expect("as an hour ahead");
    let engine = async || {
        let engine = store.engine(platform.source).await.expect("read").expect("it exists");
        let began = engine.operation.as_ref().map(|operation| operation.started_at.clone()).expect("it is open");
        assert!(engine.since >= began, "{engine:?}");
        engine
    };
    store.set_engine_state(platform.source, epoch, EngineState::Closing, None).await.expect("written");
    let closing = engine().await;
    let taken = store.take_end(&closing, EngineState::ForceClosing, None).await.expect("answered").expect("ours");
    engine().await;
    let ending = Ending { state: EngineState::Zombie, reason: Some("pid 1"), report: None };
    store.leave_engine(platform.source, taken, ending).await.expect("written");
    engine().await;
}

#[tokio::test]
async fn verbs_are_audited_when_they_change_something() {
    let platform = platform().await;
    let store = &platform.store;
    let (epoch, _) = store.take_engine(platform.source, &worker("w")).await.expect("taken");
    store.set_engine_state(platform.source, epoch, EngineState::Running, None).await.expect("written");
    for ms in [60_000, 60_000, 5_000] {
        stop(&platform, ms, OnDeadline::Force).await;
    }
    let stopped = Ending { state: EngineState::Stopped, reason: None, report: None };
    store.leave_engine(platform.source, epoch, stopped).await.expect("written");
    for _ in 0..2 {
        store.request_start(platform.source, CALLER).await.expect("answered");
    }
    let query =
        "select action, actor, request_id, target, before->>'desired', after->>'desired' from aura.audit order by id";
    let lines: Vec<(String, String, String, String, String, String)> =
        sqlx::query_as(query).fetch_all(store.pool()).await.expect("read");
    let seen: Vec<_> = lines.iter().map(|line| (line.0.as_str(), line.4.as_str(), line.5.as_str())).collect();
    let stop_line = |from| ("engine.stop", from, "stopped");
    assert_eq!(seen, [stop_line("running"), stop_line("stopped"), ("engine.start", "stopped", "running")]);
    let source = platform.source.to_string();
    assert!(lines.iter().all(|line| (line.1.as_str(), line.2.as_str(), &line.3) == ("platform", "r1", &source)));
}

#[tokio::test]
async fn r_lease_3_the_pool_is_known_by_its_heartbeats() {
    let platform = platform().await;
    let store = &platform.store;
    let (a, b) = (worker("a"), worker("b"));
    let beat = |id, draining| NewWorker { id, host: "h", version: "1", max_engines: 8, draining };
    store.heartbeat(beat(&a, false)).await.expect("written");
    store.heartbeat(beat(&b, false)).await.expect("written");
    store.heartbeat(beat(&b, true)).await.expect("written");
    store.take_engine(platform.source, &b).await.expect("taken");
    let workers = store.workers().await.expect("read");
    let seen: Vec<_> = workers.iter().map(|row| (row.id.clone(), row.engines, row.draining)).collect();
    assert_eq!(seen, [(a, 0, false), (b.clone(), 1, true)]);
    assert!(workers.iter().all(|row| (0..10_000).contains(&row.silent_ms)));
    store.remove_worker(&b).await.expect("removed");
    assert_eq!(store.workers().await.expect("read").len(), 1);
}

#[tokio::test]
async fn r_sd_6_the_third_panic_at_a_position_is_the_last() {
    let platform = platform().await;
    let store = &platform.store;
    let (epoch, _) = store.take_engine(platform.source, &worker("w")).await.expect("taken");
    let position = Position { generation: Generation(1), commit: Lsn(9), change: Lsn(8), n: 0 };
    for count in 1..=3 {
        assert_eq!(store.positions_to_skip(platform.source).await.expect("read"), []);
        assert_eq!(store.note_panic(platform.source, epoch, position).await.expect("noted"), count);
    }
    assert_eq!(store.positions_to_skip(platform.source).await.expect("read"), [position]);
    store.raise_epoch(platform.source).await.expect("raised");
    let late = store.note_panic(platform.source, epoch, position).await;
    assert!(matches!(late, Err(StoreError::Fenced)), "{late:?}");
}
