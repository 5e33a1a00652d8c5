//! The platform database: every query of it, and its migrations. Nothing else speaks SQL to it.
//!
//! Writes of a worker are fenced: they carry the epoch that the worker raised after it won the lease, and change nothing
//! once a successor has raised it again ([`StoreError::Fenced`], R-LEASE-2). Every call ends within [`QUERY_TIMEOUT`].

use std::{future::Future, str::FromStr, time::Duration};

use sqlx::{
    Connection, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};

mod audit;
mod decode;
mod engines;
mod error;
mod follow;
mod gaps;
mod idempotency;
mod key;
mod keys;
mod lease;
mod migrate;
mod operations;
mod panics;
mod partitions;
mod project_changes;
mod projects;
mod registrations;
mod registry;
mod report;
mod signals;
mod sources;
mod studio;
mod unfinished;
mod workers;

pub use audit::{AuditEntry, AuditFilter, Caller, NewAudit};
pub use engines::{Engine, Operation};
pub use error::StoreError;
pub use gaps::{Gap, NewGap};
pub use idempotency::{OnceClaim, OnceRequest};
pub use key::{KeyError, MasterKey};
pub use keys::{KeyRecord, KeyRotation, ProjectAuth, RotatedKeys};
pub use lease::PostgresLease;
pub use migrate::migrate;
pub use operations::{Ending, StartRequest, StopRequest};
pub use panics::PANICS_BEFORE_SKIP;
pub use partitions::{FoundPartition, Partition};
pub use project_changes::{DeletedProject, ProjectChange, ProjectWrite};
pub use projects::{CreatedProject, NewProject, Project, ProjectSecrets, ProjectSettings};
pub use registrations::{
    NewRegistration, Registration, RegistrationFilter, RegistrationMode, RegistrationStatus, ReplicaIdentity, TableRef,
};
pub use registry::RegistrySnapshot;
pub use signals::{Signal, SignalListener, StatusListener};
pub use sources::{NewSource, Plugin, SlotRecreate, Source, SourceChange, SourceWrite};
pub use studio::StudioSession;
pub use workers::{NewWorker, WORKER_SILENCE, WorkerRow};

/// Longest time that one call may take, waiting for a connection included.
pub const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// What the server itself enforces on the pool's sessions. A transaction of a stopped or vanished process must not hold a
/// row that others wait for, least of all the engine's while its successor raises the epoch.
const SESSION_LIMITS: [(&str, &str); 2] = [("idle_in_transaction_session_timeout", "3s"), ("statement_timeout", "10s")];

/// Connections per process: queries are short, and N replicas share the server's limit.
const MAX_CONNECTIONS: u32 = 10;

/// What is wrong with the URL of the platform database before anybody connects, in words for the operator that repeat nothing
/// of it. An empty one is none.
pub fn url_problems(url: &str) -> Option<String> {
    let is_url = url.starts_with("postgres://") || url.starts_with("postgresql://");
    let usable = url.is_empty() || is_url && url.parse::<sqlx::postgres::PgConnectOptions>().is_ok();
    (!usable).then(|| "DATABASE_URL is not a postgres:// URL".to_owned())
}

/// A handle of the platform database; clones share the pool.
#[derive(Debug, Clone)]
pub struct Store {
    pool: PgPool,
    key: MasterKey,
}

impl Store {
    /// Connects and checks that the database answers. It need not be migrated: see [`Store::schema_is_current`].
    pub async fn connect(url: &str, key: MasterKey) -> Result<Self, StoreError> {
        let pool = PgPoolOptions::new().max_connections(MAX_CONNECTIONS).acquire_timeout(Duration::from_secs(5));
        let options = connect_options(url)?;
        let store = Self { pool: pool.connect_lazy_with(options.clone().options(SESSION_LIMITS)), key };
        match store.ping().await {
            // The pool tries again for a while and keeps the cause to itself.
            Err(StoreError::Unreachable(sqlx::Error::PoolTimedOut)) => {
                bounded(async { Ok(PgConnection::connect_with(&options).await?.close().await?) }).await?;
                store.ping().await?;
            }
            answer => answer?,
        }
        Ok(store)
    }

    /// The pool, for tests and migrations of other schemas in the same database.
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// The key that seals secrets.
    pub fn master_key(&self) -> &MasterKey {
        &self.key
    }

    /// Whether the database answers.
    pub async fn ping(&self) -> Result<(), StoreError> {
        bounded(async { Ok(sqlx::query("select 1").execute(&self.pool).await.map(|_| ())?) }).await
    }
}

/// Parses a URL; its text, which may hold a password, stays out of the error.
fn connect_options(url: &str) -> Result<PgConnectOptions, StoreError> {
    let options = PgConnectOptions::from_str(url).map_err(|_| StoreError::BadUrl)?;
    Ok(options.application_name("aura-platform"))
}

/// Gives a call its deadline; a server that accepts and then says nothing must not hang us.
async fn bounded<T>(call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    match tokio::time::timeout(QUERY_TIMEOUT, call).await {
        Ok(result) => result,
        Err(_) => Err(StoreError::Timeout(QUERY_TIMEOUT)),
    }
}
