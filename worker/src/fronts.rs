//! Fronts that were heard lately, whoever leads: a standby that takes over knows whom to wait for.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use aura_bus::{SharedBus, Subject};
use aura_domain::{FrontId, SourceId};
use aura_wire::control::Heartbeat;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::subs::control::FRONT_TIMEOUT;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Fronts(Mutex<HashMap<FrontId, (Instant, Vec<SourceId>)>>);

impl Fronts {
    /// Listens until `stop`.
    pub(crate) async fn listen(&self, bus: SharedBus, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let Ok(mut heartbeats) = bus.subscribe(&Subject::front_heartbeats()).await else {
                tokio::time::sleep(std::time::Duration::from_millis(500)).await;
                continue;
            };
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    message = heartbeats.next() => match message {
                        Some(message) => self.hear(&message.payload),
                        None => break,
                    },
                }
            }
        }
    }

    fn hear(&self, payload: &[u8]) {
        let Ok(heartbeat) = serde_json::from_slice::<Heartbeat>(payload) else { return };
        let mut fronts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if heartbeat.leaving {
            fronts.remove(&heartbeat.front);
            return;
        }
        let sources = heartbeat.sources.iter().filter(|state| state.count > 0).map(|state| state.source).collect();
        fronts.insert(heartbeat.front, (Instant::now(), sources));
        fronts.retain(|_, (heard, _)| heard.elapsed() <= FRONT_TIMEOUT);
    }

    /// Whether any front was heard in the last 15 s.
    pub(crate) fn any(&self) -> bool {
        self.live(|_| true) > 0
    }

    /// Number of fronts heard in the last 15 s that have subscriptions of the source.
    pub(crate) fn with_subscriptions(&self, source: SourceId) -> usize {
        self.live(|sources| sources.contains(&source))
    }

    fn live(&self, wanted: impl Fn(&[SourceId]) -> bool) -> usize {
        let fronts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        fronts.values().filter(|(heard, sources)| heard.elapsed() <= FRONT_TIMEOUT && wanted(sources)).count()
    }
}
