//! `aura-realtime dev`: everything in one process.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context, Result, anyhow};
use aura_domain::EngineReport;
use aura_kit::{
    MetricsAccess, Problems, ShutdownHandle,
    http::{Limits, Origins},
};
use aura_store::{NewSource, Store};
use aura_worker::{WorkerArgs, WorkerSettings, WorkerStatus};
use secrecy::ExposeSecret;
use serde_json::json;
use tokio::{net::TcpListener, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::stack::{ApiClient, Lease, Stack, StackConfig};

mod child;
mod cluster;
mod data_dir;
mod databases;
mod demo;
mod engine;
mod existing;
mod installation;
mod live;
mod options;
mod screen;
mod subscriber;
mod summary;

use child::User;
use cluster::Cluster;
use data_dir::{DataDir, Secrets};
use databases::Urls;
use demo::Demo;
use installation::Installation;
pub(crate) use options::DevOptions;
use screen::Screen;
use summary::DevFile;

/// One developer's engine has little to drain, and waits for its end.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(8);

/// Starts everything, runs until Ctrl-C (or, with `--once`, until the first event), stops everything.
pub(crate) async fn run(options: DevOptions, shutdown: ShutdownHandle) -> Result<Vec<EngineReport>> {
    let started = Instant::now();
    let screen = Screen::new(options.json);
    let user = User::to_drop_to()?;
    // Before anything is made: a taken port is the most common mistake. By whom it is taken, an own data directory tells.
    let listener = match listen(options.port).await {
        Err(error) if !options.data_dir.exists() => return Err(error),
        listener => listener,
    };
    let mut dir = DataDir::open(&options.data_dir, user.as_ref())?;
    let listener = listener?;
    let secrets = dir.secrets()?;
    let (cluster, urls) = match &options.database_url {
        Some(url) => {
            existing::check(url.expose_secret()).await?;
            (None, Ok(Urls::all_in(url.expose_secret())))
        }
        None => {
            let cluster = start_cluster(&dir, &options, user, screen).await?;
            let urls = databases::prepare(&cluster, &secrets).await;
            (Some(cluster), urls)
        }
    };
    let outcome = match urls {
        Ok(urls) => Session { options, screen, secrets, urls, started }.run(&mut dir, listener, &shutdown).await,
        Err(error) => Err(error),
    };
    if let Some(cluster) = cluster {
        cluster.stop().await?;
    }
    let engines = outcome.map_err(existing::explain)?;
    screen.note("stopped", "stopped, nothing is left running");
    Ok(engines)
}

async fn listen(port: u16) -> Result<TcpListener> {
    let bound = aura_kit::http::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await;
    bound.map_err(|error| anyhow!("{error}; choose another with --port"))
}

async fn start_cluster(dir: &DataDir, options: &DevOptions, user: Option<User>, screen: Screen) -> Result<Cluster> {
    let begun = Instant::now();
    let installation = Installation::find(options.pg_bin.as_deref())?;
    if !installation.wal2json {
        let install = installation.wal2json_install();
        screen.note("warning", &format!("wal2json isn't installed, pgoutput takes its place; to get it: {install}"));
    }
    let cluster = Cluster::start(dir, &installation, user, options.port.saturating_add(1)).await?;
    let user = cluster.user().map(|user| format!(" as {}", user.name)).unwrap_or_default();
    let (version, port, pid) = (&installation.version, cluster.port(), cluster.pid());
    let seconds = begun.elapsed().as_secs_f64();
    let text = format!("PostgreSQL {version} on 127.0.0.1:{port}, pid {pid}{user}, {seconds:.1} s");
    screen.note("postgres", &text);
    if !cluster.directory().starts_with(dir.path()) {
        let text =
            format!("the cluster is in {}: its user can't reach the data directory", cluster.directory().display());
        screen.note("postgres", &text);
    }
    Ok(cluster)
}

/// Handles on the running stack.
struct Handles {
    store: Store,
    api: ApiClient,
    platform_key: String,
    worker: WorkerStatus,
    /// Whether somebody is connected besides ourselves.
    watched: Box<dyn Fn() -> bool + Send + Sync>,
}

/// A run with a database.
struct Session {
    options: DevOptions,
    screen: Screen,
    secrets: Secrets,
    urls: Urls,
    started: Instant,
}

impl Session {
    async fn run(
        &self,
        dir: &mut DataDir,
        listener: TcpListener,
        shutdown: &ShutdownHandle,
    ) -> Result<Vec<EngineReport>> {
        let origin = format!("http://{}", listener.local_addr()?);
        aura_store::migrate(&self.urls.platform).await.context("can't migrate the platform database")?;
        let stack = Stack::build(self.stack_config()?, shutdown).await?;
        let handles = Handles {
            store: stack.store().clone(),
            api: stack.api_client(),
            platform_key: stack.platform_key()?,
            worker: stack.worker_status(),
            watched: Box::new(stack.watched_by_others()),
        };
        let serving = stack.run(listener, shutdown);
        let using = async {
            let outcome = self.use_stack(dir, handles, &origin, shutdown).await;
            // Also on errors: whoever waits for the end of serving must get it.
            shutdown.trigger();
            outcome
        };
        let (served, used) = tokio::join!(serving, using);
        used.and(served)
    }

    fn stack_config(&self) -> Result<StackConfig> {
        let existing = self.options.database_url.as_ref();
        // What is wrong there was said at the start.
        let worker =
            WorkerArgs::from_environment(&mut Problems::default()).context("the CDC_* variables can't be read")?;
        Ok(StackConfig {
            platform_url: self.urls.platform.clone().into(),
            master_key: self.secrets.master_key.clone().into(),
            platform_jwt_secret: self.secrets.platform_jwt_secret.clone().into(),
            jwks_loopback: false,
            nats_url: self.options.nats_url.clone(),
            source: Some(NewSource {
                slot_recreate: aura_store::SlotRecreate::Auto,
                name: "shared".to_owned(),
                replication_url: self.urls.replication.clone().into(),
                admin_url: Some(self.urls.admin.clone().into()),
                slot_name: existing.map(|url| existing::slot_name(url.expose_secret())).transpose()?,
                plugin: self.options.plugin.into(),
            }),
            // The lock on the data directory is all the lease that a private cluster needs; after a kill -9 nobody has to
            // wait for a lease to expire.
            lease: if existing.is_none() { Lease::Ours } else { Lease::Shared },
            worker: WorkerSettings { drain_timeout: DRAIN_TIMEOUT, ..worker.settings() },
            limits: Limits::off(),
            metrics: MetricsAccess::Everybody,
            origins: Origins::any(),
            secure_cookies: false,
        })
    }

    async fn use_stack(
        &self,
        dir: &mut DataDir,
        stack: Handles,
        origin: &str,
        shutdown: &ShutdownHandle,
    ) -> Result<()> {
        let stop = shutdown.token();
        let demo = match self.options.no_demo {
            true => None,
            false => stop.run_until_cancelled(self.prepare_demo(&stack)).await.transpose()?,
        };
        let file = self.dev_file(&stack, origin, demo)?;
        dir.write_private("dev.json", &file)?;
        dir.announce(origin)?;
        if self.options.once {
            return self.once(&file).await;
        }
        file.print(self.screen, dir.path());
        if let Some(why) = stop.run_until_cancelled(engine::not_streaming(&stack.worker)).await.flatten() {
            self.screen.note("warning", &why);
        }
        self.watch(stack, &file, stop).await;
        Ok(())
    }

    async fn prepare_demo(&self, stack: &Handles) -> Result<Demo> {
        let demo = Demo::prepare(stack, &self.urls.admin, self.options.database_url.is_none()).await?;
        if let Some(why) = demo.go_live(&stack.api).await? {
            self.screen.note("warning", &format!("public.messages isn't live: {why}"));
        }
        Ok(demo)
    }

    fn dev_file(&self, stack: &Handles, origin: &str, demo: Option<Demo>) -> Result<DevFile> {
        Ok(DevFile {
            api_url: origin.to_owned(),
            ws_url: format!("{}/realtime/v1", origin.replacen("http", "ws", 1)),
            studio_url: format!("{origin}/studio"),
            database_url: match (&self.options.database_url, &demo) {
                (Some(url), Some(demo)) => existing::with_search_path(url.expose_secret(), &demo.schema),
                _ => self.urls.admin.clone(),
            },
            platform_database_url: self.urls.platform.clone(),
            platform_key: stack.platform_key.clone(),
            pid: std::process::id(),
            demo,
        })
    }

    async fn once(&self, file: &DevFile) -> Result<()> {
        let demo = file.demo.as_ref().context("stopped before the demo was ready")?;
        let took = live::once(&file.ws_url, demo, &self.urls.admin, self.started).await?.as_millis();
        self.screen.object("first_event", json!({"ms": took}), &format!("first event in {took} ms"));
        Ok(())
    }

    /// The live view and the demo's writer, until stopped.
    async fn watch(&self, stack: Handles, file: &DevFile, stop: CancellationToken) {
        let Some(demo) = &file.demo else { return stop.cancelled().await };
        let tasks = TaskTracker::new();
        let key = demo.service_role_key.clone();
        tasks.spawn(live::show(file.ws_url.clone(), key, self.screen, stop.clone()));
        let writer = demo::write(self.urls.admin.clone(), demo.schema.clone(), stack.watched, stop.clone());
        tasks.spawn(writer);
        tasks.close();
        stop.cancelled().await;
        tasks.wait().await;
    }
}
