//! Whether a subscription can deliver, and what its client is told when it can't.

use std::{sync::Arc, time::Duration};

use aura_domain::SubscriptionSpec;
use aura_pgsource::{
    RoleAccess, SourceError, TableCatalog,
    conditions::{self, Compiled, Condition},
    visibility::{CompileError, Identity, Subscriber, VisibilityPool},
};
use aura_wire::control::{Exception, Subscription};

use super::index::{Active, ActiveSubscription, TableKey};
use crate::engine::registry::{ProjectInfo, RegisteredTable, Registry};

/// Roles that every project has (R-RLS-8).
const ROLES: [&str; 3] = ["anon", "authenticated", "service_role"];

/// How long a join waits for the source: a source that doesn't answer is told of, and the front asks again.
const DESCRIBE_LIMIT: Duration = Duration::from_secs(2);

/// What PostgreSQL may take to check all conditions of a subscription, a wildcard's for all of its tables. Who takes longer
/// is refused: asked about again it would take as long again, for ever, and others of the project wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why a subscription doesn't deliver (now).
#[derive(Debug)]
pub(crate) enum Refusal {
    /// It never will.
    Fatal(String),
    /// It will when its table is registered, and its role may read anything of it: who may not is not to learn which.
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

/// Checks a subscription against what is registered and against its table's catalogue.
pub(crate) async fn admit(
    subscription: &Subscription,
    registry: &Registry,
    visibility: &VisibilityPool,
) -> Result<Active, Refusal> {
    let spec = &subscription.spec;
    let conditions = parse(spec)?;
    let project = registry.projects.get(&spec.project).ok_or_else(|| not_registered(spec))?;
    check_role(&spec.role, project)?;
    let mut patience = PATIENCE;
    if let Some(key) = TableKey::of(spec) {
        let table = registry.enabled(&key).ok_or_else(|| not_registered(spec))?;
        let compiled = describe_and_compile(subscription, &conditions, table, visibility, &mut patience).await?;
        return Ok(Active::Table(key, compiled));
    }
    if spec.select.is_some() {
        let hint = "Provide an explicit schema and table name.";
        return Err(Refusal::Fatal(format!("Column selection is not supported for wildcard subscriptions. {hint}")));
    }
    if conditions.is_empty() {
        return Ok(Active::Wildcard(active(subscription, Vec::new())));
    }
    let mut tables = Vec::new();
    for table in registry.tables().filter(|table| table.is_enabled() && table.key.is_named_by(spec)) {
        match describe_and_compile(subscription, &conditions, table, visibility, &mut patience).await {
            Ok(compiled) => tables.push((table.key.clone(), compiled)),
            // One that the role may not read, or that is gone: for a wildcard it isn't there.
            Err(Refusal::NotRegistered(_)) => {}
            Err(refusal) => return Err(refusal),
        }
    }
    Ok(Active::Filtered(tables))
}

/// The subscription's conditions against a table as a catalogue shows it: one that was registered later than the
/// subscription was made, or whose columns have other types now.
pub(crate) async fn compile_again(
    subscription: &Subscription,
    table: &RegisteredTable,
    catalog: &TableCatalog,
    visibility: &VisibilityPool,
) -> Result<ActiveSubscription, Refusal> {
    let spec = &subscription.spec;
    let access = table.project.tenant().access(&spec.role, catalog);
    compile(subscription, &parse(spec)?, table, (catalog, &access), visibility, &mut PATIENCE.clone()).await
}

fn parse(spec: &SubscriptionSpec) -> Result<Vec<Condition>, Refusal> {
    conditions::parse(spec.filter.as_deref().unwrap_or_default()).map_err(|error| Refusal::Fatal(error.to_string()))
}

fn active(subscription: &Subscription, conditions: Vec<Arc<Compiled>>) -> ActiveSubscription {
    let spec = &subscription.spec;
    ActiveSubscription {
        sub_id: subscription.sub_id,
        twin: subscription.twin,
        identity: Arc::new(Identity { role: spec.role.clone(), claims: spec.claims.clone() }),
        event: spec.event,
        conditions,
        select: spec.select.clone(),
    }
}

fn check_role(role: &str, project: &ProjectInfo) -> Result<(), Refusal> {
    if is_role(role, project) { Ok(()) } else { Err(unknown_role(role)) }
}

/// Whether a token's role word is one of the project's (R-RLS-8).
pub(crate) fn is_role(role: &str, project: &ProjectInfo) -> bool {
    ROLES.contains(&role) || project.extra_roles.iter().any(|extra| extra == role)
}

fn unknown_role(role: &str) -> Refusal {
    Refusal::Fatal(format!("role {role:?} is not a role of this project"))
}

async fn describe_and_compile(
    subscription: &Subscription,
    conditions: &[Condition],
    table: &RegisteredTable,
    visibility: &VisibilityPool,
    patience: &mut Duration,
) -> Result<ActiveSubscription, Refusal> {
    let spec = &subscription.spec;
    if conditions.is_empty() && spec.select.is_none() {
        let project = &table.project;
        let may_read = visibility.may_read(project.id, &table.relation, &spec.role, &project.extra_roles).await;
        return if may_read { Ok(active(subscription, Vec::new())) } else { Err(not_registered(spec)) };
    }
    let asked = async {
        let described = visibility.describe(table.project.id, &table.relation, &spec.role, &table.project.extra_roles);
        let described = described.await.map_err(Refusal::Unknown)?;
        let (catalog, access) = described.filter(|(_, access)| access.any()).ok_or_else(|| not_registered(spec))?;
        for column in spec.select.iter().flatten() {
            readable_column(&catalog, &access, column)
                .ok_or_else(|| Refusal::Fatal(format!("invalid column for select {column}")))?;
        }
        compile(subscription, conditions, table, (&catalog, &access), visibility, patience).await
    };
    let late = |_| Refusal::Unknown(SourceError::Timeout { what: "describing a table", limit: DESCRIBE_LIMIT });
    tokio::time::timeout(DESCRIBE_LIMIT, asked).await.map_err(late)?
}

async fn compile(
    subscription: &Subscription,
    conditions: &[Condition],
    table: &RegisteredTable,
    (catalog, access): (&TableCatalog, &RoleAccess),
    visibility: &VisibilityPool,
    patience: &mut Duration,
) -> Result<ActiveSubscription, Refusal> {
    let subscriber = Subscriber { tenant: table.project.tenant(), role: &subscription.spec.role, access };
    match visibility.compile(subscriber, catalog, conditions, patience).await {
        Ok(compiled) => Ok(active(subscription, compiled)),
        Err(CompileError::Source(error)) => Err(Refusal::Unknown(error)),
        Err(CompileError::Refused(why)) => {
            let spec = &subscription.spec;
            let parameters = parameters(spec, conditions);
            Err(Refusal::Fatal(format!(
                "Unable to subscribe to changes with given parameters. An exception happened so please check your \
                 connect parameters: {parameters}. Exception: {why}"
            )))
        }
    }
}

/// A column that isn't there and one that the role may not read look the same.
fn readable_column(catalog: &TableCatalog, access: &RoleAccess, name: &str) -> Option<usize> {
    let n = catalog.column(name)?;
    (access.schema_usage && access.readable.get(n) == Some(&true)).then_some(n)
}

/// The original's words (supabase-wire.md §2.4).
fn not_registered(spec: &SubscriptionSpec) -> Refusal {
    let parameters = parameters(spec, &parse(spec).unwrap_or_default());
    Refusal::NotRegistered(format!(
        "Unable to subscribe to changes with given parameters. Please check Realtime is enabled for the given connect \
         parameters: {parameters}"
    ))
}

fn parameters(spec: &SubscriptionSpec, conditions: &[Condition]) -> String {
    let filters: Vec<String> = conditions.iter().map(Condition::to_string).collect();
    format!(
        "[event: {}, schema: {}, table: {}, filters: [{}], select: {}]",
        spec.event.as_str(),
        spec.schema,
        spec.table.as_deref().unwrap_or("*"),
        filters.join(", "),
        spec.select.as_ref().map_or_else(|| "nil".to_owned(), |columns| format!("{columns:?}")),
    )
}
