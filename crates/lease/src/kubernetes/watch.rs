//! Follows all our leases, so that a release is seen at once and a held lease needs no asking. Only a hint: nothing is
//! taken or given up without a conditional write or a read.

use std::{pin::pin, sync::Arc, time::Duration};

use futures_util::TryStreamExt;
use kube::api::{WatchEvent, WatchParams};
use tokio::time::{Instant, sleep, timeout};

use super::{
    Inner,
    api::{backend, bounded, list},
    record::LABEL,
};
use crate::LeaseError;

/// Seconds until the server ends a watch by itself.
const SESSION: u32 = 290;
/// A watch that tells nothing for so long, not even a bookmark (once a minute), is taken for dead.
const SILENCE: Duration = Duration::from_secs(90);
/// From one watch to the next, also after one that ended well: a server whose lists lag would else be asked without end.
const PAUSE: Duration = Duration::from_secs(1);

/// For ever.
pub(super) async fn follow(inner: Arc<Inner>) {
    loop {
        if let Err(error) = session(&inner).await {
            tracing::debug!(%error, "the watch of the leases broke, leases are asked for instead");
        }
        inner.sightings().unwatched();
        // The fraction keeps the workers' lists apart after an outage of the server.
        sleep(PAUSE.mul_f64(1.0 + rand::random::<f64>())).await;
    }
}

/// Lists, then watches until the watch is over.
async fn session(inner: &Inner) -> Result<(), LeaseError> {
    let (leases, version) = list(&inner.api).await?;
    inner.sightings().listed(&leases, Instant::now());
    let (key, value) = LABEL;
    let params = WatchParams::default().labels(&format!("{key}={value}")).timeout(SESSION);
    let mut events = pin!(bounded(inner.api.watch(&params, &version)).await?.map_err(backend)?);
    loop {
        let event = timeout(SILENCE, events.try_next()).await.map_err(|_| LeaseError::Timeout(SILENCE))?;
        let (lease, exists) = match event.map_err(backend)? {
            None => return Ok(()),
            Some(WatchEvent::Added(lease) | WatchEvent::Modified(lease)) => (lease, true),
            Some(WatchEvent::Deleted(lease)) => (lease, false),
            Some(WatchEvent::Bookmark(_)) => continue,
            // Too old a version, as after a long partition: list again.
            Some(WatchEvent::Error(status)) if status.code == 410 => return Ok(()),
            Some(WatchEvent::Error(status)) => return Err(backend(kube::Error::Api(status))),
        };
        if let Some(object) = &lease.metadata.name {
            inner.sightings().told(object, exists.then_some(&lease), Instant::now());
        }
    }
}
