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
    findings: Vec<Finding>,
}

/// Looks at a source with both its logins. Changes nothing.
pub(crate) async fn check(source: &Source) -> Result<Checked> {
    let url = SourceUrl::from_secret(&source.replication_url)?;
    let admin = source.admin_url.as_ref().map(SourceUrl::from_secret).transpose()?;
    let options = PreflightOptions {
        require_wal2json: source.plugin == Plugin::Wal2json,
        shared: source.name == "shared",
        slot: Some(&source.slot_name),
        admin: Some(admin.as_ref().unwrap_or(&url)),
    };
    let findings = preflight(&url, options).await;
    let ok = findings.iter().all(|finding| finding.severity != Severity::Critical);
    Ok(Checked { ok, findings })
}
