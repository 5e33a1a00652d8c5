//! Which engines this process runs: one lease loop for each source of the platform database.

use std::{collections::HashMap, sync::Arc, time::Duration};

use aura_domain::{Desired, SourceId};
use aura_lease::{LeaseConfig, run_with_lease};
use aura_store::{Signal, SignalListener, Source};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    engine::{self, EngineDeps},
    status::EngineStatus,
};

/// Sources are looked at this often, signal or not.
const REFRESH: Duration = Duration::from_secs(3);

/// Runs engines until `stop`, then waits until all have drained and left.
pub(crate) async fn run(deps: EngineDeps, stop: CancellationToken) {
    let tasks = TaskTracker::new();
    let mut running: HashMap<SourceId, CancellationToken> = HashMap::new();
    let mut listener = None;
    while !stop.is_cancelled() {
        match deps.store.sources().await {
            Ok(sources) => reconcile(&deps, sources, &mut running, &tasks, &stop).await,
            Err(error) => tracing::warn!(%error, "can't read the sources, keeping the engines that run"),
        }
        if listener.is_none() {
            listener = deps.store.listen().await.ok();
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = signalled(&mut listener) => {}
        }
    }
    tasks.close();
    tasks.wait().await;
}

/// Starts what should run here and stops what should not.
async fn reconcile(
    deps: &EngineDeps,
    sources: Vec<Source>,
    running: &mut HashMap<SourceId, CancellationToken>,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) {
    for source in sources {
        let wanted = match deps.store.engine(source.id).await {
            Ok(engine) => engine.is_none_or(|engine| engine.desired == Desired::Running),
            Err(_) => continue,
        };
        match (wanted, running.get(&source.id)) {
            (true, None) => {
                let token = stop.child_token();
                running.insert(source.id, token.clone());
                deps.board.update(source.id, &source.name, |_: &mut EngineStatus| {});
                tasks.spawn(hold(deps.clone(), source, token));
            }
            (false, Some(token)) => {
                token.cancel();
                running.remove(&source.id);
            }
            _ => {}
        }
    }
}

async fn hold(deps: EngineDeps, source: Source, stop: CancellationToken) {
    let config = LeaseConfig {
        name: format!("source-{}", source.id),
        holder: deps.worker.clone(),
        duration: deps.settings.lease_duration,
        retry: (deps.settings.lease_duration / 10).min(Duration::from_secs(1)),
    };
    let lease = Arc::clone(&deps.lease);
    let work = |claim, lost| engine::run(deps.clone(), source.clone(), claim, lost, stop.clone());
    run_with_lease(&*lease, &config, stop.clone(), work).await;
}

async fn signalled(listener: &mut Option<SignalListener>) {
    let Some(active) = listener else { return tokio::time::sleep(REFRESH).await };
    let engines = async {
        loop {
            match active.next().await {
                Ok(Signal::Engines | Signal::Lost) => return true,
                Ok(_) => {}
                Err(_) => return false,
            }
        }
    };
    if tokio::time::timeout(REFRESH, engines).await == Ok(false) {
        *listener = None;
    }
}
