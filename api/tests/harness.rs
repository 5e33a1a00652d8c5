//! A platform with one source, both databases of one throw-away cluster.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
use aura_api::{Api, ApiDeps, Settings};
use aura_auth::{Minter, generate_secret};
use aura_bus::{MemoryBus, SharedBus};
use aura_domain::{Epoch, ProjectId};
use aura_kit::http::with_layers;
use aura_store::{MasterKey, NewSource, Plugin, Source, Store, migrate};
use aura_testkit::Postgres;
use axum::{
    Router,
    body::{Body, to_bytes},
    http::{HeaderMap, Method, Request, StatusCode},
};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;

use crate::contract;

/// Patience with what should happen at once.
pub(crate) const SOON: Duration = Duration::from_secs(10);

pub(crate) struct Platform {
    pub(crate) postgres: Postgres,
    pub(crate) store: Store,
    pub(crate) source: Source,
    pub(crate) platform_key: String,
    pub(crate) bus: SharedBus,
    settings: Settings,
    router: Router,
    instance: Instance,
    stop: CancellationToken,
    tasks: TaskTracker,
}

/// One process of the api, without the process.
pub(crate) struct Instance {
    router: Router,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Instance {
    fn start(store: &Store, bus: &SharedBus, settings: &Settings) -> Self {
        let api = Api::new(ApiDeps { store: store.clone(), bus: Some(Arc::clone(bus)), settings: settings.clone() });
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let (router, token) = (with_layers(api.router()), stop.clone());
        tasks.spawn(async move { api.run(token).await });
        tasks.close();
        Self { router, stop, tasks }
    }

    pub(crate) async fn stop(self) -> Result<()> {
        self.stop.cancel();
        tokio::time::timeout(SOON, self.tasks.wait()).await.context("background tasks didn't end")
    }
}

/// A project with its keys.
pub(crate) struct Tenant {
    pub(crate) id: ProjectId,
    pub(crate) schema: String,
    pub(crate) anon: String,
    pub(crate) service: String,
    pub(crate) secret: SecretString,
}

#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
}

impl Reply {
    pub(crate) fn code(&self) -> &str {
        self.body["code"].as_str().unwrap_or_default()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// The body without what differs between any two requests.
    pub(crate) fn stable_body(&self) -> Value {
        let mut body = self.body.clone();
        if let Some(body) = body.as_object_mut() {
            body.remove("request_id");
        }
        body
    }
}

/// A request under construction.
pub(crate) struct Call<'a> {
    router: &'a Router,
    request: axum::http::request::Builder,
    body: Body,
}

impl Call<'_> {
    pub(crate) fn key(mut self, key: &str) -> Self {
        self.request = self.request.header("apikey", key);
        self
    }

    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.request = self.request.header(name, value);
        self
    }

    pub(crate) fn json(mut self, body: &Value) -> Self {
        self.request = self.request.header("content-type", "application/json");
        self.body = Body::from(body.to_string());
        self
    }

    pub(crate) fn text(mut self, content_type: &str, body: &str) -> Self {
        self.request = self.request.header("content-type", content_type);
        self.body = Body::from(body.to_owned());
        self
    }

    pub(crate) async fn send(self) -> Result<Reply> {
        let request = self.request.body(self.body)?;
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let response = self.router.clone().oneshot(request).await?;
        let (parts, body) = response.into_parts();
        let bytes = to_bytes(body, 4 << 20).await?;
        let body = serde_json::from_slice(&bytes)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
        let reply = Reply { status: parts.status, headers: parts.headers, body };
        contract::check(&method, &path, &reply)?;
        Ok(reply)
    }
}

impl Platform {
    pub(crate) async fn start() -> Result<Self> {
        Self::start_as(|_| None).await
    }

    /// The api's role in the source is no superuser: CREATEROLE and owner of the database, as the documentation asks.
    pub(crate) async fn start_without_superuser() -> Result<Self> {
        Self::start_as(|postgres| Some(postgres.url_as("aura_admin", "secret", "app"))).await
    }

    async fn start_as(admin_url: impl Fn(&Postgres) -> Option<String>) -> Result<Self> {
        let postgres = Postgres::start().await?;
        let url = postgres.create_database("platform").await?;
        let source_url = postgres.create_database("app").await?;
        migrate(&url).await?;
        let store = Store::connect(&url, MasterKey::new("a master key for tests, 32 bytes or more")?).await?;
        let admin = "create role aura_admin login createrole password 'secret'; alter database app owner to aura_admin";
        postgres.client("postgres").await?.batch_execute(admin).await?;
        let source = store.upsert_source(new_source(source_url, admin_url(&postgres))).await?;
        let platform_secret = generate_secret();
        let platform_key = Minter::new(&platform_secret).platform_key(Duration::from_secs(3600))?;
        // The crowds of the tests are larger than a minute's share.
        let settings = Settings { toggles_per_minute: 1000, ..Settings::new(platform_secret) };
        let bus: SharedBus = Arc::new(MemoryBus::new());
        let instance = Instance::start(&store, &bus, &settings);
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let router = instance.router.clone();
        Ok(Self { postgres, store, source, platform_key, bus, settings, router, instance, stop, tasks })
    }

    /// Ends the api and starts another, as a new process would be.
    pub(crate) async fn replace_instance(&mut self) -> Result<()> {
        let fresh = Instance::start(&self.store, &self.bus, &self.settings);
        self.router = fresh.router.clone();
        std::mem::replace(&mut self.instance, fresh).stop().await
    }

    /// Another instance beside it.
    pub(crate) fn another_instance(&self) -> Instance {
        Instance::start(&self.store, &self.bus, &self.settings)
    }

    pub(crate) fn call(&self, method: Method, path: &str) -> Call<'_> {
        Self::call_on(&self.router, method, path)
    }

    /// A request to another instance.
    pub(crate) fn call_other<'a>(instance: &'a Instance, method: Method, path: &str) -> Call<'a> {
        Self::call_on(&instance.router, method, path)
    }

    fn call_on<'a>(router: &'a Router, method: Method, path: &str) -> Call<'a> {
        Call { router, request: Request::builder().method(method).uri(path), body: Body::empty() }
    }

    /// Creates a project through the api.
    pub(crate) async fn tenant(&self, name: &str) -> Result<Tenant> {
        let reply = self.call(Method::POST, "/v1/projects").key(&self.platform_key).json(&json!({"name": name}));
        let Reply { status, body, .. } = reply.send().await?;
        anyhow::ensure!(status == StatusCode::CREATED, "{status}: {body}");
        let text = |member: &str| body[member].as_str().map(str::to_owned).with_context(|| member.to_owned());
        Ok(Tenant {
            id: text("id")?.parse()?,
            schema: text("schema")?,
            anon: text("anon_key")?,
            service: text("service_role_key")?,
            secret: text("jwt_secret")?.into(),
        })
    }

    /// A platform key whose time is over.
    pub(crate) fn expired_platform_key(&self) -> String {
        let claims = json!({"iss": "aura", "role": "platform_admin", "exp": 1});
        let secret = self.settings.platform_secret.expose_secret();
        crate::credentials::signed(&json!({"alg": "HS256", "typ": "JWT"}), &claims, secret.as_bytes())
    }

    /// Runs SQL in the source as superuser.
    pub(crate) async fn sql(&self, sql: &str) -> Result<()> {
        Ok(self.postgres.client("app").await?.batch_execute(sql).await?)
    }

    /// `relreplident` of a table of the source.
    pub(crate) async fn replica_identity(&self, tenant: &Tenant, table: &str) -> Result<char> {
        let client = self.postgres.client("app").await?;
        let sql = "select relreplident::text from pg_class c join pg_namespace n on n.oid = relnamespace
                   where nspname = $1 and relname = $2";
        let row = client.query_one(sql, &[&tenant.schema, &table]).await?;
        row.get::<_, String>(0).chars().next().context("empty")
    }

    /// Number of audit lines of an action.
    pub(crate) async fn audited(&self, tenant: &Tenant, action: &str) -> Result<usize> {
        let entries = self.store.audit_of_project(tenant.id, None, 1000).await?;
        Ok(entries.iter().filter(|entry| entry.action == action).count())
    }

    /// Plays a worker that covers at once whatever is registered, until the platform is stopped.
    pub(crate) async fn play_worker(&self) -> Result<()> {
        let (store, source, stop) = (self.store.clone(), self.source.id, self.stop.clone());
        let epoch = store.raise_epoch(source).await?;
        self.tasks.spawn(async move {
            while !stop.is_cancelled() {
                if let Err(error) = Self::cover(&store, source, epoch).await {
                    tracing::warn!(%error, "played worker");
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Ok(())
    }

    async fn cover(store: &Store, source: aura_domain::SourceId, epoch: Epoch) -> Result<()> {
        let registry = store.registry(source).await?;
        let covered = registry.registrations.iter().filter(|known| known.enabled && known.identity_set);
        let active: Vec<_> = covered.map(|known| (known.id, known.enabled_at_lsn.unwrap_or_default())).collect();
        store.mark_active(source, epoch, registry.revision, &active).await?;
        Ok(store.set_applied_revision(source, epoch, registry.revision).await?)
    }

    pub(crate) async fn stop(self) -> Result<()> {
        self.stop.cancel();
        self.tasks.close();
        tokio::time::timeout(SOON, self.tasks.wait()).await.context("background tasks didn't end")?;
        self.instance.stop().await
    }
}

fn new_source(url: String, admin_url: Option<String>) -> NewSource {
    NewSource {
        name: "shared".to_owned(),
        replication_url: url.into(),
        admin_url: admin_url.map(Into::into),
        slot_name: None,
        plugin: Plugin::Auto,
        slot_recreate: aura_store::SlotRecreate::Auto,
    }
}

/// The toggle's path.
pub(crate) fn toggle(tenant: &Tenant, table: &str) -> String {
    let encoded: String = table.bytes().map(|byte| format!("%{byte:02X}")).collect();
    format!("/v1/db/{}/schema/tables/{encoded}/realtime", tenant.id)
}
