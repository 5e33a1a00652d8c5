//! Who may do what: every operation × every kind of key (R-SEC-1), and refused keys run no DDL.

use std::time::Duration;

use anyhow::Result;
use aura_auth::{KeyRole, Minter, generate_secret};
use axum::http::{Method, StatusCode};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::harness::{Platform, Tenant, toggle};

const HOUR: Duration = Duration::from_secs(3600);

struct Keys {
    /// What it is, the token, whether it is refused before anybody looks at its role.
    list: Vec<(&'static str, Option<String>, bool)>,
}

impl Keys {
    fn of(platform: &Platform, own: &Tenant, other: &Tenant) -> Result<Self> {
        let minter = Minter::new(&own.secret);
        let user = minter.user_token(own.id, "alice", Map::new(), HOUR)?;
        let expired = minter.user_token(own.id, "alice", Map::from_iter([("exp".to_owned(), json!(1))]), HOUR)?;
        let foreign_secret = generate_secret();
        let forged = Minter::new(&foreign_secret).project_key(own.id, Uuid::new_v4(), KeyRole::ServiceRole)?;
        let unknown_kid = minter.project_key(own.id, Uuid::new_v4(), KeyRole::ServiceRole)?;
        let forged_platform = Minter::new(&foreign_secret).platform_key(HOUR)?;
        Ok(Self {
            list: vec![
                ("no key", None, true),
                ("anon", Some(own.anon.clone()), false),
                ("authenticated", Some(user), false),
                ("service", Some(own.service.clone()), false),
                ("other project's service", Some(other.service.clone()), false),
                ("platform", Some(platform.platform_key.clone()), false),
                ("expired", Some(expired), true),
                ("forged", Some(forged), true),
                ("alg none", Some(alg_none(own)), true),
                ("unknown kid", Some(unknown_kid), true),
                ("forged platform", Some(forged_platform), true),
                ("not a token", Some("abc".to_owned()), true),
            ],
        })
    }
}

fn alg_none(tenant: &Tenant) -> String {
    let part = |value: Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
    let claims = json!({"iss": "aura", "ref": tenant.id, "role": "service_role", "exp": 4_000_000_000_u64});
    format!("{}.{}.", part(json!({"alg": "none", "kid": Uuid::new_v4()})), part(claims))
}

/// What a key may expect of an operation, by who the operation is for.
fn expected(path: &str, key: &str, refused: bool) -> StatusCode {
    let for_service = path.contains("/db/") || path.ends_with("/explain");
    match key {
        _ if refused => StatusCode::UNAUTHORIZED,
        "service" if for_service => StatusCode::OK,
        "other project's service" if for_service => StatusCode::NOT_FOUND,
        "platform" if !for_service => StatusCode::OK,
        _ => StatusCode::FORBIDDEN,
    }
}

#[tokio::test]
async fn r_sec_1_every_operation_asks_every_key() -> Result<()> {
    let platform = Platform::start().await?;
    let (own, other) = (platform.tenant("own").await?, platform.tenant("other").await?);
    platform.sql(&format!("create table \"{}\".t (id int primary key)", own.schema)).await?;
    platform.play_worker().await?;
    let keys = Keys::of(&platform, &own, &other)?;
    let document: Value = serde_json::from_str(&aura_api::document()?)?;
    for (path, item) in document["paths"].as_object().unwrap().iter().filter(|(path, _)| path.starts_with("/v1/")) {
        let concrete =
            path.replace("{project}", &own.id.to_string()).replace("{table}", "t").replace("{source}", "shared");
        for method in item.as_object().unwrap().keys() {
            for (key, token, refused) in &keys.list {
                let mut call = platform.call(method.to_uppercase().parse::<Method>()?, &concrete);
                if matches!(method.as_str(), "put" | "post" | "patch") {
                    call = call.json(&json!({"enabled": false}));
                }
                let call = token.iter().fold(call, |call, token| call.key(token));
                let status = call.send().await?.status;
                let wanted = expected(path, key, *refused);
                // A body that isn't the operation's, or a state that isn't, proves as well that the key was let in.
                let inside = [StatusCode::OK, StatusCode::UNPROCESSABLE_ENTITY, StatusCode::CONFLICT];
                let let_in = wanted == StatusCode::OK && inside.contains(&status);
                assert!(let_in || status == wanted, "{method} {path} with {key}: {status}, wanted {wanted}");
            }
        }
    }
    platform.stop().await
}

#[tokio::test]
async fn refused_keys_run_no_ddl_and_learn_nothing() -> Result<()> {
    let platform = Platform::start().await?;
    let (own, other) = (platform.tenant("own").await?, platform.tenant("other").await?);
    platform.sql(&format!("create table \"{}\".t (id int primary key)", own.schema)).await?;
    let keys = Keys::of(&platform, &own, &other)?;
    for (key, token, refused) in keys.list.iter().filter(|(key, ..)| *key != "service") {
        let call = platform.call(Method::PUT, &toggle(&own, "t")).json(&json!({"enabled": true}));
        let reply = token.iter().fold(call, |call, token| call.key(token)).send().await?;
        assert_eq!(reply.status, expected("/db/", key, *refused), "{key}");
        assert_eq!(reply.header("content-type"), "application/problem+json");
        assert_eq!(reply.header("www-authenticate"), if *refused { "Bearer" } else { "" }, "{key}");
        assert!(!reply.body["detail"].as_str().unwrap().contains(&own.id.to_string()), "{key}");
    }
    assert_eq!(platform.replica_identity(&own, "t").await?, 'd');
    assert_eq!(platform.audited(&own, "table.enable").await?, 0);
    platform.stop().await
}

#[tokio::test]
async fn a_foreign_project_looks_exactly_like_an_unknown_one() -> Result<()> {
    let platform = Platform::start().await?;
    let (own, other) = (platform.tenant("own").await?, platform.tenant("other").await?);
    platform.sql(&format!("create table \"{}\".t (id int primary key)", own.schema)).await?;
    let mut bodies = Vec::new();
    for project in [own.id.to_string(), Uuid::new_v4().to_string(), "no-id".to_owned()] {
        for key in [&other.service, &other.anon] {
            let path = format!("/v1/db/{project}/schema/tables/t/realtime");
            let reply = platform.call(Method::GET, &path).key(key).send().await?;
            assert_eq!(reply.status, StatusCode::NOT_FOUND);
            bodies.push(reply.stable_body());
        }
    }
    assert!(bodies.windows(2).all(|pair| pair[0] == pair[1]), "{bodies:?}");
    assert_eq!(bodies[0]["code"], "project_not_found");
    platform.stop().await
}

#[tokio::test]
async fn a_revoked_key_is_refused() -> Result<()> {
    let platform = Platform::start().await?;
    let own = platform.tenant("own").await?;
    let path = format!("/v1/db/{}/schema/tables", own.id);
    assert_eq!(platform.call(Method::GET, &path).key(&own.service).send().await?.status, StatusCode::OK);
    let client = platform.postgres.client("platform").await?;
    client.execute("update aura.keys set revoked_at = now()", &[]).await?;
    let reply = platform.call(Method::GET, &path).key(&own.service).send().await?;
    assert_eq!((reply.status, reply.code()), (StatusCode::UNAUTHORIZED, "key_revoked"));
    platform.stop().await
}
