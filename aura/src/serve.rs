use std::net::SocketAddr;

use anyhow::Result;
use aura_domain::EngineReport;
use aura_kit::{
    Component, PlatformArgs, PlatformKeyArgs, Problems, ShutdownArgs, ShutdownHandle,
    config::{JwksArgs, KeyLimitArgs, LimitArgs, ListenArgs, OriginArgs},
};
use aura_worker::{WorkerArgs, WorkerSettings};

use crate::stack::{Lease, Stack, StackConfig};

/// Api, worker and front in one process, configured by the environment.
#[derive(Debug, clap::Args)]
pub(crate) struct ServeOptions {
    #[command(flatten)]
    platform: PlatformArgs,
    #[command(flatten)]
    platform_key: PlatformKeyArgs,
    #[command(flatten)]
    jwks: JwksArgs,
    #[command(flatten)]
    worker: WorkerArgs,
    /// Where everything is served.
    #[arg(long, env = "AURA_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:54321")]
    listen: SocketAddr,
    #[command(flatten)]
    listening: ListenArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    key_limits: KeyLimitArgs,
    #[command(flatten)]
    origins: OriginArgs,
    #[command(flatten)]
    shutdown: ShutdownArgs,
}

impl ServeOptions {
    /// How it shuts down.
    pub(crate) fn shutdown(&self) -> ShutdownArgs {
        self.shutdown.clone()
    }

    /// Adds what is wrong.
    pub(crate) fn check(&self, problems: &mut Problems) {
        self.platform.check(problems);
        problems.extend(aura_store::url_problems(self.platform.database_url()));
        if self.platform.nats_url() != "memory:" {
            problems.extend(aura_bus::url_problems(self.platform.nats_url(), self.platform.is_production()));
        }
        self.platform_key.check(self.platform.env, problems);
        self.jwks.check(self.platform.env, problems);
        self.worker.check(problems);
        self.listening.check(self.platform.env, "AURA_LISTEN", self.listen, problems);
        self.origins.check(problems);
    }
}

pub(crate) async fn run(options: ServeOptions, shutdown: ShutdownHandle) -> Result<Vec<EngineReport>> {
    let listener = aura_kit::http::bind(options.listen).await.component("http")?;
    let Some(stack) = shutdown.unless_triggered(Box::pin(Stack::build(options.stack_config(), &shutdown))).await else {
        return Ok(vec![]);
    };
    stack?.run(listener, &shutdown).await
}

impl ServeOptions {
    fn stack_config(&self) -> StackConfig {
        StackConfig {
            platform_url: self.platform.database_url().to_owned().into(),
            master_key: self.platform.master_key(),
            platform_jwt_secret: self.platform_key.secret(),
            jwks_loopback: self.jwks.jwks_loopback,
            nats_url: Some(self.platform.nats_url.clone()),
            source: self.worker.shared_source(),
            lease: Lease::Chosen(Box::new(self.worker.clone())),
            worker: WorkerSettings { drain_timeout: self.shutdown.drain_timeout, ..self.worker.settings() },
            metrics: self.listening.metrics(self.platform.env, self.listen),
            origins: self.origins.origins(),
            secure_cookies: self.listening.behind_tls,
            limits: self.limits.limits(&self.listening, Some(&self.key_limits)),
        }
    }
}
