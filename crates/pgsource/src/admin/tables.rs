use aura_domain::{Relation, SqlName};
use tokio_postgres::{Row, types::ToSql};

use super::{Admin, bounded};
use crate::SourceError;

const TABLES_SQL: &str = include_str!("tables.sql");

/// A relation as the admin role sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableInfo {
    /// Physical names.
    pub relation: Relation,
    /// `pg_class.oid`.
    pub oid: u32,
    /// `pg_class.relkind`: `r` table, `p` partitioned, `v`, `m` views, `f` foreign.
    pub kind: char,
    /// `pg_class.relpersistence`: `p` permanent, `u` unlogged, `t` temporary.
    pub persistence: char,
    /// `pg_class.relreplident`: `d`, `n`, `f`, `i`. Of a partitioned table: `f` if all leaves have it, else that of the
    /// first one that hasn't.
    pub replica_identity: char,
    /// Index of identity `i`.
    pub identity_index: Option<SqlName>,
    /// Owner.
    pub owner: String,
    /// Our role has the owner's privileges, so that it may ALTER.
    pub owned_by_us: bool,
    /// Row security is on.
    pub rls_enabled: bool,
    /// Policies that can let somebody read.
    pub policies: i64,
    /// There is a primary key.
    pub has_primary_key: bool,
    /// Number of columns ever made.
    pub columns: i64,
    /// In a schema of the server or of ours.
    pub is_system: bool,
    /// Where a partitioned table's rows are, in oid order.
    pub leaves: Vec<Leaf>,
    /// A role of the project other than its back end may read some of it. Not asked for a list: true.
    pub readable: bool,
    /// Policies that can't be judged on rows of the log (R-RLS-4), by name. Not asked for a list: empty.
    pub unjudgeable: Vec<Unjudgeable>,
    /// Of [`TableInfo::policies`] the permissive ones: restrictive ones only take away.
    pub permissive: i64,
    /// Some permissive policy is for a role of the project. Not asked for a list: true.
    pub policies_apply: bool,
    /// Average size of a row in bytes, as the planner's statistics have it; `None` = not known yet.
    pub row_bytes: Option<i64>,
}

/// A policy that can't be judged on rows of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unjudgeable {
    /// The policy's name.
    pub policy: String,
    /// Why.
    pub cause: UnjudgeableCause,
}

/// Why a policy can't be judged on rows of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnjudgeableCause {
    /// It reads a system column.
    SystemColumn,
    /// It writes, or calls a function whose text does.
    Writes,
    /// It reads a generated column, which pgoutput doesn't send before PostgreSQL 18.
    GeneratedColumn,
}

/// A partition that holds rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leaf {
    /// Physical names.
    pub relation: Relation,
    /// `pg_class.oid`.
    pub oid: u32,
    /// `pg_class.relreplident`.
    pub replica_identity: char,
    /// Index of identity `i`.
    pub identity_index: Option<SqlName>,
}

impl TableInfo {
    /// Whether the log carries whole old rows: REPLICA IDENTITY FULL, on every leaf.
    pub fn is_full(&self) -> bool {
        self.replica_identity == 'f'
    }
}

impl Admin {
    /// What stands under a name; `None`: no table, view or foreign table.
    pub async fn table(&self, schema: &SqlName, name: &SqlName) -> Result<Option<TableInfo>, SourceError> {
        find(&*self.session().await, schema, name).await
    }

    /// Tables that can be enabled, in byte order of (schema, name): those whose name holds `query`, in any case, behind
    /// the one named by `after`, at most `limit`.
    pub async fn tables(
        &self,
        schemas: &[SqlName],
        query: Option<&str>,
        after: Option<(&str, &str)>,
        limit: i64,
    ) -> Result<Vec<TableInfo>, SourceError> {
        let schemas: Vec<&str> = schemas.iter().map(|name| name.as_str()).collect();
        let (schema, table) = after.unzip();
        let params: [&(dyn ToSql + Sync); 6] = [&schemas, &None::<&str>, &query, &schema, &table, &limit];
        let session = self.session().await;
        bounded(session.query(TABLES_SQL, &params)).await?.iter().map(TableInfo::from_row).collect()
    }
}

pub(super) async fn find(
    client: &tokio_postgres::Client,
    schema: &SqlName,
    name: &SqlName,
) -> Result<Option<TableInfo>, SourceError> {
    let (schemas, none) = ([schema.as_str()], None::<&str>);
    let params: [&(dyn ToSql + Sync); 6] = [&schemas.as_slice(), &name.as_str(), &none, &none, &none, &1_i64];
    bounded(client.query_opt(TABLES_SQL, &params)).await?.as_ref().map(TableInfo::from_row).transpose()
}

impl TableInfo {
    fn from_row(row: &Row) -> Result<Self, SourceError> {
        let leaves: Vec<String> = row.try_get(14)?;
        let leaves = leaves.iter().map(|json| Leaf::parse(json)).collect::<Result<Vec<_>, _>>()?;
        let unjudgeable: Vec<String> = row.try_get(16)?;
        let unjudgeable = unjudgeable.iter().map(|json| Unjudgeable::parse(json)).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            oid: oid(row.try_get(0)?)?,
            relation: relation(row.try_get(1)?, row.try_get(2)?)?,
            kind: letter(row, 3)?,
            persistence: letter(row, 4)?,
            replica_identity: identity(letter(row, 5)?, &leaves),
            identity_index: row.try_get::<_, Option<String>>(6)?.map(name).transpose()?,
            owner: row.try_get(7)?,
            owned_by_us: row.try_get(8)?,
            rls_enabled: row.try_get(9)?,
            policies: row.try_get(10)?,
            has_primary_key: row.try_get(11)?,
            columns: row.try_get(12)?,
            is_system: row.try_get(13)?,
            leaves,
            readable: row.try_get(15)?,
            unjudgeable: unjudgeable.into_iter().flatten().collect(),
            permissive: row.try_get(17)?,
            policies_apply: row.try_get(18)?,
            row_bytes: row.try_get(19)?,
        })
    }
}

/// A partitioned table's own identity says nothing about its rows.
fn identity(own: char, leaves: &[Leaf]) -> char {
    if leaves.is_empty() {
        return own;
    }
    leaves.iter().map(|leaf| leaf.replica_identity).find(|identity| *identity != 'f').unwrap_or('f')
}

impl Leaf {
    pub(crate) fn parse(json: &str) -> Result<Self, SourceError> {
        let unreadable = |_| SourceError::Protocol("a partition that can't be read");
        let (oid, schema, table, replica_identity, index): (u32, String, String, char, Option<String>) =
            serde_json::from_str(json).map_err(unreadable)?;
        let identity_index = index.map(name).transpose()?;
        Ok(Self { relation: relation(schema, table)?, oid, replica_identity, identity_index })
    }
}

impl Unjudgeable {
    /// `None`: it can be judged.
    fn parse(json: &str) -> Result<Option<Self>, SourceError> {
        let unreadable = |_| SourceError::Protocol("a policy that can't be read");
        let (policy, cause): (String, Option<String>) = serde_json::from_str(json).map_err(unreadable)?;
        let cause = cause.map(|cause| match cause.as_str() {
            "system_column" => UnjudgeableCause::SystemColumn,
            "writes" => UnjudgeableCause::Writes,
            _ => UnjudgeableCause::GeneratedColumn,
        });
        Ok(cause.map(|cause| Self { policy, cause }))
    }
}

fn relation(schema: String, table: String) -> Result<Relation, SourceError> {
    Ok(Relation { schema: name(schema)?, table: name(table)? })
}

fn name(text: String) -> Result<SqlName, SourceError> {
    SqlName::new(text).map_err(|_| SourceError::Protocol("a name that can't be one"))
}

fn oid(wide: i64) -> Result<u32, SourceError> {
    u32::try_from(wide).map_err(|_| SourceError::Protocol("an oid out of range"))
}

fn letter(row: &Row, at: usize) -> Result<char, SourceError> {
    let text: String = row.try_get(at)?;
    text.chars().next().ok_or(SourceError::Protocol("a catalogue letter is missing"))
}
