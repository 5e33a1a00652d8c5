//! Looks after every engine that may have to be ended from outside, in this instance and for all others: what is overdue
//! is taken over, whoever asked for it, and whether or not they still wait.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use aura_domain::{EngineState, OnDeadline, SourceId};
use aura_store::Engine;
use tokio::{
    sync::{Mutex as AsyncMutex, OwnedMutexGuard, Semaphore},
    task::JoinHandle,
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    attend::{Seen, attend},
    task::{self, Task},
};
use crate::{error::Result, state::AppState};

/// How often to look without being told to.
const PERIOD: Duration = Duration::from_secs(1);
/// Rounds are at least so far apart, however many signals come.
const MIN_PERIOD: Duration = Duration::from_millis(50);
/// Between two looks at a slot that isn't free, or isn't to be held (R-ENG-7).
const WATCH_PERIOD: Duration = Duration::from_secs(10);
/// Sources that are watched at a time; ends that are due don't count and never wait for them.
const WATCHED_AT_ONCE: usize = 16;

/// When the last one of a source began.
type Turn = Arc<AsyncMutex<Option<Instant>>>;

/// What this instance is at.
pub(crate) struct Closer {
    turns: Mutex<HashMap<SourceId, Turn>>,
    looked: Mutex<HashMap<SourceId, Look>>,
    watchers: Arc<Semaphore>,
    tasks: TaskTracker,
}

/// A look at an engine, at what it was then.
#[derive(Debug, Clone, Copy)]
struct Look {
    at: Instant,
    operation: Option<i64>,
    state: EngineState,
    policy: Option<OnDeadline>,
}

impl Default for Closer {
    fn default() -> Self {
        Self {
            turns: Mutex::default(),
            looked: Mutex::default(),
            watchers: Arc::new(Semaphore::new(WATCHED_AT_ONCE)),
            tasks: TaskTracker::new(),
        }
    }
}

impl Closer {
    /// One at a time per source.
    pub(super) async fn turn(&self, source: SourceId) -> OwnedMutexGuard<Option<Instant>> {
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(turns.entry(source).or_default())
        };
        turn.lock_owned().await
    }

    /// Attends to an engine now, in a task that goes on when nobody waits for it any more.
    pub(super) fn attend_now(&self, state: &AppState, source: SourceId) -> JoinHandle<Result<Seen>> {
        let state = state.clone();
        self.tasks.spawn(async move { attend(&state, source, true).await })
    }

    /// Notes a look, unless one at the same thing was not long ago.
    fn look(&self, engine: &Engine) -> bool {
        let now = Look {
            at: Instant::now(),
            operation: engine.operation.as_ref().map(|operation| operation.id),
            state: engine.state,
            policy: engine.operation.as_ref().map(|operation| operation.on_deadline),
        };
        let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
        let again = looked.get(&engine.source).is_none_or(|last| {
            let same = (last.operation, last.state, last.policy) == (now.operation, now.state, now.policy);
            !same || last.at.elapsed() >= WATCH_PERIOD
        });
        if again {
            looked.insert(engine.source, now);
        }
        again
    }

    fn forget(&self, source: SourceId) {
        self.looked.lock().unwrap_or_else(PoisonError::into_inner).remove(&source);
    }
}

/// Until `stop`; then what is under way is finished.
pub(crate) async fn sweep(state: &AppState, stop: &CancellationToken) {
    let mut news = state.progress().subscribe();
    while !stop.is_cancelled() {
        let began = Instant::now();
        // Before looking: what changes while we look wakes us again.
        news.borrow_and_update();
        let pause = match stop.run_until_cancelled(Box::pin(round(state))).await {
            Some(Ok(pause)) => pause.clamp(MIN_PERIOD, PERIOD),
            Some(Err(error)) => {
                tracing::warn!(code = %error.code(), "can't look after engines");
                PERIOD
            }
            None => break,
        };
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::time::sleep_until(began + pause) => {}
            _ = news.changed() => tokio::time::sleep_until(began + MIN_PERIOD).await,
        }
    }
    state.closer().tasks.close();
    state.closer().tasks.wait().await;
}

/// Sets going what is due, and answers when the next may be.
async fn round(state: &AppState) -> Result<Duration> {
    let engines = state.store().unsettled_engines().await?;
    if engines.is_empty() {
        return Ok(PERIOD);
    }
    let workers = state.store().workers().await?;
    let mut pause = PERIOD;
    for engine in engines {
        let led = task::is_led(&engine, &workers);
        match task::task(&engine, led, false) {
            Some(Task::Watch) => watch(state, &engine),
            Some(_) => begin(state, &engine),
            None => {
                let due = engine.operation.as_ref().map(|operation| task::due_in(&engine, operation, led));
                pause = pause.min(due.filter(|due| !due.is_zero()).unwrap_or(PERIOD));
            }
        }
    }
    Ok(pause)
}

fn watch(state: &AppState, engine: &Engine) {
    // None to be had: the next round.
    let Ok(permit) = Arc::clone(&state.closer().watchers).try_acquire_owned() else { return };
    if state.closer().look(engine) {
        let (state, source) = (state.clone(), engine.source);
        state.clone().closer().tasks.spawn(async move {
            run(&state, source).await;
            drop(permit);
        });
    }
}

fn begin(state: &AppState, engine: &Engine) {
    if state.closer().look(engine) {
        let (state, source) = (state.clone(), engine.source);
        state.clone().closer().tasks.spawn(async move { run(&state, source).await });
    }
}

async fn run(state: &AppState, source: SourceId) {
    if let Err(error) = attend(state, source, false).await {
        tracing::warn!(%source, code = %error.code(), "can't end the engine from outside, trying again");
        state.closer().forget(source);
    }
}
