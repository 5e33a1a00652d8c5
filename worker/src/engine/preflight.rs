//! Whether the source and the bus have what the engine needs, before it touches the slot (R-ENG-9).

use aura_domain::{Finding, Severity};
use aura_pgsource::{
    SqlConnection,
    preflight::{PreflightOptions, STATISTICS_VISIBLE, inspect},
};

use super::{Engine, error::EngineError};

impl Engine {
    /// Logs what is found; the first critical finding is why the engine doesn't run.
    pub(super) async fn preflight(&self, sql: &SqlConnection) -> Result<(), EngineError> {
        let options = PreflightOptions {
            shared: self.source.name == "shared",
            slot: Some(&self.source.slot_name),
            ..PreflightOptions::default()
        };
        let mut findings = inspect(sql, &self.url, options).await?;
        findings.extend(self.deps.bus.findings());
        for Finding { code, severity, evidence, fix } in &findings {
            match severity {
                Severity::Critical => tracing::error!(source = %self.source.id, code, evidence, fix, "preflight"),
                Severity::Warning => tracing::warn!(source = %self.source.id, code, evidence, fix, "preflight"),
            }
        }
        let stops = |finding: &Finding| finding.severity == Severity::Critical && finding.code != STATISTICS_VISIBLE;
        findings.into_iter().find(stops).map_or(Ok(()), |finding| Err(EngineError::Preflight(finding)))
    }
}
