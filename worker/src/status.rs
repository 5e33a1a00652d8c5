//! What the worker tells of its engines on `/health`, `/status` and in the log.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use aura_domain::{Epoch, Lsn, SourceId};
use serde::Serialize;

/// One engine, as this worker sees it.
#[derive(Debug, Clone, Serialize)]
pub struct EngineStatus {
    /// Source's name.
    pub name: String,
    /// Observed state (design §7).
    pub state: &'static str,
    /// Closed set of codes, why it isn't running.
    pub reason: Option<String>,
    /// The slot was confirmed to be healthy: the stream's first frame has arrived.
    pub cdc_active: bool,
    /// Fencing token; absent while somebody else holds the lease.
    pub epoch: Option<Epoch>,
    /// `wal2json` or `pgoutput`.
    pub plugin: Option<&'static str>,
    /// End of what was read.
    pub received_lsn: Lsn,
    /// End of what the bus has received without a hole.
    pub resolved_lsn: Lsn,
    /// Last flush position sent to the server.
    pub confirmed_lsn: Lsn,
    /// Registered tables that the running filter covers.
    pub tables: usize,
    /// Registered tables that it doesn't (R-HOLE-1).
    pub holes: usize,
    /// Bytes held, of the engine's share of the quota.
    pub used_bytes: usize,
    /// Reading is paused since too much is held.
    pub paused: bool,
}

impl EngineStatus {
    /// A standby: somebody else leads, or nobody yet.
    pub(crate) fn standby(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            state: "stopped",
            reason: Some("standby".to_owned()),
            cdc_active: false,
            epoch: None,
            plugin: None,
            received_lsn: Lsn::ZERO,
            resolved_lsn: Lsn::ZERO,
            confirmed_lsn: Lsn::ZERO,
            tables: 0,
            holes: 0,
            used_bytes: 0,
            paused: false,
        }
    }
}

impl EngineStatus {
    /// Sets the gauges of the source; a position is given in bytes of log.
    pub(crate) fn measure(&self, source: SourceId) {
        let gauges = [
            ("cdc_received_lsn", self.received_lsn.0),
            ("cdc_resolved_lsn", self.resolved_lsn.0),
            ("cdc_confirmed_lsn", self.confirmed_lsn.0),
            ("cdc_flow_used_bytes", self.used_bytes as u64),
            ("cdc_flow_paused", u64::from(self.paused)),
            ("cdc_holes", self.holes as u64),
        ];
        for (name, value) in gauges {
            metrics::gauge!(name, "source" => source.to_string()).set(value as f64);
        }
    }
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

    /// A copy.
    pub(crate) fn read(&self) -> BTreeMap<SourceId, EngineStatus> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
