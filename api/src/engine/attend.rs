//! Ends one engine from outside. `stopped` is written only after the slot was seen inactive.

use std::time::Duration;

use aura_domain::{EngineLive, EngineReport, EngineState, Epoch, Lag, OnDeadline, SourceId, Timed};
use aura_pgsource::{
    ladder::{Climb, Freed, Target, zombie_reason},
    slot::{SlotHolder, SlotStatus},
};
use aura_store::{Ending, Engine, Source, StoreError};
use tokio::time::Instant;

use super::{slot, task, task::Task};
use crate::{
    error::{ApiError, Result},
    state::AppState,
};

/// An engine's `reason` when its slot can't be looked at; also the condition's word.
const UNREACHABLE: &str = "source_unreachable";
/// Begins an engine's `reason` when somebody else holds its slot.
pub(super) const FOREIGN: &str = "slot_in_use_by_other";

/// What the api saw of the slot when it did what was to be done.
#[derive(Debug)]
pub(super) enum Seen {
    /// There was nothing to do, or somebody else does it.
    Nothing,
    /// Nobody holds it.
    Free,
    /// Somebody else does, and was left alone.
    Foreign(SlotHolder),
    /// Ours still does, or nobody can tell.
    Held,
}

/// Does what is to be done about a source's engine now. One at a time in this process, and whoever queued behind one that
/// began after they came has nothing left to do. Other instances are kept apart by the epoch that whoever begins has
/// raised, and nothing here does harm when it is done twice.
pub(super) async fn attend(state: &AppState, source: SourceId, urgent: bool) -> Result<Seen> {
    let came = Instant::now();
    let mut last_began = state.closer().turn(source).await;
    if last_began.is_some_and(|began| began >= came) {
        return Ok(Seen::Nothing);
    }
    *last_began = Some(Instant::now());
    let store = state.store();
    let (engine, workers) = (store.engine(source).await?, store.workers().await?);
    let (Some(engine), Some(source)) = (engine, store.source(source).await?) else { return Ok(Seen::Nothing) };
    let led = engine.is_led(&workers);
    match task::task(&engine, led, urgent) {
        Some(Task::TakeOver(policy)) => take_over(state, &source, &engine, policy).await,
        Some(Task::Again(policy)) => {
            let report = engine.report_from_outside(policy);
            end(state, &source, task::LADDER, (engine.epoch, engine.state), report, policy).await
        }
        Some(Task::Assist) => Ok(seen(free(&source, engine.epoch, task::LADDER).await.freed)),
        Some(Task::Watch) => watch(state, &source, engine).await,
        None => Ok(Seen::Nothing),
    }
}

async fn take_over(state: &AppState, source: &Source, engine: &Engine, policy: OnDeadline) -> Result<Seen> {
    let ending = match policy {
        OnDeadline::Force => EngineState::ForceClosing,
        OnDeadline::Abandon => EngineState::Closing,
    };
    let report = engine.report_from_outside(policy);
    let Some(epoch) = state.store().take_end(engine, ending, Some(&report)).await? else { return Ok(Seen::Nothing) };
    tracing::warn!(source = %source.id, %epoch, was = %engine.state, holder = ?engine.holder, policy = %policy,
        "ending the engine from outside");
    end(state, source, task::ladder(engine), (epoch, ending), report, policy).await
}

/// Frees the slot, or only looks if nobody is to be ended, and writes what came of it.
async fn end(
    state: &AppState,
    source: &Source,
    limit: Duration,
    (epoch, ending): (Epoch, EngineState),
    mut report: EngineReport,
    policy: OnDeadline,
) -> Result<Seen> {
    let climb = match policy {
        OnDeadline::Force => free(source, epoch, limit).await,
        OnDeadline::Abandon => observed(source).await,
    };
    climb.tell(&mut report);
    let reason = reason(source, &climb.freed);
    let seen_state = match &climb.freed {
        Freed::Free => EngineState::Stopped,
        Freed::Foreign(_) | Freed::Held(_) => EngineState::Zombie,
        // Nobody knows.
        Freed::Unknown(_) => ending,
    };
    let ending = Ending { state: seen_state, reason: reason.as_deref(), report: Some(&report) };
    write(state, source.id, epoch, ending).await?;
    tracing::info!(source = %source.id, state = %seen_state, reason, rungs = ?names(&climb.rungs), "ended from outside");
    Ok(seen(climb.freed))
}

/// Nobody leads and nobody is to: what holds the slot under our name is left over, and ended at once (R-ENG-7, Z6).
async fn watch(state: &AppState, source: &Source, engine: Engine) -> Result<Seen> {
    let mut report = engine.report_from_outside(OnDeadline::Force);
    let mut epoch = engine.epoch;
    if engine.holder.is_some() {
        // A dead worker; should it come back, it is not to write over what is found now.
        match state.store().take_end(&engine, engine.state, Some(&report)).await? {
            Some(raised) => epoch = raised,
            None => return Ok(Seen::Nothing),
        }
    }
    let climb = free(source, epoch, task::LADDER).await;
    if let Some(ended) = &climb.ended {
        metrics::counter!("engine_orphans_ended_total").increment(1);
        tracing::warn!(source = %source.id, pid = ended.pid, name = ended.application_name, rungs = ?names(&climb.rungs),
            "ended what held the slot although nobody runs the engine");
    }
    climb.tell(&mut report);
    let reason = reason(source, &climb.freed);
    let ending = match &climb.freed {
        Freed::Free if engine.state == EngineState::Stopped => None,
        Freed::Free => Some(Ending { state: EngineState::Stopped, reason: None, report: Some(&report) }),
        // A stopped engine's slot is anybody's.
        Freed::Foreign(_) if engine.state == EngineState::Stopped => None,
        Freed::Foreign(_) | Freed::Held(_) => {
            Some(Ending { state: EngineState::Zombie, reason: reason.as_deref(), report: Some(&report) })
        }
        Freed::Unknown(error) => {
            tracing::debug!(source = %source.id, %error, "can't look at the slot");
            None
        }
    };
    if let Some(ending) = ending {
        write(state, source.id, epoch, ending).await?;
    }
    if let Some(status) = &climb.slot {
        state.store().set_slot(source.id, epoch, &live(status)).await?;
    }
    Ok(seen(climb.freed))
}

/// What is known of an engine that nobody runs: log piles up behind its slot, until that is lost.
fn live(status: &SlotStatus) -> EngineLive {
    let behind = status.confirmed_flush.map(|confirmed| status.wal_end.0.saturating_sub(confirmed.0));
    let lag = Lag { bytes: behind.filter(|_| !status.is_lost()), seconds: None, lost: status.is_lost() };
    EngineLive { slot: status.live(), lag, ..EngineLive::default() }
}

async fn free(source: &Source, up_to: Epoch, limit: Duration) -> Climb {
    slot::free(source, Target { slot: &source.slot_name, source: source.id, up_to }, limit).await
}

/// As [`free`] says it, without ending anybody.
async fn observed(source: &Source) -> Climb {
    let status = match slot::observe(source).await {
        Ok(status) => status,
        Err(error) => return Climb::failed(error),
    };
    let holder = status.as_ref().filter(|status| status.active).and_then(|status| status.holder.clone());
    let freed = match holder {
        None => Freed::Free,
        Some(holder) if is_ours(source, &holder) => Freed::Held(holder),
        Some(holder) => Freed::Foreign(holder),
    };
    Climb { rungs: Vec::new(), ended: None, slot: status, freed }
}

/// The api could not look at the slot when it was to.
pub(crate) fn is_unreachable(engine: &Engine) -> bool {
    engine.reason_code() == Some(UNREACHABLE)
}

/// Whether a process says that it is this source's engine.
pub(super) fn is_ours(source: &Source, holder: &SlotHolder) -> bool {
    aura_pgsource::slot::epoch_of(&holder.application_name, source.id).is_some()
}

fn reason(source: &Source, freed: &Freed) -> Option<String> {
    match freed {
        Freed::Free => None,
        Freed::Foreign(holder) => Some(format!("{FOREIGN}: {}", zombie_reason(&source.slot_name, holder))),
        Freed::Held(holder) => Some(zombie_reason(&source.slot_name, holder)),
        Freed::Unknown(error) => {
            tracing::warn!(source = %source.id, %error, "can't look at the slot");
            Some(UNREACHABLE.to_owned())
        }
    }
}

fn seen(freed: Freed) -> Seen {
    match freed {
        Freed::Free => Seen::Free,
        Freed::Foreign(holder) => Seen::Foreign(holder),
        Freed::Held(_) | Freed::Unknown(_) => Seen::Held,
    }
}

async fn write(state: &AppState, source: SourceId, epoch: Epoch, ending: Ending<'_>) -> Result<()> {
    match state.store().leave_engine(source, epoch, ending).await {
        // Somebody has taken it since: what was seen is of a run that is over.
        Err(StoreError::Fenced) => Ok(()),
        outcome => outcome.map_err(ApiError::from),
    }
}

fn names(rungs: &[Timed]) -> Vec<&str> {
    rungs.iter().map(|rung| rung.name.as_str()).collect()
}
