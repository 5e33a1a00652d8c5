//! The control plane as a process of its own.

use std::{net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Result;
use aura_api::{Api, ApiDeps, Settings};
use aura_auth::{JwksOptions, Verifier};
use aura_bus::{NatsBus, NatsOptions};
use aura_domain::EngineReport;
use aura_kit::{
    Cap, Component, Configuration, PlatformArgs, PlatformKeyArgs, Problems, ShutdownArgs, ShutdownHandle,
    TelemetryArgs,
    config::{JwksArgs, KeyLimitArgs, LimitArgs, ListenArgs},
    http,
    http::Server,
};
use aura_store::{MasterKey, Store};
use clap::Parser;
use secrecy::ExposeSecret;

/// The control plane of aura-realtime: projects, sources, engines and the toggle that makes a table live.
#[derive(Debug, Parser)]
#[command(name = "aura-api", version)]
struct Config {
    #[command(flatten)]
    platform: PlatformArgs,
    #[command(flatten)]
    platform_key: PlatformKeyArgs,
    #[command(flatten)]
    jwks: JwksArgs,
    /// Where to listen.
    #[arg(long, env = "AURA_API_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:4000")]
    listen: SocketAddr,
    #[command(flatten)]
    listening: ListenArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    key_limits: KeyLimitArgs,
    #[command(flatten)]
    telemetry: TelemetryArgs,
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
        self.platform_key.check(self.platform.env, problems);
        self.jwks.check(self.platform.env, problems);
        self.listening.check(self.platform.env, "AURA_API_LISTEN", self.listen, problems);
    }

    fn shutdown(&self) -> ShutdownArgs {
        self.shutdown.clone()
    }
}

/// Kept of the drain for what comes after the requests.
const AFTER_REQUESTS: Duration = Duration::from_secs(6);
/// Longest time for background tasks: an engine's end from outside that is under way is finished.
const BACKGROUND: Duration = Duration::from_secs(5);
/// Longest time for answers to leave.
const LEAVE: Duration = Duration::from_millis(500);

/// Between two tries to reach the bus.
const BUS_AGAIN: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    aura_kit::run(serve)
}

async fn serve(config: Config, shutdown: ShutdownHandle) -> Result<Vec<EngineReport>> {
    let listener = http::bind(config.listen).await.component("http")?;
    let Some(api) = shutdown.unless_triggered(Box::pin(build(&config))).await else { return Ok(vec![]) };
    let metrics = config.listening.metrics(config.platform.env, config.listen);
    let api = api?.until(&shutdown).with_metrics_access(metrics);
    let (running, stop) = (api.clone(), shutdown.token());
    let bus = connect(api.clone(), config.platform.nats_url().to_owned());
    let background = shutdown.spawn("background", async move {
        let cancelled = stop.clone();
        tokio::join!(running.run(stop), cancelled.run_until_cancelled(bus));
    });
    let limits = config.limits.limits(&config.listening, Some(&config.key_limits));
    let server = Server::start(listener, api.router(), limits, &shutdown)?;
    shutdown.token().cancelled().await;
    let phases = shutdown.phases();
    phases.run("requests", Cap::Leaving(AFTER_REQUESTS), server.finished()).await;
    phases.run("background", Cap::AtMost(BACKGROUND), background).await;
    phases.run("leave", Cap::AtMost(LEAVE), server.close()).await;
    Ok(vec![])
}

/// Only explanations need the bus, so nobody waits for it.
async fn connect(api: Api, url: String) {
    let mut told = false;
    loop {
        // Below what the api may publish anyway, so that its user of the bus needs nothing else (R-SEC-6).
        let options = NatsOptions { inbox: Some("aura.control.inbox"), ..NatsOptions::new(url.as_str(), "aura-api") };
        match NatsBus::connect(options).await {
            Ok(bus) => return api.connect(Arc::new(bus)),
            Err(error) if told => tracing::debug!(%error, "the bus is still away"),
            Err(error) => tracing::warn!(%error, "the bus is away, trying on; all but explanations works without"),
        }
        told = true;
        tokio::time::sleep(BUS_AGAIN).await;
    }
}

async fn build(config: &Config) -> Result<Api> {
    let key = MasterKey::new(config.platform.master_key().expose_secret()).component("AURA_MASTER_KEY")?;
    let store = Store::connect(config.platform.database_url(), key).await.component("platform database")?;
    store.check().await.component("platform database")?;
    let secure_cookies = config.listening.behind_tls;
    let verifier = Verifier::new(JwksOptions { loopback: config.jwks.jwks_loopback, ..Default::default() });
    let settings = Settings { secure_cookies, verifier, ..Settings::new(config.platform_key.secret()) };
    Ok(Api::new(ApiDeps { store, bus: None, settings }))
}
