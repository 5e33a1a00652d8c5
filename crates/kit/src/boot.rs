//! Two-phase boot: what can be wrong with the configuration is found and reported before anything runs.

use std::{process::ExitCode, time::Duration};

use crate::{
    config::Problems,
    shutdown::{Shutdown, Signals},
    telemetry::TelemetryArgs,
};

/// Exit code for bad configuration: a restart is no use.
pub const EXIT_BAD_CONFIGURATION: u8 = 2;
/// Exit code for a failure at run time.
pub const EXIT_FAILED: u8 = 1;
/// What tasks that ignore cancellation get at the very end.
const RUNTIME_END: Duration = Duration::from_secs(1);

/// A binary's configuration: clap options, each with an environment variable.
pub trait Configuration: clap::Parser {
    /// Logging.
    fn telemetry(&self) -> &TelemetryArgs;

    /// Adds everything that is wrong.
    fn check(&self, problems: &mut Problems);

    /// How long the drain may take after the first signal.
    fn drain_timeout(&self) -> Duration {
        Duration::from_secs(25)
    }
}

/// The main function of a binary: parses and checks the configuration (exit code 2 and every problem on standard error
/// if it is bad), starts logging and the runtime, follows signals, runs `main`. An error of `main` is printed with its
/// causes, exit code 1.
pub fn run<C, F, Fut>(main: F) -> ExitCode
where
    C: Configuration,
    F: FnOnce(C, Shutdown) -> Fut,
    Fut: Future<Output = anyhow::Result<ExitCode>>,
{
    match configure::<C>() {
        Ok(config) => drive(config, main),
        Err(code) => code,
    }
}

fn configure<C: Configuration>() -> Result<C, ExitCode> {
    let config = C::try_parse().map_err(|error| {
        // Nothing can be done about a closed standard error.
        drop(error.print());
        ExitCode::from(if error.use_stderr() { EXIT_BAD_CONFIGURATION } else { 0 })
    })?;
    let mut problems = Problems::default();
    config.check(&mut problems);
    match config.telemetry().filter() {
        Ok(filter) if problems.list().is_empty() => {
            config.telemetry().start(filter);
            Ok(config)
        }
        filter => {
            filter.err().into_iter().for_each(|problem| problems.add(problem));
            report(&problems);
            Err(ExitCode::from(EXIT_BAD_CONFIGURATION))
        }
    }
}

#[expect(clippy::print_stderr, reason = "logging hasn't started yet")]
fn report(problems: &Problems) {
    for problem in problems.list() {
        eprintln!("error: {problem}");
    }
}

fn drive<C, F, Fut>(config: C, main: F) -> ExitCode
where
    C: Configuration,
    F: FnOnce(C, Shutdown) -> Fut,
    Fut: Future<Output = anyhow::Result<ExitCode>>,
{
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "can't start the runtime");
            return ExitCode::from(EXIT_FAILED);
        }
    };
    let outcome = runtime.block_on(with_signals(config, main));
    runtime.shutdown_timeout(RUNTIME_END);
    outcome.unwrap_or_else(|error| {
        tracing::error!("{}", with_causes(&error));
        ExitCode::from(EXIT_FAILED)
    })
}

/// The error and its causes in one line. Messages of some libraries hold their cause's message: it is said once.
pub fn with_causes(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

async fn with_signals<C, F, Fut>(config: C, main: F) -> anyhow::Result<ExitCode>
where
    C: Configuration,
    F: FnOnce(C, Shutdown) -> Fut,
    Fut: Future<Output = anyhow::Result<ExitCode>>,
{
    let shutdown = Shutdown::new(config.drain_timeout());
    let signals = Signals::install()?;
    // A handler of its own, so that a main that never yields still ends at the third signal.
    let handler = tokio::spawn(shutdown.clone().follow_signals(signals));
    let outcome = main(config, shutdown).await;
    handler.abort();
    outcome
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let inner = anyhow!("password authentication failed");
        let outer: anyhow::Result<()> = Err(inner).context("database: password authentication failed").context("start");
        let error = outer.context("dev").expect_err("an error");
        assert_eq!(with_causes(&error), "dev: start: database: password authentication failed");
    }
}
