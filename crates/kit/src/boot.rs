//! Two-phase boot: what can be wrong with the configuration is found and reported before anything runs.

use std::{panic::AssertUnwindSafe, process::ExitCode, time::Duration};

use aura_domain::{EngineReport, ExitReport};
use futures_util::FutureExt;

use crate::{
    Component, Failure,
    config::Problems,
    exit,
    shutdown::{ShutdownArgs, ShutdownHandle},
    telemetry::TelemetryArgs,
};

/// Exit code for bad configuration: a restart is no use.
pub const EXIT_BAD_CONFIGURATION: u8 = 2;
/// Exit code for a failure at run time.
pub const EXIT_FAILED: u8 = 1;
/// What tasks that ignore cancellation get at the very end.
const RUNTIME_END: Duration = Duration::from_secs(1);
/// What main gets after the deadline to return its report; the watchdog waits longer.
const LAST_MOMENT: Duration = Duration::from_millis(250);

/// A binary's configuration: clap options, each with an environment variable.
pub trait Configuration: clap::Parser {
    /// Logging.
    fn telemetry(&self) -> &TelemetryArgs;

    /// Adds everything that is wrong.
    fn check(&self, problems: &mut Problems);

    /// How it shuts down.
    fn shutdown(&self) -> ShutdownArgs {
        ShutdownArgs::default()
    }
}

/// The main function of a binary: parses and checks the configuration (exit code 2 and every problem on standard error
/// if it is bad), starts logging, the threads of the shutdown and the runtime, and runs `main`, which returns the reports of
/// its engines. However that ends, it is reported: see [`ExitReport`]. An error of `main` is exit code 1.
pub fn run<C, F, Fut>(main: F) -> ExitCode
where
    C: Configuration,
    F: FnOnce(C, ShutdownHandle) -> Fut,
    Fut: Future<Output = anyhow::Result<Vec<EngineReport>>>,
{
    let config = match configure::<C>() {
        Ok(config) => config,
        Err(code) => return code,
    };
    let args = config.shutdown();
    if let Some(warning) = args.warning() {
        tracing::warn!("{warning}");
    }
    let (shutdown, started) = match ShutdownHandle::start(args.options()) {
        Ok(shutdown) => (shutdown, Ok(())),
        Err(error) => (ShutdownHandle::new(args.drain_timeout), Err(error).component("signals")),
    };
    let report = match started {
        Ok(()) => drive(&shutdown, main(config, shutdown.clone())),
        Err(failure) => exit::report(&shutdown, Err(failure.into())),
    };
    let code = report.exit_code(args.strict_exit_codes);
    exit::log(&report, &shutdown, code);
    ExitCode::from(code)
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

fn drive(shutdown: &ShutdownHandle, main: impl Future<Output = anyhow::Result<Vec<EngineReport>>>) -> ExitReport {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return exit::report(shutdown, Err(error.into())),
    };
    let report = runtime.block_on(supervise(shutdown, main));
    runtime.shutdown_timeout(RUNTIME_END);
    report
}

/// Runs `main` to its end, or to a moment after the shutdown's deadline, and reports how that went.
pub async fn supervise(
    shutdown: &ShutdownHandle,
    main: impl Future<Output = anyhow::Result<Vec<EngineReport>>>,
) -> ExitReport {
    let overdue = async {
        shutdown.expired().await;
        tokio::time::sleep(LAST_MOMENT).await;
    };
    let outcome = tokio::select! {
        outcome = AssertUnwindSafe(main).catch_unwind() => {
            outcome.unwrap_or_else(|panic| Err(Failure::of_panic("process", &*panic).into()))
        }
        () = overdue => Err(Failure::new("shutdown", "the drain did not end by its deadline").into()),
    };
    exit::report(shutdown, outcome)
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use anyhow::anyhow;
    use aura_domain::{ExitState, Trigger};

    use super::*;

    fn failed(component: &str, reason: &str) -> ExitState {
        ExitState::Failed { component: component.to_owned(), reason: reason.to_owned() }
    }

    #[tokio::test(start_paused = true)]
    async fn r_sd_7_the_report_says_how_it_ended_whatever_happened() {
        let drain = Duration::from_secs(25);
        let shutdown = ShutdownHandle::new(drain);
        let stopped = async {
            shutdown.trigger();
            shutdown.token().cancelled().await;
            Ok(vec![])
        };
        let report = supervise(&shutdown, stopped).await;
        assert_eq!((report.ok(), report.trigger, report.exit_code(true)), (true, Trigger::Handle, 0));

        let shutdown = ShutdownHandle::new(drain);
        let report = supervise(&shutdown, async { Err(anyhow!("no way")) }).await;
        assert_eq!((report.state, report.trigger), (failed("process", "no way"), Trigger::Fatal));

        let report = supervise(&shutdown, async { panic!("oh") }).await;
        assert_eq!((report.exit_code(false), report.state), (1, failed("process", "panicked: oh")));

        let shutdown = ShutdownHandle::new(drain);
        shutdown.fail(Failure::new("bus", "gone"));
        let report = supervise(&shutdown, async { Ok(vec![]) }).await;
        assert_eq!((report.state, report.trigger), (failed("bus", "gone"), Trigger::Fatal));

        let shutdown = ShutdownHandle::new(drain);
        shutdown.trigger();
        let report = supervise(&shutdown, pending()).await;
        assert_eq!(report.state, failed("shutdown", "the drain did not end by its deadline"));
    }
}
