//! The control plane as a process of its own.

use std::{net::SocketAddr, process::ExitCode};

use anyhow::{Context, bail};
use aura_api::{Api, ApiDeps, Settings};
use aura_kit::{Configuration, PlatformArgs, PlatformKeyArgs, Problems, Shutdown, TelemetryArgs, config::ListenArgs};
use aura_store::{MasterKey, Store};
use clap::Parser;
use secrecy::ExposeSecret;
use tokio_util::task::TaskTracker;

/// The control plane of aura-realtime: projects, sources, engines and the toggle that makes a table live.
#[derive(Debug, Parser)]
#[command(name = "aura-api", version)]
struct Config {
    #[command(flatten)]
    platform: PlatformArgs,
    #[command(flatten)]
    platform_key: PlatformKeyArgs,
    /// Where to listen.
    #[arg(long, env = "AURA_API_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:4000")]
    listen: SocketAddr,
    #[command(flatten)]
    listening: ListenArgs,
    #[command(flatten)]
    telemetry: TelemetryArgs,
}

impl Configuration for Config {
    fn telemetry(&self) -> &TelemetryArgs {
        &self.telemetry
    }

    fn check(&self, problems: &mut Problems) {
        self.platform.check(problems);
        self.platform_key.check(self.platform.env, problems);
        self.listening.check(self.platform.env, "AURA_API_LISTEN", self.listen, problems);
    }
}

fn main() -> ExitCode {
    aura_kit::run(serve)
}

async fn serve(config: Config, shutdown: Shutdown) -> anyhow::Result<ExitCode> {
    let listener = aura_kit::http::bind(config.listen).await?;
    let key = MasterKey::new(config.platform.master_key().expose_secret()).context("AURA_MASTER_KEY")?;
    let store = Store::connect(config.platform.database_url(), key).await?;
    if !store.schema_is_current().await? {
        bail!("the platform database is not migrated; run `aura-realtime migrate`");
    }
    let settings = Settings::new(config.platform_key.secret());
    let api = Api::new(ApiDeps { store, bus: None, settings });
    let tasks = TaskTracker::new();
    let (background, stop) = (api.clone(), shutdown.token());
    tasks.spawn(async move { background.run(stop).await });
    tasks.close();
    aura_kit::http::serve(listener, aura_kit::http::with_layers(api.router()), &shutdown).await?;
    shutdown.trigger();
    tokio::select! {
        () = tasks.wait() => {}
        () = shutdown.expired() => tracing::warn!("background tasks were still running at the deadline"),
    }
    Ok(ExitCode::SUCCESS)
}
