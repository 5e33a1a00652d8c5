//! An engine seen from outside: told to end, watched, cut, and how it says that it ended.

use std::{sync::Arc, time::Duration};

use aura_domain::{EngineState, Lsn};
use aura_flow::DrainTimes;
use aura_pgsource::{Sockets, SourceError};
use tokio::sync::{Notify, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::{error::EngineError, tasks::Tasks, vitals::Vitals};
use crate::{states::Observed, stop::Stop, watchdog::Watched};

/// A running engine.
pub(crate) struct Running {
    pub(crate) sockets: Sockets,
    pub(crate) vitals: Arc<Vitals>,
    pub(crate) tasks: Tasks,
    /// For the watchdog.
    pub(super) watched: Arc<Watched>,
    pub(super) stopping: Arc<watch::Sender<Option<Stop>>>,
    pub(super) stop: CancellationToken,
    pub(super) new_slot: Arc<Notify>,
    pub(super) end: Option<oneshot::Receiver<End>>,
}

/// How an engine ended by itself.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) how: How,
    /// How it left, if it came to that.
    pub(crate) left: Option<Left>,
}

#[derive(Debug)]
pub(crate) enum How {
    /// It was told to.
    Stopped,
    /// It can't go on.
    Failed(Observed),
    /// Somebody has raised the epoch.
    Fenced,
}

/// A polite end.
#[derive(Debug)]
pub(crate) struct Left {
    /// Every row that was read is delivered or skipped with a gap, and confirmed: nothing comes again.
    pub(crate) complete: bool,
    /// What SQL says is confirmed; `None` = it could not be read back in time.
    pub(crate) verified: Option<Lsn>,
    pub(crate) verifying: Duration,
    pub(crate) slot_inactive: bool,
    pub(crate) times: DrainTimes,
}

impl Running {
    /// Tells it to end; a later order can only tighten the first.
    pub(crate) fn stop(&self, stop: Stop) {
        order(&self.stopping, &self.stop, stop);
    }

    /// Cancelled by the watchdog when it finds the engine hung.
    pub(crate) fn hung(&self) -> CancellationToken {
        self.watched.hung.clone()
    }

    /// What it waits for may be there: an operator says so, or asked for a new slot.
    pub(crate) fn try_again(&self) {
        self.new_slot.notify_one();
    }

    /// Waits until it has ended by itself. Cancel-safe.
    pub(crate) async fn ended(&mut self) -> End {
        let Some(end) = self.end.as_mut() else { return std::future::pending().await };
        let end = end.await;
        self.end = None;
        // Without a word: its own task has panicked.
        end.unwrap_or_else(|_| End::panicked("intake", End::stopped(None)))
    }
}

/// See [`Running::stop`].
pub(super) fn order(stopping: &watch::Sender<Option<Stop>>, stopped: &CancellationToken, stop: Stop) {
    stopping.send_if_modified(|now| {
        let next = Some(now.map_or(stop, |now| now.and(stop)));
        std::mem::replace(now, next) != next
    });
    stopped.cancel();
}

impl End {
    pub(super) fn stopped(left: Option<Left>) -> Self {
        Self { how: How::Stopped, left }
    }

    pub(super) fn fenced() -> Self {
        Self { how: How::Fenced, left: None }
    }

    pub(super) fn failed(error: &EngineError) -> Self {
        let observed = Observed { state: EngineState::Failed, ..error.observed() };
        Self { how: How::Failed(observed), left: None }
    }

    /// It can't even begin.
    pub(crate) fn unstartable(error: SourceError) -> Self {
        Self::failed(&error.into())
    }

    /// A task has panicked; the rest came to `end`. The message may hold a row's values, so only the task is named.
    pub(super) fn panicked(task: &str, end: Self) -> Self {
        if matches!(end.how, How::Fenced) {
            return end;
        }
        let detail = Some(task.to_owned());
        Self { how: How::Failed(Observed { state: EngineState::Failed, code: Some("panicked"), detail }), ..end }
    }

    /// Nothing comes again.
    pub(crate) fn is_complete(&self) -> bool {
        self.left.as_ref().is_none_or(|left| left.complete)
    }
}
