//! A process with bad habits, for the tests of the shutdown: they must see real signals and real exit codes.

use std::{future::pending, net::SocketAddr, process::ExitCode, time::Duration};

use aura_domain::EngineReport;
use aura_kit::{
    Cap, Configuration, Failure, Metrics, Probes, Problems, ShutdownArgs, ShutdownHandle, TelemetryArgs,
    http::{Limits, Server},
};
use axum::{Router, routing::get};
use clap::Parser;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Habit {
    /// None: ends when it is told to.
    Idle,
    /// A task of the drain never ends.
    Hangs,
    /// Blocks every thread of the runtime, and main's.
    Blocks,
    /// A component fails.
    Fails,
}

#[derive(Debug, Parser)]
struct Config {
    #[arg(value_enum)]
    habit: Habit,
    #[arg(long)]
    listen: SocketAddr,
    #[command(flatten)]
    shutdown: ShutdownArgs,
    #[command(flatten)]
    telemetry: TelemetryArgs,
}

impl Configuration for Config {
    fn telemetry(&self) -> &TelemetryArgs {
        &self.telemetry
    }

    fn check(&self, _problems: &mut Problems) {}

    fn shutdown(&self) -> ShutdownArgs {
        self.shutdown.clone()
    }
}

fn main() -> ExitCode {
    aura_kit::run(run)
}

async fn run(config: Config, shutdown: ShutdownHandle) -> anyhow::Result<Vec<EngineReport>> {
    let probes = Probes::new(Metrics::install()?).until(&shutdown);
    let router = Router::new().route("/work", get(|| async { "done" })).merge(probes.router());
    let listener = aura_kit::http::bind(config.listen).await?;
    let server = Server::start(listener, router, Limits::off(), &shutdown)?;
    match config.habit {
        Habit::Blocks => block(),
        Habit::Fails => shutdown.fail(Failure::new("sink", "it is full")),
        Habit::Idle | Habit::Hangs => {}
    }
    server.finished().await;
    let phases = shutdown.phases();
    let work = async {
        if config.habit == Habit::Hangs {
            pending::<()>().await;
        }
    };
    phases.run("work", Cap::Leaving(Duration::from_millis(500)), work).await;
    phases.run("leave", Cap::AtMost(Duration::from_millis(500)), server.close()).await;
    Ok(vec![])
}

fn block() {
    let threads = tokio::runtime::Handle::current().metrics().num_workers();
    for _ in 0..threads {
        tokio::spawn(async { park() });
    }
    tracing::info!("blocked");
    park();
}

fn park() {
    loop {
        std::thread::park();
    }
}
