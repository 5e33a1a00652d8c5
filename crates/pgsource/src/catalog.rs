//! What the catalogue says of one table: columns, row security, and who may read what.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use aura_domain::{Relation, SqlName};
use serde::Deserialize;

use crate::{
    SourceError,
    hoist::{self, Hoisted, hoist},
    types::TypeInfo,
};

/// The statement; see the file.
pub(crate) const CATALOG_SQL: &str = include_str!("catalog.sql");

/// A table as one catalogue snapshot shows it.
#[derive(Debug)]
pub struct TableCatalog {
    /// `pg_class.oid` under the name.
    pub oid: u32,
    /// Physical schema and table.
    pub relation: Relation,
    /// `pg_class.relkind`: `r` table, `p` partitioned, …
    pub kind: char,
    /// `pg_class.relreplident`: `d`, `n`, `f`, `i`.
    pub replica_identity: char,
    /// Whether row security is on, for whomever it applies to.
    pub row_security_enabled: bool,
    /// In `attnum` order, without dropped ones.
    pub columns: Vec<Column>,
    /// Where a partitioned table's rows are, by the names that the log has for them; with `pg_class.oid`.
    pub leaves: HashMap<Relation, u32>,
    policies: Vec<Policy>,
    roles: HashMap<String, RoleEntry>,
}

/// A column.
#[derive(Debug, Clone)]
pub struct Column {
    /// Name.
    pub name: Arc<str>,
    /// `pg_attribute.attnum`.
    pub attnum: i16,
    /// Type.
    pub ty: Arc<TypeInfo>,
    /// Part of the primary key.
    pub primary_key: bool,
    /// `pg_attribute.attcollation`; 0 where the type has none.
    pub collation: u32,
}

/// What one role may read of a table, by privileges alone (R-RLS-3).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleAccess {
    /// USAGE on the schema.
    pub schema_usage: bool,
    /// SELECT, one per [`TableCatalog::columns`].
    pub readable: Vec<bool>,
}

impl RoleAccess {
    /// Whether anything can be read at all.
    pub fn any(&self) -> bool {
        self.schema_usage && self.readable.contains(&true)
    }
}

#[derive(Debug)]
struct RoleEntry {
    access: Arc<RoleAccess>,
    using: Effective,
}

/// One policy for SELECT or ALL that has a USING expression.
#[derive(Debug)]
struct Policy {
    oid: u32,
    permissive: bool,
    using: String,
    columns: Vec<i16>,
    /// Depends on nothing that somebody made, but on its own table.
    closed: bool,
}

/// The expression of R-RLS-2 for one role, and what it reads of the row.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Effective {
    /// SQL; `None`: no permissive policy, so nobody.
    pub(crate) expression: Option<String>,
    /// Indexes of the columns that an image must have to be judged.
    pub(crate) columns: Vec<usize>,
    /// A policy reads a system column, which images don't have (R-RLS-4).
    pub(crate) system_columns: bool,
    /// Row security binds the role, as far as the catalogue says: no BYPASSRLS, not the owner without FORCE.
    pub(crate) bound: bool,
    /// The expression for many identities at once, where that can be had.
    pub(crate) hoisted: Option<Hoisted>,
}

impl TableCatalog {
    /// Index of a column.
    pub fn column(&self, name: &str) -> Option<usize> {
        self.columns.iter().position(|column| &*column.name == name)
    }

    /// What a *database* role (`p_<id>_anon`) may read; `None` when there is no such role.
    pub fn access(&self, role: &str) -> Option<&Arc<RoleAccess>> {
        self.roles.get(role).map(|entry| &entry.access)
    }

    /// Number of policies that can let somebody read.
    pub fn policies(&self) -> usize {
        self.policies.len()
    }

    pub(crate) fn effective(&self, role: &str) -> Option<&Effective> {
        self.roles.get(role).map(|entry| &entry.using)
    }
}

/// The statement's answer before its types are known.
#[derive(Deserialize)]
pub(crate) struct RawTable {
    oid: u32,
    kind: char,
    identity: char,
    row_security: bool,
    leaves: Option<Vec<(u32, SqlName, SqlName)>>,
    #[serde(default)]
    columns: Vec<RawColumn>,
    key: Vec<i16>,
    policies: Vec<RawPolicy>,
    roles: Vec<RawRole>,
}

/// attnum, name, type oid, type name, collation
#[derive(Deserialize)]
struct RawColumn(i16, Arc<str>, u32, Arc<str>, u32);

#[derive(Deserialize)]
struct RawPolicy {
    oid: u32,
    permissive: bool,
    using: String,
    depends: Vec<Option<Depends>>,
}

/// What a policy depends on, as far as that is of use.
#[derive(Deserialize)]
#[serde(untagged)]
enum Depends {
    /// Of its own table.
    Column(i16),
    /// Name, return type and text of a function without arguments.
    Function(String, u32, String),
}

#[derive(Deserialize)]
struct RawRole {
    name: String,
    bound: bool,
    usage: bool,
    readable: Option<HashSet<i16>>,
    policies: HashSet<u32>,
}

impl RawTable {
    /// Parses the statement's second column.
    pub(crate) fn parse(json: &str) -> Result<Self, SourceError> {
        serde_json::from_str(json).map_err(|_| SourceError::Protocol("a catalogue row that can't be read"))
    }

    /// Oid and name of every column's type.
    pub(crate) fn types(&self) -> impl Iterator<Item = (u32, &str)> {
        self.columns.iter().map(|column| (column.2, &*column.3))
    }

    /// Puts in the types.
    pub(crate) fn resolve(self, relation: &Relation, types: &HashMap<u32, Arc<TypeInfo>>) -> TableCatalog {
        let columns: Vec<Column> = self.columns.into_iter().map(|raw| raw.resolve(&self.key, types)).collect();
        let policies: Vec<Policy> = self.policies.into_iter().map(RawPolicy::resolve).collect();
        let entries = self.roles.into_iter().map(|role| {
            let using = Effective { bound: role.bound, ..effective(&policies, &role.policies, &columns) };
            (role.name.clone(), RoleEntry { access: Arc::new(role.access(&columns)), using })
        });
        let leaf = |(oid, schema, table)| (Relation { schema, table }, oid);
        TableCatalog {
            leaves: self.leaves.into_iter().flatten().map(leaf).collect(),
            oid: self.oid,
            relation: relation.clone(),
            kind: self.kind,
            replica_identity: self.identity,
            row_security_enabled: self.row_security,
            roles: entries.collect(),
            columns,
            policies,
        }
    }
}

impl RawColumn {
    fn resolve(self, key: &[i16], types: &HashMap<u32, Arc<TypeInfo>>) -> Column {
        let Self(attnum, name, oid, type_name, collation) = self;
        let ty = types.get(&oid).map_or_else(|| TypeInfo::text(oid, &type_name), Arc::clone);
        Column { primary_key: key.contains(&attnum), name, attnum, ty, collation }
    }
}

impl RawPolicy {
    fn resolve(self) -> Policy {
        let Self { oid, permissive, using, depends } = self;
        let seen_through = |it: &Option<Depends>| match it {
            Some(Depends::Column(_)) => true,
            Some(Depends::Function(name, returns, source)) => hoist::is_known(name, *returns, source),
            None => false,
        };
        let closed = depends.iter().all(seen_through);
        let column = |it: &Option<Depends>| match it {
            Some(Depends::Column(attnum)) if *attnum != 0 => Some(*attnum),
            _ => None,
        };
        let columns = depends.iter().filter_map(column).collect();
        Policy { oid, permissive, using, columns, closed }
    }
}

impl RawRole {
    fn access(&self, columns: &[Column]) -> RoleAccess {
        let readable = |column: &Column| self.readable.as_ref().is_none_or(|some| some.contains(&column.attnum));
        RoleAccess { schema_usage: self.usage, readable: columns.iter().map(readable).collect() }
    }
}

/// Whatever came with the server has a lower one (`access/transam.h`).
const FIRST_NORMAL_OID: u32 = 16_384;

/// R-RLS-2: every restrictive policy that applies to the role, and one of the permissive. In the server's order, which
/// CASE keeps: what a policy would raise for a row that another one hides is not raised.
fn effective(policies: &[Policy], applying: &HashSet<u32>, all: &[Column]) -> Effective {
    let mine = || policies.iter().filter(|policy| applying.contains(&policy.oid));
    let texts = |permissive| mine().filter(move |policy| policy.permissive == permissive).map(|policy| &policy.using);
    let permissive = texts(true).map(|using| format!("({using})")).collect::<Vec<_>>().join(" OR ");
    if permissive.is_empty() {
        return Effective { hoisted: hoist("false"), ..Effective::default() };
    }
    let guard = |inner: String, using: &String| format!("CASE WHEN ({using}) THEN ({inner}) END");
    let expression = texts(false).collect::<Vec<_>>().into_iter().rev().fold(permissive, guard);
    let needed = |column: &Column| mine().any(|policy| policy.reads(column.attnum));
    let columns: Vec<usize> = all.iter().enumerate().filter(|(_, column)| needed(column)).map(|(n, _)| n).collect();
    let system_columns = mine().any(|policy| policy.columns.iter().any(|attnum| *attnum < 0));
    // What compares a type that somebody made may be code of theirs.
    let built_in = columns.iter().all(|n| all[*n].ty.oid < FIRST_NORMAL_OID);
    let hoisted = if built_in && mine().all(|policy| policy.closed) { hoist(&expression) } else { None };
    Effective { expression: Some(expression), columns, system_columns, bound: true, hoisted }
}

impl Policy {
    /// Dependencies name the columns, but not a whole-row reference, which prints as `tab.*`; where that may stand,
    /// every column is needed.
    fn reads(&self, attnum: i16) -> bool {
        self.using.contains(".*") || self.columns.contains(&attnum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(policies: &str, applying: &str) -> TableCatalog {
        let json = format!(
            r#"{{"oid":1,"kind":"r","identity":"f","row_security":true,"key":[1],
                "columns":[[1,"id",23,"int4",0],[3,"owner",25,"text",100]],"policies":[{policies}],
                "roles":[{{"name":"r","bound":true,"usage":true,"readable":[3],"policies":[{applying}]}}]}}"#
        );
        let name = |text: &str| SqlName::new(text).expect("a name");
        let relation = Relation { schema: name("s"), table: name("t") };
        RawTable::parse(&json).expect("a row").resolve(&relation, &HashMap::new())
    }

    const A: &str = r#"{"oid":10,"permissive":true,"using":"a","depends":[0,3]}"#;
    const B: &str = r#"{"oid":11,"permissive":true,"using":"b","depends":[0]}"#;
    const C: &str = r#"{"oid":12,"permissive":false,"using":"c","depends":[0,1]}"#;
    const D: &str = r#"{"oid":13,"permissive":false,"using":"f(t.*)","depends":[0,null]}"#;

    #[test]
    fn r_rls_2_each_restrictive_must_hold_and_one_permissive() {
        let all = [A, B, C, D].join(",");
        let expression = |applying| table(&all, applying).effective("r").and_then(|it| it.expression.clone());
        assert_eq!(
            expression("10,11,12,13").as_deref(),
            Some("CASE WHEN (c) THEN (CASE WHEN (f(t.*)) THEN ((a) OR (b)) END) END")
        );
        assert_eq!(expression("10").as_deref(), Some("(a)"));
        assert_eq!(expression("12"), None, "restrictive policies alone let nobody read");
        assert_eq!(expression(""), None);
    }

    #[test]
    fn r_rls_4_the_columns_that_the_role_s_policies_read_are_needed() {
        let all = [A, B, C, D].join(",");
        let columns = |applying| table(&all, applying).effective("r").map(|it| it.columns.clone());
        assert_eq!(columns("10,11"), Some(vec![1]));
        assert_eq!(columns("10,12"), Some(vec![0, 1]));
        assert_eq!(columns("11"), Some(vec![]));
        assert_eq!(columns("11,13"), Some(vec![0, 1]), "a whole-row reference needs every column");
    }

    #[test]
    fn r_rls_5_one_policy_that_may_read_claims_unseen_keeps_all_from_being_hoisted() {
        let all = [A, B, C, D].join(",");
        let hoisted = |applying| table(&all, applying).effective("r").is_some_and(|it| it.hoisted.is_some());
        assert_eq!((hoisted("10,12"), hoisted("10,13")), (true, false));
    }

    #[test]
    fn r_rls_3_privileges_are_per_column() {
        let table = table("", "");
        let access = table.access("r").expect("the role");
        assert_eq!((access.readable.as_slice(), access.any()), ([false, true].as_slice(), true));
        assert!(table.access("other").is_none());
    }
}
