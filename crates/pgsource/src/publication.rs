//! Publications, pgoutput's filter. They are changed without a restart of the stream and take effect from that WAL
//! position on. Create one *before* the slot: pgoutput looks it up as of the record it decodes.

use std::{collections::BTreeSet, time::Duration};

use aura_domain::{Relation, SqlName, quote_ident};
use tokio_postgres::{Client, error::SqlState};

use crate::{SourceError, slot::bounded};

/// Taking a table into a publication waits for its locks, so a statement of ours may not wait for long.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// What [`sync_publication`] did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PublicationChange {
    /// Tables that came in.
    pub added: Vec<Relation>,
    /// Tables that went out.
    pub dropped: Vec<Relation>,
    /// Tables that the server refuses, with the SQLSTATE: missing (42P01), not ours (42501), locked (55P03) (R-REG-6).
    pub refused: Vec<(Relation, SqlState)>,
}

/// Makes a publication hold exactly these tables, and creates it when missing. Idempotent. Needs ownership of the
/// tables and CREATE on the database. A table that somebody has locked is waited for 1 s, then refused (55P03): one
/// customer's maintenance holds up nobody else. Leaves `lock_timeout` of the session so.
pub async fn sync_publication(
    client: &Client,
    name: &str,
    tables: &[Relation],
) -> Result<PublicationChange, SourceError> {
    bounded(STATEMENT_TIMEOUT, client.batch_execute("SET lock_timeout = '1s'")).await?;
    create_if_missing(client, name).await?;
    let current = published(client, name).await?;
    let wanted: BTreeSet<Relation> = tables.iter().cloned().collect();
    let mut change = PublicationChange::default();
    change.dropped = alter(client, name, "DROP", current.difference(&wanted).cloned().collect(), &mut change).await?;
    change.added = alter(client, name, "ADD", wanted.difference(&current).cloned().collect(), &mut change).await?;
    Ok(change)
}

async fn create_if_missing(client: &Client, name: &str) -> Result<(), SourceError> {
    let exists = "SELECT 1 FROM pg_catalog.pg_publication WHERE pubname = $1::pg_catalog.text::pg_catalog.name";
    if bounded(STATEMENT_TIMEOUT, client.query_opt(exists, &[&name])).await?.is_some() {
        return Ok(());
    }
    let sql = format!("CREATE PUBLICATION {}", quote_ident(name));
    match bounded(STATEMENT_TIMEOUT, client.batch_execute(&sql)).await {
        // Somebody else was quicker.
        Err(error) if error.sqlstate() == Some(&SqlState::DUPLICATE_OBJECT) => Ok(()),
        outcome => outcome,
    }
}

/// Drops a publication and says whether there was one. Needs its owner.
pub async fn drop_publication(client: &Client, name: &str) -> Result<bool, SourceError> {
    match bounded(STATEMENT_TIMEOUT, client.batch_execute(&format!("DROP PUBLICATION {}", quote_ident(name)))).await {
        Ok(()) => Ok(true),
        Err(error) if error.sqlstate() == Some(&SqlState::UNDEFINED_OBJECT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The tables of a publication.
pub async fn published(client: &Client, name: &str) -> Result<BTreeSet<Relation>, SourceError> {
    let sql = "SELECT n.nspname::pg_catalog.text, c.relname::pg_catalog.text \
        FROM pg_catalog.pg_publication p JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid \
        JOIN pg_catalog.pg_class c ON c.oid = r.prrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
        WHERE p.pubname = $1::pg_catalog.text::pg_catalog.name";
    let rows = bounded(STATEMENT_TIMEOUT, client.query(sql, &[&name])).await?;
    let name = |text: String| SqlName::new(text).map_err(|_| SourceError::Protocol("a name can't be read"));
    rows.iter().map(|row| Ok(Relation { schema: name(row.try_get(0)?)?, table: name(row.try_get(1)?)? })).collect()
}

/// All at once; when the server refuses, one by one, so that one bad table doesn't keep out the others.
async fn alter(
    client: &Client,
    name: &str,
    verb: &str,
    tables: Vec<Relation>,
    change: &mut PublicationChange,
) -> Result<Vec<Relation>, SourceError> {
    if tables.is_empty() {
        return Ok(tables);
    }
    match alter_one(client, name, verb, &tables).await {
        Ok(()) => return Ok(tables),
        Err(error) if error.is_connection_error() || error.sqlstate().is_none() => return Err(error),
        Err(_) => {}
    }
    let mut done = Vec::new();
    for table in tables {
        let outcome = alter_one(client, name, verb, std::slice::from_ref(&table)).await;
        match outcome.as_ref().map_err(|error| (error.is_connection_error(), error.sqlstate().cloned())) {
            Ok(()) => done.push(table),
            Err((false, Some(code))) => change.refused.push((table, code)),
            Err(_) => return outcome.map(|()| done),
        }
    }
    Ok(done)
}

async fn alter_one(client: &Client, name: &str, verb: &str, tables: &[Relation]) -> Result<(), SourceError> {
    let list: Vec<String> = tables.iter().map(Relation::quoted).collect();
    // ONLY: leaves are listed on their own, and inheritance children are other tables.
    let sql = format!("ALTER PUBLICATION {} {verb} TABLE ONLY {}", quote_ident(name), list.join(", ONLY "));
    bounded(STATEMENT_TIMEOUT, client.batch_execute(&sql)).await
}
