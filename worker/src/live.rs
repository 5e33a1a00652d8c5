//! What a run says of itself while it lives: on the board of this process, as gauges, and in the engine's row.

use std::{sync::Arc, time::Duration};

use aura_bus::SharedBus;
use aura_domain::{Condition, EngineLive, Epoch, LAGGING_BYTES, Lag, Lsn, SourceId};
use aura_store::{Store, StoreError};
use tokio_util::sync::CancellationToken;

use crate::{
    conditions::Conditions,
    engine::vitals::Vitals,
    states::{Observed, States},
    status::StatusBoard,
};

/// Written this often, and at transitions.
const PERIOD: Duration = Duration::from_secs(2);

/// One run's.
pub(crate) struct Live {
    pub(crate) source: SourceId,
    pub(crate) name: String,
    pub(crate) epoch: Epoch,
    pub(crate) board: Arc<StatusBoard>,
    pub(crate) store: Store,
    pub(crate) bus: SharedBus,
    pub(crate) conditions: Conditions,
    pub(crate) vitals: Arc<Vitals>,
    pub(crate) fenced: CancellationToken,
}

impl Live {
    /// Runs until it is dropped, or fenced.
    pub(crate) async fn keep(self, states: States) {
        let mut transitions = states.watch();
        loop {
            let live = self.look(&transitions.borrow_and_update());
            match self.store.set_live(self.source, self.epoch, &live).await {
                Ok(()) => {}
                Err(StoreError::Fenced) => return self.fenced.cancel(),
                Err(error) => tracing::debug!(source = %self.source, %error, "live status not written"),
            }
            tokio::select! {
                () = tokio::time::sleep(PERIOD) => {}
                // The sender lives in the run.
                _ = transitions.changed() => {}
            }
        }
    }

    /// Puts together what the parts have said, and shows it.
    fn look(&self, observed: &Observed) -> EngineLive {
        let away = matches!(observed.code, Some("source_unreachable" | "source_shutting_down"));
        self.conditions.put(Condition::SourceUnreachable, away, observed.detail.clone());
        self.conditions.put(Condition::Outage, !self.bus.state().borrow().connected, None);
        let mut now = EngineLive::default();
        self.board.update(self.source, &self.name, |status| {
            let live = &mut status.live;
            live.lag = self.lag(live);
            let lagging = live.lag.bytes.is_some_and(|bytes| bytes > LAGGING_BYTES);
            self.conditions.put(Condition::Lagging, lagging, live.lag.bytes.map(|bytes| format!("{bytes} bytes")));
            self.conditions.put(Condition::Paused, live.flow.paused_since.is_some(), None);
            let holes = (live.holes > 0).then(|| format!("{} tables", live.holes));
            self.conditions.put(Condition::Holes, live.holes > 0, holes);
            live.conditions = self.conditions.read();
            now = live.clone();
            status.measure(self.source);
        });
        now
    }

    /// Bytes from the server's end to what is confirmed; of a lost slot no number says how much (R-ENG-8).
    fn lag(&self, live: &EngineLive) -> Lag {
        if live.slot.wal_status.as_deref() == Some("lost") {
            return Lag { bytes: None, seconds: None, lost: true };
        }
        let vitals = &self.vitals;
        let end = vitals.received().max(vitals.server_end());
        let behind = end.0.saturating_sub(vitals.sent().0);
        let idle = vitals.rows().abandoned == 0;
        let seconds = live.flow.culprit.as_ref().map(|culprit| culprit.seconds);
        Lag {
            bytes: (vitals.sent() > Lsn::ZERO).then_some(behind),
            seconds: if idle { Some(0.0) } else { seconds },
            lost: false,
        }
    }
}
