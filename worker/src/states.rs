//! The observed state of a run: shown at once in this process and to fronts, and written to the engine's row in order.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use aura_domain::{EngineState, Epoch, SourceId};
use aura_store::{Store, StoreError};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::status::{EngineStatus, StatusBoard};

/// What isn't written while the database is away; what is older than the last few says nothing any more.
const BACKLOG: usize = 16;
/// Between two tries.
const RETRY: Duration = Duration::from_secs(1);

/// A state and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Observed {
    pub(crate) state: EngineState,
    /// Closed set of codes; what clients are told.
    pub(crate) code: Option<&'static str>,
    /// For operators: pids, names, SQL to paste. No row values.
    pub(crate) detail: Option<String>,
}

impl Observed {
    pub(crate) fn new(state: EngineState, code: Option<&'static str>) -> Self {
        Self { state, code, detail: None }
    }

    /// As the row and the api say it: `code: detail`.
    pub(crate) fn reason(&self) -> Option<String> {
        match (self.code, &self.detail) {
            (Some(code), Some(detail)) => Some(format!("{code}: {detail}")),
            (Some(code), None) => Some(code.to_owned()),
            (None, detail) => detail.clone(),
        }
    }
}

/// One run's states. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct States {
    run: Arc<Of>,
    now: watch::Sender<Observed>,
    unwritten: Arc<Unwritten>,
}

/// Whose.
#[derive(Debug)]
pub(crate) struct Of {
    pub(crate) source: SourceId,
    pub(crate) name: String,
    pub(crate) epoch: Epoch,
    pub(crate) board: Arc<StatusBoard>,
}

#[derive(Debug, Default)]
struct Unwritten {
    queue: Mutex<VecDeque<Observed>>,
    pushed: Notify,
    /// What the engine's own tasks say of it doesn't count any more.
    taken_over: AtomicBool,
}

impl States {
    /// A run begins.
    pub(crate) fn begin(run: Of) -> Self {
        let first = Observed::new(EngineState::Starting, None);
        let states = Self { run: Arc::new(run), now: watch::Sender::new(first.clone()), unwritten: Arc::default() };
        states.show(&first);
        states.unwritten.push(first);
        states
    }

    /// On the board of this process.
    fn show(&self, observed: &Observed) {
        let Of { source, name, epoch, board } = &*self.run;
        board.update(*source, name, |status| {
            if status.state != observed.state {
                status.since = crate::status::now();
            }
            (status.state, status.code, status.reason) = (observed.state, observed.code, observed.reason());
            status.cdc_active = observed.state == EngineState::Running;
            status.epoch = Some(*epoch);
            status.measure_state(*source);
        });
    }

    /// The run is over, and another one may be anybody's.
    pub(crate) fn end(&self) {
        let Of { source, name, board, .. } = &*self.run;
        board.update(*source, name, |status| *status = EngineStatus::standby(name));
    }

    /// By the engine's own tasks: without effect once the run is being ended from outside.
    pub(crate) fn report(&self, next: Observed) {
        if !self.unwritten.taken_over.load(Ordering::SeqCst) {
            self.enter(next);
        }
    }

    /// From now on only [`Self::enter`] counts: the engine is ended, whatever its tasks still say.
    pub(crate) fn take_over(&self) {
        self.unwritten.taken_over.store(true, Ordering::SeqCst);
    }

    /// Never waits. The same once more is nothing new.
    pub(crate) fn enter(&self, next: Observed) {
        let entered = self.now.send_if_modified(|now| {
            let legal = now.state == next.state || now.state.next().contains(&next.state);
            debug_assert!(legal, "{} can't follow {}", next.state, now.state);
            let changed = *now != next;
            now.clone_from(&next);
            changed
        });
        if entered {
            self.show(&next);
            self.unwritten.push(next);
        }
    }

    pub(crate) fn watch(&self) -> watch::Receiver<Observed> {
        self.now.subscribe()
    }

    pub(crate) fn now(&self) -> Observed {
        self.now.borrow().clone()
    }

    /// Writes every transition until it is fenced, then cancels `fenced`. Runs until it is dropped.
    pub(crate) async fn write(self, store: Store, fenced: CancellationToken) {
        let (source, epoch) = (self.run.source, self.run.epoch);
        loop {
            let Some(next) = self.unwritten.front() else {
                self.unwritten.pushed.notified().await;
                continue;
            };
            match store.set_engine_state(source, epoch, next.state, next.reason().as_deref()).await {
                Ok(()) => self.unwritten.written(&next),
                Err(StoreError::Fenced) => return fenced.cancel(),
                Err(error) => {
                    tracing::warn!(%source, %error, state = %next.state, "engine state not saved, trying again");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    /// Everything was written.
    pub(crate) fn is_written(&self) -> bool {
        self.unwritten.front().is_none()
    }
}

impl Unwritten {
    fn push(&self, next: Observed) {
        let mut queue = self.lock();
        if queue.len() == BACKLOG {
            queue.pop_front();
        }
        queue.push_back(next);
        self.pushed.notify_one();
    }

    fn front(&self) -> Option<Observed> {
        self.lock().front().cloned()
    }

    fn written(&self, done: &Observed) {
        let mut queue = self.lock();
        // It may have made room for newer ones meanwhile.
        if queue.front() == Some(done) {
            queue.pop_front();
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Observed>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn states() -> States {
        let (source, epoch) = (SourceId(uuid::Uuid::nil()), Epoch(1));
        States::begin(Of { source, name: "s".to_owned(), epoch, board: Arc::default() })
    }

    #[test]
    fn r_eng_1_transitions_are_kept_in_order_and_the_last_ones_win() {
        let states = states();
        states.enter(Observed::new(EngineState::Running, None));
        states.enter(Observed::new(EngineState::Running, None));
        states.enter(Observed::new(EngineState::Draining, None));
        let seen: Vec<_> = states.unwritten.lock().iter().map(|observed| observed.state).collect();
        assert_eq!(seen, [EngineState::Starting, EngineState::Running, EngineState::Draining]);
        states.enter(Observed::new(EngineState::Zombie, Some("slot_held")));
        for n in 0..2 * BACKLOG {
            let detail = Some(n.to_string());
            states.enter(Observed { state: EngineState::Zombie, code: Some("slot_held"), detail });
        }
        let (kept, last) = (states.unwritten.lock().len(), states.now().reason());
        assert_eq!((kept, last.as_deref()), (BACKLOG, Some("slot_held: 31")));
        assert_eq!(states.unwritten.lock().back().map(Observed::reason), Some(last));
    }

    #[test]
    #[should_panic(expected = "running can't follow draining")]
    fn r_eng_1_what_the_table_of_states_forbids_is_not_entered() {
        let states = states();
        states.enter(Observed::new(EngineState::Draining, None));
        states.enter(Observed::new(EngineState::Running, None));
    }
}
