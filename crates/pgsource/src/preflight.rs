//! Whether a source has what we need (R-ENG-9). Findings say what is wrong, how we know, and what to do.
//!
//! Their codes: `unreachable`, `no_replication_attribute`, `wal_level`, `slot_wal_unbounded`, `no_free_slot`,
//! `no_free_walsender`, `slot_of_other_database`, `wal2json_missing`, `not_member_of_roles`, `statistics_visible`,
//! `superuser`, `clock_skew`; of the admin's login `admin_unreachable`, `admin_on_other_server`, `no_create_role`,
//! `no_create_schema`, `cannot_signal`. docs/engine-reasons.md says what each means.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub use aura_domain::{Finding, Severity};
use tokio_postgres::{Client, error::SqlState};

use crate::{
    SourceError, SourceUrl, SqlConnection,
    admin::{JUDGE_IS_OURS, STATISTICS_HIDDEN_SQL},
    connect_sql,
};

/// Bounds each step.
const STEP_LIMIT: Duration = Duration::from_secs(5);

/// What is looked at.
#[derive(Debug, Clone, Copy, Default)]
pub struct PreflightOptions<'a> {
    /// wal2json is wanted: its absence is critical, not a warning.
    pub require_wal2json: bool,
    /// Several projects share the source: visible statistics are critical.
    pub shared: bool,
    /// The source's slot: one that is there needs no free one, and shows that its plugin can be loaded.
    pub slot: Option<&'a str>,
    /// The admin's login, which may be the worker's: whether it may do what it is for.
    pub admin: Option<&'a SourceUrl>,
}

/// Code of the finding that keeps no engine from running: a secret that may leak says nothing about the stream.
pub const STATISTICS_VISIBLE: &str = "statistics_visible";

/// A clock that differs by more is a finding. Nothing relies on it, but times in logs and answers will not fit.
const CLOCK_SKEW: Duration = Duration::from_secs(5);

/// Looks at a source through the worker's login, and the admin's. Never an error: what can't be found out is a finding.
/// Ends within half a minute.
pub async fn preflight(url: &SourceUrl, options: PreflightOptions<'_>) -> Vec<Finding> {
    let mut findings = match open(url).await {
        Ok(client) => look(&client, url, options).await.unwrap_or_else(|error| vec![unreachable(&error)]),
        Err(error) => vec![unreachable(&error)],
    };
    // The same login isn't found unreachable twice.
    let looked =
        |admin: &&SourceUrl| admin.user() != url.user() || findings.iter().all(|one| one.code != "unreachable");
    if let Some(admin) = options.admin.filter(looked) {
        findings.extend(look_as_admin(admin, url.user()).await);
    }
    findings
}

async fn open(url: &SourceUrl) -> Result<SqlConnection, SourceError> {
    let client = connect_sql(url, "aura-preflight", None, STEP_LIMIT).await?;
    // The server gives up, too: what waits for somebody's transaction must not be left behind.
    bounded(client.batch_execute("set statement_timeout = 4500")).await?;
    Ok(client)
}

async fn look(client: &Client, url: &SourceUrl, options: PreflightOptions<'_>) -> Result<Vec<Finding>, SourceError> {
    let (facts, mut findings) = inspected(client, url, options).await?;
    // A slot can be tried only when there is one to be had.
    let possible = |finding: &Finding| finding.severity < Severity::Critical || finding.code == STATISTICS_VISIBLE;
    if facts.slot_database.is_none() && findings.iter().all(possible) {
        findings.extend(try_wal2json(client, options).await);
    }
    Ok(findings)
}

/// What can be seen on a connection of the worker's login without making anything: for an engine that is about to start,
/// and finds out about its plugin when it makes its slot.
pub async fn inspect(
    client: &Client,
    url: &SourceUrl,
    options: PreflightOptions<'_>,
) -> Result<Vec<Finding>, SourceError> {
    Ok(inspected(client, url, options).await?.1)
}

async fn inspected(
    client: &Client,
    url: &SourceUrl,
    options: PreflightOptions<'_>,
) -> Result<(Facts, Vec<Finding>), SourceError> {
    let facts = Facts::read(client, options.slot).await?;
    let mut findings = facts.findings(url, options);
    findings.extend(clock_skew(client).await?);
    Ok((facts, findings))
}

/// Whether the admin's login may make roles, and end the worker's sessions: without, the api can free a slot only as the
/// worker's login.
const ADMIN_SQL: &str = "select r.rolname::text, r.rolsuper or r.rolcreaterole, w.rolname is not null, \
     r.rolsuper or coalesce(not w.rolsuper and (pg_has_role(r.oid, w.oid, 'USAGE') \
         or pg_has_role(r.oid, 'pg_signal_backend', 'USAGE')), false), \
     has_database_privilege(current_database(), 'CREATE'), quote_ident(current_database()) \
     from pg_roles r left join pg_roles w on w.rolname = $1::text where r.rolname = session_user";

async fn look_as_admin(admin: &SourceUrl, worker: &str) -> Vec<Finding> {
    let row = async { bounded(open(admin).await?.query_one(ADMIN_SQL, &[&worker])).await };
    let row = match row.await {
        Ok(row) => row,
        Err(error) => {
            let fix = "check the admin URL's address, login, TLS and pg_hba.conf".to_owned();
            return vec![Finding::warning("admin_unreachable", error.to_string(), fix)];
        }
    };
    let role = aura_domain::quote_ident(row.get(0));
    let worker = aura_domain::quote_ident(worker);
    let (creates, known, signals): (bool, bool, bool) = (row.get(1), row.get(2), row.get(3));
    let mut found = Vec::new();
    if !known {
        let evidence = format!("the admin URL's server has no role {worker}");
        found.push(Finding::critical("admin_on_other_server", evidence, "let both URLs name one server".to_owned()));
    }
    if !creates {
        let evidence = format!("{role} may not make roles, so projects can't be made");
        found.push(Finding::warning("no_create_role", evidence, format!("ALTER ROLE {role} CREATEROLE")));
    }
    if !row.get::<_, bool>(4) {
        let database: String = row.get(5);
        let evidence =
            format!("{role} may not create schemas in {database}, so projects can't be made, nor publications");
        let fix = format!("GRANT CREATE ON DATABASE {database} TO {role}");
        found.push(Finding::warning("no_create_schema", evidence, fix));
    }
    if known && !signals {
        let evidence = format!("{role} may not end sessions of {worker}");
        found.push(Finding::warning("cannot_signal", evidence, format!("GRANT {worker} TO {role}")));
    }
    found
}

async fn clock_skew(client: &Client) -> Result<Option<Finding>, SourceError> {
    let (began, before) = (Instant::now(), SystemTime::now());
    let row = bounded(client.query_one("select extract(epoch from clock_timestamp())::float8", &[])).await?;
    let theirs: f64 = row.try_get(0)?;
    let trip = began.elapsed().as_secs_f64();
    let ours = before.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() + trip / 2.0;
    Ok(skewed(theirs - ours, trip))
}

/// `trip` seconds are what the question and its answer took: within half of it nobody knows.
fn skewed(skew: f64, trip: f64) -> Option<Finding> {
    let found = skew.abs() > CLOCK_SKEW.as_secs_f64() + trip / 2.0;
    let evidence = || format!("the server's clock differs from ours by {skew:.1} s");
    found.then(|| Finding::warning("clock_skew", evidence(), "let both hosts follow NTP".to_owned()))
}

fn unreachable(error: &SourceError) -> Finding {
    Finding::critical("unreachable", error.to_string(), "check address, login, TLS and pg_hba.conf".to_owned())
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
    /// The function with which bootstrap lets policies be judged for many identities at once, if it was run at all.
    judge: bool,
    /// Database of the source's slot; `None` when there is no such slot.
    slot_database: Option<String>,
}

const FACTS_SQL: &str = "select r.rolname::text, r.rolsuper, r.rolreplication, current_setting('wal_level'), \
     coalesce(current_setting('max_slot_wal_keep_size', true), '-1'), \
     current_setting('max_replication_slots')::int8 - (select count(*) from pg_replication_slots), \
     current_setting('max_wal_senders')::int8 - (select count(*) from pg_stat_replication s \
         where s.pid is distinct from (select active_pid from pg_replication_slots where slot_name = $1::text)), \
     array(select p.rolname::text from pg_roles p where p.rolname ~ '^p_[0-9a-f-]{36}_(anon|authenticated)$' \
         and not exists (select from pg_auth_members m join pg_roles l on l.oid = m.member \
             where m.roleid = p.oid and l.rolname ~ '^p_[0-9a-f-]{36}_visibility$') order by 1 limit 5), \
     (select coalesce(database::text, '') from pg_replication_slots where slot_name = $1::text), \
     not exists (select from pg_roles where rolname = 'aura_authenticated') \
     from pg_roles r where r.rolname = session_user";

impl Facts {
    async fn read(client: &Client, slot: Option<&str>) -> Result<Self, SourceError> {
        let row = bounded(client.query_one(FACTS_SQL, &[&slot])).await?;
        let hidden = bounded(client.query_one(STATISTICS_HIDDEN_SQL, &[])).await?;
        let judge = bounded(client.query_one(&format!("select {JUDGE_IS_OURS}"), &[])).await?;
        Ok(Self {
            role: row.try_get(0)?,
            superuser: row.try_get(1)?,
            replication: row.try_get(2)?,
            wal_level: row.try_get(3)?,
            max_slot_wal_keep_size: row.try_get(4)?,
            free_slots: row.try_get(5)?,
            free_walsenders: row.try_get(6)?,
            foreign_roles: row.try_get(7)?,
            judge: row.try_get(9)? || judge.try_get(0)?,
            slot_database: row.try_get(8)?,
            statistics_hidden: hidden.try_get(0)?,
        })
    }

    fn findings(&self, url: &SourceUrl, options: PreflightOptions<'_>) -> Vec<Finding> {
        let role = aura_domain::quote_ident(&self.role);
        let mut found = Vec::new();
        if !self.replication && !self.superuser {
            let evidence = format!("{role} lacks the REPLICATION attribute");
            found.push(Finding::critical(
                "no_replication_attribute",
                evidence,
                format!("ALTER ROLE {role} REPLICATION"),
            ));
        }
        if self.superuser {
            let evidence = format!("{role} is a superuser");
            found.push(Finding::warning("superuser", evidence, "use a role that is not one".to_owned()));
        }
        if self.wal_level != "logical" {
            let fix = "ALTER SYSTEM SET wal_level = logical, then restart PostgreSQL".to_owned();
            found.push(Finding::critical("wal_level", format!("wal_level = {}", self.wal_level), fix));
        }
        if let Some(database) = self.slot_database.as_deref().filter(|database| *database != url.database()) {
            let evidence = format!("the slot belongs to database {}", aura_domain::quote_ident(database));
            found.push(Finding::critical(
                "slot_of_other_database",
                evidence,
                "give the source another slot_name".to_owned(),
            ));
        }
        found.extend(self.capacity());
        if !self.statistics_hidden {
            found.push(statistics(options.shared));
        }
        if !self.judge {
            let evidence =
                "aura_source.judge is missing, or was made by somebody else: policies are asked for one identity after the other".to_owned();
            found.push(Finding::warning(
                "judge_missing",
                evidence,
                "drop the schema aura_source if it is there, then make a project: that bootstraps the source"
                    .to_owned(),
            ));
        }
        if !self.foreign_roles.is_empty() {
            let evidence = format!("no visibility login is a member of {}", self.foreign_roles.join(", "));
            found.push(Finding::warning("not_member_of_roles", evidence, "provision the project again".to_owned()));
        }
        found
    }

    fn capacity(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        if self.max_slot_wal_keep_size == "-1" {
            let fix = "ALTER SYSTEM SET max_slot_wal_keep_size = '10GB'; SELECT pg_reload_conf()".to_owned();
            let evidence = "max_slot_wal_keep_size = -1: a stopped engine fills the disk".to_owned();
            found.push(Finding::warning("slot_wal_unbounded", evidence, fix));
        }
        if self.free_slots < 1 && self.slot_database.is_none() {
            let fix = "raise max_replication_slots, then restart PostgreSQL".to_owned();
            found.push(Finding::critical("no_free_slot", "all replication slots are taken".to_owned(), fix));
        }
        if self.free_walsenders < 1 {
            let fix = "raise max_wal_senders, then restart PostgreSQL".to_owned();
            found.push(Finding::critical("no_free_walsender", "all walsenders are taken".to_owned(), fix));
        }
        found
    }
}

fn statistics(shared: bool) -> Finding {
    let severity = if shared { Severity::Critical } else { Severity::Warning };
    let evidence = "PUBLIC can read pg_stats: policies of one project could see values of another's rows".to_owned();
    let fix = "as a superuser: REVOKE ALL ON pg_stats, pg_stats_ext, pg_stats_ext_exprs FROM PUBLIC".to_owned();
    Finding { code: STATISTICS_VISIBLE, severity, evidence, fix }
}

/// Only the server knows whether it can load an output plugin, and only making a slot asks it. The slot is temporary:
/// it ends with this connection.
async fn try_wal2json(client: &Client, options: PreflightOptions<'_>) -> Option<Finding> {
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

async fn bounded<T>(answer: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Result<T, SourceError> {
    let late = SourceError::Timeout { what: "preflight", limit: STEP_LIMIT };
    Ok(tokio::time::timeout(STEP_LIMIT, answer).await.map_err(|_| late)??)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_eng_9_a_clock_is_wrong_only_beyond_what_the_question_took() {
        for (skew, trip, found) in [(0.0, 0.0, false), (-5.5, 0.01, true), (6.0, 0.01, true), (6.0, 4.0, false)] {
            assert_eq!(skewed(skew, trip).is_some(), found, "{skew} {trip}");
        }
    }
}
