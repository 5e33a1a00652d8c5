//! HTTP as README shows it.

use anyhow::{Context, Result};
use aura_testkit::ProcessOptions;
use serde_json::Value;

use crate::PATIENCE;

/// Status and JSON body.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// `null` if it isn't JSON.
    pub body: Value,
}

/// Runs curl with a method, a URL, a key (none if empty) and a JSON body.
pub async fn curl(method: &str, url: &str, key: &str, body: Option<&Value>) -> Result<Answer> {
    let mut command = ProcessOptions::new("curl")
        .args(["--silent", "--show-error", "--location", "--max-time", "60", "--request", method, url])
        .args(["--write-out", "\n%{http_code}"]);
    if !key.is_empty() {
        command = command.args(["--header", &format!("apikey: {key}")]);
    }
    if let Some(body) = body {
        command = command.args(["--header", "content-type: application/json", "--data", &body.to_string()]);
    }
    let mut lines = command.start()?.succeeds(PATIENCE * 2).await?;
    let status = lines.pop().and_then(|line| line.trim().parse().ok()).context("curl tells no status")?;
    let body = serde_json::from_str(&lines.join("\n")).unwrap_or(Value::Null);
    Ok(Answer { status, body })
}
