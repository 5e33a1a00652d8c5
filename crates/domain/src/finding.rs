use serde::Serialize;

use crate::words;

words! {
    /// How bad a finding is.
    Severity {
        /// Works, but should be known.
        Warning = "warning",
        /// The engine can't or mustn't run.
        Critical = "critical",
    }
}

/// Something that is not as it should be (R-ENG-9).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Finding {
    /// Stable word.
    #[cfg_attr(feature = "openapi", schema(value_type = String, example = "wal_level"))]
    pub code: &'static str,
    /// How bad.
    pub severity: Severity,
    /// What was found; no secrets.
    #[cfg_attr(feature = "openapi", schema(example = "wal_level = replica"))]
    pub evidence: String,
    /// One line that mends it.
    #[cfg_attr(feature = "openapi", schema(example = "ALTER SYSTEM SET wal_level = logical, then restart PostgreSQL"))]
    pub fix: String,
}

impl Finding {
    /// One that keeps the engine from running.
    pub fn critical(code: &'static str, evidence: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { code, severity: Severity::Critical, evidence: evidence.into(), fix: fix.into() }
    }

    /// One that should be known.
    pub fn warning(code: &'static str, evidence: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { code, severity: Severity::Warning, evidence: evidence.into(), fix: fix.into() }
    }
}
