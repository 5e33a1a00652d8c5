//! Under which names tables are found now: a registration follows its table's OID (R-REG-2).

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use aura_domain::{Lsn, Relation, SqlName};
use tokio_postgres::{Client, Row};

use crate::{
    SourceError,
    admin::Leaf,
    slot::{bounded, lsn},
};

/// Ten thousand names take some 20 ms.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// A table as it is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its names.
    pub relation: Relation,
    /// Its rows are in partitions.
    pub is_partitioned: bool,
}

/// A partitioned table's partitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partitions {
    /// Those that hold rows, nested ones included, in the order of their OIDs.
    pub leaves: Vec<Leaf>,
    /// Whatever has committed below was seen.
    pub seen_at: Lsn,
}

/// These tables by OID; one that is gone is left out.
pub async fn names_of(client: &Client, oids: &[u32]) -> Result<HashMap<u32, Found>, SourceError> {
    let sql = "SELECT c.oid, n.nspname::pg_catalog.text, c.relname::pg_catalog.text, c.relkind = 'p'
        FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY ($1)";
    let rows = bounded(STATEMENT_TIMEOUT, client.query(sql, &[&oids])).await?;
    let found = |row: &Row| -> Result<_, SourceError> {
        let relation = Relation { schema: name(row, 1)?, table: name(row, 2)? };
        Ok((row.try_get(0)?, Found { relation, is_partitioned: row.try_get(3)? }))
    };
    rows.iter().map(found).collect()
}

/// The partitions of those of these tables that are partitioned, by the table's OID.
pub async fn partitions_of(client: &Client, oids: &[u32]) -> Result<HashMap<u32, Partitions>, SourceError> {
    // Not by pg_partition_tree, which waits for whoever has locked one of them.
    let sql = "SELECT r.oid, ARRAY(
            WITH RECURSIVE tree (oid) AS (
                SELECT r.oid UNION ALL
                SELECT i.inhrelid FROM tree t JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid)
            SELECT pg_catalog.json_build_array(l.oid::pg_catalog.int8, n.nspname, l.relname, l.relreplident, (
                SELECT i.relname FROM pg_catalog.pg_index x JOIN pg_catalog.pg_class i ON i.oid = x.indexrelid
                WHERE x.indrelid = l.oid AND x.indisreplident))::pg_catalog.text
            FROM tree t JOIN pg_catalog.pg_class l ON l.oid = t.oid
            JOIN pg_catalog.pg_namespace n ON n.oid = l.relnamespace
            WHERE l.relkind = 'r' ORDER BY l.oid), pg_catalog.pg_current_wal_insert_lsn()::pg_catalog.text
        FROM pg_catalog.pg_class r WHERE r.oid = ANY ($1) AND r.relkind = 'p'";
    let rows = bounded(STATEMENT_TIMEOUT, client.query(sql, &[&oids])).await?;
    let partitions = |row: &Row| -> Result<_, SourceError> {
        let leaves: Vec<String> = row.try_get(1)?;
        let leaves = leaves.iter().map(|json| Leaf::parse(json)).collect::<Result<_, _>>()?;
        let seen_at = lsn(row, 2)?.ok_or(SourceError::Protocol("a log position is missing"))?;
        Ok((row.try_get(0)?, Partitions { leaves, seen_at }))
    };
    rows.iter().map(partitions).collect()
}

/// Those of these tables that no row was ever written to, as far as their files tell.
pub async fn never_written(client: &Client, oids: &[u32]) -> Result<HashSet<u32>, SourceError> {
    // An emptied table keeps its pages, but for TRUNCATE, which gives it another file, and VACUUM, which needs a while.
    let sql = "SELECT c.oid FROM pg_catalog.pg_class c WHERE c.oid = ANY ($1)
        AND pg_catalog.pg_relation_filenode(c.oid) = c.oid AND pg_catalog.pg_relation_size(c.oid) = 0";
    let rows = bounded(STATEMENT_TIMEOUT, client.query(sql, &[&oids])).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

fn name(row: &Row, column: usize) -> Result<SqlName, SourceError> {
    SqlName::new(row.try_get::<_, String>(column)?).map_err(|_| SourceError::Protocol("a name that can't be one"))
}
