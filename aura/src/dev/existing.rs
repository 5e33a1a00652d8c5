//! A database of the user's (`--database-url`): looked at before anything is written, and left with its settings.

use anyhow::{Result, bail};
use aura_domain::quote_ident;
use aura_pgsource::{
    SourceUrl,
    preflight::{PreflightOptions, Severity, preflight},
};
use aura_store::StoreError;
use sha2::{Digest, Sha256};

/// Refuses a database on which the engine can't run, with what mends it.
pub(crate) async fn check(url: &str) -> Result<()> {
    let slot = slot_name(url)?;
    let url = SourceUrl::parse(url)?;
    let options = PreflightOptions { slot: Some(&slot), ..PreflightOptions::default() };
    let findings = preflight(&url, options).await;
    let critical: Vec<String> = findings
        .iter()
        .filter(|finding| finding.severity == Severity::Critical)
        .map(|finding| format!("{}; {}", finding.evidence, finding.fix))
        .collect();
    if !critical.is_empty() {
        bail!("--database-url ({}): {}", url.endpoint(), critical.join("; "));
    }
    if !findings.iter().any(|finding| finding.code == "superuser") {
        let (user, place) = (quote_ident(url.user()), url.endpoint());
        bail!("--database-url ({place}): {user} is none, and `dev` needs a superuser; use `serve` for a lesser login");
    }
    Ok(())
}

/// Says what to do about secrets that another data directory has the key to.
pub(crate) fn explain(error: anyhow::Error) -> anyhow::Error {
    let sealed = |cause: &(dyn std::error::Error + 'static)| {
        matches!(cause.downcast_ref::<StoreError>(), Some(StoreError::Key(_)))
    };
    if !error.chain().any(sealed) {
        return error;
    }
    error.context(
        "the database was set up with another data directory, which has the key to the secrets there: name that one with \
         --data-dir, or start anew after docs/remove.sql",
    )
}

/// Slots are cluster-wide: one per database, so that several on one server don't meet.
pub(crate) fn slot_name(url: &str) -> Result<String> {
    const PREFIX: &str = "aura_dev_";
    /// Of a name whose hash follows; a slot's name has at most 63 bytes.
    const LONGEST: usize = 40;
    let url = SourceUrl::parse(url)?;
    let database = url.database();
    let legal = |character: char| character.is_ascii_lowercase() || character.is_ascii_digit() || character == '_';
    if database.chars().all(legal) && database.len() <= LONGEST {
        return Ok(format!("{PREFIX}{database}"));
    }
    let readable: String = database.chars().filter(|character| legal(*character)).take(LONGEST).collect();
    let digest = Sha256::digest(database.as_bytes());
    let hash: String = digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{PREFIX}{readable}_{hash}"))
}

/// The URL for psql, whose unqualified names are then the project's. A URL with options of its own stays as it is.
pub(crate) fn with_search_path(url: &str, schema: &str) -> String {
    if url.contains("options=") {
        return url.to_owned();
    }
    let separator = if url.contains('?') { '&' } else { '?' };
    let path = quote_ident(schema).replace('"', "%22");
    format!("{url}{separator}options=-c%20search_path%3D{path},public")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_database_has_a_slot_of_its_own() -> Result<()> {
        let slot = |database: &str| slot_name(&format!("postgres://u@127.0.0.1/{database}"));
        assert_eq!(slot("shop")?, "aura_dev_shop");
        assert_ne!(slot("Shop")?, slot("shop")?);
        assert_ne!(slot("sHop")?, slot("Shop")?);
        let long = slot(&"x".repeat(63))?;
        assert!(long.len() <= 63 && long != slot(&"x".repeat(62))?, "{long}");
        Ok(())
    }

    #[test]
    fn the_search_path_goes_into_the_url() {
        let url = with_search_path("postgres://u@h/d?sslmode=require", "project_1-2");
        assert_eq!(url, "postgres://u@h/d?sslmode=require&options=-c%20search_path%3D%22project_1-2%22,public");
        let config: tokio_postgres::Config = url.parse().expect("a URL");
        assert_eq!(config.get_options(), Some(r#"-c search_path="project_1-2",public"#));
        assert_eq!(with_search_path("postgres://h/d?options=-cx%3D1", "s"), "postgres://h/d?options=-cx%3D1");
    }
}
