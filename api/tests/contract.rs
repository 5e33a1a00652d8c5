//! Every answer that a test of this package gets is one that the document announces: its status, its content type and, of a
//! problem, its code.

use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use axum::http::{Method, StatusCode};
use serde_json::Value;

use crate::harness::Reply;

pub(crate) fn document() -> &'static Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    let parse = || serde_json::from_str(&aura_api::document().unwrap_or_default()).unwrap_or_default();
    DOCUMENT.get_or_init(parse)
}

/// Fails when the document says nothing of such an answer. What isn't an operation has no document.
pub(crate) fn check(method: &Method, path: &str, reply: &Reply) -> Result<()> {
    let Some((template, operation)) = operation(method, path) else { return Ok(()) };
    let said = || format!("{method} {template} answered {} {}", reply.status, reply.body);
    let response = operation["responses"].get(reply.status.as_str());
    let response = response.with_context(|| format!("the document doesn't have this status: {}", said()))?;
    let response = resolved(response);
    if reply.status == StatusCode::NO_CONTENT {
        return Ok(());
    }
    let content_type = reply.header("content-type").split(';').next().unwrap_or_default();
    if content_type.is_empty() && response.get("content").is_none() {
        return Ok(());
    }
    let content = response["content"].get(content_type);
    let content = content.with_context(|| format!("the document doesn't have {content_type} there: {}", said()))?;
    let is_problem = content_type == "application/problem+json";
    ensure!(!is_problem || content["examples"].get(reply.code()).is_some(), "add its code to x-codes: {}", said());
    Ok(())
}

/// A response, or the one that a reference names.
pub(crate) fn resolved(response: &Value) -> &Value {
    let named = response["$ref"].as_str().and_then(|name| document().pointer(name.trim_start_matches('#')));
    named.unwrap_or(response)
}

fn operation(method: &Method, path: &str) -> Option<(&'static str, &'static Value)> {
    let path = path.split('?').next()?;
    let (template, item) = document()["paths"].as_object()?.iter().find(|(template, _)| matches(template, path))?;
    Some((template, item.get(method.as_str().to_ascii_lowercase())?))
}

fn matches(template: &str, path: &str) -> bool {
    let (mut wanted, mut found) = (template.split('/'), path.split('/'));
    loop {
        match (wanted.next(), found.next()) {
            (None, None) => return true,
            (Some(wanted), Some(found)) if wanted == found || wanted.starts_with('{') => (),
            _ => return false,
        }
    }
}
