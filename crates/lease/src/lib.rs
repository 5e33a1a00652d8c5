//! The exclusive right to run a source's engine. A lease gives liveness; safety comes from the epoch in the platform
//! database (R-LEASE-2), so a wrong belief about the lease costs an error and never a wrong write.

use std::time::Duration;

use async_trait::async_trait;
use aura_domain::WorkerId;

#[cfg(feature = "conformance")]
pub mod conformance;
mod identity;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod none;
mod run;

pub use identity::{Pod, is_predecessor, pod_prefix, worker_id};
#[cfg(feature = "kubernetes")]
pub use kubernetes::{KubernetesLease, KubernetesOptions};
pub use none::NoLease;
pub use run::{Guard, LeaseConfig, LeaseLost, Leave, run_with_lease};

/// A lease that was won: proof for [`LeaseBackend::renew`] and [`LeaseBackend::release`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Name of the lease, one per source.
    pub name: String,
    /// Who holds it.
    pub holder: WorkerId,
    /// Compare-and-set token of the back end; changes with every acquisition.
    pub version: i64,
    /// From a successful acquisition or renewal to expiry.
    pub duration: Duration,
}

/// Who holds a lease, as the back end tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The worker.
    pub holder: WorkerId,
    /// Time left by the back end's own clock; zero = expired, anyone may take it.
    pub remaining: Duration,
}

/// Why a back end couldn't answer. Never means "lost": that is [`LeaseBackend::renew`] saying `false`.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// Not reachable, or it failed.
    #[error("the lease back end failed: {0}")]
    Backend(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// No answer in time; the call may have taken effect.
    #[error("the lease back end did not answer within {0:?}")]
    Timeout(Duration),
}

/// A store of leases: Kubernetes, the platform database or none. One conformance suite runs on all.
#[async_trait]
pub trait LeaseBackend: Send + Sync + 'static {
    /// Whether at most one worker holds a lease at a time. A back end that doesn't exclude is for one worker only.
    fn is_exclusive(&self) -> bool {
        true
    }

    /// Tries once: takes the lease if it is free, expired, already `holder`'s or an earlier start's of the same pod. `None` =
    /// somebody else has it.
    async fn try_acquire(&self, name: &str, holder: &WorkerId, duration: Duration)
    -> Result<Option<Claim>, LeaseError>;

    /// Extends the lease by its duration from now. `false` = it isn't ours any more.
    async fn renew(&self, claim: &Claim) -> Result<bool, LeaseError>;

    /// Gives the lease back at once; harmless if it was lost before.
    async fn release(&self, claim: Claim) -> Result<(), LeaseError>;

    /// Who holds it, expired or not; `None` = nobody since it was released, or never.
    async fn holder(&self, name: &str) -> Result<Option<Holder>, LeaseError>;

    /// Returns when the lease may have changed hands since the call: a hint to look at once instead of in a while. Never
    /// returns where the back end hears nothing.
    async fn changed_hands(&self, _name: &str) {
        std::future::pending::<()>().await;
    }
}
