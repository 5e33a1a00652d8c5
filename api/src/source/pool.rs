//! Connections to a source, a few per source and reused.

use std::{
    collections::HashMap,
    ops::Deref,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use aura_domain::SourceId;
use aura_kit::{Code, Problem};
use aura_pgsource::{SourceUrl, admin::Admin};
use aura_store::{Source, Store};
use secrecy::ExposeSecret;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{ApiError, Result};

/// Longest wait for a free connection: one ALTER's 3 s, and some.
const ACQUIRE: Duration = Duration::from_secs(5);

/// Admin connections of every source.
pub(crate) struct Sources {
    per_source: usize,
    pools: Mutex<HashMap<SourceId, Arc<Pool>>>,
}

/// The connections of one source under one URL.
struct Pool {
    url: String,
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Admin>>,
}

/// An admin connection for a while. Give it back with [`AdminLease::done`]; dropped otherwise it is closed, since
/// nobody knows what state it is in.
pub(crate) struct AdminLease {
    admin: Admin,
    pool: Arc<Pool>,
    _permit: OwnedSemaphorePermit,
}

impl Sources {
    pub(crate) fn new(per_source: usize) -> Self {
        Self { per_source: per_source.max(1), pools: Mutex::default() }
    }

    /// A connection with the source's admin URL, the replication URL if it has none.
    pub(crate) async fn admin(&self, store: &Store, source: SourceId) -> Result<AdminLease> {
        let source = store.source(source).await?.ok_or_else(ApiError::source_not_found)?;
        let pool = self.pool(&source);
        let permit = tokio::time::timeout(ACQUIRE, Arc::clone(&pool.permits).acquire_owned()).await;
        let Ok(Ok(permit)) = permit else {
            return Err(Problem::new(Code::SourceSlow, "All connections to the source are busy.")
                .retry_after(1)
                .into());
        };
        let admin = match pool.reuse().await {
            Some(admin) => admin,
            None => Admin::connect(&SourceUrl::parse(&pool.url)?).await?,
        };
        Ok(AdminLease { admin, pool, _permit: permit })
    }

    fn pool(&self, source: &Source) -> Arc<Pool> {
        let url = source.admin_url.as_ref().unwrap_or(&source.replication_url).expose_secret();
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        match pools.get(&source.id) {
            Some(pool) if pool.url == url => Arc::clone(pool),
            _ => {
                let permits = Arc::new(Semaphore::new(self.per_source));
                let pool = Arc::new(Pool { url: url.to_owned(), permits, idle: Mutex::default() });
                pools.insert(source.id, Arc::clone(&pool));
                pool
            }
        }
    }
}

impl Pool {
    /// An open connection that nobody uses.
    async fn reuse(&self) -> Option<Admin> {
        loop {
            let admin = self.idle().pop()?;
            if !admin.is_closed().await {
                return Some(admin);
            }
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Admin>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AdminLease {
    /// Everything went well: the next request may have it.
    pub(crate) fn done(self) {
        self.pool.idle().push(self.admin);
    }
}

impl Deref for AdminLease {
    type Target = Admin;
    fn deref(&self) -> &Admin {
        &self.admin
    }
}
