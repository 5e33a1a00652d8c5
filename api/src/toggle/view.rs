use aura_domain::{Lag, Lsn, ProjectId};
use aura_pgsource::admin::TableInfo;
use aura_store::{Project, Registration, RegistrationMode, RegistrationStatus};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::warnings;
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
    /// Who sees to the table's REPLICA IDENTITY: `auto` = it is set when the table is enabled and restored when it is
    /// disabled, `manual` = its owner does, and it is only looked at. Null if it was never enabled.
    #[schema(value_type = Option<Mode>)]
    mode: Option<RegistrationMode>,
    /// Observed: `active` once the running filter covers the table, `pending` before, `blocked` when the plugin refuses
    /// it, `missing` when the table was dropped.
    status: Status,
    /// Why it is blocked or missing, or what it waits for.
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
    /// How far the source's engine is behind; null where it is off, or nobody knows.
    lag: Option<Lag>,
    /// When its last change was published, to within some seconds, RFC 3339; null if none was.
    #[schema(format = DateTime)]
    last_event_at: Option<String>,
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

/// Who sees to the table's replica identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = RegistrationMode)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mode {
    /// We do.
    Auto,
    /// Its owner does; we only look.
    Manual,
}

impl From<Mode> for RegistrationMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Auto => Self::Auto,
            Mode::Manual => Self::Manual,
        }
    }
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
    /// Stable word: `rls_disabled`, `rls_without_policy`, `rls_only_restrictive`, `policies_for_other_roles`,
    /// `no_select_privilege`, `policy_not_judgeable` (one for each policy), `no_primary_key`, `write_amplification`,
    /// `identity_not_restored`.
    #[schema(example = "rls_disabled")]
    pub(super) code: &'static str,
    /// For people.
    #[schema(example = "Row security is off: everybody with the anon key sees every row.")]
    pub(super) message: String,
}

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
    let (schema, table) = match (info, registration) {
        // It may have been renamed since it was enabled.
        (Some(info), _) => (info.relation.schema.as_str(), info.relation.table.as_str()),
        (None, Ok(known)) => (known.schema.as_str(), known.table.as_str()),
        (None, Err(bare)) => (bare.schema, bare.table),
    };
    let enabled = known.is_some_and(|known| known.enabled);
    let status = known.map_or(Status::Disabled, |known| status(known, info));
    RegistrationView {
        project_id: project.id,
        schema: schema_word(project, schema).to_owned(),
        table: table.to_owned(),
        enabled,
        mode: known.map(|known| known.mode),
        status,
        reason: known.and_then(|known| reason(known, status)),
        replica_identity: info.map(identity),
        drift: known.is_some_and(|known| drifted(known, info)),
        rls: info.map(|info| RowSecurity { enabled: info.rls_enabled, policies: info.policies }),
        warnings: info.map(warnings::of).unwrap_or_default(),
        active_since_lsn: known.and_then(|known| known.active_since_lsn),
        lag: None,
        last_event_at: known.and_then(|known| known.last_event_at.clone()),
        updated_at: known.map(|known| known.updated_at.clone()),
        updated_by: known.map(|known| known.updated_by.clone()),
        plan: None,
    }
}

impl RegistrationView {
    /// With the source's lag, if it is on.
    pub(crate) fn with_lag(mut self, lag: Option<Lag>) -> Self {
        self.lag = lag.filter(|_| self.enabled);
        self
    }

    pub(crate) fn with_plan(mut self, plan: Vec<String>) -> Self {
        self.plan = Some(plan);
        self
    }

    /// Says more about a state that has no reason of its own.
    pub(crate) fn with_note(mut self, note: Option<&str>) -> Self {
        if let Some(note) = note {
            self.reason = Some(note.to_owned());
        }
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
        Some(known) if known.enabled && known.mode == RegistrationMode::Manual => format!("\"manual-{}\"", known.oid),
        Some(known) if known.enabled => format!("\"on-{}\"", known.oid),
        _ => "\"off\"".to_owned(),
    }
}

/// A table that is gone or was replaced is missing even before the worker has noticed (R-REG-2).
fn status(known: &Registration, info: Option<&TableInfo>) -> Status {
    match known.status {
        _ if !known.enabled => Status::Disabled,
        _ if info.is_none_or(|info| info.oid != known.oid) => Status::Missing,
        _ if info.is_some_and(|info| info.relation != known.relation()) => Status::Pending,
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
