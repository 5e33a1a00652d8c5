//! Whether a source has what we need (R-ENG-9). Findings say what is wrong, how we know, and what to do.

use std::time::Duration;

use tokio_postgres::{Client, error::SqlState};

use crate::{SourceError, SourceUrl, admin::STATISTICS_HIDDEN_SQL, connect_sql};

/// Bounds each step.
const STEP_LIMIT: Duration = Duration::from_secs(5);

/// Something that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Closed set: `unreachable`, `no_replication_attribute`, `wal_level`, `slot_wal_unbounded`, `no_free_slot`,
    /// `no_free_walsender`, `wal2json_missing`, `no_create_role`, `not_member_of_roles`, `statistics_visible`,
    /// `superuser`.
    pub code: &'static str,
    /// How bad.
    pub severity: Severity,
    /// What was found; no secrets.
    pub evidence: String,
    /// One line that mends it.
    pub fix: String,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// Works, but should be known.
    Warning,
    /// The engine can't or mustn't run.
    Critical,
}

/// What is looked at.
#[derive(Debug, Clone, Copy)]
pub struct PreflightOptions {
    /// wal2json is wanted: its absence is critical, not a warning.
    pub require_wal2json: bool,
    /// Several projects share the source: visible statistics are critical.
    pub shared: bool,
}

/// Looks at a source through the worker's login. Never an error: what can't be found out is a finding.
pub async fn preflight(url: &SourceUrl, options: PreflightOptions) -> Vec<Finding> {
    match connect_sql(url, "aura-preflight", None, STEP_LIMIT).await {
        Ok(client) => look(&client, options).await.unwrap_or_else(|error| vec![unreachable(&error)]),
        Err(error) => vec![unreachable(&error)],
    }
}

async fn look(client: &Client, options: PreflightOptions) -> Result<Vec<Finding>, SourceError> {
    let facts = Facts::read(client).await?;
    let mut findings = facts.findings(options);
    // A slot can be tried only when there is one to be had.
    if findings.iter().all(|finding| finding.severity < Severity::Critical || finding.code == "statistics_visible") {
        findings.extend(try_wal2json(client, options).await);
    }
    Ok(findings)
}

fn unreachable(error: &SourceError) -> Finding {
    critical("unreachable", error.to_string(), "check address, login, TLS and pg_hba.conf".to_owned())
}

struct Facts {
    role: String,
    superuser: bool,
    replication: bool,
    wal_level: String,
    max_slot_wal_keep_size: String,
    free_slots: i64,
    free_walsenders: i64,
    statistics_hidden: bool,
    foreign_roles: Vec<String>,
}

const FACTS_SQL: &str = "select r.rolname::text, r.rolsuper, r.rolreplication, current_setting('wal_level'), \
     coalesce(current_setting('max_slot_wal_keep_size', true), '-1'), \
     current_setting('max_replication_slots')::int8 - (select count(*) from pg_replication_slots), \
     current_setting('max_wal_senders')::int8 - (select count(*) from pg_stat_replication), \
     array(select p.rolname::text from pg_roles p where p.rolname ~ '^p_[0-9a-f-]{36}_(anon|authenticated)$' \
         and not exists (select from pg_auth_members m join pg_roles l on l.oid = m.member \
             where m.roleid = p.oid and l.rolname ~ '^p_[0-9a-f-]{36}_visibility$') order by 1 limit 5) \
     from pg_roles r where r.rolname = session_user";

impl Facts {
    async fn read(client: &Client) -> Result<Self, SourceError> {
        let row = bounded(client.query_one(FACTS_SQL, &[])).await?;
        let hidden = bounded(client.query_one(STATISTICS_HIDDEN_SQL, &[])).await?;
        Ok(Self {
            role: row.try_get(0)?,
            superuser: row.try_get(1)?,
            replication: row.try_get(2)?,
            wal_level: row.try_get(3)?,
            max_slot_wal_keep_size: row.try_get(4)?,
            free_slots: row.try_get(5)?,
            free_walsenders: row.try_get(6)?,
            foreign_roles: row.try_get(7)?,
            statistics_hidden: hidden.try_get(0)?,
        })
    }

    fn findings(&self, options: PreflightOptions) -> Vec<Finding> {
        let role = aura_domain::quote_ident(&self.role);
        let mut found = Vec::new();
        if !self.replication && !self.superuser {
            let evidence = format!("{role} lacks the REPLICATION attribute");
            found.push(critical("no_replication_attribute", evidence, format!("ALTER ROLE {role} REPLICATION")));
        }
        if self.superuser {
            let evidence = format!("{role} is a superuser");
            found.push(warning("superuser", evidence, "use a role that is not one".to_owned()));
        }
        if self.wal_level != "logical" {
            let fix = "ALTER SYSTEM SET wal_level = logical, then restart PostgreSQL".to_owned();
            found.push(critical("wal_level", format!("wal_level = {}", self.wal_level), fix));
        }
        found.extend(self.capacity());
        if !self.statistics_hidden {
            found.push(statistics(options.shared));
        }
        if !self.foreign_roles.is_empty() {
            let evidence = format!("no visibility login is a member of {}", self.foreign_roles.join(", "));
            found.push(warning("not_member_of_roles", evidence, "provision the project again".to_owned()));
        }
        found
    }

    fn capacity(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        if self.max_slot_wal_keep_size == "-1" {
            let fix = "ALTER SYSTEM SET max_slot_wal_keep_size = '10GB'; SELECT pg_reload_conf()".to_owned();
            let evidence = "max_slot_wal_keep_size = -1: a stopped engine fills the disk".to_owned();
            found.push(warning("slot_wal_unbounded", evidence, fix));
        }
        if self.free_slots < 1 {
            let fix = "raise max_replication_slots, then restart PostgreSQL".to_owned();
            found.push(warning("no_free_slot", "all replication slots are taken".to_owned(), fix));
        }
        if self.free_walsenders < 1 {
            let fix = "raise max_wal_senders, then restart PostgreSQL".to_owned();
            found.push(critical("no_free_walsender", "all walsenders are taken".to_owned(), fix));
        }
        found
    }
}

fn statistics(shared: bool) -> Finding {
    let severity = if shared { Severity::Critical } else { Severity::Warning };
    let evidence = "PUBLIC can read pg_stats: policies of one project could see values of another's rows".to_owned();
    let fix = "as a superuser: REVOKE ALL ON pg_stats, pg_stats_ext, pg_stats_ext_exprs FROM PUBLIC".to_owned();
    Finding { code: "statistics_visible", severity, evidence, fix }
}

/// Only the server knows whether it can load an output plugin, and only making a slot asks it. The slot is temporary:
/// it ends with this connection.
async fn try_wal2json(client: &Client, options: PreflightOptions) -> Option<Finding> {
    let sql = "select pg_create_logical_replication_slot('aura_preflight_' || pg_backend_pid(), 'wal2json', true)";
    let error = bounded(client.batch_execute(sql)).await.err()?;
    let missing = [SqlState::UNDEFINED_FILE, SqlState::INSUFFICIENT_PRIVILEGE];
    // Anything else (no slot free, an open transaction) comes after the library was loaded, or says nothing about it.
    if !error.sqlstate().is_some_and(|code| missing.contains(code)) {
        return None;
    }
    let severity = if options.require_wal2json { Severity::Critical } else { Severity::Warning };
    Some(Finding {
        code: "wal2json_missing",
        severity,
        evidence: "the server can't load wal2json".to_owned(),
        fix: "apt-get install postgresql-<version>-wal2json on the server".to_owned(),
    })
}

fn critical(code: &'static str, evidence: String, fix: String) -> Finding {
    Finding { code, severity: Severity::Critical, evidence, fix }
}

fn warning(code: &'static str, evidence: String, fix: String) -> Finding {
    Finding { code, severity: Severity::Warning, evidence, fix }
}

async fn bounded<T>(answer: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Result<T, SourceError> {
    let late = SourceError::Timeout { what: "preflight", limit: STEP_LIMIT };
    Ok(tokio::time::timeout(STEP_LIMIT, answer).await.map_err(|_| late)??)
}
