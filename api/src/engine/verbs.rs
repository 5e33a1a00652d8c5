//! What an operator may ask of an engine (R-ENG-3). A verb is a row in the platform database; here it is written and
//! waited for.

use std::time::Duration;

use aura_domain::{EngineReport, EngineState, OnDeadline, Verb, VerbEffect};
use aura_kit::{Code, Problem};
use aura_pgsource::slot::SlotHolder;
use aura_store::{Caller, Engine, Operation, Source, StartRequest, StopRequest};
use serde_json::Value;
use tokio::time::{Instant, timeout, timeout_at};

use super::{
    attend::{FOREIGN, Seen, is_ours},
    slot, task,
};
use crate::{
    error::{ApiError, Result},
    state::AppState,
};

/// An answer is given so long after the deadline, whatever has come of it.
const ANSWER: Duration = Duration::from_millis(4_600);
/// For a look at the slot that only makes an answer better.
const LOOK: Duration = Duration::from_secs(2);
/// Whoever has taken an end over has ended it by then, unless it is hard or they are gone.
const USUALLY: Duration = Duration::from_millis(task::USUALLY_MS.unsigned_abs());
/// When to look again at what no deadline ends.
const WATCH_PERIOD_MS: i64 = 10_000;
/// When to ask again for what is refused while something is under way.
const RETRY_MS: i64 = 1_000;

/// How an engine is to be stopped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StopTerms {
    /// Drain for so long.
    pub(crate) deadline: Duration,
    /// And then?
    pub(crate) on_deadline: OnDeadline,
}

/// What came of a stop or force-close within its time.
#[derive(Debug)]
pub(crate) enum Stopped {
    /// It is stopped.
    Report(Box<EngineReport>),
    /// Not yet.
    Open,
}

/// Stops an engine and waits until it is stopped, can't be, or the deadline has passed by [`ANSWER`].
pub(crate) async fn stop(state: &AppState, source: &Source, terms: StopTerms, caller: Caller<'_>) -> Result<Stopped> {
    let request = state.store().request_stop(source.id, terms.deadline, terms.on_deadline, caller).await?;
    match request {
        StopRequest::Already(engine) => Ok(reported(*engine)),
        StopRequest::Accepted { operation, .. } => {
            let remaining = Duration::from_millis(u64::try_from(operation.remaining_ms).unwrap_or(0));
            let deadline = Instant::now() + remaining + ANSWER;
            if remaining.is_zero() {
                // What is known of one that is overdue may be known by softer terms.
                press(state, source, &operation, deadline).await?;
            }
            wait(state, source, &operation, deadline).await
        }
    }
}

/// Ends an engine at once: its worker, if it lives, and else this instance.
pub(crate) async fn force_close(state: &AppState, source: &Source, caller: Caller<'_>) -> Result<Stopped> {
    let deadline = Instant::now() + ANSWER;
    let request = state.store().request_force_close(source.id, caller).await?;
    let StopRequest::Accepted { operation, .. } = request else { return Err(ApiError::source_not_found()) };
    let patience = due_in(state, source, &operation).await?;
    if let ended @ Stopped::Report(_) = wait(state, source, &operation, Instant::now() + patience).await? {
        return Ok(ended);
    }
    match press(state, source, &operation, deadline).await? {
        Seen::Foreign(holder) if !is_ours(source, &holder) => return Err(in_use(&holder)),
        _ => {}
    }
    let ended = wait(state, source, &operation, deadline).await?;
    match ended {
        Stopped::Open => foreign(state, source).await?.map_or(Ok(Stopped::Open), |holder| Err(in_use(&holder))),
        ended @ Stopped::Report(_) => Ok(ended),
    }
}

/// Does now what is due. What another instance has just begun is left to it for a moment: it may have died over it.
async fn press(state: &AppState, source: &Source, operation: &Operation, deadline: Instant) -> Result<Seen> {
    let seen = attend(state, source, deadline).await?;
    if !matches!(seen, Seen::Nothing) {
        return Ok(seen);
    }
    match wait(state, source, operation, deadline.min(Instant::now() + USUALLY)).await? {
        Stopped::Report(_) => Ok(Seen::Nothing),
        Stopped::Open => attend(state, source, deadline).await,
    }
}

/// Does now what is due, and waits for it until the deadline; it goes on without us.
async fn attend(state: &AppState, source: &Source, deadline: Instant) -> Result<Seen> {
    match timeout_at(deadline, state.closer().attend_now(state, source.id)).await {
        Ok(Ok(seen)) => seen,
        // It panicked, or goes on.
        Ok(Err(_)) | Err(_) => Ok(Seen::Nothing),
    }
}

/// Who holds the slot, when another instance has found that it is somebody else.
async fn foreign(state: &AppState, source: &Source) -> Result<Option<SlotHolder>> {
    let engine = read(state, source).await?;
    Ok(if engine.reason_code() == Some(FOREIGN) { other_holder(source).await } else { None })
}

/// Somebody who is not the engine and holds its slot now; `None` also when the source doesn't answer.
async fn other_holder(source: &Source) -> Option<SlotHolder> {
    let status = timeout(LOOK, slot::look(source)).await.ok()?.ok()??;
    status.holder.filter(|holder| status.active && !is_ours(source, holder))
}

/// Waits until the operation is over or its outcome is known.
async fn wait(state: &AppState, source: &Source, operation: &Operation, deadline: Instant) -> Result<Stopped> {
    let ended = state.progress().wait(deadline, || async {
        let engine = read(state, source).await?;
        if engine.operation.as_ref().map(|open| open.id) != Some(operation.id) {
            return Ok(Some(reported(engine)));
        }
        let answer = task::is_settled(&engine) || state.is_draining();
        Ok(answer.then_some(Stopped::Open))
    });
    Ok(ended.await?.unwrap_or(Stopped::Open))
}

fn reported(engine: Engine) -> Stopped {
    Stopped::Report(Box::new(engine.report()))
}

/// Starts an engine and waits until it runs: true, or the time is over: false.
pub(crate) async fn start(state: &AppState, source: &Source, wait: Duration, caller: Caller<'_>) -> Result<bool> {
    let before = read(state, source).await?;
    match state.store().request_start(source.id, caller).await? {
        StartRequest::Refused { state, retry_after_ms } => {
            // Without an operation it is being handed over, which is soon done.
            let usual = if state == EngineState::Zombie { WATCH_PERIOD_MS } else { RETRY_MS };
            let retry_after_ms = retry_after_ms.unwrap_or(usual).max(RETRY_MS);
            return Err(conflict("start", Some(Verb::Start), state, Some(retry_after_ms)));
        }
        StartRequest::Accepted => {}
    }
    let running = state.progress().wait(Instant::now() + wait, || async {
        let engine = read(state, source).await?;
        let runs = engine.state == EngineState::Running && engine.is_led(&state.store().workers().await?);
        let failed = engine.state == EngineState::Failed && engine.since != before.since;
        let answer = runs || failed || state.is_draining();
        Ok(answer.then_some(runs))
    });
    if running.await?.unwrap_or(false) {
        return Ok(true);
    }
    match other_holder(source).await {
        Some(holder) => Err(in_use(&holder)),
        None => Ok(false),
    }
}

/// Asks for a new slot, if the old one is of no use.
pub(crate) async fn new_slot(state: &AppState, source: &Source, caller: Caller<'_>) -> Result<()> {
    let engine = read(state, source).await?;
    if engine.operation.is_some() || engine.state.effect(Verb::RecreateSlot) == VerbEffect::Refused {
        return Err(conflict("recreate-slot", Some(Verb::RecreateSlot), engine.state, None));
    }
    let status = slot::look(source).await?;
    if status.is_some_and(|status| status.useless().is_none()) {
        let detail = "The slot is there and nothing is lost: a new one would skip what is still to be read.";
        return Err(ApiError::new(Code::SlotNotLost, detail));
    }
    Ok(state.store().request_new_slot(source.id, caller).await?)
}

/// Until it is for us to act.
async fn due_in(state: &AppState, source: &Source, operation: &Operation) -> Result<Duration> {
    let engine = read(state, source).await?;
    let led = engine.is_led(&state.store().workers().await?);
    Ok(task::due_in(&engine, operation, led))
}

async fn read(state: &AppState, source: &Source) -> Result<Engine> {
    let read = Box::pin(async { state.store().engine(source.id).await?.ok_or_else(ApiError::source_not_found) });
    state.closer().engines.read(source.id, read).await
}

/// 409 with the verbs that are not refused in the state. `refused` is left out of them: an open operation refuses more than
/// its engine's state does.
pub(crate) fn conflict(wish: &str, refused: Option<Verb>, state: EngineState, retry_after_ms: Option<i64>) -> ApiError {
    let legal = state.legal_verbs().filter(|verb| Some(*verb) != refused);
    let legal: Vec<Value> = legal.map(|verb| Value::from(verb.as_str())).collect();
    let detail = format!("Not possible now: {wish}; the engine's state is {state}.");
    let problem =
        Problem::new(Code::EngineStateConflict, detail).with("state", state.as_str()).with("legal_verbs", legal);
    match retry_after_ms {
        Some(ms) => {
            let seconds = u64::try_from(ms).unwrap_or(0).div_ceil(1000);
            problem.with("retry_after_ms", ms).retry_after(seconds).into()
        }
        None => problem.into(),
    }
}

fn in_use(holder: &SlotHolder) -> ApiError {
    let SlotHolder { pid, application_name, .. } = holder;
    let name = if application_name.is_empty() { Value::Null } else { Value::from(application_name.as_str()) };
    let detail = format!("Server process {pid} holds the slot and is not ours; it was left alone.");
    Problem::new(Code::SlotInUseByOther, detail).with("pid", *pid).with("application_name", name).into()
}
