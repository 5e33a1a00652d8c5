use std::time::Duration;

use aura_domain::WorkerId;
use sqlx::FromRow;

use crate::{Store, StoreError, bounded, decode::rfc3339};

/// A worker that has been silent for longer is dead: as long as a lease lasts by default.
pub const WORKER_SILENCE: Duration = Duration::from_secs(15);

/// What a worker says of itself (R-LEASE-3).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewWorker<'a> {
    /// Unique per start.
    pub id: &'a WorkerId,
    /// Host or pod.
    pub host: &'a str,
    /// Of the program.
    pub version: &'a str,
    /// Engines that it may run.
    pub max_engines: usize,
    /// It leaves.
    pub draining: bool,
}

/// A worker of the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerRow {
    /// Unique per start.
    pub id: WorkerId,
    /// Host or pod.
    pub host: String,
    /// Of the program.
    pub version: String,
    /// Engines that it may run.
    pub max_engines: usize,
    /// Engines whose holder it is.
    pub engines: usize,
    /// It leaves.
    pub draining: bool,
    /// RFC 3339, UTC.
    pub started_at: String,
    /// Milliseconds since its last heartbeat, by the database's clock.
    pub silent_ms: i64,
}

impl WorkerRow {
    /// Whether it has been heard lately.
    pub fn is_alive(&self) -> bool {
        Duration::from_millis(u64::try_from(self.silent_ms).unwrap_or(0)) <= WORKER_SILENCE
    }
}

#[derive(FromRow)]
struct Row {
    id: String,
    host: String,
    version: String,
    max_engines: i32,
    engines: i64,
    draining: bool,
    started_at: String,
    silent_ms: i64,
}

impl Store {
    /// A worker's heartbeat. Answers whether it is new or has begun to leave: then the others are told.
    pub async fn heartbeat(&self, worker: NewWorker<'_>) -> Result<(), StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let query = sqlx::query_scalar::<_, bool>(
                "with old as (select draining from aura.workers where id = $1)
                 insert into aura.workers (id, host, version, max_engines, draining) values ($1, $2, $3, $4, $5)
                 on conflict (id) do update set draining = excluded.draining, heartbeat_at = clock_timestamp()
                 returning $5 is distinct from (select draining from old)",
            );
            let most = i32::try_from(worker.max_engines).unwrap_or(i32::MAX);
            let query = query.bind(&worker.id.0).bind(worker.host).bind(worker.version).bind(most);
            if query.bind(worker.draining).fetch_one(&mut *tx).await? {
                sqlx::query("select pg_notify('aura_engines', '')").execute(&mut *tx).await?;
            }
            tx.commit().await?;
            Ok(())
        })
        .await
    }

    /// The worker has ended. Also forgets workers that have been silent for a day.
    pub async fn remove_worker(&self, id: &WorkerId) -> Result<(), StoreError> {
        let query = sqlx::query(
            "delete from aura.workers where id = $1 or heartbeat_at < clock_timestamp() - interval '1 day'",
        );
        bounded(async { Ok(query.bind(&id.0).execute(&self.pool).await.map(|_| ())?) }).await
    }

    /// Forgets the whole pool: whoever is registered is known to be dead.
    pub async fn forget_workers(&self) -> Result<(), StoreError> {
        let query = sqlx::query("delete from aura.workers");
        bounded(async { Ok(query.execute(&self.pool).await.map(|_| ())?) }).await
    }

    /// The pool, by start; who is silent for longer than a lease lasts is dead.
    pub async fn workers(&self) -> Result<Vec<WorkerRow>, StoreError> {
        let query = sqlx::query_as::<_, Row>(concat!(
            "select w.id, host, version, max_engines, draining, ",
            rfc3339!("started_at"),
            " as started_at, (extract(epoch from clock_timestamp() - heartbeat_at) * 1000)::bigint as silent_ms,
                (select count(*) from aura.engines e where e.holder = w.id) as engines
             from aura.workers w order by w.started_at, w.id"
        ));
        let rows = bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?;
        Ok(rows.into_iter().map(WorkerRow::from).collect())
    }
}

impl From<Row> for WorkerRow {
    fn from(row: Row) -> Self {
        Self {
            id: WorkerId(row.id),
            host: row.host,
            version: row.version,
            max_engines: usize::try_from(row.max_engines).unwrap_or(0),
            engines: usize::try_from(row.engines).unwrap_or(0),
            draining: row.draining,
            started_at: row.started_at,
            silent_ms: row.silent_ms,
        }
    }
}
