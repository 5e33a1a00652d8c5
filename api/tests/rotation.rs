//! Keys are listed and replaced, users are sent away.

use anyhow::{Context, Result};
use aura_auth::Minter;
use aura_bus::Subject;
use axum::http::{Method, StatusCode};
use secrecy::SecretString;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::harness::{Platform, Reply, SOON, Tenant};

struct Stage {
    platform: Platform,
    own: Tenant,
}

impl Stage {
    async fn new() -> Result<Self> {
        let platform = Platform::start().await?;
        let own = platform.tenant("own").await?;
        Ok(Self { platform, own })
    }

    async fn rotate(&self, body: Value) -> Result<Reply> {
        let path = format!("/v1/projects/{}/keys/rotate", self.own.id);
        self.platform.call(Method::POST, &path).key(&self.platform.platform_key).json(&body).send().await
    }

    async fn keys(&self, query: &str) -> Result<Reply> {
        let path = format!("/v1/projects/{}/keys{query}", self.own.id);
        self.platform.call(Method::GET, &path).key(&self.platform.platform_key).send().await
    }

    /// What the api says to this key.
    async fn answer(&self, key: &str) -> Result<(u16, String)> {
        let path = format!("/v1/db/{}/schema/tables", self.own.id);
        let reply = self.platform.call(Method::GET, &path).key(key).send().await?;
        Ok((reply.status.as_u16(), reply.code().to_owned()))
    }

    async fn disconnect(&self, key: &str, body: Value) -> Result<Reply> {
        let path = format!("/v1/projects/{}/disconnect", self.own.id);
        self.platform.call(Method::POST, &path).key(key).json(&body).send().await
    }
}

fn text<'a>(body: &'a Value, member: &str) -> Result<&'a str> {
    body[member].as_str().with_context(|| format!("no {member} in {body}"))
}

const GOOD: (u16, &str) = (200, "");
const REVOKED: (u16, &str) = (401, "key_revoked");

fn is(answer: (u16, String), wanted: (u16, &str)) {
    assert_eq!((answer.0, answer.1.as_str()), wanted);
}

#[tokio::test]
async fn keys_are_replaced_with_an_overlap_and_at_once() -> Result<()> {
    let stage = Stage::new().await?;
    let first = stage.rotate(json!({"roles": ["service_role"], "overlap_seconds": 3600})).await?;
    assert_eq!(first.status, StatusCode::OK, "{}", first.body);
    assert_eq!((&first.body["anon_key"], &first.body["jwt_secret"]), (&Value::Null, &Value::Null));
    assert_eq!(
        (first.body["keys"].as_array().unwrap().len(), first.body["replaced"][0]["valid"].as_bool()),
        (1, Some(true))
    );
    let second = text(&first.body, "service_role_key")?;
    is(stage.answer(&stage.own.service).await?, GOOD);
    is(stage.answer(second).await?, GOOD);
    is(stage.answer(&stage.own.anon).await?, (403, "insufficient_role"));
    // Without an overlap the one that is being replaced goes, too.
    let last = stage.rotate(json!({"roles": ["service_role"], "overlap_seconds": 0})).await?;
    assert_eq!(last.body["replaced"].as_array().unwrap().len(), 2);
    is(stage.answer(&stage.own.service).await?, REVOKED);
    is(stage.answer(second).await?, REVOKED);
    is(stage.answer(text(&last.body, "service_role_key")?).await?, GOOD);
    is(stage.answer(&stage.own.anon).await?, (403, "insufficient_role"));
    // A longer overlap prolongs nobody's.
    stage.rotate(json!({"overlap_seconds": 60})).await?;
    let before = stage.keys("").await?;
    stage.rotate(json!({"overlap_seconds": 3600})).await?;
    let ends = |reply: &Reply| {
        let items = reply.body["items"].as_array().unwrap().clone();
        items
            .into_iter()
            .filter(|key| !key["valid_until"].is_null())
            .map(|key| (key["id"].clone(), key["valid_until"].clone()))
            .collect::<Vec<_>>()
    };
    let after = ends(&stage.keys("").await?);
    assert!(ends(&before).iter().all(|end| after.contains(end)), "{after:?}");
    assert_eq!(stage.platform.audited(&stage.own, "keys.rotate").await?, 4);
    stage.platform.stop().await
}

#[tokio::test]
async fn a_new_secret_takes_keys_and_tokens_along() -> Result<()> {
    let stage = Stage::new().await?;
    let user = |secret: &SecretString| Minter::new(secret).user_token(stage.own.id, "alice", Map::new(), SOON * 60);
    let old = user(&stage.own.secret)?;
    let first = stage.rotate(json!({"jwt_secret": true, "overlap_seconds": 3600})).await?;
    let secret = SecretString::from(text(&first.body, "jwt_secret")?);
    let (service, anon) = (text(&first.body, "service_role_key")?, text(&first.body, "anon_key")?);
    for key in [&stage.own.service, service] {
        is(stage.answer(key).await?, GOOD);
    }
    for token in [&old, &user(&secret)?, anon, &stage.own.anon] {
        is(stage.answer(token).await?, (403, "insufficient_role"));
    }
    let last = stage.rotate(json!({"jwt_secret": true, "overlap_seconds": 0})).await?;
    for token in [&old, &user(&secret)?, anon, service, &stage.own.service] {
        is(stage.answer(token).await?, (401, "invalid_token"));
    }
    is(stage.answer(text(&last.body, "service_role_key")?).await?, GOOD);
    let client = stage.platform.postgres.client("platform").await?;
    let kept: i64 = client.query_one("select count(*) from aura.retired_secrets", &[]).await?.get(0);
    assert_eq!(kept, 0, "what is refused isn't kept");
    stage.platform.stop().await
}

#[tokio::test]
async fn keys_are_listed_without_their_tokens() -> Result<()> {
    let stage = Stage::new().await?;
    let rotated = stage.rotate(json!({"overlap_seconds": 0})).await?;
    let all = stage.keys("").await?;
    let items = all.body["items"].as_array().context("items")?;
    assert_eq!((items.len(), &all.body["next_cursor"]), (4, &Value::Null));
    assert_eq!(items.iter().filter(|key| key["valid"] == true && key["valid_until"].is_null()).count(), 2);
    for secret in [&stage.own.service, text(&rotated.body, "anon_key")?] {
        let signature = secret.rsplit('.').next().context("a token")?;
        assert!(!all.body.to_string().contains(signature));
    }
    let (mut walked, mut query) = (Vec::new(), "?limit=3".to_owned());
    loop {
        let page = stage.keys(&query).await?;
        walked.extend(page.body["items"].as_array().context("items")?.clone());
        let Some(cursor) = page.body["next_cursor"].as_str() else { break };
        query = format!("?limit=3&cursor={cursor}");
    }
    assert_eq!(&walked, items);
    let audit = stage.platform.store.audit_of_project(stage.own.id, None, 10).await?;
    let entry = audit.iter().find(|entry| entry.action == "keys.rotate").context("an entry")?;
    assert_eq!(entry.actor, "platform");
    let (before, after) = (entry.before.as_ref().context("before")?, entry.after.as_ref().context("after")?);
    assert_eq!(
        (before["keys"].as_array().map(Vec::len), after["replaced"].as_array().map(Vec::len)),
        (Some(2), Some(2))
    );
    stage.platform.stop().await
}

#[tokio::test]
async fn rotations_that_make_no_sense_are_refused() -> Result<()> {
    let stage = Stage::new().await?;
    for body in [
        json!({"roles": []}),
        json!({"roles": ["postgres"]}),
        json!({"roles": ["anon"], "jwt_secret": true}),
        json!({"overlap_seconds": 2_592_001}),
        json!({"overlap_seconds": -1}),
        json!({"overlap_seconds": "1"}),
        json!({"overlap": 1}),
    ] {
        let reply = stage.rotate(body.clone()).await?;
        assert_eq!((reply.status, reply.code()), (StatusCode::UNPROCESSABLE_ENTITY, "invalid_body"), "{body}");
    }
    is(stage.answer(&stage.own.service).await?, GOOD);
    let nowhere = format!("/v1/projects/{}/keys/rotate", Uuid::new_v4());
    let reply = stage.platform.call(Method::POST, &nowhere).key(&stage.platform.platform_key).json(&json!({})).send();
    assert_eq!(reply.await?.code(), "project_not_found");
    stage.platform.stop().await
}

#[tokio::test]
async fn r_frt_3_disconnect_orders_every_front_and_only_who_may_orders() -> Result<()> {
    let stage = Stage::new().await?;
    let other = stage.platform.tenant("other").await?;
    let mut orders = stage.platform.bus.subscribe(&Subject::all_disconnects()).await?;
    let key = Uuid::new_v4();
    for (actor, body) in
        [(&stage.own.service, json!({"subject": "alice"})), (&stage.platform.platform_key, json!({"key_id": key}))]
    {
        let reply = stage.disconnect(actor, body.clone()).await?;
        assert_eq!(reply.status, StatusCode::NO_CONTENT, "{}", reply.body);
        let order = tokio::time::timeout(SOON, orders.next()).await?.context("an order")?;
        let mut wanted = json!({"project": stage.own.id});
        wanted.as_object_mut().context("an object")?.extend(body.as_object().context("an object")?.clone());
        assert_eq!(order.subject, Subject::disconnect(stage.own.id));
        assert_eq!(serde_json::from_slice::<Value>(&order.payload)?, wanted);
    }
    for body in [
        json!({}),
        json!({"subject": ""}),
        json!({"subject": "x".repeat(4097)}),
        json!({"subject": "alice", "key_id": key}),
        json!({"key_id": "alice"}),
    ] {
        assert_eq!(stage.disconnect(&stage.own.service, body).await?.code(), "invalid_body");
    }
    let subject = json!({"subject": "alice"});
    for (actor, code) in [(&stage.own.anon, "insufficient_role"), (&other.service, "project_not_found")] {
        assert_eq!(stage.disconnect(actor, subject.clone()).await?.code(), code);
    }
    assert!(orders.try_next().is_none());
    assert_eq!(stage.platform.audited(&stage.own, "project.disconnect").await?, 2);
    stage.platform.stop().await
}
