use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use aura_bus::SharedBus;
use aura_kit::{MetricsAccess, Probes, ShutdownHandle};
use aura_store::Store;

use crate::{
    ApiDeps, Settings,
    engine::Closer,
    probes,
    source::Sources,
    toggle::{Progress, TableLocks, ToggleRate},
};

/// Tries of a project's keys on other projects that the audit gets in a minute: it can't be flooded.
const INTRUSIONS_PER_MINUTE: u32 = 20;

/// What handlers share.
#[derive(Clone)]
pub(crate) struct AppState {
    inner: Arc<Inner>,
    probes: Option<Probes>,
}

struct Inner {
    store: Store,
    /// Set once it is connected.
    bus: OnceLock<SharedBus>,
    settings: Settings,
    sources: Sources,
    locks: TableLocks,
    rate: ToggleRate,
    intrusions: ToggleRate,
    progress: Progress,
    closer: Closer,
    draining: AtomicBool,
}

impl AppState {
    pub(crate) fn new(deps: ApiDeps) -> Self {
        let inner = Inner {
            sources: Sources::new(deps.settings.source_connections),
            locks: TableLocks::default(),
            rate: ToggleRate::new(deps.settings.toggles_per_minute),
            intrusions: ToggleRate::new(INTRUSIONS_PER_MINUTE),
            progress: Progress::default(),
            closer: Closer::default(),
            draining: AtomicBool::new(false),
            store: deps.store,
            bus: deps.bus.map(OnceLock::from).unwrap_or_default(),
            settings: deps.settings,
        };
        let state = Self { inner: Arc::new(inner), probes: None };
        let probes = probes::of(&state);
        Self { probes, ..state }
    }

    pub(crate) fn with_probes(self, probes: Probes) -> Self {
        Self { probes: Some(probes), ..self }
    }

    pub(crate) fn until(self, shutdown: &ShutdownHandle) -> Self {
        Self { probes: self.probes.map(|probes| probes.until(shutdown)), ..self }
    }

    pub(crate) fn with_metrics_access(self, access: MetricsAccess) -> Self {
        Self { probes: self.probes.map(|probes| probes.metrics_access(access)), ..self }
    }

    pub(crate) fn store(&self) -> &Store {
        &self.inner.store
    }

    pub(crate) fn bus(&self) -> Option<&SharedBus> {
        self.inner.bus.get()
    }

    pub(crate) fn set_bus(&self, bus: SharedBus) {
        // Whoever is first is as good as the next.
        let _ = self.inner.bus.set(bus);
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.inner.settings
    }

    /// Connections to customers' databases.
    pub(crate) fn sources(&self) -> &Sources {
        &self.inner.sources
    }

    /// One writer per table in this process.
    pub(crate) fn locks(&self) -> &TableLocks {
        &self.inner.locks
    }

    /// How often a project may change its toggles.
    pub(crate) fn rate(&self) -> &ToggleRate {
        &self.inner.rate
    }

    /// How often a project's keys may try another project before nobody writes it down any more.
    pub(crate) fn intrusions(&self) -> &ToggleRate {
        &self.inner.intrusions
    }

    /// News of the workers' progress.
    pub(crate) fn progress(&self) -> &Progress {
        &self.inner.progress
    }

    /// Ends engines from outside.
    pub(crate) fn closer(&self) -> &Closer {
        &self.inner.closer
    }

    /// `None` if another recorder than ours is installed.
    pub(crate) fn probes(&self) -> Option<&Probes> {
        self.probes.as_ref()
    }

    /// From now on nobody is kept waiting.
    pub(crate) fn drain(&self) {
        self.inner.draining.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.inner.draining.load(Ordering::Relaxed)
    }
}
