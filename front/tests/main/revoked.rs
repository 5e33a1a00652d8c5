//! Who is no longer accepted, or is sent away, is gone within 2 s (R-FRT-3).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aura_auth::{
    KeyRole, Minter,
    issuer::{Endpoint, Key},
};
use aura_bus::{Message, Subject};
use aura_domain::{ProjectId, Target};
use aura_store::{Caller, CreatedProject, KeyRotation};
use aura_wire::{control::Disconnect, phoenix::Version};
use secrecy::SecretString;
use serde_json::{Map, Value, json};
use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    client::Client,
    stored_projects::{Platform, platform, project, status},
    streams::Stream,
};

/// R-FRT-3.
const LIMIT: Duration = Duration::from_secs(2);
const HOUR: Duration = Duration::from_secs(3600);
const CALLER: Caller<'static> = Caller { actor: "platform", request_id: None };

struct Stage {
    platform: Platform,
    created: CreatedProject,
}

impl Stage {
    async fn new() -> Self {
        let platform = platform().await;
        let created = project(&platform.store, "ours").await;
        Self { platform, created }
    }

    fn id(&self) -> ProjectId {
        self.created.project.id
    }

    fn minter(&self) -> Minter<'_> {
        Minter::new(&self.created.secrets.jwt_secret)
    }

    fn anon(&self) -> String {
        self.minter().project_key(self.id(), self.created.anon_key, KeyRole::Anon).expect("a key")
    }

    fn service(&self) -> String {
        let key = self.created.service_role_key;
        self.minter().project_key(self.id(), key, KeyRole::ServiceRole).expect("a key")
    }

    fn user(&self, sub: &str) -> String {
        self.minter().user_token(self.id(), sub, Map::new(), HOUR).expect("a token")
    }

    async fn socket(&self, token: &str) -> Client {
        Client::connect(&self.platform.url, Version::V2, token).await.expect("a socket")
    }

    /// A socket with the anon key, and a channel of this token.
    async fn channel(&self, token: &str) -> Client {
        let mut client = self.socket(&self.anon()).await;
        client.join_with("realtime:room", json!({}), Some(token)).await;
        assert_eq!(client.next().await.payload["status"], "ok");
        client
    }

    async fn rotate(&self, roles: &[KeyRole], secret: bool, overlap: Duration) -> (SecretString, Vec<Uuid>) {
        let rotation = KeyRotation { roles: roles.to_vec(), secret, overlap };
        let rotated = self.platform.store.rotate_keys(self.id(), rotation, CALLER).await.expect("rotated");
        (rotated.jwt_secret, rotated.keys.iter().map(|key| key.id).collect())
    }

    /// As the api sends it.
    async fn disconnect(&self, on: ProjectId, order: Value) {
        let message = Message::new(Subject::disconnect(on), order.to_string());
        self.platform.bus.publish(message).await.expect("published");
    }

    /// As a change of the project's settings signals it.
    async fn set(&self, settings: &Value) {
        let client = self.platform.postgres.client("platform").await.expect("a superuser");
        let sql = "with changed as (update aura.projects set settings = $1::text::jsonb returning id::text)
                   select pg_notify('aura_projects', id) from changed";
        client.query(sql, &[&settings.to_string()]).await.expect("changed");
    }
}

/// Waits for the close frame with this code, at most 2 s from now.
async fn gone(client: &mut Client) {
    let began = Instant::now();
    assert_eq!(client.close_code().await, Some(1008));
    assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
}

/// Waits for the end of the channel; the socket lives.
async fn closed(client: &mut Client) {
    let began = Instant::now();
    assert_eq!(client.next().await.event, "system");
    assert_eq!(client.next().await.event, "phx_close");
    assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
    client.expect_nothing().await;
}

#[tokio::test]
async fn r_frt_3_a_key_that_is_replaced_at_once_closes_its_sockets_and_streams_and_no_other() {
    let stage = Stage::new().await;
    let (anon, service) = (stage.anon(), stage.service());
    let (mut old, mut other) = (stage.socket(&anon).await, stage.socket(&service).await);
    let path = "/realtime/v1/sse?table=t";
    let mut stream = Stream::open(&stage.platform.http, path, &format!("apikey: {anon}\r\n")).await;
    stream.until("event: system").await;
    let (_, keys) = stage.rotate(&[KeyRole::Anon], false, Duration::ZERO).await;
    gone(&mut old).await;
    stream.end().await;
    assert!(
        stream.text.ends_with("\n\n") && stream.text.contains("Failed to validate JWT signature"),
        "{}",
        stream.text
    );
    other.expect_nothing().await;
    let fresh = stage.minter().project_key(stage.id(), keys[0], KeyRole::Anon).expect("a key");
    assert_eq!(status(&stage.platform.url, &anon).await, 401);
    assert_eq!(status(&stage.platform.url, &fresh).await, 101);
}

#[tokio::test]
async fn r_frt_3_a_key_that_is_being_replaced_is_good_until_its_end() {
    let stage = Stage::new().await;
    let anon = stage.anon();
    let mut before = stage.socket(&anon).await;
    let overlap = Duration::from_secs(4);
    let ends = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970") + overlap;
    stage.rotate(&[KeyRole::Anon], false, overlap).await;
    before.expect_nothing().await;
    let mut within = stage.socket(&anon).await;
    within.expect_nothing().await;
    for client in [&mut before, &mut within] {
        assert_eq!(client.close_code().await, Some(1008));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    assert!(now + Duration::from_secs(1) >= ends && now <= ends + LIMIT, "{now:?}, wanted {ends:?}");
    assert_eq!(status(&stage.platform.url, &anon).await, 401);
}

#[tokio::test]
async fn r_frt_3_a_new_secret_takes_users_along_at_the_end_of_its_overlap() {
    let stage = Stage::new().await;
    let alice = stage.user("alice");
    let mut socket = stage.socket(&alice).await;
    let (secret, _) = stage.rotate(&[], true, HOUR).await;
    socket.expect_nothing().await;
    let renewed = Minter::new(&secret).user_token(stage.id(), "alice", Map::new(), HOUR).expect("a token");
    assert_eq!(status(&stage.platform.url, &alice).await, 101, "both are good");
    // A front that has just looked knows the new one when the signal is here.
    let known = || async { status(&stage.platform.url, &renewed).await == 101 };
    aura_testkit::eventually(LIMIT, known).await.expect("the new one as well");
    let mut current = stage.socket(&renewed).await;
    stage.rotate(&[], true, Duration::ZERO).await;
    gone(&mut socket).await;
    gone(&mut current).await;
    for token in [&alice, &renewed, &stage.anon()] {
        assert_eq!(status(&stage.platform.url, token).await, 401);
    }
}

#[tokio::test]
async fn r_frt_3_disconnect_closes_a_subjects_or_keys_connections_and_nobody_elses() {
    let stage = Stage::new().await;
    let theirs = project(&stage.platform.store, "theirs").await;
    let foreign = Minter::new(&theirs.secrets.jwt_secret);
    let foreign = foreign.user_token(theirs.project.id, "alice", Map::new(), HOUR).expect("a token");
    let mut alice = stage.socket(&stage.user("alice")).await;
    let mut alices_channel = stage.channel(&stage.user("alice")).await;
    let mut bob = stage.channel(&stage.user("bob")).await;
    let mut namesake = stage.socket(&foreign).await;
    let mut service = stage.socket(&stage.service()).await;
    let order =
        |project: ProjectId, target: Target| serde_json::to_value(Disconnect { project, target }).expect("an object");
    let subject = order(stage.id(), Target::Subject("alice".to_owned()));
    assert_eq!(subject, json!({"project": stage.id(), "subject": "alice"}));
    // Neither in another's name, nor in a shape that says nothing.
    stage.disconnect(theirs.project.id, subject.clone()).await;
    stage.disconnect(stage.id(), json!({"project": stage.id()})).await;
    stage.disconnect(stage.id(), subject).await;
    gone(&mut alice).await;
    gone(&mut alices_channel).await;
    namesake.expect_nothing().await;
    bob.expect_nothing().await;
    stage.disconnect(stage.id(), order(stage.id(), Target::KeyId(stage.created.anon_key))).await;
    gone(&mut bob).await;
    service.expect_nothing().await;
    assert_eq!(status(&stage.platform.url, &stage.user("alice")).await, 101, "it is no ban");
}

#[tokio::test]
async fn r_rls_8_role_words_come_and_go_with_the_settings() {
    let stage = Stage::new().await;
    let claims = Map::from_iter([("role".to_owned(), json!("editor"))]);
    let editor = stage.minter().user_token(stage.id(), "alice", claims, HOUR).expect("a token");
    let mut client = stage.socket(&stage.anon()).await;
    client.join_with("realtime:room", json!({}), Some(&editor)).await;
    let refused = client.next().await.payload;
    assert_eq!(refused["response"]["reason"], "InvalidJWTToken: The role of the token is not a role of this project");
    stage.set(&json!({"roles": ["editor"]})).await;
    // The word is known once the signal is here, at the latest after a second.
    let joined = || async { status(&stage.platform.url, &editor).await == 101 };
    aura_testkit::eventually(LIMIT, joined).await.expect("known");
    let mut client = stage.channel(&editor).await;
    stage.set(&json!({})).await;
    closed(&mut client).await;
}

#[tokio::test]
async fn n_9_a_token_of_a_jwks_joins_and_goes_with_its_url() {
    let stage = Stage::new().await;
    let (key, stranger) = (Key::edwards("k1"), Key::edwards("k2"));
    let endpoint = Endpoint::of(&[&key]).await;
    stage.set(&json!({"jwks_url": endpoint.url})).await;
    let exp = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs() + 60;
    let claims = json!({"sub": "alice", "role": "authenticated", "exp": exp});
    let (good, unknown) = (key.sign(&claims), stranger.sign(&claims));
    let known = || async {
        let mut client = stage.socket(&stage.anon()).await;
        client.join_with("realtime:room", json!({}), Some(&good)).await;
        client.next().await.payload["status"] == "ok"
    };
    aura_testkit::eventually(LIMIT, known).await.expect("the URL is known");
    assert_eq!(status(&stage.platform.url, &good).await, 404, "without ref it names no project");
    let mut client = stage.channel(&good).await;
    client.send(json!("1"), json!("2"), "realtime:room", "access_token", json!({"access_token": unknown})).await;
    closed(&mut client).await;
    let raised = key.sign(&json!({"sub": "alice", "role": "service_role", "exp": exp}));
    client.join_with("realtime:room", json!({}), Some(&raised)).await;
    assert_eq!(client.next().await.payload["status"], "error");
    let mut client = stage.channel(&good).await;
    stage.set(&json!({})).await;
    closed(&mut client).await;
    assert_eq!(endpoint.hits(), 1);
}
