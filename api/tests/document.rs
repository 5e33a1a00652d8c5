//! The committed document is what the binary serves, and every route is in it.

use std::{collections::BTreeSet, fs, path::PathBuf};

use anyhow::Result;
use aura_testkit::repository_root;
use axum::http::{Method, StatusCode};
use serde_json::Value;

use crate::harness::Platform;

const UPDATE: &str = "UPDATE";

fn committed() -> PathBuf {
    repository_root().join("openapi/api.v1.json")
}

#[test]
fn the_committed_openapi_document_is_fresh() -> Result<()> {
    let fresh = aura_api::document()?;
    if std::env::var_os(UPDATE).is_some() {
        fs::write(committed(), &fresh)?;
    }
    let stale = "openapi/api.v1.json is stale: run this test with UPDATE=1";
    assert!(fs::read_to_string(committed())? == fresh, "{stale}");
    Ok(())
}

#[test]
fn the_document_follows_openapi_3_1_and_complete() -> Result<()> {
    let document: Value = serde_json::from_str(&aura_api::document()?)?;
    assert_eq!(document["openapi"], "3.1.0");
    let mut ids = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let id = operation["operationId"].as_str().unwrap();
            assert!(ids.insert(id.to_owned()), "{id} twice");
            assert!(operation["summary"].is_string(), "{method} {path}");
            if path.starts_with("/v1/") {
                assert!(operation["security"].is_array(), "{method} {path} says who may");
                assert!(operation["responses"]["4XX"].is_object(), "{method} {path} says how it fails");
            }
        }
    }
    Ok(())
}

/// A route without documentation would be one that isn't in this list: the router is built from `routes!` alone, and
/// what isn't documented is not found.
#[tokio::test]
async fn every_documented_operation_is_served_and_nothing_else_under_v1() -> Result<()> {
    let platform = Platform::start().await?;
    let document: Value = serde_json::from_str(&aura_api::document()?)?;
    for (path, item) in document["paths"].as_object().unwrap() {
        let concrete = path.replace("{project}", "x").replace("{table}", "x").replace("{source}", "x");
        for method in ["get", "put", "post", "delete", "patch"] {
            let reply = platform.call(method.to_uppercase().parse::<Method>()?, &concrete).send().await?;
            let served = !matches!(reply.code(), "route_not_found" | "method_not_allowed");
            assert_eq!(served, item.get(method).is_some(), "{method} {path}: {}", reply.status);
        }
    }
    let unknown = platform.call(Method::GET, "/v1/nothing").send().await?;
    assert_eq!((unknown.status, unknown.code()), (StatusCode::NOT_FOUND, "route_not_found"));
    platform.stop().await
}

#[tokio::test]
async fn pages_are_served_from_the_binary() -> Result<()> {
    let platform = Platform::start().await?;
    for path in ["/docs/", "/docs/index.html", "/docs/swagger-ui.css", "/studio", "/openapi.json", "/ready", "/metrics"]
    {
        let reply = platform.call(Method::GET, path).send().await?;
        assert_eq!(reply.status, StatusCode::OK, "{path}: {}", reply.body);
    }
    let index = platform.call(Method::GET, "/docs/").send().await?;
    let html = index.body.as_str().unwrap().to_owned();
    assert!(!html.contains("src=\"http") && !html.contains("href=\"http"), "loads from elsewhere: {html}");
    let initializer = platform.call(Method::GET, "/docs/swagger-initializer.js").send().await?;
    assert!(initializer.body.as_str().unwrap().contains("/openapi.json"));
    let ready = platform.call(Method::GET, "/ready").send().await?;
    assert_eq!(ready.body["status"], "ok");
    platform.stop().await
}
