use std::{net::SocketAddr, process::ExitCode, time::Duration};

use anyhow::Result;
use aura_kit::{PlatformArgs, PlatformKeyArgs, Problems, Shutdown, config::ListenArgs};
use aura_worker::{LeaseKind, WorkerArgs};

use crate::stack::{Lease, Stack, StackConfig};

/// Api, worker and front in one process, configured by the environment.
#[derive(Debug, clap::Args)]
pub(crate) struct ServeOptions {
    #[command(flatten)]
    platform: PlatformArgs,
    #[command(flatten)]
    platform_key: PlatformKeyArgs,
    #[command(flatten)]
    worker: WorkerArgs,
    /// Where everything is served.
    #[arg(long, env = "AURA_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:54321")]
    listen: SocketAddr,
    #[command(flatten)]
    listening: ListenArgs,
}

impl ServeOptions {
    /// How long the drain may take.
    pub(crate) fn drain_timeout(&self) -> Duration {
        self.worker.settings().drain_timeout
    }

    /// Adds what is wrong.
    pub(crate) fn check(&self, problems: &mut Problems) {
        self.platform.check(problems);
        self.platform_key.check(self.platform.env, problems);
        self.worker.check(problems);
        self.listening.check(self.platform.env, "AURA_LISTEN", self.listen, problems);
    }
}

pub(crate) async fn run(options: ServeOptions, shutdown: Shutdown) -> Result<ExitCode> {
    let listener = aura_kit::http::bind(options.listen).await?;
    let stack = Stack::build(StackConfig {
        platform_url: options.platform.database_url().to_owned().into(),
        master_key: options.platform.master_key(),
        platform_jwt_secret: options.platform_key.secret(),
        nats_url: Some(options.platform.nats_url.clone()),
        source: options.worker.shared_source(),
        lease: match options.worker.lease_backend() {
            LeaseKind::None => Lease::Ours,
            LeaseKind::Auto | LeaseKind::Postgres => Lease::Shared,
        },
        worker: options.worker.settings(),
    })
    .await?;
    stack.run(listener, shutdown).await?;
    Ok(ExitCode::SUCCESS)
}
