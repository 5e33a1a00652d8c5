//! The API server that a test talks to: the fake one, or the one that `AURA_TEST_KUBECONFIG` names.

use std::{env, sync::Arc, time::Duration};

use async_trait::async_trait;
use aura_lease::{KubernetesLease, KubernetesOptions, LeaseBackend, conformance};
use aura_testkit::{FakeKubernetes, ServedKubernetes};
use axum::body::Body;
use http::{HeaderValue, Request, header};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api, Client, Config,
    api::PostParams,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use tower::{ServiceExt, service_fn};

const NAMESPACE: &str = "default";

/// A server on the network.
pub(crate) enum Server {
    Fake(ServedKubernetes),
    /// Path of a kubeconfig.
    Real(String),
}

impl Server {
    pub(crate) async fn start() -> Self {
        if let Ok(path) = env::var("AURA_TEST_KUBECONFIG") {
            return Self::Real(path);
        }
        let required = env::var_os("AURA_TEST_KUBECONFIG_REQUIRED").is_some();
        assert!(!required, "AURA_TEST_KUBECONFIG_REQUIRED is set and AURA_TEST_KUBECONFIG is not");
        Self::Fake(FakeKubernetes::new().serve().await.expect("a port"))
    }

    pub(crate) async fn client(&self, token: &str) -> Client {
        let path = match self {
            Self::Fake(served) => served.kubeconfig(token).expect("a kubeconfig"),
            Self::Real(path) => path.into(),
        };
        let kubeconfig = Kubeconfig::read_from(path).expect("a kubeconfig");
        let mut config =
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.expect("a configuration");
        config.default_retry = false;
        Client::try_from(config).expect("a client")
    }

    pub(crate) async fn api(&self, token: &str) -> Api<Lease> {
        Api::namespaced(self.client(token).await, NAMESPACE)
    }
}

#[async_trait]
impl conformance::Rig for Server {
    async fn backend(&self, process: usize) -> Arc<dyn LeaseBackend> {
        Arc::new(KubernetesLease::new(self.client(&format!("worker-{process}")).await, options()))
    }

    async fn steal(&self, lease: &str) {
        let api = self.api("thief").await;
        loop {
            let all = api.list(&Default::default()).await.expect("a list");
            let mut stolen = all.items.into_iter().find(|item| readable_name(item) == Some(lease)).expect("the lease");
            stolen.spec.get_or_insert_default().holder_identity = Some("thief".to_owned());
            let object = stolen.metadata.name.clone().expect("a name");
            // Against the holder's own renewals.
            if api.replace(&object, &PostParams::default(), &stolen).await.is_ok() {
                return;
            }
        }
    }

    fn short(&self) -> Duration {
        Duration::from_secs(2)
    }
}

pub(crate) fn options() -> KubernetesOptions {
    KubernetesOptions { namespace: Some(NAMESPACE.to_owned()), prefix: "aura-test".to_owned(), ..Default::default() }
}

/// The name that people know a lease by.
pub(crate) fn readable_name(lease: &Lease) -> Option<&str> {
    lease.metadata.annotations.as_ref()?.get("aura-realtime/lease").map(String::as_str)
}

/// A client of a fake server without a network between, so that time may be paused.
pub(crate) fn local_client(fake: &FakeKubernetes, token: &str) -> Client {
    let (router, bearer) = (fake.router(), HeaderValue::from_str(&format!("Bearer {token}")).expect("a header"));
    let service = service_fn(move |mut request: Request<kube::client::Body>| {
        request.headers_mut().insert(header::AUTHORIZATION, bearer.clone());
        router.clone().oneshot(request.map(Body::new))
    });
    Client::new(service, NAMESPACE)
}

/// The back end of one worker of a fake server, without a network between.
pub(crate) fn local_backend(fake: &FakeKubernetes, token: &str) -> KubernetesLease {
    KubernetesLease::new(local_client(fake, token), options())
}

/// The spec of a lease by its readable name, null if there is none.
pub(crate) fn stored(fake: &FakeKubernetes, name: &str) -> Value {
    let is_it = |lease: &Value| lease["metadata"]["annotations"]["aura-realtime/lease"] == json!(name);
    fake.leases(NAMESPACE).into_iter().find(is_it).unwrap_or_default()
}
