//! Shutdown in phases: the first signal starts the drain, the second shortens it to 1 s, the third ends the process.

use std::{sync::Arc, time::Duration};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
    time::Instant,
};
use tokio_util::sync::CancellationToken;

/// What the second signal leaves of the drain.
const HURRIED: Duration = Duration::from_secs(1);

/// The process's shutdown. Cheap to clone; triggering is idempotent.
#[derive(Debug, Clone)]
pub struct Shutdown {
    started: CancellationToken,
    deadline: Arc<watch::Sender<Option<Instant>>>,
    drain: Duration,
}

impl Shutdown {
    /// A shutdown whose drain may take `drain`.
    pub fn new(drain: Duration) -> Self {
        Self { started: CancellationToken::new(), deadline: Arc::new(watch::Sender::new(None)), drain }
    }

    /// Cancelled when the drain starts: stop taking work, finish what is there.
    pub fn token(&self) -> CancellationToken {
        self.started.clone()
    }

    /// Whether the drain has started.
    pub fn is_triggered(&self) -> bool {
        self.started.is_cancelled()
    }

    /// Starts the drain. Later calls change nothing.
    pub fn trigger(&self) {
        self.limit(self.drain);
        self.started.cancel();
    }

    /// Shortens the rest of the drain to 1 s, starting it if need be.
    pub fn hurry(&self) {
        self.limit(HURRIED);
        self.started.cancel();
    }

    /// When the drain must be over; `None` before it started. May move to an earlier instant.
    pub fn deadline(&self) -> Option<Instant> {
        *self.deadline.borrow()
    }

    /// Returns when the deadline has passed. Cancel-safe.
    pub async fn expired(&self) {
        let mut changes = self.deadline.subscribe();
        loop {
            let deadline = *changes.borrow_and_update();
            let passed = async {
                match deadline {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = passed => return,
                // The sender lives in self.
                _ = changes.changed() => {}
            }
        }
    }

    /// Follows SIGINT and SIGTERM until the process ends or `self` was dropped with all its clones.
    pub(crate) async fn follow_signals(self, mut signals: Signals) {
        signals.next().await;
        tracing::info!("draining, a second signal shortens it to 1 s");
        self.trigger();
        signals.next().await;
        tracing::warn!("second signal, 1 s left");
        self.hurry();
        let number = signals.next().await;
        tracing::error!("third signal, ending at once");
        std::process::exit(128 + number);
    }

    fn limit(&self, left: Duration) {
        let at = Instant::now() + left;
        self.deadline.send_if_modified(|deadline| {
            let earlier = deadline.is_none_or(|old| at < old);
            if earlier {
                *deadline = Some(at);
            }
            earlier
        });
    }
}

/// SIGINT and SIGTERM.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Takes over both signals; from here on they don't end the process by themselves.
    pub(crate) fn install() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.interrupt.recv() => SignalKind::interrupt().as_raw_value(),
            _ = self.terminate.recv() => SignalKind::terminate().as_raw_value(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_second_signal_shortens_the_drain_and_nothing_lengthens_it() {
        let shutdown = Shutdown::new(Duration::from_secs(25));
        assert!(shutdown.deadline().is_none() && !shutdown.is_triggered());
        shutdown.trigger();
        assert!(shutdown.is_triggered());
        let first = shutdown.deadline().unwrap();
        shutdown.hurry();
        let hurried = shutdown.deadline().unwrap();
        assert!(hurried < first && hurried <= Instant::now() + HURRIED);
        shutdown.trigger();
        shutdown.hurry();
        assert_eq!(shutdown.deadline(), Some(hurried));
    }

    #[tokio::test]
    async fn who_waits_for_the_deadline_learns_of_an_earlier_one() {
        let shutdown = Shutdown::new(Duration::from_secs(600));
        shutdown.trigger();
        let waiter = tokio::spawn({
            let shutdown = shutdown.clone();
            async move { shutdown.expired().await }
        });
        shutdown.limit(Duration::ZERO);
        tokio::time::timeout(Duration::from_secs(5), waiter).await.unwrap().unwrap();
    }
}
