use aura_pgsource::{
    SourceUrl,
    preflight::{Finding, PreflightOptions, Severity, preflight},
};
use aura_store::{Plugin, Source};
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::Result;

/// What was found of a source.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = SourceCheck)]
pub(crate) struct Checked {
    /// Nothing critical was found.
    ok: bool,
    /// What is not as it should be.
    findings: Vec<FindingView>,
}

/// Something that is not as it should be.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Finding)]
struct FindingView {
    /// Stable word.
    #[schema(example = "wal_level")]
    code: &'static str,
    /// How bad.
    severity: SeverityView,
    /// What was found.
    #[schema(example = "wal_level = replica")]
    evidence: String,
    /// One line that mends it.
    #[schema(example = "ALTER SYSTEM SET wal_level = logical, then restart PostgreSQL")]
    fix: String,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = FindingSeverity)]
#[serde(rename_all = "snake_case")]
enum SeverityView {
    /// Works, but should be known.
    Warning,
    /// The engine can't or mustn't run.
    Critical,
}

/// Looks at a source with both its logins. Changes nothing.
pub(crate) async fn check(source: &Source) -> Result<Checked> {
    let url = SourceUrl::from_secret(&source.replication_url)?;
    let admin = source.admin_url.as_ref().map(SourceUrl::from_secret).transpose()?;
    let options = PreflightOptions {
        require_wal2json: source.plugin == Plugin::Wal2json,
        shared: source.name == "shared",
        slot: Some(&source.slot_name),
        admin: admin.as_ref(),
    };
    let findings: Vec<_> = preflight(&url, options).await.into_iter().map(FindingView::from).collect();
    let ok = findings.iter().all(|finding| finding.severity != SeverityView::Critical);
    Ok(Checked { ok, findings })
}

impl From<Finding> for FindingView {
    fn from(finding: Finding) -> Self {
        let Finding { code, severity, evidence, fix } = finding;
        let severity = match severity {
            Severity::Warning => SeverityView::Warning,
            Severity::Critical => SeverityView::Critical,
        };
        Self { code, severity, evidence, fix }
    }
}
