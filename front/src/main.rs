//! The front's binary.

use std::{net::SocketAddr, process::ExitCode, sync::Arc};

use anyhow::Context;
use aura_bus::{NatsBus, NatsOptions, SharedBus};
use aura_front::{Front, FrontDeps, FrontSettings};
use aura_kit::{
    Configuration, Metrics, PlatformArgs, Probes, Problems, Report, Shutdown, TelemetryArgs, config::ListenArgs, http,
};
use aura_store::{MasterKey, Store};
use clap::Parser;
use secrecy::ExposeSecret;
use serde_json::json;
use tokio_util::sync::CancellationToken;

/// Serves PostgreSQL changes and broadcasts to clients over WebSocket and event streams.
#[derive(Debug, Parser)]
#[command(name = "aura-realtime-ws-front", version)]
struct Config {
    #[command(flatten)]
    platform: PlatformArgs,
    #[command(flatten)]
    telemetry: TelemetryArgs,
    #[command(flatten)]
    listener: ListenArgs,
    /// Address of the sockets, and of /health, /ready and /metrics.
    #[arg(long, env = "AURA_FRONT_LISTEN", default_value = "127.0.0.1:8081")]
    listen: SocketAddr,
}

impl Configuration for Config {
    fn telemetry(&self) -> &TelemetryArgs {
        &self.telemetry
    }

    fn check(&self, problems: &mut Problems) {
        self.platform.check(problems);
        self.listener.check(self.platform.env, "AURA_FRONT_LISTEN", self.listen, problems);
    }
}

fn main() -> ExitCode {
    aura_kit::run(run)
}

async fn run(config: Config, shutdown: Shutdown) -> anyhow::Result<ExitCode> {
    let metrics = Metrics::install().context("metrics")?;
    let key = MasterKey::new(config.platform.master_key().expose_secret()).context("AURA_MASTER_KEY")?;
    let sub_id_key = key.sub_id_key();
    let store = Store::connect(config.platform.database_url(), key).await.context("platform database")?;
    anyhow::ensure!(
        store.schema_is_current().await?,
        "the platform database isn't migrated: run `aura-realtime migrate`"
    );
    let nats = NatsOptions::new(config.platform.nats_url(), "aura-realtime-ws-front");
    let bus: SharedBus = Arc::new(NatsBus::connect(nats).await.context("bus")?);
    let settings = FrontSettings::default();
    let front = Front::new(FrontDeps { store: store.clone(), bus: Arc::clone(&bus), sub_id_key, settings });
    let probes = probes(metrics, store, bus, front.clone(), shutdown.clone());
    let router = http::with_layers(front.router().merge(probes.router()));
    let listener = http::bind(config.listen).await?;
    let stop = CancellationToken::new();
    let serving = http::serve(listener, router, &shutdown);
    let (served, (), ()) = tokio::join!(serving, front.run(stop.clone()), drain(&front, &shutdown, stop));
    served?;
    Ok(ExitCode::SUCCESS)
}

/// Closes the sockets when the shutdown starts, then ends the background work; at the shutdown's deadline either way.
async fn drain(front: &Front, shutdown: &Shutdown, stop: CancellationToken) {
    shutdown.token().cancelled().await;
    tokio::select! {
        () = front.drain() => {}
        () = shutdown.expired() => tracing::warn!(open = front.connections(), "sockets were still open at the deadline"),
    }
    stop.cancel();
}

fn probes(metrics: Metrics, store: Store, bus: SharedBus, front: Front, shutdown: Shutdown) -> Probes {
    let health = move || std::future::ready(Report::ok(json!({"status": "ok", "connections": front.connections()})));
    let ready = move || {
        let (store, bus, draining) = (store.clone(), Arc::clone(&bus), shutdown.is_triggered());
        async move {
            let (database, bus) = (store.ping().await.is_ok(), bus.state().borrow().connected);
            let body = json!({"draining": draining, "platform_database": database, "bus": bus});
            // A bus that is away takes no socket from anybody (R-FRT-4), so it isn't asked here.
            if database && !draining { Report::ok(body) } else { Report::failing(body) }
        }
    };
    Probes::new(metrics).health(health).ready(ready)
}
