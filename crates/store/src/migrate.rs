use sqlx::{
    Connection, PgConnection,
    migrate::{Migrate, Migrator},
};

use crate::{Store, StoreError, bounded, connect_options};

/// Bookkeeping lives beside our tables, not in `public`, where an owner of the database's only schema may lack CREATE.
const HISTORY: &str = "aura._sqlx_migrations";

fn migrator() -> Migrator {
    let mut migrator = sqlx::migrate!("../../migrations");
    migrator.create_schema("aura");
    migrator.dangerous_set_table_name(HISTORY);
    migrator
}

/// Applies what is missing, each file in a transaction, under an advisory lock: a second caller waits and finds nothing
/// to do. Needs CREATE on the database, no superuser. Returns the names of the migrations applied now.
pub async fn migrate(url: &str) -> Result<Vec<String>, StoreError> {
    let options = connect_options(url)?;
    let mut connection = bounded(async { Ok(PgConnection::connect_with(&options).await?) }).await?;
    let migrator = migrator();
    // Taken here, too, so that what we report is what this call applied. Session locks are re-entrant.
    bounded(async { connection.lock().await.map_err(StoreError::Migrate) }).await?;
    let result = apply(&mut connection, &migrator).await;
    connection.close().await?;
    result
}

async fn apply(connection: &mut PgConnection, migrator: &Migrator) -> Result<Vec<String>, StoreError> {
    connection.create_schema_if_not_exists("aura").await.map_err(StoreError::Migrate)?;
    connection.ensure_migrations_table(HISTORY).await.map_err(StoreError::Migrate)?;
    let before = connection.list_applied_migrations(HISTORY).await.map_err(StoreError::Migrate)?;
    migrator.run_direct(None, connection, false).await.map_err(StoreError::Migrate)?;
    let new = migrator.iter().filter(|migration| before.iter().all(|done| done.version != migration.version));
    Ok(new.map(|migration| format!("{:04}_{}", migration.version, migration.description)).collect())
}

impl Store {
    /// For the start of a process: the schema is this version's, and the master key opens what is stored. With another key a
    /// process could do nothing, and what it wrote nobody else could read. `NotMigrated`, `Key`.
    pub async fn check(&self) -> Result<(), StoreError> {
        if !self.schema_is_current().await? {
            return Err(StoreError::NotMigrated);
        }
        self.sources().await.map(drop)
    }

    /// Whether every migration that this binary knows was applied. Newer ones are fine: changes expand before they
    /// contract.
    pub async fn schema_is_current(&self) -> Result<bool, StoreError> {
        let known: Vec<i64> = migrator().iter().map(|migration| migration.version).collect();
        let query = sqlx::query_scalar::<_, i64>(
            "select count(*) from aura._sqlx_migrations where success and version = any($1)",
        );
        match bounded(async { Ok(query.bind(&known).fetch_one(&self.pool).await?) }).await {
            Ok(applied) => Ok(usize::try_from(applied) == Ok(known.len())),
            Err(StoreError::NotMigrated) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
