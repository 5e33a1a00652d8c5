//! The worker's binary.

use std::{net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context;
use aura_bus::{NatsBus, NatsOptions, SharedBus};
use aura_kit::{Configuration, Metrics, PlatformArgs, Probes, Problems, Report, Shutdown, TelemetryArgs, http};
use aura_lease::{LeaseBackend, NoLease};
use aura_store::{MasterKey, PostgresLease, Store};
use aura_worker::{LeaseKind, Worker, WorkerArgs, WorkerDeps, WorkerStatus};
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
}

impl Configuration for Config {
    fn telemetry(&self) -> &TelemetryArgs {
        &self.telemetry
    }

    fn check(&self, problems: &mut Problems) {
        self.platform.check(problems);
        self.worker.check(problems);
    }

    fn drain_timeout(&self) -> Duration {
        self.worker.settings().drain_timeout
    }
}

fn main() -> ExitCode {
    aura_kit::run(run)
}

async fn run(config: Config, shutdown: Shutdown) -> anyhow::Result<ExitCode> {
    let metrics = Metrics::install().context("metrics")?;
    let key = MasterKey::new(config.platform.master_key().expose_secret()).context("AURA_MASTER_KEY")?;
    let store = Store::connect(config.platform.database_url(), key).await.context("platform database")?;
    anyhow::ensure!(
        store.schema_is_current().await?,
        "the platform database isn't migrated: run `aura-realtime migrate`"
    );
    if let Some(source) = config.worker.shared_source() {
        store.upsert_source(source).await.context("registering the source `shared`")?;
    }
    let nats = NatsOptions::new(config.platform.nats_url(), "aura-realtime-cdc-worker");
    let bus: SharedBus = Arc::new(NatsBus::connect(nats).await.context("bus")?);
    let lease: Arc<dyn LeaseBackend> = match config.worker.lease_backend() {
        LeaseKind::None => Arc::new(NoLease),
        LeaseKind::Auto | LeaseKind::Postgres => Arc::new(PostgresLease::new(&store)),
    };
    let worker = Worker::new(WorkerDeps {
        store: store.clone(),
        bus: Arc::clone(&bus),
        lease,
        settings: config.worker.settings(),
    });
    let router = router(metrics, worker.status(), store, bus, shutdown.clone());
    let listener = http::bind(config.listen).await?;
    let serving = http::serve(listener, router, &shutdown);
    let running = worker.run(shutdown.token());
    let (served, ()) = tokio::join!(serving, running);
    served?;
    Ok(ExitCode::SUCCESS)
}

fn router(metrics: Metrics, status: WorkerStatus, store: Store, bus: SharedBus, shutdown: Shutdown) -> Router {
    let health = {
        let status = status.clone();
        move || std::future::ready(Report::ok(status.report()))
    };
    let ready = move || {
        let (store, bus, draining) = (store.clone(), Arc::clone(&bus), shutdown.is_triggered());
        async move {
            // A standby is ready: else a rolling update waits for the slot that the old pod holds (F.11).
            let (database, bus) = (store.ping().await.is_ok(), bus.state().borrow().connected);
            let body = json!({"draining": draining, "platform_database": database, "bus": bus});
            if database && bus && !draining { Report::ok(body) } else { Report::failing(body) }
        }
    };
    let probes = Probes::new(metrics).health(health).ready(ready);
    probes.router().route("/status", get(move || std::future::ready(axum::Json(status.report()))))
}
