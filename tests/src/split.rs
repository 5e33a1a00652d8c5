//! The product running as its three production binaries against real PostgreSQL and NATS.

use anyhow::{Context, Result};
use aura_testkit::{
    Nats, NatsOptions, Postgres, PostgresOptions, Process, ProcessOptions, SlotWatch, TcpProxy, eventually, free_port,
    http_get, http_status,
};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::{Answer, PATIENCE, Project, curl};

/// `AURA_MASTER_KEY` of every part.
pub const MASTER_KEY: &str = "a master key of the system tests, long enough";
const PLATFORM_SECRET: &str = "a platform secret of the system tests, long enough";

/// Slot of the source `shared`.
pub const SLOT: &str = "aura_cdc_slot";

/// What differs from the usual stage.
#[derive(Debug, Clone, Default)]
pub struct SplitOptions {
    postgres: PostgresOptions,
    nats: NatsOptions,
    worker: Vec<(String, String)>,
    /// The bus has users of the test's own in place of those of `deploy/nats`.
    own_users: bool,
    source_proxy: bool,
    bus_proxy: bool,
    own_platform: bool,
    log: Option<String>,
}

impl SplitOptions {
    /// Sets a server setting of PostgreSQL.
    #[must_use]
    pub fn postgres(mut self, name: &str, value: &str) -> Self {
        self.postgres = self.postgres.setting(name, value);
        self
    }

    /// Sets an environment variable of the worker.
    #[must_use]
    pub fn worker(mut self, name: &str, value: &str) -> Self {
        self.worker.push((name.to_owned(), value.to_owned()));
        self
    }

    /// What every binary logs, in the words of `AURA_LOG`; `info` otherwise.
    #[must_use]
    pub fn log(mut self, filter: &str) -> Self {
        self.log = Some(filter.to_owned());
        self
    }

    /// The worker may not publish to these subjects.
    #[must_use]
    pub fn worker_refused(mut self, subjects: &[&str]) -> Self {
        self.nats = self.nats.user("aura-worker", "aura-worker", subjects);
        for user in ["aura-front", "aura-api", "aura-realtime"] {
            self.nats = self.nats.user(user, user, &[]);
        }
        self.own_users = true;
        self
    }

    /// The platform database lives in a cluster of its own: it stays when the source goes.
    #[must_use]
    pub fn own_platform(mut self) -> Self {
        self.own_platform = true;
        self
    }

    /// The worker reaches the source through [`Split::source_proxy`].
    #[must_use]
    pub fn source_proxy(mut self) -> Self {
        self.source_proxy = true;
        self
    }

    /// The worker reaches the bus through [`Split::bus_proxy`].
    #[must_use]
    pub fn bus_proxy(mut self) -> Self {
        self.bus_proxy = true;
        self
    }

    /// The worker's part of the environment.
    fn on_worker(&self, mut command: ProcessOptions, bus_proxy: Option<&TcpProxy>) -> ProcessOptions {
        // A killed worker's lease must expire before the next one reads.
        command = command.env("LEASE_DURATION_SECS", "3");
        if let Some(proxy) = bus_proxy {
            let port = proxy.port();
            command = command.env("NATS_URL", format!("nats://aura-worker:aura-worker@127.0.0.1:{port}"));
        }
        self.worker.iter().fold(command, |command, (name, value)| command.env(name, value))
    }
}

/// A worker; killed when dropped.
#[derive(Debug)]
pub struct Worker {
    /// The process.
    pub process: Process,
    /// Where it listens.
    pub port: u16,
}

impl Worker {
    fn start(command: &ProcessOptions) -> Result<Self> {
        let port = free_port()?;
        let process = command.clone().env("AURA_WORKER_LISTEN", format!("127.0.0.1:{port}")).start()?;
        Ok(Self { process, port })
    }

    /// `/status`; null while it can't be reached.
    pub async fn status(&self) -> Value {
        self.json("/status").await
    }

    async fn json(&self, path: &str) -> Value {
        let answer = http_get(self.port, path).await;
        answer.ok().and_then(|(_, body)| serde_json::from_str(&body).ok()).unwrap_or_default()
    }

    /// Sum of a metric's values over all its labels; `None` when nothing has been counted under that name yet. A worker that
    /// doesn't answer is an error, not a zero.
    pub async fn metric(&self, name: &str) -> Result<Option<f64>> {
        self.metric_of(name, "").await
    }

    /// The same over those series whose labels contain this, e.g. `reason="quota"`.
    pub async fn metric_of(&self, name: &str, label: &str) -> Result<Option<f64>> {
        let (status, text) = http_get(self.port, "/metrics").await?;
        anyhow::ensure!(status == 200, "/metrics answers {status}: {text}");
        let is_it = |line: &&str| line.split(['{', ' ']).next() == Some(name) && line.contains(label);
        let value = |line: &str| line.rsplit(' ').next().context("no value")?.parse::<f64>().context(line.to_owned());
        let values = text.lines().filter(is_it).map(value).collect::<Result<Vec<_>>>()?;
        Ok((!values.is_empty()).then(|| values.iter().sum()))
    }

    /// Whether the shared source's engine streams here.
    pub async fn is_streaming(&self) -> bool {
        self.json("/health").await["cdc_active"] == true
    }
}

/// Everything running, killed when dropped.
pub struct Split {
    /// Databases `app` (the source) and, unless it is elsewhere, `platform`.
    pub postgres: Postgres,
    /// Where the platform database is; see [`SplitOptions::own_platform`].
    platform: Option<Postgres>,
    /// The bus.
    pub nats: Nats,
    /// The first worker; see [`Self::start_worker`] and [`Self::another_worker`].
    pub worker: Worker,
    /// Between the workers and the source; see [`SplitOptions::source_proxy`].
    pub source_proxy: Option<TcpProxy>,
    /// Between the workers and the bus; see [`SplitOptions::bus_proxy`].
    pub bus_proxy: Option<TcpProxy>,
    /// The api.
    pub api: Process,
    /// The front.
    pub front: Process,
    /// Where the api listens.
    pub api_port: u16,
    /// Where the front listens.
    pub front_port: u16,
    /// Origin of the api.
    pub api_url: String,
    /// `ws://…/realtime/v1`.
    pub ws_url: String,
    platform_key: OnceCell<String>,
    worker_command: ProcessOptions,
    api_command: ProcessOptions,
}

impl Split {
    /// Starts it all and waits until the worker streams.
    pub async fn start() -> Result<Self> {
        Self::start_with(SplitOptions::default()).await
    }

    /// The same with other options.
    pub async fn start_with(options: SplitOptions) -> Result<Self> {
        let bus = options.nats.clone();
        let bus = if options.own_users { bus } else { bus.with_product_users()? };
        let (postgres, nats) = tokio::try_join!(Postgres::start_with(options.postgres.clone()), Nats::start_with(bus))?;
        postgres.create_database("app").await?;
        let own_platform = if options.own_platform { Some(Postgres::start().await?) } else { None };
        let platform = own_platform.as_ref().unwrap_or(&postgres).create_database("platform").await?;
        let superuser = postgres.client("postgres").await?;
        superuser.batch_execute("create role worker login replication password 'worker'").await?;
        let log = options.log.as_deref().unwrap_or("info");
        let binary = |name: &str| {
            binary(name, &platform, &nats.url_as(bus_user(name), bus_user(name)))
                .map(|binary| binary.env("AURA_LOG", log))
        };
        binary("aura-realtime")?.arg("migrate").start()?.succeeds(PATIENCE).await?;
        let source_proxy = proxy(options.source_proxy, postgres.port()).await?;
        let bus_proxy = proxy(options.bus_proxy, nats.port()).await?;
        let source_port = source_proxy.as_ref().map_or_else(|| postgres.port(), TcpProxy::port);
        let worker_command = options
            .on_worker(binary("aura-realtime-cdc-worker")?, bus_proxy.as_ref())
            .env(
                "POSTGRES_REPLICATION_URL",
                format!("postgres://worker:worker@127.0.0.1:{source_port}/app?sslmode=disable"),
            )
            .env("POSTGRES_ADMIN_URL", postgres.url("app"));
        let (api_port, front_port) = (free_port()?, free_port()?);
        let listen = |port: u16| format!("127.0.0.1:{port}");
        let api_command = binary("aura-api")?;
        let split = Self {
            worker: Worker::start(&worker_command)?,
            api: api_command.clone().env("AURA_API_LISTEN", listen(api_port)).start()?,
            front: binary("aura-realtime-ws-front")?.env("AURA_FRONT_LISTEN", listen(front_port)).start()?,
            postgres,
            platform: own_platform,
            nats,
            source_proxy,
            bus_proxy,
            api_port,
            front_port,
            api_url: format!("http://{}", listen(api_port)),
            ws_url: format!("ws://{}/realtime/v1", listen(front_port)),
            platform_key: OnceCell::new(),
            worker_command,
            api_command,
        };
        split.wait_until_streaming().await?;
        Ok(split)
    }

    /// Waits until the worker's `/health` says `cdc_active`, the api is ready and the front takes connections.
    pub async fn wait_until_streaming(&self) -> Result<()> {
        let waited = eventually(PATIENCE, || async {
            self.worker.is_streaming().await && is_ready(self.api_port).await && is_ready(self.front_port).await
        });
        waited.await.map_err(|error| error.context(self.logs()))
    }

    /// What the binaries logged.
    pub fn logs(&self) -> String {
        let logs = [&self.worker.process, &self.api, &self.front].map(|process| process.lines().join("\n"));
        logs.join("\n---\n")
    }

    /// Starts the first worker again after its end.
    pub fn start_worker(&mut self) -> Result<()> {
        self.worker = Worker::start(&self.worker_command)?;
        Ok(())
    }

    /// One more worker of the pool.
    pub fn another_worker(&self) -> Result<Worker> {
        Worker::start(&self.worker_command)
    }

    /// One more instance of the api, ready, and its origin.
    pub async fn another_api(&self) -> Result<(Process, String)> {
        let port = free_port()?;
        let listen = format!("127.0.0.1:{port}");
        let process = self.api_command.clone().env("AURA_API_LISTEN", &listen).start()?;
        eventually(PATIENCE, || is_ready(port)).await?;
        Ok((process, format!("http://{listen}")))
    }

    /// The cluster of the database `platform`, to be stopped and started.
    pub fn platform_mut(&mut self) -> &mut Postgres {
        self.platform.as_mut().unwrap_or(&mut self.postgres)
    }

    /// The cluster of the database `platform`.
    pub fn platform(&self) -> &Postgres {
        self.platform.as_ref().unwrap_or(&self.postgres)
    }

    /// What no log, answer or metric may have in it.
    pub fn secrets() -> [&'static str; 5] {
        [MASTER_KEY, PLATFORM_SECRET, "worker:worker@", "aura-worker:aura-worker@", "aura-front:aura-front@"]
    }

    /// A key that may do everything.
    pub async fn platform_key(&self) -> Result<&str> {
        let make = || async {
            let token = ProcessOptions::binary("aura-realtime")?
                .args(["token", "--role", "platform_admin"])
                .env("DATABASE_URL", self.platform().url("platform"))
                .env("AURA_MASTER_KEY", MASTER_KEY)
                .env("AURA_PLATFORM_JWT_SECRET", PLATFORM_SECRET);
            token.start()?.succeeds(PATIENCE).await?.pop().context("no key")
        };
        self.platform_key.get_or_try_init(make).await.map(String::as_str)
    }

    /// `GET /v1/engines/shared`.
    pub async fn engine(&self) -> Result<Value> {
        let url = format!("{}/v1/engines/shared", self.api_url);
        Ok(curl("GET", &url, self.platform_key().await?, None).await?.body)
    }

    /// `POST /v1/engines/shared/<verb>`.
    pub async fn verb(&self, verb: &str, body: Value) -> Result<Answer> {
        let url = format!("{}/v1/engines/shared/{verb}", self.api_url);
        curl("POST", &url, self.platform_key().await?, Some(&body)).await
    }

    /// The shared source's slot.
    pub async fn slot(&self) -> Result<SlotWatch> {
        self.postgres.slot(SLOT).await
    }

    /// Creates a project through the api.
    pub async fn project(&self, name: &str) -> Result<Project> {
        let (url, body) = (format!("{}/v1/projects", self.api_url), json!({"name": name}));
        let answer = curl("POST", &url, self.platform_key().await?, Some(&body)).await?;
        assert_eq!(answer.status, 201, "{}", answer.body);
        Project::from_answer(&answer.body, &self.api_url, &self.ws_url, &self.postgres.url("app"))
    }
}

/// Its user in `deploy/nats`, whose password is its name, too.
fn bus_user(binary: &str) -> &'static str {
    match binary {
        "aura-realtime-cdc-worker" => "aura-worker",
        "aura-realtime-ws-front" => "aura-front",
        "aura-api" => "aura-api",
        _ => "aura-realtime",
    }
}

async fn is_ready(port: u16) -> bool {
    http_status(port, "/ready").await.is_ok_and(|status| status == 200)
}

async fn proxy(wanted: bool, port: u16) -> Result<Option<TcpProxy>> {
    if wanted { TcpProxy::start(port).await.map(Some) } else { Ok(None) }
}

fn binary(name: &str, platform: &str, bus: &str) -> Result<ProcessOptions> {
    Ok(ProcessOptions::binary(name)?
        .env("DATABASE_URL", platform)
        .env("NATS_URL", bus)
        .env("AURA_MASTER_KEY", MASTER_KEY)
        .env("AURA_PLATFORM_JWT_SECRET", PLATFORM_SECRET))
}
