//! What is known to be away, for all who must not take it for a stall (R-SH-3, R-SH-5).

use aura_bus::SharedBus;
use aura_flow::Outage;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// See the module. Shared by the engine's tasks.
#[derive(Debug, Default)]
pub(crate) struct Outages(watch::Sender<Outage>);

impl Outages {
    /// Our own login can't connect to the source, or can again.
    pub(crate) fn source(&self, away: bool) {
        self.change(|outage| outage.source = away);
    }

    /// The present state.
    pub(crate) fn now(&self) -> Outage {
        *self.0.borrow()
    }

    /// The present state and its changes.
    pub(crate) fn watch(&self) -> watch::Receiver<Outage> {
        self.0.subscribe()
    }

    /// Follows the bus's connection until `stop`.
    pub(crate) async fn follow(&self, bus: &SharedBus, stop: &CancellationToken) {
        let mut state = bus.state();
        loop {
            let connected = state.borrow_and_update().connected;
            self.change(|outage| outage.bus = !connected);
            tokio::select! {
                () = stop.cancelled() => return,
                changed = state.changed() => if changed.is_err() { return },
            }
        }
    }

    fn change(&self, change: impl FnOnce(&mut Outage)) {
        self.0.send_if_modified(|outage| {
            let before = *outage;
            change(outage);
            if *outage != before {
                tracing::warn!(
                    away = outage.as_str(),
                    before = before.as_str(),
                    "what is known to be away has changed"
                );
            }
            *outage != before
        });
    }
}
