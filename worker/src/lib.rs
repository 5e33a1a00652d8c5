//! The worker: holds leases of sources and runs their engines — slot, reader, shards, visibility, bus.

mod args;
mod encode;
mod engine;
mod fronts;
mod settings;
mod status;
mod subs;
mod supervisor;

use std::{collections::BTreeMap, sync::Arc};

pub use args::{LeaseKind, WorkerArgs};
use aura_bus::SharedBus;
use aura_domain::{SourceId, WorkerId};
use aura_lease::LeaseBackend;
use aura_store::Store;
use serde_json::json;
pub use settings::WorkerSettings;
pub use status::EngineStatus;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{engine::EngineDeps, fronts::Fronts, status::StatusBoard};

/// What a worker needs.
pub struct WorkerDeps {
    /// Platform database.
    pub store: Store,
    /// Where changes go and subscriptions come from.
    pub bus: SharedBus,
    /// Back end of the leases.
    pub lease: Arc<dyn LeaseBackend>,
    /// Knobs.
    pub settings: WorkerSettings,
}

/// A worker of the pool; runs the engines whose leases it holds.
pub struct Worker {
    deps: EngineDeps,
}

impl Worker {
    /// A worker with an identity of its own; nothing runs yet.
    pub fn new(deps: WorkerDeps) -> Self {
        let WorkerDeps { store, bus, lease, settings } = deps;
        // Unique per start: a restarted process is another holder and gets another epoch.
        let worker = WorkerId(format!("worker-{}", uuid::Uuid::new_v4()));
        let (board, fronts) = (Arc::new(StatusBoard::default()), Arc::new(Fronts::default()));
        Self { deps: EngineDeps { store, bus, lease, worker, settings, board, fronts } }
    }

    /// A handle on what the engines are doing.
    pub fn status(&self) -> WorkerStatus {
        WorkerStatus { worker: self.deps.worker.clone(), board: Arc::clone(&self.deps.board) }
    }

    /// Runs until `stop`, then drains every engine inside `drain_timeout` and releases its lease.
    pub async fn run(self, stop: CancellationToken) {
        let tasks = TaskTracker::new();
        let (fronts, bus, listening) =
            (Arc::clone(&self.deps.fronts), Arc::clone(&self.deps.bus), CancellationToken::new());
        let listener_stop = listening.clone();
        tasks.spawn(async move { fronts.listen(bus, listener_stop).await });
        supervisor::run(self.deps, stop).await;
        listening.cancel();
        tasks.close();
        tasks.wait().await;
    }
}

/// What a worker tells of itself; cheap to clone.
#[derive(Clone)]
pub struct WorkerStatus {
    worker: WorkerId,
    board: Arc<StatusBoard>,
}

impl WorkerStatus {
    /// The holder's name in leases.
    pub fn worker(&self) -> &WorkerId {
        &self.worker
    }

    /// Every source's engine as this worker sees it.
    pub fn engines(&self) -> BTreeMap<SourceId, EngineStatus> {
        self.board.read()
    }

    /// The body of `/health` and `/status`.
    pub fn report(&self) -> serde_json::Value {
        let engines: Vec<_> =
            self.engines().into_iter().map(|(source, engine)| json!({"source": source, "engine": engine})).collect();
        json!({"worker": self.worker, "cdc_active": self.cdc_active(), "engines": engines})
    }

    /// False until the slot of every engine that this worker leads is confirmed to be healthy, and while it leads none.
    pub fn cdc_active(&self) -> bool {
        let engines = self.board.read();
        let mut led = engines.values().filter(|engine| engine.epoch.is_some() && engine.state != "stopped").peekable();
        led.peek().is_some() && led.all(|engine| engine.cdc_active)
    }
}
