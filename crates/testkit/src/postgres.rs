use std::{path::PathBuf, time::Duration};

use anyhow::{Context, Result, anyhow};
use rustix::process::Signal;
use tokio_postgres::{Client, NoTls};

use crate::{
    dirs::{self, RunDir},
    eventually_some, free_port,
    process::{Process, ProcessOptions},
    template::{self, Installation, PASSWORD},
};

/// A start or stop on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// What differs from the usual test cluster.
#[derive(Debug, Clone)]
pub struct PostgresOptions {
    settings: Vec<(String, String)>,
    wal2json: bool,
}

impl Default for PostgresOptions {
    fn default() -> Self {
        let settings = [
            ("wal_level", "logical"),
            ("fsync", "off"),
            ("max_connections", "200"),
            ("max_replication_slots", "20"),
            ("max_wal_senders", "20"),
            ("max_slot_wal_keep_size", "1GB"),
            ("shared_buffers", "64MB"),
        ];
        let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        Self { settings, wal2json: true }
    }
}

impl PostgresOptions {
    /// Sets a server setting; the last one of a name counts.
    #[must_use]
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// A server that lacks the wal2json library.
    #[must_use]
    pub fn without_wal2json(mut self) -> Self {
        self.wal2json = false;
        self
    }
}

/// How PostgreSQL goes down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shutdown {
    /// Ends sessions and writes a checkpoint. Waits for walsenders to have sent everything.
    Fast,
    /// As a crash: recovery at the next start.
    Immediate,
}

/// A throw-away cluster on loopback TCP and a Unix socket, stopped when dropped.
#[derive(Debug)]
pub struct Postgres {
    // Dropped before the directory it writes to.
    server: Option<Process>,
    command: ProcessOptions,
    port: u16,
    dir: RunDir,
}

impl Postgres {
    /// The usual cluster: `wal_level=logical`, wal2json.
    pub async fn start() -> Result<Self> {
        Self::start_with(PostgresOptions::default()).await
    }

    /// A cluster with other settings.
    pub async fn start_with(options: PostgresOptions) -> Result<Self> {
        // Somebody else may take the free port before the server does.
        match Self::try_start(&options).await {
            Ok(postgres) => Ok(postgres),
            Err(_) => Self::try_start(&options).await,
        }
    }

    async fn try_start(options: &PostgresOptions) -> Result<Self> {
        let installation = Installation::find()?;
        let dir = RunDir::create("pg")?;
        dirs::give_to(dir.path(), installation.ids)?;
        template::copy(&installation.cluster()?, &dir.path().join("data"))?;
        let port = free_port()?;
        let mut command = ProcessOptions::new(installation.server(options.wal2json)?)
            .args(["-D", &dir.path().join("data").to_string_lossy()])
            .args(["-c", "listen_addresses=127.0.0.1", "-c", &format!("port={port}")])
            .args(["-c", &format!("unix_socket_directories={}", dir.path().display())])
            .user(installation.user)
            .directory("/")
            .death_signal("QUIT");
        if installation.lists_output_plugins()? {
            command = command.args(["-c", "output_plugin_libraries=pgoutput,test_decoding,wal2json"]);
        }
        for (name, value) in &options.settings {
            command = command.arg("-c").arg(format!("{name}={value}"));
        }
        let mut postgres = Self { server: None, command, port, dir };
        postgres.start_again().await?;
        Ok(postgres)
    }

    /// Folder of the programs of an installation that lacks wal2json, for `--pg-bin`.
    pub fn programs_without_wal2json() -> Result<PathBuf> {
        let server = Installation::find()?.server(false)?;
        Ok(server.parent().context("a program has a folder")?.to_owned())
    }

    /// Starts the stopped server on its old port and data; returns when it takes connections.
    pub async fn start_again(&mut self) -> Result<()> {
        let server = self.command.start()?;
        let url = self.url("postgres");
        let ready = eventually_some(PATIENCE, || async {
            match server.exited() {
                Some(status) => Some(Err(anyhow!("{status}:\n{}", server.lines().join("\n")))),
                None => tokio_postgres::connect(&url, NoTls).await.ok().map(|_| Ok(())),
            }
        });
        ready.await.and_then(|outcome| outcome).context("the test cluster didn't start")?;
        self.server = Some(server);
        Ok(())
    }

    /// Stops the server and waits for its end.
    pub async fn stop(&mut self, how: Shutdown) -> Result<()> {
        let server = self.server.take().context("the test cluster doesn't run")?;
        server.signal(match how {
            Shutdown::Fast => Signal::INT,
            Shutdown::Immediate => Signal::QUIT,
        })?;
        server.wait(PATIENCE).await.map(drop)
    }

    /// Stops and starts.
    pub async fn restart(&mut self, how: Shutdown) -> Result<()> {
        self.stop(how).await?;
        self.start_again().await
    }

    /// Connection URL of a database as the superuser `postgres`. The database need not exist yet.
    pub fn url(&self, database: &str) -> String {
        self.url_as("postgres", PASSWORD, database)
    }

    /// Connection URL as another user.
    pub fn url_as(&self, user: &str, password: &str, database: &str) -> String {
        format!("postgres://{user}:{password}@127.0.0.1:{}/{database}", self.port)
    }

    /// TCP port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Where the cluster's files are.
    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Process id of the postmaster.
    pub fn pid(&self) -> Option<u32> {
        self.server.as_ref().map(Process::pid)
    }

    /// The server's log so far.
    pub fn log(&self) -> Vec<String> {
        self.server.as_ref().map(Process::lines).unwrap_or_default()
    }

    /// A superuser session in a database.
    pub async fn client(&self, database: &str) -> Result<Client> {
        let (client, connection) = tokio_postgres::connect(&self.url(database), NoTls).await?;
        // Ends when the client is dropped, or with the test's runtime.
        tokio::spawn(connection);
        Ok(client)
    }

    /// Creates a database and answers its URL.
    pub async fn create_database(&self, name: &str) -> Result<String> {
        let sql = format!("create database \"{}\"", name.replace('"', "\"\""));
        self.client("postgres").await?.batch_execute(&sql).await?;
        Ok(self.url(name))
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // Killing the postmaster alone would orphan its backends for a moment; SIGQUIT ends them all at once.
        if let Some(server) = &self.server {
            let _ = server.signal(Signal::QUIT);
            let _ = server.wait_blocking(Duration::from_secs(10));
        }
    }
}
