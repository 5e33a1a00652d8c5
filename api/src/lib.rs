//! The control plane: projects, sources, engines and the toggle that makes a table live. Stateless: any number of
//! instances may run on one platform database.

mod access;
mod engine;
mod error;
mod headers;
mod once;
mod openapi;
mod paging;
mod probes;
mod project;
mod routes;
mod session;
mod source;
mod state;
mod toggle;

use aura_auth::Verifier;
use aura_bus::SharedBus;
use aura_kit::{MetricsAccess, Probes, ShutdownHandle};
use aura_store::Store;
use axum::Router;
use secrecy::SecretString;
use tokio_util::sync::CancellationToken;

pub use openapi::document;
use state::AppState;

/// What the api needs.
pub struct ApiDeps {
    /// The platform database, migrated.
    pub store: Store,
    /// The bus, if there is one yet (see [`Api::connect`]): toggles and stops work without.
    pub bus: Option<SharedBus>,
    /// Settings.
    pub settings: Settings,
}

/// Settings of the api.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Verifies platform keys.
    pub platform_secret: SecretString,
    /// Verifies everybody else's; clones share what they know of projects' key sets.
    pub verifier: Verifier,
    /// Connections per source that the api may open (admin URL).
    pub source_connections: usize,
    /// Changing toggles that a project may make in a minute (R-HOLE-3).
    pub toggles_per_minute: u32,
    /// Browsers reach us by TLS: a session's cookie never leaves it.
    pub secure_cookies: bool,
}

impl Settings {
    /// Settings with the defaults.
    pub fn new(platform_secret: SecretString) -> Self {
        Self {
            platform_secret,
            verifier: Verifier::default(),
            source_connections: 4,
            toggles_per_minute: 120,
            secure_cookies: false,
        }
    }
}

/// The control plane. Cheap to clone.
#[derive(Clone)]
pub struct Api {
    state: AppState,
}

impl Api {
    /// Builds it; nothing runs and nothing is connected yet.
    pub fn new(deps: ApiDeps) -> Self {
        Self { state: AppState::new(deps) }
    }

    /// Answers `/health`, `/ready` and `/metrics` with these instead of the api's own: for the undivided binary, whose
    /// health is more than the api's.
    #[must_use]
    pub fn with_probes(mut self, probes: Probes) -> Self {
        self.state = self.state.with_probes(probes);
        self
    }

    /// Not ready from the instant in which `shutdown` is triggered.
    #[must_use]
    pub fn until(mut self, shutdown: &ShutdownHandle) -> Self {
        self.state = self.state.until(shutdown);
        self
    }

    /// Shows `/metrics` to these only.
    #[must_use]
    pub fn with_metrics_access(mut self, access: MetricsAccess) -> Self {
        self.state = self.state.with_metrics_access(access);
        self
    }

    /// Uses this bus from now on, unless there was one at the start: an api starts and works while its bus is away.
    pub fn connect(&self, bus: SharedBus) {
        self.state.set_bus(bus);
    }

    /// Every route: `/v1/…`, `/health`, `/ready`, `/metrics`, `/openapi.json`, `/docs`, `/studio`. Served within
    /// [`aura_kit::http::with_layers`], as [`aura_kit::http::Server`] does.
    pub fn router(&self) -> Router {
        routes::router(self.state.clone())
    }

    /// Until `stop`: follows signals of the platform database (without, waits take up to 200 ms longer), finishes what a
    /// crash left half done, and ends engines whose stop is overdue. What is under way then is finished, within seconds.
    pub async fn run(&self, stop: CancellationToken) {
        let draining = async {
            stop.cancelled().await;
            self.state.drain();
        };
        let signals = self.state.progress().follow(self.state.store(), &stop);
        let engines = engine::sweep(&self.state, &stop);
        let projects = project::reconcile(&self.state, &stop);
        let answers = once::sweep(&self.state, &stop);
        tokio::join!(signals, toggle::reconcile(&self.state, &stop), projects, engines, answers, draining);
    }
}
