//! What the worker tells of its engines on `/health`, `/status` and in the log.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use aura_domain::{EngineLive, EngineState, Epoch, SourceId};
use serde::Serialize;

/// One engine, as this worker sees it.
#[derive(Debug, Clone, Serialize)]
pub struct EngineStatus {
    /// Source's name.
    pub name: String,
    /// Observed state (design §7).
    pub state: EngineState,
    /// Closed set of codes, why it isn't running; what clients are told.
    pub code: Option<&'static str>,
    /// The code and, for the operator, what is known besides.
    pub reason: Option<String>,
    /// When it entered the state, RFC 3339 UTC.
    pub since: String,
    /// The slot was confirmed to be healthy: the stream's first frame has arrived.
    pub cdc_active: bool,
    /// Fencing token; absent while somebody else holds the lease.
    pub epoch: Option<Epoch>,
    /// The same as in the platform database.
    #[serde(flatten)]
    pub live: EngineLive,
}

impl EngineStatus {
    /// A standby: somebody else leads, or nobody yet.
    pub(crate) fn standby(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            state: EngineState::Stopped,
            code: Some("standby"),
            reason: Some("standby".to_owned()),
            since: now(),
            cdc_active: false,
            epoch: None,
            live: EngineLive::default(),
        }
    }

    /// This worker holds its lease.
    pub(crate) fn is_led(&self) -> bool {
        self.epoch.is_some() && self.state != EngineState::Stopped
    }

    /// Sets the gauges of the source; a position is given in bytes of log.
    pub(crate) fn measure(&self, source: SourceId) {
        let live = &self.live;
        let gauges = [
            ("cdc_received_lsn", live.received_lsn.0),
            ("cdc_resolved_lsn", live.resolved_lsn.0),
            ("cdc_confirmed_lsn", live.confirmed_lsn.0),
            ("cdc_flow_used_bytes", live.flow.used_bytes),
            ("cdc_flow_paused", u64::from(live.flow.paused_since.is_some())),
            ("cdc_holes", live.holes as u64),
        ];
        for (name, value) in gauges {
            metrics::gauge!(name, "source" => source.to_string()).set(value as f64);
        }
    }

    /// One gauge per state, 1 for the present one.
    pub(crate) fn measure_state(&self, source: SourceId) {
        for state in EngineState::ALL {
            let labels = [("source", source.to_string()), ("state", state.to_string())];
            metrics::gauge!("cdc_pipeline_state", &labels).set(if *state == self.state { 1.0 } else { 0.0 });
        }
    }
}

/// RFC 3339, UTC, to the millisecond.
pub(crate) fn now() -> String {
    format!("{:.3}", jiff::Timestamp::now())
}

/// The present status of all engines.
#[derive(Debug, Default)]
pub(crate) struct StatusBoard(Mutex<BTreeMap<SourceId, EngineStatus>>);

impl StatusBoard {
    /// Changes one engine's entry.
    pub(crate) fn update(&self, source: SourceId, name: &str, change: impl FnOnce(&mut EngineStatus)) {
        let mut board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(board.entry(source).or_insert_with(|| EngineStatus::standby(name)));
    }

    /// A source that is gone.
    pub(crate) fn forget(&self, source: SourceId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&source);
    }

    /// A copy.
    pub(crate) fn read(&self) -> BTreeMap<SourceId, EngineStatus> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A copy of one.
    pub(crate) fn one(&self, source: SourceId) -> Option<EngineStatus> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&source).cloned()
    }
}
