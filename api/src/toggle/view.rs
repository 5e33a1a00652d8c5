use aura_domain::{Lsn, ProjectId};
use aura_pgsource::admin::{TableInfo, Unjudgeable, UnjudgeableCause};
use aura_store::{Project, Registration, RegistrationStatus};
use serde::Serialize;
use utoipa::ToSchema;

use crate::access::schema_word;

/// The realtime state of one table.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Registration)]
pub(crate) struct RegistrationView {
    /// Project.
    #[schema(value_type = uuid::Uuid)]
    project_id: ProjectId,
    /// As the client says it: `public` is the project's main schema.
    #[schema(example = "public")]
    schema: String,
    /// Table.
    #[schema(example = "messages")]
    table: String,
    /// Desired.
    #[schema(example = true)]
    enabled: bool,
    /// Observed: `active` once the running filter covers the table, `pending` before, `blocked` when the plugin refuses
    /// it, `missing` when the table was dropped.
    status: Status,
    /// Why it is blocked or missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// The table's REPLICA IDENTITY now; null when there is no such table.
    replica_identity: Option<Identity>,
    /// It is enabled and somebody set the replica identity back: PUT it again.
    drift: bool,
    /// Row security now; null when there is no such table.
    rls: Option<RowSecurity>,
    /// What to look at; none of it stops the stream.
    warnings: Vec<Warning>,
    /// Everything committed above this position is delivered.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "16/B374D848")]
    active_since_lsn: Option<Lsn>,
    /// RFC 3339; null if it was never enabled.
    #[schema(format = DateTime)]
    updated_at: Option<String>,
    /// Key id and role; null if it was never enabled.
    updated_by: Option<String>,
    /// With `?dry_run=true`: what would be done, in order.
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<Vec<String>>,
}

/// Observed state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = RegistrationStatus)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    /// The running filter covers it.
    Active,
    /// Not yet.
    Pending,
    /// The plugin refuses it.
    Blocked,
    /// Dropped.
    Missing,
    /// Off.
    Disabled,
}

/// `REPLICA IDENTITY`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ReplicaIdentity)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Identity {
    /// The primary key.
    Default,
    /// No old row at all.
    Nothing,
    /// The whole old row.
    Full,
    /// A unique index.
    Index,
}

/// Row security of a table.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(crate) struct RowSecurity {
    /// Whether it is on.
    enabled: bool,
    /// Number of policies.
    policies: i64,
}

/// Something to look at (R-REG-7).
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct Warning {
    /// Stable word: `rls_disabled`, `rls_without_policy`, `no_select_privilege`, `policy_not_judgeable` (one for each
    /// policy), `no_primary_key`, `write_amplification`, `identity_not_restored`.
    #[schema(example = "rls_disabled")]
    code: &'static str,
    /// For people.
    #[schema(example = "Row security is off: everybody with the anon key sees every row.")]
    message: String,
}

/// Above so many columns, FULL writes noticeably more log than the key would.
const WIDE_TABLE_COLUMNS: i64 = 50;

/// A table that was never enabled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unregistered<'a> {
    /// Physical schema.
    pub(crate) schema: &'a str,
    /// Table.
    pub(crate) table: &'a str,
}

/// What a client sees of a registration, or of a table without one.
pub(crate) fn view(
    project: &Project,
    registration: Result<&Registration, Unregistered<'_>>,
    info: Option<&TableInfo>,
) -> RegistrationView {
    let known = registration.ok();
    let (schema, table) = match registration {
        Ok(known) => (known.schema.as_str(), known.table.as_str()),
        Err(bare) => (bare.schema, bare.table),
    };
    let enabled = known.is_some_and(|known| known.enabled);
    let status = known.map_or(Status::Disabled, |known| status(known, info));
    RegistrationView {
        project_id: project.id,
        schema: schema_word(project, schema).to_owned(),
        table: table.to_owned(),
        enabled,
        status,
        reason: known.and_then(|known| reason(known, status)),
        replica_identity: info.map(identity),
        drift: known.is_some_and(|known| drifted(known, info)),
        rls: info.map(|info| RowSecurity { enabled: info.rls_enabled, policies: info.policies }),
        warnings: info.map(warnings).unwrap_or_default(),
        active_since_lsn: known.and_then(|known| known.active_since_lsn),
        updated_at: known.map(|known| known.updated_at.clone()),
        updated_by: known.map(|known| known.updated_by.clone()),
        plan: None,
    }
}

impl RegistrationView {
    pub(crate) fn with_plan(mut self, plan: Vec<String>) -> Self {
        self.plan = Some(plan);
        self
    }

    pub(crate) fn with_warning(mut self, code: &'static str, message: &'static str) -> Self {
        self.warnings.push(Warning { code, message: message.to_owned() });
        self
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled
    }
}

/// Version of the desired fields only (design §6): what the worker or somebody's ALTER does is no new version.
pub(crate) fn etag(registration: Option<&Registration>) -> String {
    match registration {
        Some(known) if known.enabled => format!("\"on-{}\"", known.oid),
        _ => "\"off\"".to_owned(),
    }
}

/// A table that is gone or was replaced is missing even before the worker has noticed (R-REG-2).
fn status(known: &Registration, info: Option<&TableInfo>) -> Status {
    match known.status {
        _ if !known.enabled => Status::Disabled,
        _ if info.is_none_or(|info| info.oid != known.oid) => Status::Missing,
        RegistrationStatus::Active if known.identity_set => Status::Active,
        RegistrationStatus::Active | RegistrationStatus::Pending => Status::Pending,
        RegistrationStatus::Blocked => Status::Blocked,
        RegistrationStatus::Missing => Status::Missing,
        RegistrationStatus::Disabled => Status::Disabled,
    }
}

fn reason(known: &Registration, status: Status) -> Option<String> {
    let ours = || (status == Status::Missing).then(|| "the table was dropped or replaced; enable it again".to_owned());
    known.reason.clone().or_else(ours)
}

/// Somebody set the replica identity back.
pub(crate) fn drifted(known: &Registration, info: Option<&TableInfo>) -> bool {
    known.enabled && known.identity_set && info.is_some_and(|info| info.oid == known.oid && !info.is_full())
}

fn identity(info: &TableInfo) -> Identity {
    match info.replica_identity {
        'f' => Identity::Full,
        'n' => Identity::Nothing,
        'i' => Identity::Index,
        _ => Identity::Default,
    }
}

fn warnings(info: &TableInfo) -> Vec<Warning> {
    let checks = [
        (!info.rls_enabled, "rls_disabled", "Row security is off: everyone with the anon key sees every row."),
        (
            info.rls_enabled && info.policies == 0,
            "rls_without_policy",
            "Row security is on and there is no policy: nobody sees a row.",
        ),
        (
            !info.readable,
            "no_select_privilege",
            "No role but service_role may read the table: grant SELECT to aura_anon or aura_authenticated.",
        ),
        (!info.has_primary_key, "no_primary_key", "Without a primary key clients can't tell rows apart."),
        (
            info.columns > WIDE_TABLE_COLUMNS,
            "write_amplification",
            "The table is wide: with REPLICA IDENTITY FULL each UPDATE and DELETE logs the whole old row.",
        ),
    ];
    let found = checks.into_iter().filter(|(applies, ..)| *applies);
    let found = found.map(|(_, code, message)| Warning { code, message: message.to_owned() });
    found.chain(info.unjudgeable.iter().map(not_judgeable)).collect()
}

/// R-RLS-4: what it decides, nobody gets.
fn not_judgeable(policy: &Unjudgeable) -> Warning {
    let why = match policy.cause {
        UnjudgeableCause::SystemColumn => "reads a system column, which a row of the log doesn't have",
        UnjudgeableCause::Writes => "may write, and policies are judged read-only",
        UnjudgeableCause::GeneratedColumn => {
            "reads a generated column, which pgoutput doesn't send before PostgreSQL 18"
        }
    };
    let message = format!("The policy {:?} {why}: rows that it decides are not delivered.", policy.policy);
    Warning { code: "policy_not_judgeable", message }
}
