use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use aura_domain::{ProjectId, SqlName};
use aura_kit::{Code, Problem};
use tokio::{
    sync::{Mutex as AsyncMutex, OwnedMutexGuard},
    time::Instant,
};

use crate::error::{ApiError, Result};

/// Longest wait for one's turn: two ALTERs that both use up their 3 s (R-REG-3), and some.
const TURN: Duration = Duration::from_secs(8);
/// Locks that are kept before unused ones are swept.
const SWEEP_ABOVE: usize = 1024;

type Key = (ProjectId, SqlName, SqlName);
type Slot = Arc<AsyncMutex<Option<Failure>>>;

/// One writer per table in this process, so that 200 parallel PUTs cause one ALTER (R-REG-1). Other processes are kept
/// apart by the platform database's row lock and by the ALTER being a no-op the second time.
#[derive(Default)]
pub(crate) struct TableLocks(Mutex<HashMap<Key, Slot>>);

struct Failure {
    at: Instant,
    error: ApiError,
}

/// One's turn on a table.
pub(crate) struct Turn {
    slot: OwnedMutexGuard<Option<Failure>>,
    arrived: Instant,
}

impl TableLocks {
    /// Waits for one's turn.
    pub(crate) async fn turn(&self, project: ProjectId, schema: &SqlName, table: &SqlName) -> Result<Turn> {
        let arrived = Instant::now();
        let slot = self.slot((project, schema.clone(), table.clone()));
        let busy = |_| {
            Problem::new(Code::LockTimeout, "Other requests for this table are still waiting for its lock.")
                .retry_after(1)
        };
        let slot = tokio::time::timeout(TURN, slot.lock_owned()).await.map_err(busy)?;
        Ok(Turn { slot, arrived })
    }

    fn slot(&self, key: Key) -> Slot {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.len() > SWEEP_ABOVE {
            slots.retain(|_, slot| Arc::strong_count(slot) > 1);
        }
        Arc::clone(slots.entry(key).or_default())
    }
}

impl Turn {
    /// Who queued behind an ALTER that then gave up shares its answer: the lock is as taken for them, and a queue of
    /// waits of 3 s each would never end.
    pub(crate) fn shared_failure(&self) -> Result<()> {
        match self.slot.as_ref() {
            Some(failure) if failure.at >= self.arrived => Err(failure.error.clone()),
            _ => Ok(()),
        }
    }

    /// Leaves a lock time-out to those who are waiting.
    pub(crate) fn leave<T>(mut self, outcome: Result<T>) -> Result<T> {
        let failed = outcome.as_ref().err().filter(|error| error.code() == Code::LockTimeout);
        *self.slot = failed.map(|error| Failure { at: Instant::now(), error: error.clone() });
        outcome
    }
}
