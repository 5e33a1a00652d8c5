//! Tells [`ConnectionState`]: a loss at once, a return only when the subscriptions are registered again.

use std::{sync::Arc, time::Duration};

use tokio::sync::watch;

use super::Link;
use crate::ConnectionState;

/// Between two tries to settle a connection that stands but doesn't answer.
const RETRY: Duration = Duration::from_millis(200);

pub(super) struct Reporter {
    asking: Arc<Link>,
    publishing: Arc<Link>,
    asking_changes: watch::Receiver<bool>,
    publishing_changes: watch::Receiver<bool>,
    slow_consumer: watch::Receiver<u64>,
    state: watch::Sender<ConnectionState>,
    patience: Duration,
}

impl Reporter {
    pub(super) fn new(
        asking: &Arc<Link>,
        publishing: &Arc<Link>,
        slow_consumer: Arc<watch::Sender<u64>>,
        state: watch::Sender<ConnectionState>,
        patience: Duration,
    ) -> Self {
        Self {
            asking: Arc::clone(asking),
            publishing: Arc::clone(publishing),
            asking_changes: asking.changes(),
            publishing_changes: publishing.changes(),
            slow_consumer: slow_consumer.subscribe(),
            state,
            patience,
        }
    }

    pub(super) async fn run(mut self) {
        loop {
            let settled = self.look().await;
            tokio::select! {
                changed = self.asking_changes.changed() => if changed.is_err() { return },
                changed = self.publishing_changes.changed() => if changed.is_err() { return },
                changed = self.slow_consumer.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(RETRY), if !settled => {}
            }
        }
    }

    /// Brings the state up to date; false = the connections stand, but it isn't proved that subscriptions are back.
    async fn look(&mut self) -> bool {
        let slow = *self.slow_consumer.borrow_and_update();
        self.report(|state| state.slow_consumer = slow);
        if !(self.asking.is_connected() && self.publishing.is_connected()) {
            self.report(|state| state.connected = false);
            return true;
        }
        let connects = self.asking.connects();
        let known = *self.state.borrow();
        if known.connected && known.connects == connects {
            return true;
        }
        self.report(|state| state.connected = false);
        if self.asking.settle(self.patience).await.is_err() || self.asking.connects() != connects {
            return false;
        }
        self.report(|state| (state.connected, state.connects) = (true, connects));
        true
    }

    fn report(&self, change: impl FnOnce(&mut ConnectionState)) {
        self.state.send_if_modified(|state| {
            let before = *state;
            change(state);
            *state != before
        });
    }
}
