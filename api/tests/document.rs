//! The committed document is what the binary serves, and every route is in it.

use std::{collections::BTreeSet, fs, path::PathBuf};

use anyhow::Result;
use aura_testkit::repository_root;
use axum::http::{Method, StatusCode};
use serde_json::Value;

use crate::{contract, harness::Platform};

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

/// The page about engines: what is written by hand around the tables of the type.
fn engine_states() -> String {
    format!(
        "# States of an engine\n\n\
         This page is generated from the type that the programs use (`aura_domain::EngineState`): `make openapi` writes it \
         anew, and a test fails when it is stale.\n\n\
         Desired state (`running`, `stopped`) and observed state are stored in the platform database and survive restarts. \
         Conditions (`paused`, `lagging`, `slot_at_risk`, …) hold besides the state. `stopped` is written only after the slot \
         was seen inactive.\n\n\
         ## States, and what may follow\n\n{}\n\
         A verb *begins* something, *joins* what is under way, finds that it is so *already*, or is *refused* with 409 \
         [`engine_state_conflict`](errors/engine_state_conflict.md). While a stop or force-close is open, `start` and \
         `recreate-slot` are refused in any state.\n",
        // The second table, of verbs, follows the first after an empty line.
        aura_domain::state_tables().replacen("\n\n", "\n\n## Verbs\n\n", 1)
    )
}

#[test]
fn the_committed_openapi_neighbour_engine_states_is_fresh() -> Result<()> {
    let page = repository_root().join("docs/engine-states.md");
    let fresh = engine_states();
    if std::env::var_os(UPDATE).is_some() {
        fs::write(&page, &fresh)?;
    }
    assert!(fs::read_to_string(page)? == fresh, "docs/engine-states.md is stale: run this test with UPDATE=1");
    Ok(())
}

/// The words are literals at the calls that make them; the page explains every one.
#[test]
fn every_reason_of_an_engine_has_its_line() -> Result<()> {
    let page = fs::read_to_string(repository_root().join("docs/engine-reasons.md"))?;
    let makers = ["failed(\"", "backoff(\"", "critical(\"", "warning(\"", "code: Some(\""];
    let mut words = BTreeSet::new();
    for file in ["worker/src/engine/error.rs", "worker/src/engine/slot.rs", "worker/src/engine/end.rs"]
        .into_iter()
        .chain(["worker/src/actor/finish.rs", "crates/pgsource/src/preflight.rs", "crates/bus/src/nats.rs"])
    {
        let source = fs::read_to_string(repository_root().join(file))?;
        for maker in makers {
            let made = source.split(maker).skip(1).filter_map(|rest| rest.split('"').next());
            words.extend(made.map(str::to_owned));
        }
    }
    assert!(words.len() > 20 && words.contains("slot_lost") && words.contains("wal_level"), "{words:?}");
    let missing: Vec<_> = words.iter().filter(|word| !page.contains(&format!("| `{word}` |"))).collect();
    assert!(missing.is_empty(), "docs/engine-reasons.md lacks {missing:?}");
    Ok(())
}

#[test]
fn the_document_follows_openapi_3_1_and_is_complete() -> Result<()> {
    let document = contract::document();
    assert_eq!(document["openapi"], "3.1.0");
    let mut ids = BTreeSet::new();
    let mut lacks = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let id = operation["operationId"].as_str().unwrap();
            assert!(ids.insert(id.to_owned()), "{id} twice");
            lacks.extend(what_lacks(operation).into_iter().map(|what| format!("{method} {path}: {what}")));
            assert!(!path.starts_with("/v1/") || operation["security"].is_array(), "{method} {path} says who may");
        }
    }
    assert!(lacks.is_empty(), "the document lacks:\n{}", lacks.join("\n"));
    Ok(())
}

/// What a reader of an operation would miss.
fn what_lacks(operation: &Value) -> Vec<String> {
    let mut lacks = Vec::new();
    let said = |text: &Value| text.as_str().is_some_and(|text| !text.is_empty());
    for member in ["summary", "description"] {
        lacks.extend((!said(&operation[member])).then(|| member.to_owned()));
    }
    for parameter in operation["parameters"].as_array().into_iter().flatten() {
        let name = parameter["name"].as_str().unwrap_or_default();
        lacks.extend((!said(&parameter["description"])).then(|| format!("description of {name}")));
        let shown = parameter.get("example").is_some() || parameter["in"] == "query";
        lacks.extend((!shown).then(|| format!("example of {name}")));
    }
    let responses = operation["responses"].as_object().into_iter().flatten();
    let responses = responses.map(|(status, response)| (status, contract::resolved(response)));
    for (status, response) in responses.clone() {
        let ranged = status.parse::<u16>().is_err();
        lacks.extend(ranged.then(|| format!("{status} is no status: problems are added by code, see x-codes")));
        lacks.extend((!said(&response["description"])).then(|| format!("description of {status}")));
        let bodiless = status == "204" || status.starts_with('3');
        lacks.extend((response.get("content").is_none() && !bodiless).then(|| format!("content of {status}")));
    }
    lacks.extend((!responses.clone().any(|(status, _)| status.starts_with('2'))).then(|| "success".to_owned()));
    let bodies = responses.map(|(status, response)| (status.as_str(), response));
    for (place, body) in bodies.chain([("the request", &operation["requestBody"])]) {
        for (kind, content) in
            body["content"].as_object().into_iter().flatten().filter(|(kind, _)| kind.ends_with("json"))
        {
            let example = [content.get("example"), content.get("examples")].into_iter().flatten().next();
            let what = || format!("example of {place} ({kind}): {}", example.unwrap_or(&Value::Null));
            // The mark that stands where nobody has said anything better.
            lacks.extend(example.is_none_or(|example| example.to_string().contains('…')).then(what));
        }
    }
    lacks
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
