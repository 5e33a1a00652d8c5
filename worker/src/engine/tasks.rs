//! The tasks of one run: named, ended from outside, their panics caught (R-SD-6).

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures_util::FutureExt;
use tokio::{sync::mpsc, task::AbortHandle};

/// Handle on the tasks; whoever has one can end them all, whatever they are doing. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Tasks {
    // Held for list operations only, never across an await.
    running: Arc<Mutex<Vec<AbortHandle>>>,
    panics: mpsc::Sender<String>,
}

impl Tasks {
    /// No tasks, and where the names of those that panic arrive.
    pub(crate) fn new() -> (Self, mpsc::Receiver<String>) {
        // One is enough to end the run.
        let (panics, panicked) = mpsc::channel(1);
        (Self { running: Arc::default(), panics }, panicked)
    }

    /// Starts a task.
    pub(crate) fn spawn(&self, name: impl Into<String>, work: impl Future<Output = ()> + Send + 'static) {
        let (name, panics) = (name.into(), self.panics.clone());
        let watched = async move {
            if AssertUnwindSafe(work).catch_unwind().await.is_err() {
                tracing::error!(task = %name, "a task of an engine panicked");
                // Full: another one has panicked before.
                drop(panics.try_send(name));
            }
        };
        let handle = tokio::spawn(watched).abort_handle();
        let mut running = self.running();
        running.retain(|task| !task.is_finished());
        running.push(handle);
    }

    /// Ends all at their next await. One that blocks its thread goes on to the end of what it does.
    pub(crate) fn abort_all(&self) {
        for task in self.running().drain(..) {
            task.abort();
        }
    }

    fn running(&self) -> MutexGuard<'_, Vec<AbortHandle>> {
        // A list that is pushed to is whole, whoever panicked.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test]
    async fn r_sd_6_a_panic_is_caught_and_named_and_the_others_go_on() {
        let (tasks, mut panicked) = Tasks::new();
        let (alive, mut dead) = mpsc::channel::<()>(1);
        tasks.spawn("good", async move {
            let _alive = alive;
            pending::<()>().await;
        });
        tasks.spawn("bad", async { panic!("oh") });
        assert_eq!(panicked.recv().await.as_deref(), Some("bad"));
        assert!(dead.try_recv().is_err_and(|error| error == mpsc::error::TryRecvError::Empty), "it goes on");
        tasks.abort_all();
        assert_eq!(dead.recv().await, None);
    }
}
