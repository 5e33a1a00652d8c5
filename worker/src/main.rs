//! The worker's binary.

use std::{net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use aura_bus::{NatsBus, NatsOptions, SharedBus};
use aura_domain::EngineReport;
use aura_kit::{
    Cap, Component, Configuration, Metrics, PlatformArgs, Probes, Problems, Report, ShutdownArgs, ShutdownHandle,
    TelemetryArgs, http, http::Server,
};
use aura_lease::{LeaseBackend, NoLease};
use aura_store::{MasterKey, PostgresLease, Store};
use aura_worker::{LeaseKind, Worker, WorkerArgs, WorkerDeps, WorkerSettings, WorkerStatus};
use axum::{Router, routing::get};
use clap::Parser;
use secrecy::ExposeSecret;
use serde_json::json;

/// Streams the WAL of PostgreSQL sources to the bus, each row only to those who may see it.
#[derive(Debug, Parser)]
#[command(name = "aura-realtime-cdc-worker", version)]
struct Config {
    #[command(flatten)]
    platform: PlatformArgs,
    #[command(flatten)]
    worker: WorkerArgs,
    #[command(flatten)]
    telemetry: TelemetryArgs,
    /// Address of /health, /ready, /metrics and /status.
    #[arg(long, env = "AURA_WORKER_LISTEN", default_value = "127.0.0.1:8082")]
    listen: SocketAddr,
    #[command(flatten)]
    shutdown: ShutdownArgs,
}

impl Configuration for Config {
    fn telemetry(&self) -> &TelemetryArgs {
        &self.telemetry
    }

    fn check(&self, problems: &mut Problems) {
        self.platform.check(problems);
        self.worker.check(problems);
    }

    fn shutdown(&self) -> ShutdownArgs {
        self.shutdown.clone()
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
    let reports = phases.run("engines", Cap::Leaving(LEAVE), engines).await;
    phases.run("leave", Cap::AtMost(LEAVE), server.close()).await;
    // Without a word of its own: it was cut off or has panicked, and the shutdown knows.
    Ok(reports.and_then(Result::ok).flatten().unwrap_or_default())
}

async fn build(config: &Config, shutdown: &ShutdownHandle) -> Result<(Worker, Server)> {
    let metrics = Metrics::install().component("metrics")?;
    let key = MasterKey::new(config.platform.master_key().expose_secret()).component("AURA_MASTER_KEY")?;
    let store = Store::connect(config.platform.database_url(), key).await.component("platform database")?;
    anyhow::ensure!(
        store.schema_is_current().await?,
        "the platform database isn't migrated: run `aura-realtime migrate`"
    );
    if let Some(source) = config.worker.shared_source() {
        store.upsert_source(source).await.context("registering the source `shared`")?;
    }
    let nats = NatsOptions::new(config.platform.nats_url(), "aura-realtime-cdc-worker");
    let bus: SharedBus = Arc::new(NatsBus::connect(nats).await.component("bus")?);
    let lease: Arc<dyn LeaseBackend> = match config.worker.lease_backend() {
        LeaseKind::None => {
            aura_worker::ensure_alone(&store, &config.worker.settings()).await.component("lease")?;
            Arc::new(NoLease)
        }
        LeaseKind::Auto | LeaseKind::Postgres => Arc::new(PostgresLease::new(&store)),
    };
    let settings = WorkerSettings { drain_timeout: config.shutdown.drain_timeout, ..config.worker.settings() };
    let worker = Worker::new(WorkerDeps { store: store.clone(), bus: Arc::clone(&bus), lease, settings });
    let router = router(probes(metrics, worker.status(), store, bus).until(shutdown), worker.status());
    let listener = http::bind(config.listen).await.component("http")?;
    Ok((worker, Server::start(listener, router, shutdown)?))
}

fn router(probes: Probes, status: WorkerStatus) -> Router {
    probes.router().route("/status", get(move || std::future::ready(axum::Json(status.report()))))
}

fn probes(metrics: Metrics, status: WorkerStatus, store: Store, bus: SharedBus) -> Probes {
    let health = move || std::future::ready(Report::ok(status.report()));
    let ready = move || {
        let (store, bus) = (store.clone(), Arc::clone(&bus));
        async move {
            // A standby is ready: else a rolling update waits for the slot that the old pod holds (F.11).
            let (database, bus) = (store.ping().await.is_ok(), bus.state().borrow().connected);
            Report { ok: database && bus, body: json!({"platform_database": database, "bus": bus}) }
        }
    };
    Probes::new(metrics).health(health).ready(ready)
}
