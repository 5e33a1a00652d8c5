//! The demo project: a table with two policies, two users and a writer.

use std::time::Duration;

use anyhow::{Context, Result};
use aura_auth::{KeyRole, Minter};
use aura_domain::{ProjectId, quote_ident};
use aura_store::ProjectAuth;
use secrecy::ExposeSecret;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::time::{MissedTickBehavior, interval};
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use super::{Handles, databases};
use crate::stack::ApiClient;

const NAME: &str = "demo";
/// Subjects of the two users; policies compare them with `auth.uid()`.
const ALICE: &str = "a11ce000-0000-4000-8000-000000000001";
const BOB: &str = "b0b00000-0000-4000-8000-000000000002";
/// Users' tokens live a day, longer than a session in front of the demo.
const TOKEN_LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// Pace of the writer.
const WRITE_EVERY: Duration = Duration::from_secs(2);

/// What a client needs, in `dev.json`.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Demo {
    pub(crate) project_id: ProjectId,
    /// The `ref` claim of its keys: the id.
    pub(crate) project_ref: ProjectId,
    pub(crate) anon_key: String,
    pub(crate) service_role_key: String,
    pub(crate) jwt_secret: String,
    pub(crate) users: Users,
    /// Physical schema of the project's `public`.
    pub(crate) schema: String,
}

/// Tokens of the demo's users.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Users {
    pub(crate) alice: User,
    pub(crate) bob: User,
}

/// An end user.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct User {
    pub(crate) sub: &'static str,
    pub(crate) token: String,
}

impl Demo {
    /// Creates what is missing of project, table and policies. The stack need not serve yet. In a database of `dev`'s
    /// own, statements of a plain psql session then mean the project's schema; one of the user's keeps its settings.
    pub(crate) async fn prepare(stack: &Handles, admin_url: &str, own_database: bool) -> Result<Self> {
        let auth = project(stack).await?;
        let demo = Self::from_auth(&auth)?;
        let client = databases::connect(admin_url).await?;
        table(&client, &demo.schema).await.context("can't create the demo table")?;
        if own_database {
            let path = format!("{}, public", quote_ident(&demo.schema));
            client.batch_execute(&format!("alter database {} set search_path to {path}", databases::APP)).await?;
        }
        Ok(demo)
    }

    fn from_auth(auth: &ProjectAuth) -> Result<Self> {
        let minter = Minter::new(&auth.jwt_secret);
        let id = auth.project.id;
        let key = |role: KeyRole| {
            let key = auth.rules.keys.iter().find(|key| key.role.as_str() == role.as_str());
            let key = key.with_context(|| format!("the demo project has no {} key left", role.as_str()))?;
            Ok::<_, anyhow::Error>(minter.project_key(id, key.id, role)?)
        };
        let user =
            |sub: &'static str| minter.user_token(id, sub, Map::new(), TOKEN_LIFETIME).map(|token| User { sub, token });
        Ok(Self {
            project_id: id,
            project_ref: id,
            anon_key: key(KeyRole::Anon)?,
            service_role_key: key(KeyRole::ServiceRole)?,
            jwt_secret: auth.jwt_secret.expose_secret().to_owned(),
            users: Users { alice: user(ALICE)?, bob: user(BOB)? },
            schema: auth.project.schema.to_string(),
        })
    }

    /// Makes the table live, as anybody would; answers why not if it isn't.
    pub(crate) async fn go_live(&self, api: &ApiClient) -> Result<Option<String>> {
        let path = format!("/v1/db/{}/schema/tables/messages/realtime", self.project_id);
        let (status, body) = api.call("PUT", &path, &self.service_role_key, json!({"enabled": true})).await?;
        if status == 200 {
            return Ok(None);
        }
        let why = body["detail"].as_str().or_else(|| body["reason"].as_str()).or_else(|| body["status"].as_str());
        Ok(Some(format!("{status} {}", why.unwrap_or("not active yet"))))
    }
}

async fn project(stack: &Handles) -> Result<ProjectAuth> {
    let store = &stack.store;
    let id = match store.project_by_name(NAME).await? {
        Some(project) => project.id,
        None => {
            let (status, body) =
                stack.api.call("POST", "/v1/projects", &stack.platform_key, json!({"name": NAME})).await?;
            let id = body["id"].as_str().and_then(|id| id.parse().ok());
            id.with_context(|| format!("can't create the demo project: {status} {}", body["detail"]))?
        }
    };
    store.project_auth(id).await?.context("the demo project is gone")
}

/// One simple query, so one transaction.
async fn table(client: &Client, schema: &str) -> Result<()> {
    let name = format!("{}.messages", quote_ident(schema));
    let exists: bool = client.query_one("select to_regclass($1) is not null", &[&name]).await?.get(0);
    if exists {
        return Ok(());
    }
    Ok(client.batch_execute(&format!("set search_path to {}; {TABLE}", quote_ident(schema))).await?)
}

const TABLE: &str = "
    create table messages (
        id bigint generated always as identity primary key,
        room text not null default 'lobby',
        author uuid not null,
        body text not null,
        private boolean not null default false,
        created_at timestamptz not null default now()
    );
    alter table messages enable row level security;
    create policy \"everybody sees what isn't private\" on messages
        for select to aura_anon, aura_authenticated using (not private);
    create policy \"authors see their own\" on messages
        for select to aura_authenticated using (author = (select auth.uid()));";

/// Inserts a row every 2 s while somebody but us is subscribed.
pub(crate) async fn write(admin_url: String, schema: String, watched: impl Fn() -> bool, stop: CancellationToken) {
    let mut ticks = interval(WRITE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut number = 0_u64;
    while stop.run_until_cancelled(ticks.tick()).await.is_some() {
        if !watched() {
            continue;
        }
        number += 1;
        if let Err(error) = insert(&admin_url, &schema, number).await {
            tracing::warn!(error = aura_kit::with_causes(&error), "the demo writer couldn't insert");
        }
    }
}

/// Alice and bob take turns; every third message is private.
async fn insert(admin_url: &str, schema: &str, number: u64) -> Result<()> {
    let (author, name) = if number.is_multiple_of(2) { (ALICE, "alice") } else { (BOB, "bob") };
    let private = number.is_multiple_of(3);
    let body = format!("message {number} from {name}{}", if private { ", for nobody else" } else { "" });
    add_message(&*databases::connect(admin_url).await?, schema, author, &body, private).await
}

/// Inserts one row that everybody sees.
pub(crate) async fn insert_public(admin_url: &str, schema: &str, body: &str) -> Result<()> {
    add_message(&*databases::connect(admin_url).await?, schema, ALICE, body, false).await
}

async fn add_message(client: &Client, schema: &str, author: &str, body: &str, private: bool) -> Result<()> {
    let sql =
        format!("insert into {}.messages (author, body, private) values ($1::text::uuid, $2, $3)", quote_ident(schema));
    client.execute(&sql, &[&author, &body, &private]).await?;
    Ok(())
}

/// The binding that sees every change of the project's main schema.
pub(crate) fn all_changes() -> Value {
    json!({"event": "*", "schema": "public"})
}
