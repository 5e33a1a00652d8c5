//! The source that the environment names.

use std::time::Duration;

use aura_pgsource::{SourceError, SourceUrl, connect_sql};
use aura_store::{NewSource, Source, Store, StoreError};
use secrecy::ExposeSecret;

/// For a look whether a URL works.
const CONNECT: Duration = Duration::from_secs(5);

/// The source can't be registered.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The platform database didn't take it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another URL than the one that is registered, and nobody answers there.
    #[error("the source {name} keeps the URL that it has: under the one given here it can't be reached: {error}")]
    Unreachable {
        /// Its name.
        name: String,
        /// What came instead of an answer.
        error: SourceError,
    },
}

/// Registers the source, or changes what is registered. Others may run it: a URL that isn't theirs must be one that works, so
/// that a mistyped one ends who was given it, and not the engine of those who weren't.
pub async fn register(store: &Store, new: NewSource) -> Result<Source, RegisterError> {
    let known = store.source_by_name(&new.name).await?;
    let moved = |known: Source| known.replication_url.expose_secret() != new.replication_url.expose_secret();
    if known.is_some_and(moved) {
        let connected = async {
            let url = SourceUrl::from_secret(&new.replication_url)?;
            connect_sql(&url, "aura-look", None, CONNECT).await
        };
        connected.await.map_err(|error| RegisterError::Unreachable { name: new.name.clone(), error })?;
    }
    Ok(store.upsert_source(new).await?)
}
