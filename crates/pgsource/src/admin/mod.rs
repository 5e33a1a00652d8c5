//! The admin role's work in a source: bootstrap, a project's schema and roles, table information, replica identity.
//! Nothing here needs a superuser; what is better done by one is reported.

use std::{collections::HashMap, time::Duration};

use aura_domain::{Lsn, Relation};
use tokio::sync::{Mutex, MutexGuard};

use crate::{SourceError, SourceUrl, SqlConnection, connect_sql, names_of};

mod bootstrap;
mod identity;
mod project;
mod project_changes;
mod tables;

pub use bootstrap::BootstrapReport;
pub(crate) use bootstrap::{JUDGE_IS_OURS, STATISTICS_HIDDEN_SQL};
pub use identity::{IdentityChange, IdentityError, PreviousIdentity};
pub use project_changes::Leftovers;
pub use tables::{Leaf, TableInfo, Unjudgeable, UnjudgeableCause};

/// Bounds connecting.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Bounds one statement. DDL has its own, shorter bound on lock waits.
const STATEMENT_LIMIT: Duration = Duration::from_secs(10);

/// A connection of the admin role. Calls are serialised: one transaction at a time.
pub struct Admin {
    session: Mutex<SqlConnection>,
}

impl Admin {
    /// Connects.
    pub async fn connect(url: &SourceUrl) -> Result<Self, SourceError> {
        let session = connect_sql(url, "aura-admin", None, CONNECT_LIMIT).await?;
        bounded(session.batch_execute("set statement_timeout = 10000; set lock_timeout = 3000")).await?;
        Ok(Self { session: Mutex::new(session) })
    }

    /// Whether the connection is gone.
    pub async fn is_closed(&self) -> bool {
        self.session.lock().await.is_closed()
    }

    /// `pg_current_wal_insert_lsn()`.
    pub async fn current_wal_insert_lsn(&self) -> Result<Lsn, SourceError> {
        wal_insert_lsn(&*self.session().await).await
    }

    /// Under which name the table of that OID stands now; `None` = it is gone.
    pub async fn name_of(&self, oid: u32) -> Result<Option<Relation>, SourceError> {
        Ok(self.names_of(&[oid]).await?.remove(&oid))
    }

    /// Under which names these tables stand now, by OID; what is gone is left out.
    pub async fn names_of(&self, oids: &[u32]) -> Result<HashMap<u32, Relation>, SourceError> {
        let found = names_of(&*self.session().await, oids).await?;
        Ok(found.into_iter().map(|(oid, found)| (oid, found.relation)).collect())
    }

    async fn session(&self) -> MutexGuard<'_, SqlConnection> {
        self.session.lock().await
    }
}

/// Awaits a statement.
async fn bounded<T>(answer: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Result<T, SourceError> {
    let late = SourceError::Timeout { what: "an admin statement", limit: STATEMENT_LIMIT };
    Ok(tokio::time::timeout(STATEMENT_LIMIT, answer).await.map_err(|_| late)??)
}

async fn wal_insert_lsn(client: &tokio_postgres::Client) -> Result<Lsn, SourceError> {
    let row = bounded(client.query_one("select pg_current_wal_insert_lsn()::text", &[])).await?;
    let text: String = row.try_get(0)?;
    text.parse().map_err(|_| SourceError::Protocol("an LSN that can't be read"))
}
