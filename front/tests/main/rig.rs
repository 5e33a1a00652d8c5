use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use aura_bus::{Headers, MemoryBus, Message, SharedBus, Subject};
use aura_domain::{Claims, Epoch, Generation, Lsn, Position, ProjectId, SourceId, SubId, SubIdKey};
use aura_front::{Authenticator, Front, FrontSettings, Identity, TokenError};
use aura_kit::ShutdownHandle;
use aura_testkit::eventually;
use aura_wire::{ChangeEnvelope, phoenix::Version};
use serde_json::{json, value::RawValue};
use tokio_util::sync::CancellationToken;

use crate::{
    client::{Client, PATIENCE},
    leader::Leader,
};

/// Tokens of the form `<sub>.<role>.<exp>`; `forged`, `unknown` and `away` are refused.
pub(crate) struct Tokens;

pub(crate) const FAR: i64 = 4_000_000_000;

pub(crate) fn project() -> ProjectId {
    "6a0c2a2e-4f0a-4b62-9b5f-2f0f7e0d9c11".parse().expect("an id")
}

pub(crate) fn source() -> SourceId {
    "0b0e9d6e-0000-4000-8000-000000000001".parse().expect("an id")
}

#[async_trait]
impl Authenticator for Tokens {
    async fn connect(&self, token: &str) -> Result<Identity, TokenError> {
        let parts: Vec<_> = token.split('.').collect();
        let [sub, role, exp] = parts[..] else {
            return Err(match token {
                "unknown" => TokenError::UnknownProject,
                "forged" => TokenError::Signature,
                "away" => TokenError::Unavailable,
                _ => TokenError::Malformed,
            });
        };
        let expires: i64 = exp.parse().map_err(|_| TokenError::MissingClaims)?;
        if expires < 1_000_000_000 {
            return Err(TokenError::Expired { seconds: 5 });
        }
        let claims = Claims::from_payload(&json!({"sub": sub, "role": role})).expect("an object");
        Ok(Identity {
            project: project(),
            source: source(),
            role: role.to_owned(),
            claims,
            expires,
            read_only: sub == "inspector",
            ends: None,
            key: None,
        })
    }

    async fn channel(&self, _: ProjectId, token: &str) -> Result<Identity, TokenError> {
        self.connect(token).await
    }
}

/// A front on a port, with a leader behind the bus.
pub(crate) struct Rig {
    pub(crate) front: Front,
    pub(crate) bus: SharedBus,
    pub(crate) leader: Leader,
    pub(crate) http: String,
    pub(crate) ws: String,
    stop: CancellationToken,
}

impl Rig {
    pub(crate) async fn start() -> Self {
        Self::start_with(FrontSettings::default(), Arc::new(MemoryBus::new())).await
    }

    pub(crate) async fn start_with(settings: FrontSettings, bus: SharedBus) -> Self {
        let leader = Leader::start(Arc::clone(&bus), source()).await;
        let front = Front::with_authenticator(Arc::new(Tokens), Arc::clone(&bus), SubIdKey::new([7; 32]), settings);
        let port = serve(&front).await;
        let stop = CancellationToken::new();
        let (running, stopped) = (front.clone(), stop.clone());
        tokio::spawn(async move { running.run(stopped).await });
        let (http, ws) = (format!("http://127.0.0.1:{port}"), format!("ws://127.0.0.1:{port}/realtime/v1/websocket"));
        Self { front, bus, leader, http, ws, stop }
    }

    pub(crate) async fn connect(&self, version: Version, sub: &str) -> Client {
        let token = format!("{sub}.authenticated.{FAR}");
        Client::connect(&self.ws, version, &token).await.expect("a socket")
    }

    /// A client of version 2 that receives changes of `table`.
    pub(crate) async fn subscriber(&self, table: &str, sub: &str) -> Client {
        let mut client = self.connect(Version::V2, sub).await;
        client.subscribe("realtime:room", json!([{"event": "*", "schema": "public", "table": table}])).await;
        client
    }

    /// Publishes an INSERT as the worker does.
    pub(crate) async fn change(&self, seq: u64, table: &str, allowed: &[SubId]) {
        self.publish(change(seq, seq, table, allowed)).await;
    }

    pub(crate) async fn publish(&self, message: Message) {
        self.bus.publish(message).await.expect("the bus takes it");
    }

    /// Waits until the leader's copy is as wanted.
    pub(crate) async fn leader_has(&self, subscriptions: usize) {
        let wanted = || async { self.leader.state().subscriptions.len() == subscriptions };
        eventually(PATIENCE, wanted).await.expect("the leader's copy follows");
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn serve(front: &Front) -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let router = front.router();
    tokio::spawn(async move { axum::serve(listener, router).await });
    port
}

/// Position of the `n`th change.
pub(crate) fn position(n: u64) -> Position {
    Position { generation: Generation(1), commit: Lsn(n), change: Lsn(n), n: 0 }
}

/// A change envelope on its subject, in epoch 1.
pub(crate) fn change(seq: u64, at: u64, table: &str, allowed: &[SubId]) -> Message {
    let data = json!({
        "type": "INSERT", "schema": "public", "table": table, "commit_timestamp": "2026-01-05T10:20:30.123Z",
        "columns": [{"name": "id", "type": "int4"}], "record": {"id": at}, "errors": null,
    });
    let data = RawValue::from_string(data.to_string()).expect("JSON");
    let envelope = ChangeEnvelope {
        v: 1,
        project: project(),
        source: source(),
        seq,
        position: position(at),
        m: 0,
        kind: "INSERT",
        schema: "public",
        table,
        allowed_sub_ids: allowed,
        part: None,
        data: &data,
    };
    let mut message = Message::new(Subject::changes(project(), "public", table), envelope.encode());
    message.headers = Headers { origin: Some("w".to_owned()), source: Some(source()), epoch: Some(Epoch(1)) };
    message
}

/// Settings with short times.
pub(crate) fn hasty() -> FrontSettings {
    FrontSettings {
        join_hold: Duration::from_millis(300),
        interruption: Duration::from_millis(300),
        heartbeat: Duration::from_millis(200),
        ..Default::default()
    }
}

/// A shutdown that has begun.
pub(crate) fn triggered() -> ShutdownHandle {
    let shutdown = ShutdownHandle::new(Duration::from_secs(25));
    shutdown.trigger();
    shutdown
}
