//! `aura-realtime`: the undivided binary and the command line.

use std::{process::ExitCode, time::Duration};

use aura_kit::{Configuration, Problems, ShutdownArgs, ShutdownHandle, TelemetryArgs, telemetry::LogFormat};
use aura_worker::WorkerArgs;
use clap::{Parser, Subcommand};

mod dev;
mod migrate;
mod serve;
mod stack;
mod token;

/// Live, row-level-secure event streams from PostgreSQL tables.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(flatten)]
    telemetry: TelemetryArgs,
    /// For commands whose own output is what one wants to read.
    #[arg(skip = TelemetryArgs { log: Some("warn".to_owned()), log_format: LogFormat::Text })]
    quiet: TelemetryArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Dev(dev::DevOptions),
    Serve(Box<serve::ServeOptions>),
    Migrate(migrate::MigrateOptions),
    Token(token::TokenOptions),
}

impl Configuration for Cli {
    fn telemetry(&self) -> &TelemetryArgs {
        let chosen = self.telemetry.log.is_some() || std::env::var_os("RUST_LOG").is_some();
        if chosen || matches!(self.command, Command::Serve(_)) { &self.telemetry } else { &self.quiet }
    }

    fn check(&self, problems: &mut Problems) {
        match &self.command {
            Command::Serve(options) => options.check(problems),
            Command::Token(options) => options.check(problems),
            Command::Dev(_) => drop(WorkerArgs::from_environment(problems)),
            Command::Migrate(_) => {}
        }
    }

    fn shutdown(&self) -> ShutdownArgs {
        match &self.command {
            Command::Serve(options) => options.shutdown(),
            // The engine's own time and a little for the rest.
            _ => ShutdownArgs { drain_timeout: dev::DRAIN_TIMEOUT + Duration::from_secs(2), ..ShutdownArgs::default() },
        }
    }
}

fn main() -> ExitCode {
    aura_kit::run(|cli: Cli, shutdown: ShutdownHandle| async move {
        match cli.command {
            // Boxed: the undivided stack's future is large.
            Command::Dev(options) => Box::pin(dev::run(options, shutdown)).await,
            Command::Serve(options) => Box::pin(serve::run(*options, shutdown)).await,
            Command::Migrate(options) => migrate::run(options).await.map(|()| vec![]),
            Command::Token(options) => token::run(options).await.map(|()| vec![]),
        }
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_valid() {
        Cli::command().debug_assert();
    }
}
