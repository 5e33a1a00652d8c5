//! The product running undivided: `aura-realtime dev` in a directory of its own.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use aura_testkit::{Process, ProcessOptions, free_port};
use serde_json::{Value, json};
use tokio_postgres::{Client as Sql, NoTls};

use crate::{Answer, PATIENCE, curl, sign};

/// A tenant and how to reach it.
#[derive(Debug, Clone)]
pub struct Project {
    /// Origin of the api.
    pub api_url: String,
    /// `ws://…/realtime/v1`.
    pub ws_url: String,
    /// Project id.
    pub id: String,
    /// Physical schema of its `public`.
    pub schema: String,
    /// Key of role anon.
    pub anon_key: String,
    /// Key of role service_role.
    pub service_key: String,
    /// Signs end users' tokens.
    pub jwt_secret: String,
    /// Superuser of the source.
    pub admin_url: String,
}

impl Project {
    /// From the answer of `POST /v1/projects`.
    pub fn from_answer(body: &Value, api_url: &str, ws_url: &str, admin_url: &str) -> Result<Self> {
        let text = |name: &str| body[name].as_str().map(str::to_owned).with_context(|| format!("no {name} in {body}"));
        Ok(Self {
            api_url: api_url.to_owned(),
            ws_url: ws_url.to_owned(),
            id: text("id")?,
            schema: text("schema")?,
            anon_key: text("anon_key")?,
            service_key: text("service_role_key")?,
            jwt_secret: text("jwt_secret")?,
            admin_url: admin_url.to_owned(),
        })
    }

    /// A token of an end user, valid for an hour.
    pub fn user_token(&self, subject: &str) -> String {
        self.token(&json!({"sub": subject, "role": "authenticated", "exp": now() + 3600}))
    }

    /// A token with this payload, signed with the project's secret.
    pub fn token(&self, payload: &Value) -> String {
        sign(&self.jwt_secret, payload)
    }

    /// URL of a table's toggle.
    pub fn toggle_url(&self, table: &str) -> String {
        let encoded: String = table.bytes().map(|byte| format!("%{byte:02X}")).collect();
        format!("{}/v1/db/{}/schema/tables/{encoded}/realtime", self.api_url, self.id)
    }

    /// PUT the toggle with the service key.
    pub async fn put(&self, table: &str, enabled: bool) -> Result<Answer> {
        curl("PUT", &self.toggle_url(table), &self.service_key, Some(&json!({"enabled": enabled}))).await
    }

    /// Makes a table live, and expects that it is when the answer comes.
    pub async fn enable(&self, table: &str) -> Result<Value> {
        let answer = self.put(table, true).await?;
        assert_eq!((answer.status, &answer.body["status"]), (200, &json!("active")), "{}", answer.body);
        Ok(answer.body)
    }

    /// Makes a table `(id bigint primary key, body text)` and makes it live.
    pub async fn table(&self, name: &str) -> Result<()> {
        self.sql().await?.batch_execute(&format!("create table {name} (id bigint primary key, body text)")).await?;
        self.enable(name).await.map(drop)
    }

    /// The same with row security that lets everybody see everything: who judges a row must read the policy, and waits for
    /// whoever has locked the table.
    pub async fn guarded_table(&self, name: &str) -> Result<()> {
        self.table(name).await?;
        let guard = format!(
            "alter table {name} enable row level security; create policy all_of_it on {name} for select using (true)"
        );
        Ok(self.sql().await?.batch_execute(&guard).await?)
    }

    /// A superuser session in the source whose unqualified names are the project's.
    pub async fn sql(&self) -> Result<Sql> {
        let (client, connection) = tokio_postgres::connect(&self.admin_url, NoTls).await?;
        tokio::spawn(connection);
        client.batch_execute(&format!("set search_path to \"{}\"", self.schema)).await?;
        Ok(client)
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    std::time::UNIX_EPOCH.elapsed().map_or(0, |elapsed| elapsed.as_secs())
}

/// A running `dev`; its directory is removed when dropped.
pub struct Dev {
    /// The process.
    pub process: Process,
    /// Holds the data directory `data`.
    pub directory: Directory,
    /// The one port.
    pub port: u16,
}

/// A directory that is removed when dropped.
pub struct Directory(
    /// Its path.
    pub PathBuf,
);

impl Directory {
    /// A fresh one under the system's temporary directory.
    pub fn create() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("aura-system-{}-{}", std::process::id(), free_port()?));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // Best effort: the database may still be writing its last file.
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Dev {
    /// `aura-realtime dev` in a fresh directory on a free port, not started.
    pub fn command(directory: &Directory, port: u16) -> Result<ProcessOptions> {
        let data = directory.0.join("data");
        let options = ProcessOptions::binary("aura-realtime")?.args(["dev", "--data-dir", &data.to_string_lossy()]);
        Ok(options.args(["--port", &port.to_string()]))
    }

    /// Starts with these further arguments and waits until it is ready.
    pub async fn start(arguments: &[&str]) -> Result<Self> {
        let (directory, port) = (Directory::create()?, free_port()?);
        let process = Self::command(&directory, port)?.args(["--json"]).args(arguments.iter().copied()).start()?;
        process.line(PATIENCE * 2, |line| line.contains(r#""type":"ready""#)).await?;
        Ok(Self { process, directory, port })
    }

    /// `dev.json`.
    pub fn file(&self) -> Result<Value> {
        Ok(serde_json::from_slice(&fs::read(self.directory.0.join("data/dev.json"))?)?)
    }

    /// The demo project.
    pub fn demo(&self) -> Result<Project> {
        let file = self.file()?;
        let text =
            |name: &str| file[name].as_str().map(str::to_owned).with_context(|| format!("no {name} in dev.json"));
        Ok(Project {
            api_url: text("api_url")?,
            ws_url: text("ws_url")?,
            id: text("project_id")?,
            schema: text("schema")?,
            anon_key: text("anon_key")?,
            service_key: text("service_role_key")?,
            jwt_secret: text("jwt_secret")?,
            admin_url: text("database_url")?,
        })
    }
}
