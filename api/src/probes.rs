//! The api's own health: it is of use while it runs, and ready while the platform database answers.

use aura_kit::{Metrics, Probes, Report};
use serde_json::json;

use crate::state::AppState;

/// `None` if another recorder is installed, then whoever did that serves the metrics.
pub(crate) fn of(state: &AppState) -> Option<Probes> {
    let metrics = Metrics::install().inspect_err(|error| tracing::warn!(%error, "no metrics")).ok()?;
    // The probes must not keep their owner alive, nor the other way round: the state they hold has none.
    let state = state.clone();
    Some(Probes::new(metrics).ready(move || ready(state.clone())))
}

async fn ready(state: AppState) -> Report {
    let status = match state.store().schema_is_current().await {
        Ok(true) => "ok",
        Ok(false) => "the platform database is not migrated",
        Err(_) => "the platform database is unreachable",
    };
    let bus = state.bus().map(|bus| bus.state().borrow().connected);
    // Toggles and stops work without the bus: it is shown, not required.
    Report { ok: status == "ok", body: json!({"status": status, "bus_connected": bus}) }
}
