//! Whether a subscription can deliver, and what its client is told when it can't.

use std::{sync::Arc, time::Duration};

use aura_domain::SubscriptionSpec;
use aura_pgsource::{
    RoleAccess, SourceError, TableCatalog,
    visibility::{Identity, VisibilityPool},
};
use aura_wire::control::{Exception, Subscription};

use super::{
    filter::{self, CompiledCondition, Condition, FilterError},
    index::{ActiveSubscription, TableKey},
};
use crate::engine::registry::{ProjectInfo, RegisteredTable, Registry};

/// Roles that every project has (R-RLS-8).
const ROLES: [&str; 3] = ["anon", "authenticated", "service_role"];

/// How long a join waits for the source: a source that doesn't answer is told of, and the front asks again.
const DESCRIBE_LIMIT: Duration = Duration::from_secs(2);

/// Why a subscription doesn't deliver (now).
#[derive(Debug)]
pub(crate) enum Refusal {
    /// It never will.
    Fatal(String),
    /// It will when its table is registered.
    NotRegistered(String),
    /// PostgreSQL couldn't be asked; the front asks again.
    Unknown(SourceError),
}

impl Refusal {
    /// What the front is told.
    pub(crate) fn exception(&self, subscription: &Subscription) -> Exception {
        let (message, fatal) = match self {
            Self::Fatal(message) => (message.clone(), true),
            Self::NotRegistered(message) => (message.clone(), false),
            Self::Unknown(_) => ("The source database can't be reached, please wait".to_owned(), false),
        };
        Exception { sub_id: subscription.sub_id, message, fatal }
    }
}

impl From<FilterError> for Refusal {
    fn from(error: FilterError) -> Self {
        Self::Fatal(error.to_string())
    }
}

/// Checks a subscription against what is registered and against its table's catalogue.
pub(crate) async fn admit(
    subscription: &Subscription,
    registry: &Registry,
    visibility: &VisibilityPool,
) -> Result<Arc<ActiveSubscription>, Refusal> {
    let spec = &subscription.spec;
    let conditions = filter::parse(spec.filter.as_deref().unwrap_or_default())?;
    let project = registry.projects.get(&spec.project).ok_or_else(|| not_registered(spec))?;
    check_role(&spec.role, project)?;
    let compiled = match TableKey::of(spec) {
        Some(key) => {
            let table = registry.enabled(&key).ok_or_else(|| not_registered(spec))?;
            compile(spec, &conditions, table, visibility).await?
        }
        None => check_wildcard(spec, &conditions)?,
    };
    Ok(Arc::new(ActiveSubscription {
        sub_id: subscription.sub_id,
        twin: subscription.twin,
        identity: Arc::new(Identity { role: spec.role.clone(), claims: spec.claims.clone() }),
        event: spec.event,
        conditions: compiled,
        select: spec.select.clone(),
    }))
}

fn check_role(role: &str, project: &ProjectInfo) -> Result<(), Refusal> {
    let known = ROLES.contains(&role) || project.extra_roles.iter().any(|extra| extra == role);
    if known { Ok(()) } else { Err(unknown_role(role)) }
}

fn unknown_role(role: &str) -> Refusal {
    Refusal::Fatal(format!("role {role:?} is not a role of this project"))
}

fn check_wildcard(spec: &SubscriptionSpec, conditions: &[Condition]) -> Result<Vec<CompiledCondition>, Refusal> {
    let hint = "Provide an explicit schema and table name.";
    if spec.select.is_some() {
        return Err(Refusal::Fatal(format!("Column selection is not supported for wildcard subscriptions. {hint}")));
    }
    if !conditions.is_empty() {
        return Err(Refusal::Fatal(format!("Filters are not supported for wildcard subscriptions. {hint}")));
    }
    Ok(Vec::new())
}

async fn compile(
    spec: &SubscriptionSpec,
    conditions: &[Condition],
    table: &RegisteredTable,
    visibility: &VisibilityPool,
) -> Result<Vec<CompiledCondition>, Refusal> {
    if conditions.is_empty() && spec.select.is_none() {
        return Ok(Vec::new());
    }
    let described = visibility.describe(table.project.id, &table.relation, &spec.role, &table.project.extra_roles);
    let late = |_| SourceError::Timeout { what: "describing a table", limit: DESCRIBE_LIMIT };
    let described = tokio::time::timeout(DESCRIBE_LIMIT, described).await.map_err(late);
    let described = described.and_then(|described| described).map_err(Refusal::Unknown)?;
    let (catalog, access) = described.ok_or_else(|| not_registered(spec))?;
    for column in spec.select.iter().flatten() {
        readable_column(&catalog, &access, column)
            .ok_or_else(|| Refusal::Fatal(format!("invalid column for select {column}")))?;
    }
    let compile_one = |condition: &Condition| {
        let unknown = || FilterError::Column(condition.column.clone());
        let n = readable_column(&catalog, &access, &condition.column).ok_or_else(unknown)?;
        CompiledCondition::new(condition, &catalog.columns[n].ty)
    };
    Ok(conditions.iter().map(compile_one).collect::<Result<_, _>>()?)
}

/// A column that isn't there and one that the role may not read look the same.
fn readable_column(catalog: &TableCatalog, access: &RoleAccess, name: &str) -> Option<usize> {
    let n = catalog.column(name)?;
    (access.schema_usage && access.readable.get(n) == Some(&true)).then_some(n)
}

/// The original's words (supabase-wire.md §2.4).
fn not_registered(spec: &SubscriptionSpec) -> Refusal {
    let or_nil = |text: Option<String>| text.unwrap_or_else(|| "nil".to_owned());
    Refusal::NotRegistered(format!(
        "Unable to subscribe to changes with given parameters. Please check Realtime is enabled for the given connect \
         parameters: [event: {}, schema: {}, table: {}, filters: [{}], select: {}]",
        spec.event.as_str(),
        spec.schema,
        spec.table.as_deref().unwrap_or("*"),
        spec.filter.as_deref().unwrap_or_default(),
        or_nil(spec.select.as_ref().map(|columns| format!("{columns:?}"))),
    ))
}
