//! `Idempotency-Key`: what is repeated is done once.

use anyhow::{Context, Result};
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::harness::{Platform, Reply};

impl Platform {
    async fn post_once(&self, path: &str, key: &str, body: &Value) -> Result<Reply> {
        let call = self.call(Method::POST, path).key(&self.platform_key).header("idempotency-key", key);
        call.json(body).send().await
    }

    async fn platform_rows(&self, sql: &str) -> Result<i64> {
        Ok(self.postgres.client("platform").await?.query_one(sql, &[]).await?.get(0))
    }
}

#[tokio::test]
async fn a_repeated_request_gets_the_first_ones_answer_keys_included() -> Result<()> {
    let platform = Platform::start().await?;
    let body = json!({"name": "demo"});
    let first = platform.post_once("/v1/projects", "k1", &body).await?;
    assert_eq!(first.status, StatusCode::CREATED, "{}", first.body);
    assert_eq!(first.header("idempotency-replayed"), "");
    let again = platform.post_once("/v1/projects", "\"k1\"", &body).await?;
    assert_eq!((again.status, &again.body), (StatusCode::CREATED, &first.body), "also as a structured field");
    for header in ["location", "etag", "content-type"] {
        assert_eq!(again.header(header), first.header(header));
    }
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_ne!(again.header("x-request-id"), first.header("x-request-id"));
    assert_eq!(platform.platform_rows("select count(*) from aura.projects").await?, 1);
    assert_eq!(platform.platform_rows("select count(*) from aura.audit").await?, 1, "and audited once");
    let source = json!({"name": "orders", "replication_url": "postgres://u:p@127.0.0.1:1/d"});
    let made = platform.post_once("/v1/sources", "k2", &source).await?;
    let same = platform.post_once("/v1/sources", "k2", &source).await?;
    assert_eq!((made.status, &made.body), (StatusCode::CREATED, &same.body));
    platform.stop().await
}

#[tokio::test]
async fn another_request_under_the_key_is_refused_and_a_refused_one_frees_it() -> Result<()> {
    let platform = Platform::start().await?;
    platform.tenant("taken").await?;
    let refused = platform.post_once("/v1/projects", "k", &json!({"name": "taken"})).await?;
    assert_eq!(refused.code(), "project_exists");
    let body = json!({"name": "a"});
    let mended = platform.post_once("/v1/projects", "k", &body).await?;
    assert_eq!(mended.status, StatusCode::CREATED, "nothing was done under the key: {}", mended.body);
    for (path, other) in [("/v1/projects", json!({"name": "b"})), ("/v1/sources", body.clone())] {
        let reused = platform.post_once(path, "k", &other).await?;
        let wanted = if path == "/v1/projects" { "idempotency_key_reused" } else { "invalid_body" };
        assert_eq!((reused.status, reused.code()), (StatusCode::UNPROCESSABLE_ENTITY, wanted), "{path}");
    }
    for key in ["", "\"\"", &"x".repeat(256)] {
        assert_eq!(platform.post_once("/v1/projects", key, &body).await?.code(), "invalid_parameter", "{key:?}");
    }
    platform.stop().await
}

/// The answer holds keys: at rest it is sealed, after 24 h it is gone, and nobody else gets it.
#[tokio::test]
async fn answers_are_sealed_and_forgotten_after_a_day() -> Result<()> {
    let platform = Platform::start().await?;
    let body = json!({"name": "demo"});
    let first = platform.post_once("/v1/projects", "a key of my own", &body).await?;
    let client = platform.postgres.client("platform").await?;
    let dump: String = client
        .query_one("select string_agg(encode(i.answer, 'escape') || i::text, '') from aura.idempotency i", &[])
        .await?
        .get(0);
    let secret = first.body["jwt_secret"].as_str().context("a secret")?;
    assert!(!dump.contains(secret) && !dump.contains("jwt_secret") && !dump.contains("a key of my own"), "{dump}");
    let anonymous = platform
        .call(Method::POST, "/v1/projects")
        .header("idempotency-key", "a key of my own")
        .json(&body)
        .send()
        .await?;
    assert_eq!(anonymous.code(), "missing_credentials", "a replay is for who may ask");
    client.batch_execute("update aura.idempotency set created_at = now() - interval '25 hours'").await?;
    let late = platform.post_once("/v1/projects", "a key of my own", &body).await?;
    assert_eq!(late.code(), "project_exists", "it is another request by then");
    client.batch_execute("update aura.idempotency set created_at = now() - interval '25 hours'").await?;
    platform.store.forget_answers().await?;
    assert_eq!(platform.platform_rows("select count(*) from aura.idempotency").await?, 0);
    platform.stop().await
}

#[tokio::test]
async fn of_many_at_once_one_does_it_and_the_others_are_told_so() -> Result<()> {
    let platform = Platform::start().await?;
    let body = json!({"name": "demo"});
    let replies = (0..12).map(|_| platform.post_once("/v1/projects", "k", &body));
    let replies = futures_util::future::join_all(replies).await.into_iter().collect::<Result<Vec<_>>>()?;
    for reply in &replies {
        let told = matches!((reply.status, reply.code()), (StatusCode::CREATED, _) | (_, "idempotency_in_progress"));
        assert!(told, "{} {}", reply.status, reply.body);
    }
    assert!(replies.iter().any(|reply| reply.status == StatusCode::CREATED));
    assert_eq!(platform.platform_rows("select count(*) from aura.projects").await?, 1);
    platform.stop().await
}

/// The process died behind the commit and before the schema was made: the same request goes on with the same project.
#[tokio::test]
async fn a_request_that_was_cut_off_is_gone_on_with() -> Result<()> {
    let platform = Platform::start().await?;
    let body = json!({"name": "demo"});
    let first = platform.post_once("/v1/projects", "k", &body).await?;
    let id = first.body["id"].as_str().context("an id")?;
    let schema = first.body["schema"].as_str().context("a schema")?;
    platform.sql(&format!("drop schema \"{schema}\"")).await?;
    let client = platform.postgres.client("platform").await?;
    client
        .batch_execute("update aura.idempotency set answer = null, locked_until = now() + interval '1 minute'")
        .await?;
    let busy = platform.post_once("/v1/projects", "k", &body).await?;
    assert_eq!((busy.code(), busy.header("retry-after")), ("idempotency_in_progress", "1"));
    client.batch_execute("update aura.idempotency set locked_until = now()").await?;
    let resumed = platform.post_once("/v1/projects", "k", &body).await?;
    assert_eq!((resumed.status, &resumed.body["id"]), (StatusCode::CREATED, &json!(id)), "{}", resumed.body);
    assert_eq!(resumed.body["jwt_secret"], first.body["jwt_secret"]);
    let there = "select count(*) from pg_namespace where nspname = $1";
    let made: i64 = platform.postgres.client("app").await?.query_one(there, &[&schema]).await?.get(0);
    assert_eq!((made, platform.platform_rows("select count(*) from aura.audit").await?), (1, 1));
    platform.stop().await
}
