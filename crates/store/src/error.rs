use std::time::Duration;

use crate::KeyError;

/// Why the platform database didn't do it. Messages never hold values, secrets or URLs.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The URL isn't a PostgreSQL URL.
    #[error("not a PostgreSQL URL")]
    BadUrl,
    /// Not reachable, or the connection broke.
    #[error("the platform database is unreachable")]
    Unreachable(#[source] sqlx::Error),
    /// No answer in time.
    #[error("the platform database did not answer within {0:?}")]
    Timeout(Duration),
    /// The named thing doesn't exist (any more).
    #[error("no such {0}")]
    NotFound(&'static str),
    /// Something else has that name (`project_name`, `source_name`, …) already.
    #[error("the {0} is taken")]
    Taken(&'static str),
    /// Another worker has raised the epoch: nothing was written, and the caller must stop (R-LEASE-2).
    #[error("a newer epoch owns the engine")]
    Fenced,
    /// Migrations are missing: run `aura-realtime migrate`.
    #[error("the platform database is not migrated; run `aura-realtime migrate`")]
    NotMigrated,
    /// A migration failed, or the applied ones aren't ours.
    #[error("migration failed")]
    Migrate(#[source] sqlx::migrate::MigrateError),
    /// A sealed value doesn't open: other master key, or damaged.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A stored value that this version doesn't know.
    #[error("the platform database holds an unknown {0}")]
    Corrupt(&'static str),
    /// Anything else that the database said.
    #[error("the platform database refused a query")]
    Database(#[source] sqlx::Error),
}

impl StoreError {
    /// Whether the same call may work in a moment.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::Timeout(_))
    }
}

/// Constraints whose violation has a meaning for callers.
const NAMES: [(&str, &str); 4] = [
    ("sources_name_key", "source name"),
    ("projects_name_key", "project name"),
    ("projects_schema_key", "schema name"),
    ("projects_pkey", "project id"),
];

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        match &error {
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::Protocol(_)
            | sqlx::Error::WorkerCrashed => Self::Unreachable(error),
            sqlx::Error::Database(db) => {
                let taken = NAMES.iter().find(|(name, _)| db.constraint() == Some(name));
                match (taken, db.code().as_deref()) {
                    (Some((_, what)), _) => Self::Taken(what),
                    // undefined_table, invalid_schema_name
                    (_, Some("42P01" | "3F000")) => Self::NotMigrated,
                    // query_canceled, by its statement_timeout; lock_not_available
                    (_, Some("57014" | "55P03")) => Self::Timeout(crate::QUERY_TIMEOUT),
                    // Nothing was done, and the same may work in a moment: idle_in_transaction_session_timeout, when this
                    // process got no time for longer than that; deadlock_detected; serialization_failure.
                    (_, Some("25P03" | "40P01" | "40001")) => Self::Unreachable(error),
                    // Class 57: shutting down or starting up; class 08 and 53: no connection to be had.
                    (_, Some(code)) if ["57P", "08", "53"].iter().any(|class| code.starts_with(class)) => {
                        Self::Unreachable(error)
                    }
                    _ => Self::Database(error),
                }
            }
            _ => Self::Database(error),
        }
    }
}
