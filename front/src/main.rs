//! The front's binary.

use std::{net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Result;
use aura_auth::{JwksOptions, Verifier};
use aura_bus::{NatsBus, NatsOptions, SharedBus};
use aura_domain::EngineReport;
use aura_front::{Front, FrontDeps, FrontSettings};
use aura_kit::{
    Cap, Component, Configuration, Metrics, PlatformArgs, Probes, Problems, Report, ShutdownArgs, ShutdownHandle,
    TelemetryArgs,
    config::{JwksArgs, LimitArgs, ListenArgs, OriginArgs},
    http,
    http::Server,
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
    jwks: JwksArgs,
    #[command(flatten)]
    telemetry: TelemetryArgs,
    #[command(flatten)]
    listener: ListenArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    origins: OriginArgs,
    /// Address of the sockets, and of /health, /ready and /metrics.
    #[arg(long, env = "AURA_FRONT_LISTEN", default_value = "127.0.0.1:8081")]
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
        problems.extend(aura_store::url_problems(self.platform.database_url()));
        problems.extend(aura_bus::url_problems(self.platform.nats_url(), self.platform.is_production()));
        self.jwks.check(self.platform.env, problems);
        self.listener.check(self.platform.env, "AURA_FRONT_LISTEN", self.listen, problems);
        self.origins.check(problems);
    }

    fn shutdown(&self) -> ShutdownArgs {
        self.shutdown.clone()
    }
}

/// Kept of the drain for what comes after the sockets.
const AFTER_SOCKETS: Duration = Duration::from_secs(2);
/// Longest time for leaving the workers' lists.
const BACKGROUND: Duration = Duration::from_secs(1);
/// Longest time for answers to leave.
const LEAVE: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    aura_kit::run(run)
}

async fn run(config: Config, shutdown: ShutdownHandle) -> Result<Vec<EngineReport>> {
    let Some(parts) = shutdown.unless_triggered(Box::pin(build(&config, &shutdown))).await else { return Ok(vec![]) };
    let (front, server) = parts?;
    let (running, stop) = (front.clone(), CancellationToken::new());
    let stopped = stop.clone();
    let background = shutdown.spawn("background", async move { running.run(stopped).await });
    shutdown.token().cancelled().await;
    let phases = shutdown.phases();
    let sockets = async { tokio::join!(server.finished(), front.drain(&shutdown)) };
    if phases.run("sockets", Cap::Leaving(AFTER_SOCKETS), sockets).await.is_none() {
        tracing::warn!(open = front.connections(), "sockets were still open");
    }
    stop.cancel();
    phases.run("background", Cap::AtMost(BACKGROUND), background).await;
    phases.run("leave", Cap::AtMost(LEAVE), server.close()).await;
    Ok(vec![])
}

async fn build(config: &Config, shutdown: &ShutdownHandle) -> Result<(Front, Server)> {
    let metrics = Metrics::install().component("metrics")?;
    let key = MasterKey::new(config.platform.master_key().expose_secret()).component("AURA_MASTER_KEY")?;
    let sub_id_key = key.sub_id_key();
    let store = Store::connect(config.platform.database_url(), key).await.component("platform database")?;
    store.check().await.component("platform database")?;
    let nats = NatsOptions::new(config.platform.nats_url(), "aura-realtime-ws-front");
    let bus: SharedBus = Arc::new(NatsBus::connect(nats).await.component("bus")?);
    let verifier = Verifier::new(JwksOptions { loopback: config.jwks.jwks_loopback, ..Default::default() });
    let settings = FrontSettings { verifier, origins: config.origins.origins(), ..FrontSettings::default() };
    let front = Front::new(FrontDeps { store: store.clone(), bus: Arc::clone(&bus), sub_id_key, settings });
    let access = config.listener.metrics(config.platform.env, config.listen);
    let probes = probes(metrics, store, bus, front.clone()).metrics_access(access).until(shutdown);
    let listener = http::bind(config.listen).await.component("http")?;
    let limits = config.limits.limits(&config.listener, None);
    let server = Server::start(listener, front.router().merge(probes.router()), limits, shutdown)?;
    Ok((front, server))
}

fn probes(metrics: Metrics, store: Store, bus: SharedBus, front: Front) -> Probes {
    let health = move || std::future::ready(Report::ok(json!({"status": "ok", "connections": front.connections()})));
    let ready = move || {
        let (store, bus) = (store.clone(), Arc::clone(&bus));
        async move {
            let (database, bus) = (store.ping().await.is_ok(), bus.state().borrow().connected);
            // A bus that is away takes no socket from anybody (R-FRT-4), so it isn't asked here.
            Report { ok: database, body: json!({"platform_database": database, "bus": bus}) }
        }
    };
    Probes::new(metrics).health(health).ready(ready)
}
