use std::time::Duration;

use async_trait::async_trait;
use aura_domain::WorkerId;
use aura_lease::{Claim, Holder, LeaseBackend, LeaseError, pod_prefix};
use sqlx::PgPool;

use crate::{Store, StoreError, bounded};

/// Leases as rows of the platform database: compare-and-set, judged by the database's clock only (R-LEASE-2).
#[derive(Debug, Clone)]
pub struct PostgresLease {
    pool: PgPool,
}

impl PostgresLease {
    /// Uses the store's connections.
    pub fn new(store: &Store) -> Self {
        Self { pool: store.pool().clone() }
    }
}

fn backend(error: StoreError) -> LeaseError {
    match error {
        StoreError::Timeout(after) => LeaseError::Timeout(after),
        other => LeaseError::Backend(Box::new(other)),
    }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

#[async_trait]
impl LeaseBackend for PostgresLease {
    async fn try_acquire(
        &self,
        name: &str,
        holder: &WorkerId,
        duration: Duration,
    ) -> Result<Option<Claim>, LeaseError> {
        // The conflict's row lock makes two contenders take turns; the second sees the first's fresh row.
        let query = sqlx::query_scalar::<_, i64>(
            "insert into aura.leases as l (name, holder, version, duration_ms) values ($1, $2, 1, $3)
             on conflict (name) do update set holder = excluded.holder, version = l.version + 1,
                duration_ms = excluded.duration_ms, renewed_at = clock_timestamp()
             where l.holder is null or l.holder = excluded.holder or starts_with(l.holder, $4)
                or l.renewed_at + l.duration_ms * interval '1 ms' <= clock_timestamp()
             returning version",
        );
        // Outside a pod nothing but the holder itself: its own name is a prefix of nobody else's.
        let predecessors = pod_prefix(holder).unwrap_or(&holder.0);
        let query = query.bind(name).bind(&holder.0).bind(millis(duration)).bind(predecessors);
        let version = bounded(async { Ok(query.fetch_optional(&self.pool).await?) }).await.map_err(backend)?;
        Ok(version.map(|version| Claim { name: name.to_owned(), holder: holder.clone(), version, duration }))
    }

    async fn renew(&self, claim: &Claim) -> Result<bool, LeaseError> {
        // An expired lease that nobody took may be renewed: the version proves that nobody had it in between.
        let query = sqlx::query(
            "update aura.leases set renewed_at = clock_timestamp(), duration_ms = $4
             where name = $1 and holder = $2 and version = $3",
        );
        let query = query.bind(&claim.name).bind(&claim.holder.0).bind(claim.version).bind(millis(claim.duration));
        let done = bounded(async { Ok(query.execute(&self.pool).await?) }).await.map_err(backend)?;
        Ok(done.rows_affected() == 1)
    }

    async fn release(&self, claim: Claim) -> Result<(), LeaseError> {
        let query =
            sqlx::query("update aura.leases set holder = null where name = $1 and holder = $2 and version = $3");
        let query = query.bind(&claim.name).bind(&claim.holder.0).bind(claim.version);
        bounded(async { Ok(query.execute(&self.pool).await.map(|_| ())?) }).await.map_err(backend)
    }

    async fn holder(&self, name: &str) -> Result<Option<Holder>, LeaseError> {
        let query = sqlx::query_as::<_, (String, i64)>(
            "select holder, greatest(0, duration_ms - (extract(epoch from clock_timestamp() - renewed_at) * 1000)::bigint)
             from aura.leases where name = $1 and holder is not null",
        );
        let row = bounded(async { Ok(query.bind(name).fetch_optional(&self.pool).await?) }).await.map_err(backend)?;
        Ok(row.map(|(holder, left)| Holder {
            holder: WorkerId(holder),
            remaining: Duration::from_millis(left.unsigned_abs()),
        }))
    }
}
