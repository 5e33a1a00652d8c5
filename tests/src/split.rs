//! The product running as its three production binaries against real PostgreSQL and NATS.

use anyhow::Result;
use aura_testkit::{Nats, Postgres, Process, ProcessOptions, eventually, free_port};
use serde_json::json;

use crate::{PATIENCE, Project, curl};

const MASTER_KEY: &str = "a master key of the system tests, long enough";
const PLATFORM_SECRET: &str = "a platform secret of the system tests, long enough";

/// Everything running, killed when dropped.
pub struct Split {
    /// Databases `platform` and `app` (the source).
    pub postgres: Postgres,
    /// The bus.
    pub nats: Nats,
    /// The worker; see [`Self::start_worker`].
    pub worker: Process,
    /// The control plane.
    pub api: Process,
    /// The front.
    pub front: Process,
    /// Where the api listens.
    pub api_port: u16,
    /// Where the front listens.
    pub front_port: u16,
    /// `ws://…/realtime/v1`.
    pub ws_url: String,
    api_url: String,
    worker_url: String,
    worker_command: ProcessOptions,
}

impl Split {
    /// Starts it all and waits until the worker streams.
    pub async fn start() -> Result<Self> {
        let (postgres, nats) = tokio::try_join!(Postgres::start(), Nats::start())?;
        postgres.create_database("app").await?;
        let platform = postgres.create_database("platform").await?;
        let superuser = postgres.client("postgres").await?;
        superuser.batch_execute("create role worker login replication password 'worker'").await?;
        binary("aura-realtime", &platform, &nats)?.arg("migrate").start()?.succeeds(PATIENCE).await?;
        let (api_port, front_port, worker_port) = (free_port()?, free_port()?, free_port()?);
        let worker_command = binary("aura-realtime-cdc-worker", &platform, &nats)?
            .env("POSTGRES_REPLICATION_URL", postgres.url_as("worker", "worker", "app"))
            .env("POSTGRES_ADMIN_URL", postgres.url("app"))
            // A killed worker's lease must expire before the next one reads.
            .env("LEASE_DURATION_SECS", "3")
            .env("AURA_WORKER_LISTEN", format!("127.0.0.1:{worker_port}"));
        let worker = worker_command.start()?;
        let api = binary("aura-api", &platform, &nats)?.env("AURA_API_LISTEN", format!("127.0.0.1:{api_port}"));
        let front = binary("aura-realtime-ws-front", &platform, &nats)?
            .env("AURA_FRONT_LISTEN", format!("127.0.0.1:{front_port}"));
        let (api, front) = (api.start()?, front.start()?);
        let split = Self {
            postgres,
            nats,
            worker,
            api,
            front,
            api_port,
            front_port,
            api_url: format!("http://127.0.0.1:{api_port}"),
            ws_url: format!("ws://127.0.0.1:{front_port}/realtime/v1"),
            worker_url: format!("http://127.0.0.1:{worker_port}"),
            worker_command,
        };
        split.wait_until_streaming().await?;
        Ok(split)
    }

    /// Waits until the worker's `/health` says `cdc_active`, the api is ready and the front takes connections.
    pub async fn wait_until_streaming(&self) -> Result<()> {
        let waited = eventually(PATIENCE, || async {
            let health = curl("GET", &format!("{}/health", self.worker_url), "", None).await;
            let ready = curl("GET", &format!("{}/ready", self.api_url), "", None).await;
            health.is_ok_and(|answer| answer.body["cdc_active"] == true)
                && ready.is_ok_and(|answer| answer.status == 200)
        });
        waited.await.map_err(|error| error.context(self.logs()))
    }

    /// What the binaries logged.
    pub fn logs(&self) -> String {
        let logs = [&self.worker, &self.api, &self.front].map(|process| process.lines().join("\n"));
        logs.join("\n---\n")
    }

    /// Starts the worker again after its end.
    pub fn start_worker(&mut self) -> Result<()> {
        self.worker = self.worker_command.start()?;
        Ok(())
    }

    /// Creates a project through the api.
    pub async fn project(&self, name: &str) -> Result<Project> {
        let token = ProcessOptions::binary("aura-realtime")?
            .args(["token", "--role", "platform_admin"])
            .env("DATABASE_URL", self.postgres.url("platform"))
            .env("AURA_MASTER_KEY", MASTER_KEY)
            .env("AURA_PLATFORM_JWT_SECRET", PLATFORM_SECRET);
        let key = token.start()?.succeeds(PATIENCE).await?.pop().unwrap_or_default();
        let body = json!({"name": name});
        let answer = curl("POST", &format!("{}/v1/projects", self.api_url), &key, Some(&body)).await?;
        assert_eq!(answer.status, 201, "{}", answer.body);
        Project::from_answer(&answer.body, &self.api_url, &self.ws_url, &self.postgres.url("app"))
    }
}

fn binary(name: &str, platform: &str, nats: &Nats) -> Result<ProcessOptions> {
    Ok(ProcessOptions::binary(name)?
        .env("DATABASE_URL", platform)
        .env("NATS_URL", nats.url())
        .env("AURA_MASTER_KEY", MASTER_KEY)
        .env("AURA_PLATFORM_JWT_SECRET", PLATFORM_SECRET)
        .env("AURA_LOG", "info"))
}
