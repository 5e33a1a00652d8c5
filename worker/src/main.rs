//! The worker's binary.

use std::{net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Result;
use aura_bus::{NatsBus, NatsOptions, SharedBus};
use aura_domain::EngineReport;
use aura_kit::{
    Cap, Component, Configuration, Environment, Metrics, MetricsAccess, PlatformArgs, PlatformKeyArgs, Probes,
    Problems, Report, ShutdownArgs, ShutdownHandle, TelemetryArgs,
    config::ListenArgs,
    http,
    http::{Limits, Server},
};
use aura_store::{MasterKey, Store};
use aura_worker::{Worker, WorkerArgs, WorkerDeps, WorkerSettings, WorkerStatus};
use axum::{Router, http::HeaderMap, routing::get};
use clap::Parser;
use secrecy::{ExposeSecret, SecretString};
use serde_json::json;

/// Streams the WAL of PostgreSQL sources to the bus, each row only to those who may see it.
#[derive(Debug, Parser)]
#[command(name = "aura-realtime-cdc-worker", version)]
struct Config {
    #[command(flatten)]
    platform: PlatformArgs,
    /// For /engine/*, which take a platform key.
    #[command(flatten)]
    platform_key: PlatformKeyArgs,
    #[command(flatten)]
    worker: WorkerArgs,
    #[command(flatten)]
    telemetry: TelemetryArgs,
    /// Address of /health, /ready, /metrics and /status.
    #[arg(long, env = "AURA_WORKER_LISTEN", default_value = "127.0.0.1:8082")]
    listen: SocketAddr,
    #[command(flatten)]
    listening: ListenArgs,
    #[command(flatten)]
    shutdown: ShutdownArgs,
}

impl Configuration for Config {
    fn telemetry(&self) -> &TelemetryArgs {
        &self.telemetry
    }

    fn check(&self, problems: &mut Problems) {
        self.platform.check(problems);
        problems.extend(aura_store::url_problems(self.platform.database_url()));
        problems.extend(aura_bus::url_problems(self.platform.nats_url(), self.platform.is_production()));
        self.worker.check(problems);
        self.listening.check(self.platform.env, "AURA_WORKER_LISTEN", self.listen, problems);
        if self.platform_key.platform_jwt_secret.is_some() {
            self.platform_key.check(self.platform.env, problems);
        }
    }

    fn shutdown(&self) -> ShutdownArgs {
        self.shutdown.clone()
    }
}

impl Config {
    /// Without it /engine/* lets nobody in, which is said once; everything else works.
    fn platform_secret(&self) -> Option<SecretString> {
        let given = self.platform_key.platform_jwt_secret.is_some() || self.platform.env == Environment::Dev;
        if !given {
            tracing::warn!("AURA_PLATFORM_JWT_SECRET is not set: /engine/* of this worker refuses every key");
        }
        given.then(|| self.platform_key.secret())
    }
}

/// Longest time for answers to leave.
const LEAVE: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    aura_kit::run(run)
}

async fn run(config: Config, shutdown: ShutdownHandle) -> Result<Vec<EngineReport>> {
    let Some(parts) = shutdown.unless_triggered(Box::pin(build(&config, &shutdown))).await else { return Ok(vec![]) };
    let (worker, server) = parts?;
    let engines = shutdown.spawn("engines", worker.run(shutdown.clone()));
    shutdown.token().cancelled().await;
    let phases = shutdown.phases();
    let ended = phases.run("engines", Cap::Leaving(LEAVE), engines).await;
    let reports = aura_worker::reports(ended, &shutdown);
    shutdown.foretell(&reports);
    phases.run("leave", Cap::AtMost(LEAVE), server.close()).await;
    Ok(reports)
}

async fn build(config: &Config, shutdown: &ShutdownHandle) -> Result<(Worker, Server)> {
    let metrics = Metrics::install().component("metrics")?;
    let key = MasterKey::new(config.platform.master_key().expose_secret()).component("AURA_MASTER_KEY")?;
    let store = Store::connect(config.platform.database_url(), key).await.component("platform database")?;
    store.check().await.component("platform database")?;
    if let Some(source) = config.worker.shared_source() {
        aura_worker::register(&store, source).await.component("POSTGRES_REPLICATION_URL")?;
    }
    let nats = NatsOptions::new(config.platform.nats_url(), "aura-realtime-cdc-worker");
    let bus: SharedBus = Arc::new(NatsBus::connect(nats).await.component("bus")?);
    let lease = config.worker.lease(&store).await.component("lease")?;
    let settings = WorkerSettings { drain_timeout: config.shutdown.drain_timeout, ..config.worker.settings() };
    let worker = Worker::new(WorkerDeps { store: store.clone(), bus, lease, settings });
    let access = config.listening.metrics(config.platform.env, config.listen);
    let probes = probes(metrics, worker.status(), store).metrics_access(access.clone()).until(shutdown);
    let router = router(probes, worker.status(), access).merge(worker.routes(config.platform_secret()));
    let listener = http::bind(config.listen).await.component("http")?;
    Ok((worker, Server::start(listener, router, Limits::off(), shutdown)?))
}

/// `/status` shows no less than the metrics do.
fn router(probes: Probes, status: WorkerStatus, access: MetricsAccess) -> Router {
    let show = move |headers: HeaderMap| async move { access.check(&headers).map(|()| axum::Json(status.report())) };
    probes.router().route("/status", get(show))
}

fn probes(metrics: Metrics, status: WorkerStatus, store: Store) -> Probes {
    let (alive, able) = (status.clone(), status);
    let health = move || std::future::ready(Report { ok: alive.is_healthy(), body: alive.report() });
    let ready = move || {
        let (store, able) = (store.clone(), able.clone());
        async move {
            let (database, ready) = (store.ping().await.is_ok(), able.is_ready());
            Report { ok: database && ready, body: json!({"platform_database": database, "worker": ready}) }
        }
    };
    Probes::new(metrics).health(health).ready(ready)
}
