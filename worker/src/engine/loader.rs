//! Keeps the engine's copy of the registry fresh: on signal, and every `CDC_FILTER_REFRESH_MS` at the latest.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use aura_domain::{ProjectId, SourceId};
use aura_store::{RegistrySnapshot, Signal, SignalListener, Store, StoreError};
use tokio::{sync::watch, time::timeout};
use tokio_util::sync::CancellationToken;

use super::{measure, registry::ProjectInfo};

/// What the platform database says, before the engine's own position is applied to it.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) snapshot: RegistrySnapshot,
    pub(crate) projects: HashMap<ProjectId, Arc<ProjectInfo>>,
}

/// Reads the registry of a source.
pub(crate) async fn load(store: &Store, source: SourceId) -> Result<Loaded, StoreError> {
    // Projects first: a registration whose project isn't known yet would be left out until the next change.
    let snapshot = store.registry(source).await?;
    let projects = store.projects_of_source(source).await?;
    let projects =
        projects.into_iter().map(|(project, secrets)| (project.id, Arc::new(ProjectInfo::new(&project, secrets))));
    Ok(Loaded { snapshot, projects: projects.collect() })
}

/// Publishes every change of the registry until `stop`.
pub(crate) async fn watch(
    store: Store,
    source: SourceId,
    refresh: Duration,
    loaded: watch::Sender<Arc<Loaded>>,
    stop: CancellationToken,
) {
    let mut listener = None;
    while !stop.is_cancelled() {
        if listener.is_none() {
            listener = store.listen().await.ok();
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = signalled(&mut listener, source, refresh) => {}
        }
        let began = Instant::now();
        match load(&store, source).await {
            Ok(fresh) => {
                measure::loaded(source, began.elapsed());
                publish(&loaded, fresh);
            }
            // The copy that we have stays valid; registrations that come now wait.
            Err(error) => tracing::warn!(%source, %error, "can't read the registry, keeping what we have"),
        }
    }
}

fn publish(loaded: &watch::Sender<Arc<Loaded>>, fresh: Loaded) {
    loaded.send_if_modified(|current| {
        let known = |(id, fresh): (&ProjectId, &Arc<ProjectInfo>)| {
            current.projects.get(id).is_some_and(|project| project.is_as(fresh))
        };
        let same = current.snapshot.revision == fresh.snapshot.revision
            && current.projects.len() == fresh.projects.len()
            && fresh.projects.iter().all(known);
        if !same {
            *current = Arc::new(fresh);
        }
        !same
    });
}

/// Returns at a signal that concerns the source, or after `refresh`.
async fn signalled(listener: &mut Option<SignalListener>, source: SourceId, refresh: Duration) {
    let Some(active) = listener else { return tokio::time::sleep(refresh).await };
    let concerned = async {
        loop {
            match active.next().await {
                Ok(Signal::Registry(other)) if other != source => {}
                Ok(Signal::Engines) => {}
                Ok(_) => return true,
                Err(_) => return false,
            }
        }
    };
    if timeout(refresh, concerned).await == Ok(false) {
        *listener = None;
    }
}
