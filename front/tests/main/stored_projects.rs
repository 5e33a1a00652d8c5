use std::{sync::Arc, time::Duration};

use aura_auth::{JwksOptions, KeyRole, Minter, Verifier};
use aura_bus::{MemoryBus, SharedBus};
use aura_front::{Front, FrontDeps, FrontSettings};
use aura_store::{CreatedProject, MasterKey, NewProject, NewSource, Plugin, Store, migrate};
use aura_testkit::Postgres;
use aura_wire::phoenix::Version;
use serde_json::{Map, json};
use tokio_tungstenite::tungstenite::Error;
use tokio_util::sync::CancellationToken;

use crate::{client::Client, rig::hasty};

/// A front over a platform database.
pub(crate) struct Platform {
    pub(crate) postgres: Postgres,
    pub(crate) store: Store,
    pub(crate) bus: SharedBus,
    pub(crate) url: String,
    pub(crate) http: String,
    stop: CancellationToken,
}

impl Drop for Platform {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub(crate) async fn platform() -> Platform {
    let postgres = Postgres::start().await.expect("a server");
    let database = postgres.create_database("platform").await.expect("a database");
    migrate(&database).await.expect("migrations");
    let key = MasterKey::new(&"k".repeat(32)).expect("a key");
    let sub_id_key = key.sub_id_key();
    let store = Store::connect(&database, key).await.expect("a store");
    let bus: SharedBus = Arc::new(MemoryBus::new());
    let verifier = Verifier::new(JwksOptions { loopback: true, ..Default::default() });
    let settings = FrontSettings { verifier, ..hasty() };
    let front = Front::new(FrontDeps { store: store.clone(), bus: Arc::clone(&bus), sub_id_key, settings });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let (stop, running, router) = (CancellationToken::new(), front.clone(), front.router());
    let stopped = stop.clone();
    tokio::spawn(async move { running.run(stopped).await });
    tokio::spawn(async move { axum::serve(listener, router).await });
    let (url, http) = (format!("ws://127.0.0.1:{port}/socket/websocket"), format!("http://127.0.0.1:{port}"));
    Platform { postgres, store, bus, url, http, stop }
}

pub(crate) async fn project(store: &Store, name: &str) -> CreatedProject {
    let source = NewSource {
        name: "shared".to_owned(),
        replication_url: "postgres://localhost/x".to_owned().into(),
        admin_url: None,
        slot_name: None,
        plugin: Plugin::Auto,
        slot_recreate: aura_store::SlotRecreate::Auto,
    };
    let source = store.upsert_source(source).await.expect("a source").id;
    let new = NewProject { id: None, name: name.to_owned(), source, schema: None, settings: Default::default() };
    store.create_project(new, "test").await.expect("a project")
}

pub(crate) async fn status(url: &str, token: &str) -> u16 {
    match Client::connect(url, Version::V2, token).await {
        Ok(_) => 101,
        Err(Error::Http(response)) => response.status().as_u16(),
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn r_sec_2_only_live_keys_and_tokens_of_the_project_open_a_socket_or_channel() {
    let platform = platform().await;
    let (ours, theirs) = (project(&platform.store, "ours").await, project(&platform.store, "theirs").await);
    let (minter, foreign) = (Minter::new(&ours.secrets.jwt_secret), Minter::new(&theirs.secrets.jwt_secret));
    let (id, hour) = (ours.project.id, Duration::from_secs(3600));
    let anon = minter.project_key(id, ours.anon_key, KeyRole::Anon).expect("a key");
    let revoked = minter.project_key(id, theirs.anon_key, KeyRole::Anon).expect("a key");
    let raised = minter.project_key(id, ours.anon_key, KeyRole::ServiceRole).expect("a key");
    let forged = foreign.project_key(id, ours.anon_key, KeyRole::Anon).expect("a key");
    let unknown = minter.project_key(uuid_of(), ours.anon_key, KeyRole::Anon).expect("a key");
    let user = minter.user_token(id, "alice", Map::new(), hour).expect("a token");
    let mut no_ref = Map::new();
    no_ref.insert("ref".to_owned(), json!(theirs.project.id));
    let crossed = minter.user_token(id, "alice", no_ref, hour).expect("a token");
    for (token, wanted) in
        [(&anon, 101), (&user, 101), (&revoked, 401), (&raised, 401), (&forged, 401), (&unknown, 404), (&crossed, 401)]
    {
        assert_eq!(status(&platform.url, token).await, wanted);
    }
    let mut client = Client::connect(&platform.url, Version::V2, &anon).await.expect("a socket");
    for (token, ok) in [(&user, true), (&crossed, false), (&forged, false), (&raised, false)] {
        client.join_with("realtime:x", json!({}), Some(token)).await;
        let mut reply = client.next().await;
        if reply.event == "phx_close" {
            reply = client.next().await;
        }
        assert_eq!(reply.payload["status"] == "ok", ok, "{reply:?}");
    }
}

fn uuid_of() -> aura_domain::ProjectId {
    "6a0c2a2e-4f0a-4b62-9b5f-2f0f7e0d9c11".parse().expect("an id")
}
