//! Looks after every engine that may have to be ended from outside, in this instance and for all others: what is overdue
//! is taken over, whoever asked for it, and whether or not they still wait.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use aura_domain::{EngineState, Epoch, OnDeadline, SourceId};
use aura_store::Engine;
use tokio::{
    sync::{Mutex as AsyncMutex, OwnedMutexGuard, Semaphore},
    task::JoinHandle,
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    attend::{Seen, attend},
    shared::Shared,
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
    /// What those who wait have read.
    pub(super) engines: Shared<Engine>,
    watchers: Arc<Semaphore>,
    tasks: TaskTracker,
}

/// A look at an engine, and at what it was then.
type Look = (Instant, Sight);

/// What is news when it changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sight {
    operation: Option<(i64, OnDeadline)>,
    state: EngineState,
    epoch: Epoch,
    led: bool,
}

impl Sight {
    fn of(engine: &Engine, led: bool) -> Self {
        let operation = engine.operation.as_ref().map(|operation| (operation.id, operation.on_deadline));
        Self { operation, state: engine.state, epoch: engine.epoch, led }
    }
}

impl Default for Closer {
    fn default() -> Self {
        Self {
            turns: Mutex::default(),
            looked: Mutex::default(),
            engines: Shared::default(),
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
    fn look(&self, source: SourceId, now: Sight) -> bool {
        let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |(at, last): &Look| *last == now && at.elapsed() < WATCH_PERIOD;
        let again = !looked.get(&source).is_some_and(same);
        if again {
            looked.insert(source, (Instant::now(), now));
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
        let led = engine.is_led(&workers);
        match task::task(&engine, led, false) {
            Some(Task::Watch) => watch(state, &engine, led),
            Some(_) => begin(state, &engine, led),
            None => {
                let due = engine.operation.as_ref().map(|operation| task::due_in(&engine, operation, led));
                pause = pause.min(due.filter(|due| !due.is_zero()).unwrap_or(PERIOD));
            }
        }
    }
    Ok(pause)
}

fn watch(state: &AppState, engine: &Engine, led: bool) {
    // None to be had: the next round.
    let Ok(permit) = Arc::clone(&state.closer().watchers).try_acquire_owned() else { return };
    if state.closer().look(engine.source, Sight::of(engine, led)) {
        let (state, source) = (state.clone(), engine.source);
        state.clone().closer().tasks.spawn(async move {
            run(&state, source).await;
            drop(permit);
        });
    }
}

fn begin(state: &AppState, engine: &Engine, led: bool) {
    if state.closer().look(engine.source, Sight::of(engine, led)) {
        let (state, source) = (state.clone(), engine.source);
        state.clone().closer().tasks.spawn(async move { run(&state, source).await });
    }
}

async fn run(state: &AppState, source: SourceId) {
    match attend(state, source, false).await {
        // It wasn't what it had been, or somebody was quicker: what has come of that is for the next round to see.
        Ok(Seen::Nothing) => state.closer().forget(source),
        // What has come of it is our own doing, and no news.
        Ok(_) => match sight(state, source).await {
            Ok(Some(sight)) => _ = state.closer().look(source, sight),
            Ok(None) => {}
            Err(error) => tracing::debug!(%source, code = %error.code(), "can't see what has come of it"),
        },
        Err(error) => {
            tracing::warn!(%source, code = %error.code(), "can't end the engine from outside, trying again");
            state.closer().forget(source);
        }
    }
}

async fn sight(state: &AppState, source: SourceId) -> Result<Option<Sight>> {
    let workers = state.store().workers().await?;
    Ok(state.store().engine(source).await?.map(|engine| Sight::of(&engine, engine.is_led(&workers))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_eng_7_the_same_sight_is_looked_at_every_ten_seconds_and_news_at_once() {
        let (closer, source) = (Closer::default(), SourceId(uuid::Uuid::nil()));
        let first =
            Sight { operation: Some((1, OnDeadline::Abandon)), state: EngineState::Zombie, epoch: Epoch(1), led: true };
        assert!(closer.look(source, first) && !closer.look(source, first));
        let news = [
            Sight { led: false, ..first },
            Sight { epoch: Epoch(2), ..first },
            Sight { state: EngineState::ForceClosing, ..first },
            Sight { operation: Some((1, OnDeadline::Force)), ..first },
            Sight { operation: Some((2, OnDeadline::Abandon)), ..first },
            Sight { operation: None, ..first },
        ];
        for now in news {
            assert!(closer.look(source, now) && !closer.look(source, now), "{now:?}");
        }
        closer.forget(source);
        assert!(closer.look(source, first));
    }
}
