//! Api, front and worker composed into one process.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
use aura_api::{Api, ApiDeps};
use aura_auth::{JwksOptions, KEY_LIFETIME, Minter, Verifier};
use aura_bus::{MemoryBus, NatsBus, NatsOptions, SharedBus};
use aura_domain::EngineReport;
use aura_front::{Front, FrontDeps, FrontSettings};
use aura_kit::{
    Cap, Component, Metrics, MetricsAccess, Probes, Report, ShutdownHandle,
    http::{Limits, Origins, Server, with_layers},
};
use aura_lease::{LeaseBackend, NoLease};
use aura_store::{MasterKey, NewSource, PostgresLease, Store};
use aura_worker::{Worker, WorkerArgs, WorkerDeps, WorkerSettings, WorkerStatus};
use axum::{Router, body::Body};
use http::{Request, header};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

/// Where everything is, and the keys to it.
pub(crate) struct StackConfig {
    /// The platform database, migrated.
    pub(crate) platform_url: SecretString,
    pub(crate) master_key: SecretString,
    pub(crate) platform_jwt_secret: SecretString,
    /// Key sets are read from the loopback only.
    pub(crate) jwks_loopback: bool,
    /// `None` or `memory:` is the in-process bus.
    pub(crate) nats_url: Option<SecretString>,
    /// Registered at start.
    pub(crate) source: Option<NewSource>,
    pub(crate) lease: Lease,
    pub(crate) worker: WorkerSettings,
    pub(crate) limits: Limits,
    pub(crate) metrics: MetricsAccess,
    pub(crate) origins: Origins,
    pub(crate) secure_cookies: bool,
}

/// Longest time for answers to leave and connections to be given back.
const LEAVE: Duration = Duration::from_millis(500);

/// Who may run engines.
#[derive(Debug, Clone)]
pub(crate) enum Lease {
    /// This process alone: somebody else sees to that.
    Ours,
    /// Whoever holds the row in the platform database.
    Shared,
    /// As the options say.
    Chosen(Box<WorkerArgs>),
}

/// The three components, built and not yet running.
pub(crate) struct Stack {
    store: Store,
    api: Api,
    front: Front,
    worker: Worker,
    router: Router,
    limits: Limits,
    platform_jwt_secret: SecretString,
}

impl Stack {
    /// Connects to the platform database and the bus.
    ///
    /// # Errors
    /// One of them can't be reached, or the schema isn't current.
    pub(crate) async fn build(config: StackConfig, shutdown: &ShutdownHandle) -> Result<Self> {
        let key = MasterKey::new(config.master_key.expose_secret()).component("AURA_MASTER_KEY")?;
        let sub_id_key = key.sub_id_key();
        let store = Store::connect(config.platform_url.expose_secret(), key).await.component("platform database")?;
        store.check().await.context("the platform database can't be used")?;
        if let Some(source) = config.source {
            aura_worker::register(&store, source).await.component("POSTGRES_REPLICATION_URL")?;
        }
        let lease: Arc<dyn LeaseBackend> = match config.lease {
            Lease::Ours => {
                // A predecessor that was killed is still registered, and nobody need wait until it has been silent for long.
                store.forget_workers().await.component("platform database")?;
                Arc::new(NoLease)
            }
            Lease::Shared => Arc::new(PostgresLease::new(&store)),
            Lease::Chosen(options) => options.lease(&store).await.component("lease")?,
        };
        let bus = bus(config.nats_url).await?;
        let deps = WorkerDeps { store: store.clone(), bus: Arc::clone(&bus), lease, settings: config.worker };
        let worker = Worker::new(deps);
        let verifier = Verifier::new(JwksOptions { loopback: config.jwks_loopback, ..Default::default() });
        let settings =
            FrontSettings { origins: config.origins, verifier: verifier.clone(), ..FrontSettings::default() };
        let deps = FrontDeps { store: store.clone(), bus: Arc::clone(&bus), sub_id_key, settings };
        let front = Front::new(deps);
        let settings = aura_api::Settings::new(config.platform_jwt_secret.clone());
        let settings = aura_api::Settings { secure_cookies: config.secure_cookies, verifier, ..settings };
        let api = Api::new(ApiDeps { store: store.clone(), bus: Some(bus), settings });
        let api = api.with_probes(probes(&store, &worker)?.metrics_access(config.metrics).until(shutdown));
        let router = api.router().merge(front.router());
        let platform_jwt_secret = config.platform_jwt_secret;
        Ok(Self { store, api, front, worker, router, limits: config.limits, platform_jwt_secret })
    }

    /// The platform database.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// A platform key, signed anew.
    pub(crate) fn platform_key(&self) -> Result<String> {
        Ok(Minter::new(&self.platform_jwt_secret).platform_key(KEY_LIFETIME)?)
    }

    /// A client that calls this stack's api without the network.
    pub(crate) fn api_client(&self) -> ApiClient {
        ApiClient(with_layers(self.router.clone()))
    }

    /// What the worker tells of its engines.
    pub(crate) fn worker_status(&self) -> WorkerStatus {
        self.worker.status()
    }

    /// Tells whether somebody is connected besides the live view's own socket.
    pub(crate) fn watched_by_others(&self) -> impl Fn() -> bool + Send + Sync + 'static {
        let front = self.front.clone();
        move || front.connections() > 1
    }

    /// Serves until the shutdown, then drains: sockets are closed, the engine confirms its position, the api finishes.
    pub(crate) async fn run(self, listener: TcpListener, shutdown: &ShutdownHandle) -> Result<Vec<EngineReport>> {
        let (stop, sockets_closed) = (shutdown.token(), CancellationToken::new());
        let (worker, api, front) = (self.worker, self.api, self.front.clone());
        let engines = shutdown.spawn("engines", worker.run(shutdown.clone()));
        let stopped = stop.clone();
        let api = shutdown.spawn("api", async move { api.run(stopped).await });
        // The front outlives its sockets, which outlive the trigger.
        let stopped = sockets_closed.clone();
        let front = shutdown.spawn("front", async move { front.run(stopped).await });
        let server = Server::start(listener, self.router, self.limits, shutdown)?;
        stop.cancelled().await;
        let phases = shutdown.phases();
        let sockets = async {
            self.front.drain(shutdown).await;
            sockets_closed.cancel();
            front.await
        };
        // What the engines said isn't lost if another part is cut off.
        let mut ended = None;
        let engines = async { ended = Some(engines.await) };
        let components = async { tokio::join!(engines, api, sockets, server.finished()) };
        phases.run("components", Cap::Leaving(LEAVE), components).await;
        let engines = aura_worker::reports(ended, shutdown);
        shutdown.foretell(&engines);
        // The database may be stopped next.
        let leaving = async { tokio::join!(server.close(), self.store.pool().close()) };
        phases.run("leave", Cap::AtMost(LEAVE), leaving).await;
        Ok(engines)
    }
}

async fn bus(url: Option<SecretString>) -> Result<SharedBus> {
    match url.as_ref().map(|url| url.expose_secret()) {
        None | Some("memory:") => Ok(Arc::new(MemoryBus::new())),
        Some(url) => {
            let bus = NatsBus::connect(NatsOptions::new(url, "aura-realtime"))
                .await
                .context("can't reach NATS")
                .component("bus")?;
            Ok(Arc::new(bus))
        }
    }
}

/// Health with the worker's `cdc_active`; ready while the platform database answers.
fn probes(store: &Store, worker: &Worker) -> Result<Probes> {
    let (store, status) = (store.clone(), worker.status());
    let health = move || std::future::ready(Report::ok(status.report()));
    let ready = move || {
        let store = store.clone();
        async move {
            let database = store.ping().await.is_ok();
            Report { ok: database, body: json!({"platform_database": database}) }
        }
    };
    Ok(Probes::new(Metrics::install().context("metrics")?).health(health).ready(ready))
}

/// Calls the api as a client would.
#[derive(Debug, Clone)]
pub(crate) struct ApiClient(Router);

impl ApiClient {
    /// Status and JSON body of the answer.
    pub(crate) async fn call(&self, method: &str, path: &str, key: &str, body: Value) -> Result<(u16, Value)> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::AUTHORIZATION, format!("Bearer {key}"))
            .header(header::CONTENT_TYPE, "application/json")
            .header("prefer", "wait=10")
            .body(Body::from(body.to_string()))?;
        let response = self.0.clone().oneshot(request).await?;
        let status = response.status().as_u16();
        let bytes = axum::body::to_bytes(response.into_body(), aura_kit::http::BODY_LIMIT).await?;
        Ok((status, serde_json::from_slice(&bytes).unwrap_or_default()))
    }
}
