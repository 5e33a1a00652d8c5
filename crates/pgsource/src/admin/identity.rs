use std::time::Duration;

use aura_domain::{Lsn, Relation, SqlName};
use rand::RngExt as _;
use tokio::time::Instant;
use tokio_postgres::{Client, error::SqlState};

use super::{
    Admin, bounded, tables,
    tables::{Leaf, TableInfo},
    wal_insert_lsn,
};
use crate::SourceError;

/// `lock_timeout` of one try, in milliseconds: a waiting ALTER blocks every later reader (R-REG-3).
const TRY_MS: u64 = 200;
/// Pauses between tries, jittered.
const PAUSE_MS: std::ops::Range<u64> = 20..120;
/// Budget of a restore.
const RESTORE_BUDGET: Duration = Duration::from_secs(3);

/// What [`Admin::set_replica_identity_full`] found and did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityChange {
    /// As it was before.
    pub previous: PreviousIdentity,
    /// An ALTER ran; false: it was so already.
    pub altered: bool,
    /// `pg_current_wal_insert_lsn()`, read after the ALTER while its lock was held: whatever commits later is above.
    pub lsn: Lsn,
}

/// A replica identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreviousIdentity {
    /// `d` default, `n` nothing, `f` full, `i` index.
    pub kind: char,
    /// Index of kind `i`.
    pub index: Option<SqlName>,
}

/// Why a replica identity was not changed.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The lock wasn't to be had in time.
    #[error("the table is locked{}", .blocker.map(|pid| format!(" by pid {pid}")).unwrap_or_default())]
    LockTimeout {
        /// A backend that holds a lock on the table.
        blocker: Option<i32>,
    },
    /// Our role may not ALTER the table.
    #[error("our role does not own the table")]
    NotOwner,
    /// No table of that oid stands under the name.
    #[error("the table is gone or another one now")]
    Missing,
    /// The source failed.
    #[error(transparent)]
    Source(#[from] SourceError),
}

impl Admin {
    /// Sets REPLICA IDENTITY FULL on the table, of a partitioned one on every leaf, unless it is so already: however many
    /// call at once, one ALTERs. Waits for the lock in tries of 200 ms, `budget` in all.
    pub async fn set_replica_identity_full(
        &self,
        relation: &Relation,
        oid: u32,
        budget: Duration,
    ) -> Result<IdentityChange, IdentityError> {
        self.alter(&Wanted { relation, oid, identity: Identity::Full }, budget).await
    }

    /// Sets back what was there before: `d`, `n`, `f`, or `i` with its index. Of a partitioned table, the leaves;
    /// they get the default instead of an index.
    pub async fn restore_replica_identity(
        &self,
        relation: &Relation,
        oid: u32,
        kind: char,
        index: Option<&SqlName>,
    ) -> Result<IdentityChange, IdentityError> {
        let identity = match (kind, index) {
            ('n', _) => Identity::Nothing,
            ('f', _) => Identity::Full,
            ('i', Some(index)) => Identity::Index(index),
            _ => Identity::Default,
        };
        self.alter(&Wanted { relation, oid, identity }, RESTORE_BUDGET).await
    }

    async fn alter(&self, wanted: &Wanted<'_>, budget: Duration) -> Result<IdentityChange, IdentityError> {
        let deadline = Instant::now() + budget;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let tried = wanted.try_once(&mut *self.session().await, left).await;
            match tried {
                Err(error) if !is_lock_timeout(&error) => return Err(error),
                Err(_) if Instant::now() >= deadline => {
                    let blocker = blocker(&*self.session().await, wanted.oid).await;
                    return Err(IdentityError::LockTimeout { blocker });
                }
                // Others may use the connection, and readers the table, meanwhile.
                Err(_) => {
                    let pause = Duration::from_millis(rand::rng().random_range(PAUSE_MS));
                    tokio::time::sleep_until((Instant::now() + pause).min(deadline)).await;
                }
                Ok(change) => return Ok(change),
            }
        }
    }
}

struct Wanted<'a> {
    relation: &'a Relation,
    oid: u32,
    identity: Identity<'a>,
}

#[derive(Clone, Copy)]
enum Identity<'a> {
    Default,
    Nothing,
    Full,
    Index(&'a SqlName),
}

impl Wanted<'_> {
    async fn try_once(&self, client: &mut Client, left: Duration) -> Result<IdentityChange, IdentityError> {
        let info = self.find(client).await?;
        if self.is_so(&info) {
            return self.unchanged(client, &info).await;
        }
        if !info.owned_by_us {
            return Err(IdentityError::NotOwner);
        }
        // Rolls back when dropped, so that a cancelled call holds no lock.
        let transaction = bounded(client.transaction()).await?;
        let ms = u64::try_from(left.as_millis()).unwrap_or(TRY_MS).clamp(1, TRY_MS);
        bounded(transaction.batch_execute(&format!("set local lock_timeout = {ms}"))).await?;
        let change = self.locked(transaction.client()).await?;
        bounded(transaction.commit()).await?;
        Ok(change)
    }

    /// In the transaction: the lock first, then a second look, since another may have been faster.
    async fn locked(&self, client: &Client) -> Result<IdentityChange, IdentityError> {
        let lock = format!("lock table only {} in access exclusive mode", self.relation.quoted());
        bounded(client.batch_execute(&lock)).await.map_err(refused)?;
        let info = self.find(client).await?;
        if self.is_so(&info) {
            return self.unchanged(client, &info).await;
        }
        for sql in self.alters(&info) {
            bounded(client.batch_execute(&sql)).await.map_err(refused)?;
        }
        Ok(IdentityChange { previous: previous(&info), altered: true, lsn: wal_insert_lsn(client).await? })
    }

    async fn find(&self, client: &Client) -> Result<TableInfo, IdentityError> {
        let info = tables::find(client, &self.relation.schema, &self.relation.table).await?;
        info.filter(|info| info.oid == self.oid).ok_or(IdentityError::Missing)
    }

    async fn unchanged(&self, client: &Client, info: &TableInfo) -> Result<IdentityChange, IdentityError> {
        Ok(IdentityChange { previous: previous(info), altered: false, lsn: wal_insert_lsn(client).await? })
    }

    fn is_so(&self, info: &TableInfo) -> bool {
        match self.identity {
            Identity::Full => info.is_full(),
            Identity::Nothing => info.replica_identity == 'n',
            Identity::Default => info.replica_identity == 'd',
            Identity::Index(index) => info.replica_identity == 'i' && info.identity_index.as_ref() == Some(index),
        }
    }

    fn alters(&self, info: &TableInfo) -> Vec<String> {
        if info.leaves.is_empty() {
            return vec![alter_sql(&info.relation, self.identity)];
        }
        // An index's name differs from leaf to leaf.
        let identity = if matches!(self.identity, Identity::Index(_)) { Identity::Default } else { self.identity };
        let is_so = |leaf: &&Leaf| matches!(identity, Identity::Full) && leaf.replica_identity == 'f';
        info.leaves.iter().filter(|leaf| !is_so(leaf)).map(|leaf| alter_sql(&leaf.relation, identity)).collect()
    }
}

fn alter_sql(relation: &Relation, identity: Identity<'_>) -> String {
    let identity = match identity {
        Identity::Default => "default".to_owned(),
        Identity::Nothing => "nothing".to_owned(),
        Identity::Full => "full".to_owned(),
        Identity::Index(index) => format!("using index {}", index.quoted()),
    };
    format!("alter table only {} replica identity {identity}", relation.quoted())
}

fn previous(info: &TableInfo) -> PreviousIdentity {
    PreviousIdentity { kind: info.replica_identity, index: info.identity_index.clone() }
}

fn refused(error: SourceError) -> IdentityError {
    match error.sqlstate() {
        Some(code) if *code == SqlState::INSUFFICIENT_PRIVILEGE => IdentityError::NotOwner,
        Some(code) if *code == SqlState::UNDEFINED_TABLE => IdentityError::Missing,
        _ => IdentityError::Source(error),
    }
}

fn is_lock_timeout(error: &IdentityError) -> bool {
    let codes = [SqlState::LOCK_NOT_AVAILABLE, SqlState::T_R_DEADLOCK_DETECTED];
    matches!(error, IdentityError::Source(error) if error.sqlstate().is_some_and(|code| codes.contains(code)))
}

/// Somebody who holds a lock on the table or a partition of it; for a message only.
async fn blocker(client: &Client, oid: u32) -> Option<i32> {
    let sql = "select l.pid from pg_locks l where l.locktype = 'relation' and l.granted and l.pid <> pg_backend_pid() \
         and l.database = (select oid from pg_database where datname = current_database()) \
         and (l.relation = $1 or l.relation in (select relid from pg_partition_tree($1))) order by l.pid limit 1";
    let row = bounded(client.query_opt(sql, &[&oid])).await.ok()??;
    row.try_get(0).ok()
}
