//! What is registered, as one engine sees it: which changes are published, and under which names (R-HOLE, R-REG-8).

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use aura_domain::{Generation, Lsn, ProjectId, Relation, SqlName};
use aura_pgsource::{Plugin, TableCatalog, visibility::Tenant};
use aura_store::{Project, ProjectSecrets, Registration, RegistrationStatus};
use secrecy::SecretString;

use super::{loader::Loaded, quarantine::Quarantine};
use crate::subs::index::TableKey;

/// A project, as far as the engine needs it.
#[derive(Debug)]
pub(crate) struct ProjectInfo {
    pub(crate) id: ProjectId,
    /// Physical main schema, the client's `public`.
    schema: SqlName,
    pub(crate) visibility_password: SecretString,
    /// Roles beyond anon, authenticated and service_role.
    pub(crate) extra_roles: Vec<String>,
    /// Tables without row security deliver nothing.
    pub(crate) require_rls: bool,
}

impl ProjectInfo {
    pub(crate) fn new(project: &Project, secrets: ProjectSecrets) -> Self {
        Self {
            id: project.id,
            schema: project.schema.clone(),
            visibility_password: secrets.visibility_password,
            extra_roles: project.settings.roles.clone(),
            require_rls: project.settings.require_rls,
        }
    }

    /// Whether what can be changed of a project is the same.
    pub(super) fn is_as(&self, other: &Self) -> bool {
        self.extra_roles == other.extra_roles && self.require_rls == other.require_rls
    }

    /// On whose behalf PostgreSQL is asked about filters.
    pub(crate) fn tenant(&self) -> Tenant<'_> {
        Tenant { project: self.id, password: &self.visibility_password, extra_roles: &self.extra_roles }
    }

    /// The client's word for a physical schema.
    pub(super) fn client_schema<'a>(&self, physical: &'a SqlName) -> &'a str {
        if *physical == self.schema { "public" } else { physical.as_str() }
    }
}

/// A table whose changes are published.
#[derive(Debug)]
pub(crate) struct RegisteredTable {
    pub(crate) registration: uuid::Uuid,
    pub(crate) project: Arc<ProjectInfo>,
    pub(crate) key: TableKey,
    pub(crate) relation: Arc<Relation>,
    pub(crate) oid: u32,
    /// Of the registration.
    pub(crate) revision: i64,
    /// Nothing committed below is published; zero when it was enabled in an earlier generation (R-REG-3).
    enabled_at: Lsn,
    /// Nothing committed above is published.
    disabled_at: Option<Lsn>,
    /// A partitioned table's: where its rows are.
    leaves: HashMap<Relation, Leaf>,
}

/// A partition that holds rows.
#[derive(Debug)]
struct Leaf {
    oid: u32,
    /// What was committed above isn't the partitioned table's.
    gone_at: Option<Lsn>,
}

impl RegisteredTable {
    /// Whether a row of this name and commit LSN is published.
    pub(crate) fn admits_as(&self, name: &Relation, commit: Lsn) -> bool {
        let gone_at = self.leaves.get(name).and_then(|leaf| leaf.gone_at);
        self.admits(commit) && gone_at.is_none_or(|gone_at| commit <= gone_at)
    }

    /// Whether a transaction with this commit LSN is published.
    pub(crate) fn admits(&self, commit: Lsn) -> bool {
        commit >= self.enabled_at && self.disabled_at.is_none_or(|disabled| commit <= disabled)
    }

    /// Nothing committed below is published; zero when it was enabled in an earlier generation.
    pub(crate) fn enabled_at(&self) -> Lsn {
        self.enabled_at
    }

    /// R-HOLE-2: `max(enabled_at_lsn, E)`.
    pub(crate) fn active_since(&self, e: Lsn) -> Lsn {
        self.enabled_at.max(e)
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.disabled_at.is_none()
    }

    /// Whether what the log has under this name is a row of the table, as the catalogue shows it: the name alone says
    /// nothing (R-RLS-10), and a partition that was detached or replaced is another table.
    pub(crate) fn holds(&self, name: &Relation, catalog: &TableCatalog) -> bool {
        let leaf = |leaf: &Leaf| catalog.leaves.get(name) == Some(&leaf.oid);
        self.leaves.is_empty() || self.leaves.get(name).is_some_and(leaf)
    }

    /// The schemas in which a partition of it may come (R-HOLE-4).
    fn schemas(&self) -> impl Iterator<Item = &SqlName> {
        let own = (!self.leaves.is_empty()).then_some(&self.relation.schema);
        own.into_iter().chain(self.leaves.keys().map(|leaf| &leaf.schema))
    }
}

/// What a filter must let through.
#[derive(Debug, Default)]
pub(super) struct Wanted<'a> {
    /// Each of these; borrowed, since they may be a hundred thousand.
    pub(super) names: Vec<&'a Relation>,
    /// And everything in these.
    pub(super) schemas: HashSet<&'a SqlName>,
}

/// One revision of the registry.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    pub(crate) revision: i64,
    pub(crate) projects: HashMap<ProjectId, Arc<ProjectInfo>>,
    tables: HashMap<Arc<Relation>, Arc<RegisteredTable>>,
    /// Whose partition a name is. One that is nested may be several tables'.
    roots: HashMap<Relation, Vec<Arc<RegisteredTable>>>,
    by_key: HashMap<TableKey, Arc<RegisteredTable>>,
    /// The first disable that a table is still in the filter for.
    first_disable: Option<Lsn>,
}

impl Registry {
    /// Takes what may be published: registrations whose ALTER has committed and that are neither blocked nor missing
    /// (R-HOLE-3), and disabled ones until the confirmed LSN has passed them (R-REG-8).
    pub(crate) fn new(loaded: &Loaded, generation: Generation, confirmed: Lsn, quarantine: &Quarantine) -> Self {
        let (revision, projects) = (loaded.snapshot.revision, loaded.projects.clone());
        let count = loaded.snapshot.registrations.len();
        let (tables, by_key) = (HashMap::with_capacity(count), HashMap::with_capacity(count));
        let mut registry = Self { revision, projects, tables, by_key, ..Self::default() };
        let mut leaves: HashMap<uuid::Uuid, HashMap<Relation, Leaf>> = HashMap::new();
        // One that is gone may have left its name to another.
        let (gone, there): (Vec<_>, Vec<_>) = loaded.snapshot.partitions.iter().partition(|it| it.gone_at.is_some());
        for partition in gone.into_iter().chain(there) {
            let leaf = Leaf { oid: partition.oid, gone_at: partition.gone_at };
            leaves.entry(partition.registration).or_default().insert(partition.relation.clone(), leaf);
        }
        for registration in &loaded.snapshot.registrations {
            if quarantine.holds(registration.id, registration.revision) {
                continue;
            }
            let Some(project) = registry.projects.get(&registration.project) else { continue };
            if let Some(table) = registered(registration, project, generation, confirmed) {
                let leaves = leaves.remove(&registration.id).unwrap_or_default();
                let table = Arc::new(RegisteredTable { leaves, ..table });
                for leaf in table.leaves.keys() {
                    registry.roots.entry(leaf.clone()).or_default().push(Arc::clone(&table));
                }
                registry.first_disable = [registry.first_disable, table.disabled_at].into_iter().flatten().min();
                registry.by_key.insert(table.key.clone(), Arc::clone(&table));
                registry.tables.insert(Arc::clone(&table.relation), table);
            }
        }
        registry
    }

    /// The table under its physical names.
    pub(crate) fn table(&self, relation: &Relation) -> Option<&Arc<RegisteredTable>> {
        self.tables.get(relation)
    }

    /// The tables whose row it is that the log has under this name: the table itself, and those that it is a partition of.
    pub(crate) fn of(&self, name: &Relation) -> impl Iterator<Item = &Arc<RegisteredTable>> {
        let own = self.tables.get(name).filter(|table| table.leaves.is_empty());
        own.into_iter().chain(self.roots.get(name).into_iter().flatten())
    }

    /// Whether a row that was admitted under an older registry still is: not if its table was turned off below it, or its
    /// project was deleted.
    pub(crate) fn still_admits(&self, table: &RegisteredTable, commit: Lsn) -> bool {
        if !self.projects.contains_key(&table.project.id) {
            return false;
        }
        let now = self.tables.get(&*table.relation).filter(|now| now.registration == table.registration);
        now.is_none_or(|now| now.admits(commit))
    }

    /// Tables on their way out.
    pub(crate) fn disabled(&self) -> HashSet<uuid::Uuid> {
        self.tables.values().filter(|table| !table.is_enabled()).map(|table| table.registration).collect()
    }

    /// The enabled table under the client's names.
    pub(crate) fn enabled(&self, key: &TableKey) -> Option<&Arc<RegisteredTable>> {
        self.by_key.get(key).filter(|table| table.is_enabled())
    }

    /// All tables.
    pub(crate) fn tables(&self) -> impl Iterator<Item = &Arc<RegisteredTable>> {
        self.tables.values()
    }

    /// Whether the confirmed LSN has passed a disabled table, so that it can leave the filter.
    pub(crate) fn can_shrink(&self, confirmed: Lsn) -> bool {
        self.first_disable.is_some_and(|disabled| disabled <= confirmed)
    }

    /// What the filter must let through. A publication knows a partitioned table by itself, wal2json its partitions' names,
    /// and the schemas where another one may come (R-HOLE-4).
    pub(super) fn wanted(&self, plugin: Plugin) -> Wanted<'_> {
        let tables = || self.tables.values();
        if plugin == Plugin::PgOutput {
            return Wanted { names: tables().map(|table| &*table.relation).collect(), schemas: HashSet::new() };
        }
        let plain = tables().filter(|table| table.leaves.is_empty()).map(|table| &*table.relation);
        let schemas = tables().flat_map(|table| table.schemas()).collect();
        Wanted { names: plain.chain(self.roots.keys()).collect(), schemas }
    }
}

fn registered(
    registration: &Registration,
    project: &Arc<ProjectInfo>,
    generation: Generation,
    confirmed: Lsn,
) -> Option<RegisteredTable> {
    let refused = matches!(registration.status, RegistrationStatus::Blocked | RegistrationStatus::Missing);
    let disabled_at = if registration.enabled { None } else { Some(registration.disabled_at_lsn?) };
    // An LSN of another generation can't be compared: all that is read now is later than that disable.
    let off = |at| at <= confirmed || registration.disabled_generation.is_some_and(|of| of != generation);
    // Disabling gives the table its old identity back at once; what was committed before is still to be published.
    let was_set = registration.identity_set || (disabled_at.is_some() && registration.enabled_at_lsn.is_some());
    if refused || !was_set || disabled_at.is_some_and(off) {
        return None;
    }
    let this_generation = registration.enabled_generation.is_none_or(|enabled| enabled == generation);
    let enabled_at = registration.enabled_at_lsn.filter(|_| this_generation).unwrap_or(Lsn::ZERO);
    Some(RegisteredTable {
        registration: registration.id,
        project: Arc::clone(project),
        key: TableKey {
            project: registration.project,
            schema: project.client_schema(&registration.schema).to_owned(),
            table: registration.table.to_string(),
        },
        relation: Arc::new(Relation { schema: registration.schema.clone(), table: registration.table.clone() }),
        oid: registration.oid,
        revision: registration.revision,
        enabled_at,
        disabled_at,
        leaves: HashMap::new(),
    })
}
