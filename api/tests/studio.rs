//! Studio's sessions and inspector tokens (R-SEC-5), and what another page can do with them (N6): nothing.

use anyhow::{Context, Result};
use aura_auth::is_inspector;
use axum::http::{Method, StatusCode};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
use serde_json::{Value, json};

use crate::harness::{Platform, Reply, Tenant};

const SESSION: &str = "/studio/session";
const INSPECTOR: &str = "/studio/inspector-token";

/// A browser's part of a session.
struct Browser {
    cookie: String,
    csrf: String,
}

async fn sign_in(platform: &Platform, key: &str) -> Result<(Browser, Reply)> {
    let reply = platform.call(Method::POST, SESSION).key(key).send().await?;
    anyhow::ensure!(reply.status == StatusCode::CREATED, "{reply:?}");
    let cookie = reply.header("set-cookie").split(';').next().context("a cookie")?.to_owned();
    let csrf = reply.body["csrf_token"].as_str().context("csrf_token")?.to_owned();
    Ok((Browser { cookie, csrf }, reply))
}

async fn with_table(platform: &Platform) -> Result<(Tenant, String)> {
    let tenant = platform.tenant("shop").await?;
    platform.sql(&format!("create table \"{}\".t (id int primary key)", tenant.schema)).await?;
    let toggle = format!("/v1/db/{}/schema/tables/t/realtime", tenant.id);
    Ok((tenant, toggle))
}

#[tokio::test]
async fn r_sec_5_a_session_is_on_the_server_and_its_cookie_is_no_pages() -> Result<()> {
    let platform = Platform::start().await?;
    let (tenant, toggle) = with_table(&platform).await?;
    let (browser, reply) = sign_in(&platform, &tenant.service).await?;
    let cookie = reply.header("set-cookie");
    for attribute in ["HttpOnly", "SameSite=Strict", "Path=/", "Max-Age=43200"] {
        assert!(cookie.split("; ").any(|given| given == attribute), "{cookie}");
    }
    assert!(!reply.body.to_string().contains(&tenant.service), "the key doesn't come back");
    assert_eq!((&reply.body["role"], &reply.body["project"]), (&json!("service_role"), &json!(tenant.id)));
    // Neither the cookie nor the key can be had from the platform database.
    let row = platform.postgres.client("platform").await?;
    let row = row.query_one("select row_to_json(s)::text from aura.studio_sessions s", &[]).await?.get::<_, String>(0);
    let hex = |text: &str| text.bytes().map(|byte| format!("{byte:02x}")).collect::<String>();
    let id = browser.cookie.split('=').nth(1).context("an id")?;
    for secret in [id, &tenant.service, &browser.csrf] {
        assert!(!row.contains(&hex(secret)) && !row.contains(secret), "{row}");
    }
    let read = platform.call(Method::GET, &toggle).header("cookie", &browser.cookie).send().await?;
    assert_eq!(read.status, StatusCode::OK, "{}", read.body);
    let who = platform.call(Method::GET, SESSION).header("cookie", &browser.cookie).send().await?;
    assert_eq!(who.body["csrf_token"], json!(browser.csrf));
    // Who sends a key of their own learns nothing of a visitor's session, nor does an old cookie keep them out.
    let other = platform.tenant("other").await?;
    for cookie in [&browser.cookie, "aura_session=over"] {
        let who = platform.call(Method::GET, SESSION).key(&other.service).header("cookie", cookie).send().await?;
        assert_eq!((who.status, &who.body["project"]), (StatusCode::OK, &json!(other.id)), "{}", who.body);
        assert_eq!((&who.body["csrf_token"], &who.body["expires_at"]), (&Value::Null, &Value::Null));
    }
    platform.stop().await
}

#[tokio::test]
async fn n_6_a_page_of_another_site_changes_nothing_with_a_visitors_session() -> Result<()> {
    let platform = Platform::start().await?;
    let (tenant, toggle) = with_table(&platform).await?;
    platform.play_worker().await?;
    let (browser, _) = sign_in(&platform, &tenant.service).await?;
    let on = json!({"enabled": true});
    let put = || platform.call(Method::PUT, &toggle).header("cookie", &browser.cookie);
    let refused = [
        put().json(&on),
        put().json(&on).header("x-csrf-token", ""),
        put().json(&on).header("x-csrf-token", "guessed"),
        put().json(&on).header("x-csrf-token", &browser.csrf).header("sec-fetch-site", "cross-site"),
        put().json(&on).header("x-csrf-token", &browser.csrf).header("sec-fetch-site", "same-site"),
        put().text("application/x-www-form-urlencoded", "enabled=true"),
        put().text("text/plain", "{\"enabled\":true}"),
        platform.call(Method::DELETE, &toggle).header("cookie", &browser.cookie),
    ];
    for call in refused {
        let reply = call.send().await?;
        assert_eq!((reply.status, reply.code()), (StatusCode::FORBIDDEN, "csrf_failed"), "{}", reply.body);
    }
    // A form that is sent with everything right but its type is still no JSON.
    let form = put().header("x-csrf-token", &browser.csrf).text("text/plain", "{\"enabled\":true}").send().await?;
    assert_eq!(form.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    assert_eq!(platform.replica_identity(&tenant, "t").await?, 'd', "nothing was done");
    let own =
        put().json(&on).header("x-csrf-token", &browser.csrf).header("sec-fetch-site", "same-origin").send().await?;
    assert_eq!(own.status, StatusCode::OK, "{}", own.body);
    platform.stop().await
}

#[tokio::test]
async fn r_sec_5_a_session_ends_by_signing_out_and_with_its_key() -> Result<()> {
    let platform = Platform::start().await?;
    let (tenant, toggle) = with_table(&platform).await?;
    let read = async |browser: &Browser| {
        let call = platform.call(Method::GET, &toggle).header("cookie", &browser.cookie);
        call.send().await.map(|reply| (reply.status.as_u16(), reply.code().to_owned()))
    };
    let (first, _) = sign_in(&platform, &tenant.service).await?;
    let (second, _) = sign_in(&platform, &tenant.service).await?;
    let out = platform.call(Method::DELETE, SESSION).header("cookie", &first.cookie);
    let out = out.header("x-csrf-token", &first.csrf).send().await?;
    assert_eq!((out.status, out.header("set-cookie").contains("Max-Age=0")), (StatusCode::NO_CONTENT, true));
    assert_eq!(read(&first).await?, (401, "invalid_token".to_owned()));
    assert_eq!(read(&second).await?.0, 200, "another session goes on");
    let revoke = "update aura.keys set revoked_at = now()";
    platform.postgres.client("platform").await?.batch_execute(revoke).await?;
    assert_eq!(read(&second).await?, (401, "key_revoked".to_owned()));
    let made_up = Browser { cookie: format!("aura_session={}", "x".repeat(43)), csrf: String::new() };
    assert_eq!(read(&made_up).await?.0, 401);
    platform.stop().await
}

fn payload(token: &str) -> Result<Value> {
    Ok(serde_json::from_slice(&BASE64.decode(token.split('.').nth(1).context("a payload")?)?)?)
}

#[tokio::test]
async fn r_sec_5_an_inspector_token_is_read_only_for_five_minutes_and_never_the_services() -> Result<()> {
    let platform = Platform::start().await?;
    let (tenant, other) = (platform.tenant("shop").await?, platform.tenant("other").await?);
    let make = async |key: &str, body: Value| platform.call(Method::POST, INSPECTOR).key(key).json(&body).send().await;
    let claims = json!({"team": 7, "exp": 4_000_000_000_u64, "jti": "mine", "ref": other.id, "role": "service_role"});
    let reply = make(&tenant.service, json!({"sub": "alice", "claims": claims})).await?;
    assert_eq!((reply.status, &reply.body["expires_in"]), (StatusCode::CREATED, &json!(300)), "{}", reply.body);
    let token = reply.body["token"].as_str().context("a token")?;
    let said = payload(token)?;
    assert!(is_inspector(&said), "{said}");
    assert_eq!(said["exp"].as_i64().context("exp")? - said["iat"].as_i64().context("iat")?, 300);
    let seen = [&said["ref"], &said["role"], &said["sub"], &said["team"]];
    assert_eq!(seen, [&json!(tenant.id), &json!("authenticated"), &json!("alice"), &json!(7)]);
    // With the control plane it can do nothing.
    let path = format!("/v1/db/{}/schema/tables", tenant.id);
    assert_eq!(platform.call(Method::GET, &path).key(token).send().await?.status, StatusCode::FORBIDDEN);

    let cases = [
        (&tenant.service, json!({"role": "service_role"}), 422),
        (&tenant.service, json!({"role": "postgres"}), 422),
        (&tenant.service, json!({"project": other.id}), 404),
        (&tenant.service, json!({"project": tenant.id, "role": "anon"}), 201),
        (&tenant.anon, json!({}), 403),
        (&platform.platform_key, json!({}), 422),
        (&platform.platform_key, json!({"project": "unknown"}), 404),
        (&platform.platform_key, json!({"project": other.id}), 201),
    ];
    for (key, body, status) in cases {
        let reply = make(key, body.clone()).await?;
        assert_eq!(reply.status.as_u16(), status, "{body}: {}", reply.body);
    }
    platform.stop().await
}
