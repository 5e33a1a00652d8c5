//! Leases of a Kubernetes cluster (`coordination.k8s.io/v1`).
//!
//! Every write is a PUT with uid and resourceVersion and the whole spec, or a POST that only creates, so that of many takers
//! one wins. Expiry is judged by what we saw change and when, on our monotonic clock. A write without an answer is looked up.
//! Needs `get`, `list`, `watch`, `create` and `update` on leases.

mod api;
mod record;
mod seen;
mod watch;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::{WriteError, get, write};
use async_trait::async_trait;
use aura_domain::WorkerId;
use k8s_openapi::{api::coordination::v1::Lease, jiff::Timestamp};
use kube::{Api, Client, Config};
use seen::{Sightings, Verdict};
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::{Claim, Holder, LeaseBackend, LeaseError};

/// Tries of one renewal or release against others' writes and lost answers.
const TRIES: usize = 3;

/// Where the leases are.
#[derive(Debug, Clone)]
pub struct KubernetesOptions {
    /// Namespace; the pod's own by default.
    pub namespace: Option<String>,
    /// First part of the objects' names, a DNS label.
    pub prefix: String,
    /// Time that is written for people to read; nothing is decided by it.
    pub clock: fn() -> Timestamp,
}

impl Default for KubernetesOptions {
    fn default() -> Self {
        Self { namespace: None, prefix: "aura".to_owned(), clock: Timestamp::now }
    }
}

/// The back end. Its watch ends with it.
#[derive(Debug)]
pub struct KubernetesLease {
    inner: Arc<Inner>,
    _watch: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct Inner {
    api: Api<Lease>,
    options: KubernetesOptions,
    sightings: Mutex<Sightings>,
}

impl KubernetesLease {
    /// Whether this process runs in a pod that may talk to its cluster.
    pub fn is_in_cluster() -> bool {
        std::env::var_os("KUBERNETES_SERVICE_HOST").is_some_and(|host| !host.is_empty())
            && std::path::Path::new("/var/run/secrets/kubernetes.io/serviceaccount/token").exists()
    }

    /// The cluster this process runs in; outside of one what the kubeconfig says.
    ///
    /// # Errors
    /// No configuration was found, or it can't be used. The server is not asked yet.
    pub async fn connect(options: KubernetesOptions) -> Result<Self, LeaseError> {
        let mut config = if Self::is_in_cluster() {
            Config::incluster().map_err(|error| LeaseError::Backend(Box::new(error)))?
        } else {
            Config::infer().await.map_err(|error| LeaseError::Backend(Box::new(error)))?
        };
        // The client would try a write again for minutes, long after the lease it is for is lost.
        config.default_retry = false;
        Ok(Self::new(Client::try_from(config).map_err(api::backend)?, options))
    }

    /// With a client that must not retry by itself.
    pub fn new(client: Client, options: KubernetesOptions) -> Self {
        let api = match &options.namespace {
            Some(namespace) => Api::namespaced(client, namespace),
            None => Api::default_namespaced(client),
        };
        let inner = Arc::new(Inner { api, options, sightings: Mutex::default() });
        let watch = AbortOnDropHandle::new(tokio::spawn(watch::follow(Arc::clone(&inner))));
        Self { inner, _watch: watch }
    }
}

impl Inner {
    fn sightings(&self) -> MutexGuard<'_, Sightings> {
        // Each observation is whole, whoever panicked.
        self.sightings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn object(&self, name: &str) -> String {
        record::object_name(&self.options.prefix, name)
    }

    fn now(&self) -> Timestamp {
        (self.options.clock)()
    }

    /// Asks the server.
    async fn read(&self, object: &str) -> Result<Option<Lease>, LeaseError> {
        let lease = get(&self.api, object).await?;
        self.sightings().read(object, lease.as_ref(), Instant::now());
        Ok(lease)
    }

    async fn write(&self, object: &str, lease: &Lease) -> Result<(), WriteError> {
        let written = write(&self.api, object, lease).await?;
        self.sightings().read(object, Some(&written), Instant::now());
        Ok(())
    }

    /// The state of `claim`'s lease, if it is still its: as we know it, or `fresh` as the server says.
    async fn claimed(&self, object: &str, claim: &Claim, fresh: bool) -> Result<Option<Lease>, LeaseError> {
        let ours = |lease: &Lease| record::is_held_by(lease, &claim.holder, claim.version);
        let known = self.sightings().last(object).cloned().filter(|lease| ours(lease) && !fresh);
        match known {
            Some(lease) => Ok(Some(lease)),
            None => Ok(self.read(object).await?.filter(ours)),
        }
    }
}

#[async_trait]
impl LeaseBackend for KubernetesLease {
    async fn try_acquire(
        &self,
        name: &str,
        holder: &WorkerId,
        duration: Duration,
    ) -> Result<Option<Claim>, LeaseError> {
        let (inner, object) = (&self.inner, self.inner.object(name));
        if inner.sightings().is_told_held(&object, holder, Instant::now()) {
            return Ok(None);
        }
        inner.read(&object).await?;
        let verdict = inner.sightings().verdict(&object, holder, Instant::now());
        let (before, probation) = match verdict {
            Verdict::Held(_) => return Ok(None),
            Verdict::Create(probation) => (None, probation),
            Verdict::Take(lease) => (Some(*lease), None),
            Verdict::Wait(lease) => {
                // So that nobody else takes it meanwhile; whatever comes of this, there is a next try.
                drop(inner.write(&object, &record::renewed(*lease, inner.now())).await);
                return Ok(None);
            }
        };
        // Says which acquisition a record is of, also when the answer to this write gets lost.
        let version = rand::random::<i64>() & i64::MAX;
        let claim = Claim { name: name.to_owned(), holder: holder.clone(), version, duration };
        let wanted = record::taken(before.as_ref(), &object, &claim, inner.now());
        if let Some(believed) = probation {
            // Before the write, which may arrive when we have given it up.
            inner.sightings().on_probation(&object, version, Instant::now() + believed.max(duration));
        }
        match inner.write(&object, &wanted).await {
            Ok(()) => {}
            Err(WriteError::Conflict) => return Ok(None),
            Err(WriteError::Refused(error)) => return Err(error),
            // It may still be applied; then it is ours at the next try.
            Err(WriteError::Doubtful(error)) => {
                inner.claimed(&object, &claim, true).await?.ok_or(error)?;
            }
        }
        Ok(probation.is_none().then_some(claim))
    }

    async fn renew(&self, claim: &Claim) -> Result<bool, LeaseError> {
        let (inner, object) = (&self.inner, self.inner.object(&claim.name));
        let mut doubt: Option<String> = None;
        for attempt in 0..TRIES {
            let Some(lease) = inner.claimed(&object, claim, attempt > 0).await? else { return Ok(false) };
            if doubt.is_some() && doubt.as_deref() == record::write_token(&lease) {
                return Ok(true);
            }
            let wanted = record::renewed(lease, inner.now());
            match inner.write(&object, &wanted).await {
                Ok(()) => return Ok(true),
                Err(WriteError::Conflict) => doubt = None,
                Err(WriteError::Refused(error)) => return Err(error),
                Err(WriteError::Doubtful(_)) => doubt = record::write_token(&wanted).map(str::to_owned),
            }
        }
        Err(LeaseError::Backend("others keep writing this lease, or answers keep getting lost".into()))
    }

    async fn release(&self, claim: Claim) -> Result<(), LeaseError> {
        let (inner, object) = (&self.inner, self.inner.object(&claim.name));
        for _ in 0..TRIES {
            // Fresh: the lease may be another's since our last look.
            let Some(lease) = inner.claimed(&object, &claim, true).await? else { return Ok(()) };
            match inner.write(&object, &record::freed(lease, inner.now())).await {
                Ok(()) => return Ok(()),
                Err(WriteError::Refused(error)) => return Err(error),
                Err(WriteError::Conflict | WriteError::Doubtful(_)) => {}
            }
        }
        Err(LeaseError::Backend("others keep writing this lease, or answers keep getting lost".into()))
    }

    async fn holder(&self, name: &str) -> Result<Option<Holder>, LeaseError> {
        let object = self.inner.object(name);
        self.inner.read(&object).await?;
        let holder = self.inner.sightings().holder(&object, Instant::now());
        Ok(holder.map(|(holder, remaining)| Holder { holder: WorkerId(holder), remaining }))
    }

    async fn changed_hands(&self, name: &str) {
        let mut hands = self.inner.sightings().hands(&self.inner.object(name), Instant::now());
        // The sender lives in the sightings.
        drop(hands.changed().await);
    }
}
