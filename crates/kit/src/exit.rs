//! How a process ended: made into a report, said, and turned into an exit code by `main` alone.

use aura_domain::{EngineReport, ExitReport, ExitState, Trigger};

use crate::{Failure, ShutdownHandle, shutdown::write_termination_log};

/// The report of a process whose main returned `outcome`.
pub(crate) fn report(shutdown: &ShutdownHandle, outcome: anyhow::Result<Vec<EngineReport>>) -> ExitReport {
    let (engines, failure) = match outcome {
        Ok(engines) => (engines, shutdown.failure().cloned()),
        // What failed first is the reason, the rest follows from it.
        Err(error) => (vec![], Some(shutdown.failure().cloned().unwrap_or_else(|| Failure::of(error)))),
    };
    let unasked = if failure.is_some() { Trigger::Fatal } else { Trigger::Handle };
    ExitReport {
        state: failure
            .map_or(ExitState::Completed, |Failure { component, reason }| ExitState::Failed { component, reason }),
        trigger: shutdown.cause().unwrap_or(unasked),
        engines,
        phases: shutdown.phases_done(),
        signals_seen: shutdown.signals_seen(),
    }
}

/// The last log line, and for a failure the orchestrator's termination message: both name component and reason.
pub(crate) fn log(report: &ExitReport, shutdown: &ShutdownHandle, exit_code: u8) {
    let (trigger, signals_seen, engines) = (report.trigger, report.signals_seen, report.engines.len());
    let phases: Vec<_> = report.phases.iter().map(|phase| format!("{} {} ms", phase.name, phase.ms)).collect();
    let phases = phases.join(", ");
    match &report.state {
        ExitState::Completed => tracing::info!(?trigger, signals_seen, engines, phases, exit_code, "completed"),
        ExitState::Failed { component, reason } => {
            let failure = Failure::new(component.as_str(), reason.as_str());
            write_termination_log(shutdown.termination_log(), &failure);
            tracing::error!(?trigger, signals_seen, engines, phases, exit_code, component = %component, "{reason}");
        }
    }
}
