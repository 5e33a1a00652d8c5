//! Stock clients as child processes (`tests/clients`).

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context, Result};
use aura_testkit::{Process, ProcessOptions, eventually_some, repository_root};
use serde_json::{Value, json};

use crate::{PATIENCE, Project};

/// Which client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `@supabase/realtime-js` of a version.
    Js(&'static str),
    /// PyPI `realtime`.
    Python,
}

impl Kind {
    /// All that we promise to serve.
    pub const ALL: [Self; 3] = [Self::Js("2.109.0"), Self::Js("2.119.1"), Self::Python];
    /// One of them where the client makes no difference.
    pub const ANY: Self = Self::Js("2.119.1");
}

/// A running client.
pub struct Client {
    process: Process,
}

impl Client {
    /// Connects with a key and, if there is one, an end user's token.
    pub async fn start(kind: Kind, project: &Project, key: &str, token: Option<&str>) -> Result<Self> {
        let clients = repository_root().join("tests/clients");
        let mut command = match kind {
            Kind::Js(version) => {
                let folder = clients.join("js");
                ProcessOptions::new("node").args(["client.mjs", &format!("realtime-{version}")]).directory(folder)
            }
            Kind::Python => {
                let python = repository_root().join(".cache/venv/bin/python");
                ProcessOptions::new(python).arg("client.py").directory(clients.join("python"))
            }
        };
        command = command.args([&project.ws_url, key]).args(token);
        let process = command.writable().start()?;
        process.line(PATIENCE, |line| line == r#"{"ready":true}"# || line == r#"{"ready": true}"#).await?;
        Ok(Self { process })
    }

    /// With the anon key.
    pub async fn anon(kind: Kind, project: &Project) -> Result<Self> {
        Self::start(kind, project, &project.anon_key, None).await
    }

    /// As an end user.
    pub async fn user(kind: Kind, project: &Project, subject: &str) -> Result<Self> {
        Self::start(kind, project, &project.anon_key, Some(&project.user_token(subject))).await
    }

    /// Joins a channel with one binding, and waits until the client says SUBSCRIBED and the server says ok.
    pub async fn subscribe(&self, binding: Value) -> Result<Topic<'_>> {
        let topic = self.join(vec![binding])?;
        topic.status("SUBSCRIBED").await?;
        topic.system("ok").await?;
        Ok(topic)
    }

    /// Joins a channel of a fresh topic; waits for nothing.
    pub fn join(&self, bindings: Vec<Value>) -> Result<Topic<'_>> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("topic-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        self.command(json!({"do": "join", "topic": name, "bindings": bindings}))?;
        Ok(Topic { client: self, name })
    }

    fn command(&self, command: Value) -> Result<()> {
        self.process.write_line(&command.to_string())
    }

    /// Everything it said, as JSON.
    fn said(&self) -> Vec<Value> {
        self.process.lines().iter().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

/// A channel of a client.
pub struct Topic<'a> {
    client: &'a Client,
    name: String,
}

impl Topic<'_> {
    fn said(&self, key: &str) -> Vec<Value> {
        let mut all = self.client.said();
        all.retain(|object| object["topic"] == self.name.as_str());
        all.iter_mut().filter_map(|object| object.get_mut(key).map(Value::take)).collect()
    }

    async fn wait(&self, key: &str, what: &str, within: Duration, found: impl Fn(&Value) -> bool) -> Result<Value> {
        let look = || {
            let value = self.said(key).into_iter().find(|value| found(value));
            async { value }
        };
        let waited = eventually_some(within, look).await;
        waited.with_context(|| format!("{what}; the client said:\n{}", self.client.process.lines().join("\n")))
    }

    /// Waits for a status of the channel.
    pub async fn status(&self, status: &str) -> Result<()> {
        self.wait("status", &format!("no status {status}"), PATIENCE, |value| value == status).await.map(drop)
    }

    /// Waits for a `system` message of a status.
    pub async fn system(&self, status: &str) -> Result<Value> {
        self.wait("system", &format!("no system {status}"), PATIENCE, |value| value["status"] == status).await
    }

    /// All changes so far, as the client shows them to its application.
    pub fn changes(&self) -> Vec<Value> {
        self.said("change").iter().map(normal).collect()
    }

    /// Waits for the change of a type whose new (or, for a delete, old) row has these columns.
    pub async fn change(&self, kind: &str, row: &Value) -> Result<Value> {
        let fits = |change: &Value| {
            let change = normal(change);
            let side = if kind == "DELETE" { "old" } else { "new" };
            change["type"] == kind && contains(&change[side], row)
        };
        let found = self.wait("change", &format!("no {kind} {row}"), PATIENCE, fits).await?;
        Ok(normal(&found))
    }

    /// Leaves the channel.
    pub async fn leave(&self) -> Result<()> {
        self.client.command(json!({"do": "leave", "topic": self.name}))?;
        self.wait("left", "doesn't leave", PATIENCE, |_| true).await.map(drop)
    }
}

/// `{type, schema, table, new, old}` of either client's shape; absent rows are `{}`.
fn normal(change: &Value) -> Value {
    let python = &change["data"];
    if python.is_object() {
        let row = |name: &str| if python[name].is_object() { python[name].clone() } else { json!({}) };
        let (schema, table) = (&python["schema"], &python["table"]);
        return json!({"type": python["type"], "schema": schema, "table": table, "new": row("record"),
            "old": row("old_record")});
    }
    let (kind, schema, table) = (&change["eventType"], &change["schema"], &change["table"]);
    json!({"type": kind, "schema": schema, "table": table, "new": change["new"], "old": change["old"]})
}

fn contains(row: &Value, part: &Value) -> bool {
    part.as_object().is_some_and(|part| part.iter().all(|(name, value)| &row[name] == value))
}
