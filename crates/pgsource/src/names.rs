//! Under which names tables are found now: a registration follows its table's OID (R-REG-2).

use std::{collections::HashMap, time::Duration};

use aura_domain::{Relation, SqlName};
use tokio_postgres::{Client, Row};

use crate::{SourceError, slot::bounded};

/// Ten thousand names take some 20 ms.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// The names of these tables by OID; one that is gone is left out.
pub async fn names_of(client: &Client, oids: &[u32]) -> Result<HashMap<u32, Relation>, SourceError> {
    let sql = "SELECT c.oid, n.nspname::pg_catalog.text, c.relname::pg_catalog.text FROM pg_catalog.pg_class c
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY ($1)";
    let rows = bounded(STATEMENT_TIMEOUT, client.query(sql, &[&oids])).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, Relation { schema: name(row, 1)?, table: name(row, 2)? }))).collect()
}

fn name(row: &Row, column: usize) -> Result<SqlName, SourceError> {
    SqlName::new(row.try_get::<_, String>(column)?).map_err(|_| SourceError::Protocol("a name that can't be one"))
}
