//! Databases and roles inside the private cluster: `platform` owned by its own role, `app` for the tenants' tables, and
//! a worker's login that is no superuser.

use std::time::Duration;

use anyhow::{Context, Result};
use aura_domain::{quote_ident, quote_literal};
use aura_pgsource::{SourceUrl, SqlConnection, connect_sql};
use tokio_postgres::Client;

use super::{cluster::Cluster, data_dir::Secrets};

/// Owner of the platform database.
const PLATFORM_ROLE: &str = "aura_platform";
/// The worker's login: REPLICATION and nothing else.
const WORKER_ROLE: &str = "aura_worker";

/// The tenants' database.
pub(crate) const APP: &str = "app";

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Where everything is.
#[derive(Debug, Clone)]
pub(crate) struct Urls {
    /// Owner of the platform tables.
    pub(crate) platform: String,
    /// The worker's.
    pub(crate) replication: String,
    /// The api's: in `dev` the superuser.
    pub(crate) admin: String,
}

impl Urls {
    /// One database of the user's for everything.
    pub(crate) fn all_in(url: &str) -> Self {
        Self { platform: url.to_owned(), replication: url.to_owned(), admin: url.to_owned() }
    }
}

/// Creates what is missing; passwords follow the secrets.
pub(crate) async fn prepare(cluster: &Cluster, secrets: &Secrets) -> Result<Urls> {
    let client = connect(&cluster.superuser_url("postgres")).await?;
    role(&client, PLATFORM_ROLE, "login", &secrets.platform_password).await?;
    role(&client, WORKER_ROLE, "login replication nosuperuser nobypassrls", &secrets.worker_password).await?;
    database(&client, "platform", PLATFORM_ROLE).await?;
    database(&client, APP, "postgres").await?;
    // Tenants' logins have no business there.
    client.batch_execute("revoke connect on database platform from public").await?;
    Ok(Urls {
        platform: cluster.url(PLATFORM_ROLE, &secrets.platform_password, "platform"),
        replication: cluster.url(WORKER_ROLE, &secrets.worker_password, APP),
        admin: cluster.superuser_url(APP),
    })
}

/// A session of our own, encrypted as the URL's `sslmode` asks for.
pub(crate) async fn connect(url: &str) -> Result<SqlConnection> {
    let url = SourceUrl::parse(url)?;
    connect_sql(&url, "aura-dev", None, CONNECT_TIMEOUT).await.context("can't connect to PostgreSQL")
}

async fn role(client: &Client, name: &str, attributes: &str, password: &str) -> Result<()> {
    let exists = client.query_opt("select from pg_roles where rolname = $1", &[&name]).await?.is_some();
    let verb = if exists { "alter" } else { "create" };
    let (name, password) = (quote_ident(name), quote_literal(password));
    let sql = format!("{verb} role {name} with {attributes} password {password}");
    // The statement holds a password: its text must not get into an error.
    client.batch_execute(&sql).await.with_context(|| format!("can't {verb} role {name}"))
}

async fn database(client: &Client, name: &str, owner: &str) -> Result<()> {
    if client.query_opt("select from pg_database where datname = $1", &[&name]).await?.is_some() {
        return Ok(());
    }
    let sql = format!("create database {} owner {}", quote_ident(name), quote_ident(owner));
    client.batch_execute(&sql).await.with_context(|| format!("can't create database {name}"))
}
