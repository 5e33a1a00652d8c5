//! Which back end keeps the leases.

use std::{collections::HashMap, sync::Arc, time::Duration};

use aura_domain::WorkerId;
use aura_kit::{Failure, ShutdownHandle};
use aura_lease::{KubernetesLease, KubernetesOptions, LeaseBackend, LeaseError, NoLease};
use aura_store::{PostgresLease, Store, WorkerRow};
use tokio::time::sleep;

use crate::{NotAlone, WorkerSettings, ensure_alone, supervisor::HEARTBEAT};

/// Where the leases are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LeaseKind {
    /// In a cluster Kubernetes, else Postgres.
    Auto,
    /// `coordination.k8s.io/v1` of the cluster, or of what the kubeconfig says.
    Kubernetes,
    /// The platform database.
    Postgres,
    /// Always leading: for a single worker.
    None,
}

/// Why there are no leases.
#[derive(Debug, thiserror::Error)]
pub enum NoBackend {
    /// The cluster can't be talked to.
    #[error("LEASE_BACKEND=kubernetes: {0}")]
    Kubernetes(#[from] LeaseError),
    /// Without leases this worker must be alone.
    #[error(transparent)]
    NotAlone(#[from] NotAlone),
}

impl LeaseKind {
    /// What it stands for here.
    fn here(self) -> Self {
        match self {
            Self::Auto if KubernetesLease::is_in_cluster() => Self::Kubernetes,
            Self::Auto => Self::Postgres,
            chosen => chosen,
        }
    }

    /// Opens the back end. A cluster isn't asked for anything yet; [`Self::None`] waits until it is sure to be alone.
    pub(crate) async fn open(
        self,
        store: &Store,
        settings: &WorkerSettings,
        namespace: Option<String>,
    ) -> Result<Arc<dyn LeaseBackend>, NoBackend> {
        let kind = self.here();
        tracing::info!(backend = ?kind, "leases");
        Ok(match kind {
            Self::Kubernetes => {
                let options = KubernetesOptions { namespace, ..KubernetesOptions::default() };
                Arc::new(KubernetesLease::connect(options).await?)
            }
            Self::Auto | Self::Postgres => Arc::new(PostgresLease::new(store)),
            Self::None => {
                ensure_alone(store, settings).await?;
                Arc::new(NoLease)
            }
        })
    }
}

/// For workers without leases: fails the process as soon as another worker is heard, since both would lead.
pub(crate) async fn stay_alone(store: Store, me: WorkerId, shutdown: ShutdownHandle) {
    let mut silence = HashMap::new();
    loop {
        if let Ok(workers) = store.workers().await
            && let Some(rival) = heard(&mut silence, workers.into_iter().filter(|worker| worker.id != me))
        {
            let rival = NotAlone::Rival { rival: rival.id, host: rival.host };
            return shutdown.fail(Failure::new("lease", rival.to_string()));
        }
        sleep(HEARTBEAT / 2).await;
    }
}

/// The first whose heart has beaten since the look before: one that was killed is still registered for a while.
fn heard(silence: &mut HashMap<WorkerId, i64>, others: impl Iterator<Item = WorkerRow>) -> Option<WorkerRow> {
    let recent = |other: &WorkerRow| Duration::from_millis(other.silent_ms.unsigned_abs()) < HEARTBEAT * 2;
    others.filter(|other| !other.draining).find(|other| {
        let before = silence.insert(other.id.clone(), other.silent_ms);
        recent(other) && before.is_some_and(|before| other.silent_ms < before)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(silent_ms: i64, draining: bool) -> WorkerRow {
        WorkerRow {
            id: WorkerId("other".to_owned()),
            host: "h".to_owned(),
            version: "1".to_owned(),
            max_engines: 8,
            engines: 0,
            draining,
            started_at: "2026-01-01T00:00:00Z".to_owned(),
            silent_ms,
        }
    }

    #[test]
    fn r_sec_4_another_worker_is_heard_by_its_heartbeat_and_a_dead_or_leaving_one_is_not() {
        let mut silence = HashMap::new();
        for silent_ms in [100, 1100, 2100] {
            assert_eq!(heard(&mut silence, [worker(silent_ms, false)].into_iter()), None);
        }
        assert_eq!(heard(&mut silence, [worker(50, true)].into_iter()), None);
        // The database's clock was set back.
        assert_eq!(heard(&mut silence, [worker(90_000, false)].into_iter()), None);
        assert_eq!(heard(&mut silence, [worker(80_000, false)].into_iter()), None);
        assert!(heard(&mut silence, [worker(50, false)].into_iter()).is_some());
    }
}
