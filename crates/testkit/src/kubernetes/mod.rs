//! A Kubernetes API server that knows Leases only. What it answers was read off a real 1.36 server; on top of that it can
//! fail each client in its own way. A client says who it is by its bearer token.

mod faults;
mod objects;
mod routes;
mod status;

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::Result;
use axum::Router;
use faults::Faults;
pub use faults::{Fault, On};
use objects::Objects;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::dirs::RunDir;

/// The server. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct FakeKubernetes {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Rises with each change of an object.
    revision: watch::Sender<u64>,
    frozen: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct State {
    objects: Objects,
    clients: HashMap<String, Client>,
}

#[derive(Debug, Default)]
struct Client {
    faults: Faults,
    /// Rises when its watches are to be cut.
    cuts: watch::Sender<u64>,
    frozen: watch::Sender<bool>,
}

impl FakeKubernetes {
    /// An empty server.
    pub fn new() -> Self {
        Self::default()
    }

    /// The server as a service: for clients in the same process, without a network.
    pub fn router(&self) -> Router {
        routes::router(self.clone())
    }

    /// Listens on loopback until the answer is dropped.
    pub async fn serve(&self) -> Result<ServedKubernetes> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let stop = CancellationToken::new();
        let server = axum::serve(listener, self.router());
        tokio::spawn({
            let stop = stop.clone();
            async move { stop.run_until_cancelled(server.into_future()).await }
        });
        Ok(ServedKubernetes { url, _stop: stop.drop_guard(), directory: RunDir::create("kubernetes")? })
    }

    /// The switches of one client.
    pub fn client(&self, token: &str) -> ClientSwitches {
        ClientSwitches { server: self.clone(), token: token.to_owned() }
    }

    /// Every request hangs, watches are silent.
    pub fn freeze(&self, frozen: bool) {
        self.shared.frozen.send_replace(frozen);
    }

    /// Watches from before now are answered 410.
    pub fn compact(&self) {
        self.state().objects.compact();
    }

    /// Every lease of a namespace.
    pub fn leases(&self, namespace: &str) -> Vec<Value> {
        self.state().objects.list(namespace, "")["items"].as_array().cloned().unwrap_or_default()
    }

    /// Deletes a lease, as an operator would.
    pub fn delete(&self, namespace: &str, name: &str) -> bool {
        let deleted = self.state().objects.delete(&(namespace.to_owned(), name.to_owned()), &json!({}));
        self.announce();
        deleted.is_ok()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panicked test's state is of no use to anybody; the others' is whole.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn announce(&self) {
        let revision = self.state().objects.revision();
        self.shared.revision.send_replace(revision);
    }
}

/// Fault switches of one client.
#[derive(Debug, Clone)]
pub struct ClientSwitches {
    server: FakeKubernetes,
    token: String,
}

impl ClientSwitches {
    /// Its requests fail until [`Self::heal`].
    pub fn fail(&self, on: On, fault: Fault) {
        self.with(|client| client.faults.fail(on, fault));
    }

    /// Its next request of that kind fails.
    pub fn once(&self, on: On, fault: Fault) {
        self.with(|client| client.faults.once(on, fault));
    }

    /// Nothing fails any more.
    pub fn heal(&self) {
        self.with(|client| {
            client.faults.heal();
            client.frozen.send_replace(false);
        });
    }

    /// Its requests hang, and its watches are silent.
    pub fn freeze(&self, frozen: bool) {
        self.with(|client| client.frozen.send_replace(frozen));
    }

    /// Its watches break off.
    pub fn cut_watches(&self) {
        self.with(|client| client.cuts.send_modify(|cuts| *cuts += 1));
    }

    /// Its lists are answered with what is there now, until [`Self::heal`].
    pub fn stale_lists(&self) {
        let objects = self.server.state().objects.clone();
        self.with(|client| client.faults.stale_list = Some(objects));
    }

    /// How many requests of a kind it has sent.
    pub fn requests(&self, on: On) -> usize {
        self.with(|client| client.faults.seen.iter().filter(|kind| on == On::Any || **kind == on).count())
    }

    fn with<T>(&self, change: impl FnOnce(&mut Client) -> T) -> T {
        change(self.server.state().clients.entry(self.token.clone()).or_default())
    }
}

/// A server with an address.
#[derive(Debug)]
pub struct ServedKubernetes {
    url: String,
    directory: RunDir,
    _stop: DropGuard,
}

impl ServedKubernetes {
    /// Where it listens.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Writes a kubeconfig for the client with that token; its namespace is `default`.
    pub fn kubeconfig(&self, token: &str) -> Result<PathBuf> {
        let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"token": token}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": "default"}}]});
        let path = self.directory.path().join(format!("{token}.json"));
        std::fs::write(&path, config.to_string())?;
        Ok(path)
    }
}
