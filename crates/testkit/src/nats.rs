use std::{path::PathBuf, time::Duration};

use anyhow::{Context, Result, anyhow};
use rustix::process::Signal;
use tokio::{io::AsyncReadExt, net::TcpStream};

use crate::{
    dirs::RunDir,
    eventually_some, free_port,
    process::{Process, ProcessOptions},
    repository_root,
};

/// A start on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// What differs from the usual server.
#[derive(Debug, Clone, Default)]
pub struct NatsOptions {
    configuration: Vec<String>,
    users: Vec<String>,
}

impl NatsOptions {
    /// A line of nats-server's configuration file.
    #[must_use]
    pub fn line(mut self, line: impl Into<String>) -> Self {
        self.configuration.push(line.into());
        self
    }

    /// A user, and subjects that it may not publish to. The first one makes the server refuse everybody without a name.
    #[must_use]
    pub fn user(mut self, name: &str, password: &str, denied: &[&str]) -> Self {
        self.users.push(format!(
            "{{ user: {name:?}, password: {password:?}, permissions: {{ publish: {{ deny: {denied:?} }} }} }}"
        ));
        self
    }

    /// The users of `deploy/nats/users.conf`, each with its name as its password.
    ///
    /// # Errors
    /// The file can't be read.
    pub fn with_product_users(mut self) -> Result<Self> {
        for (variable, user) in [("WORKER", "worker"), ("FRONT", "front"), ("API", "api"), ("SERVE", "realtime")] {
            self.configuration.push(format!("NATS_{variable}_PASSWORD: \"aura-{user}\""));
        }
        self.configuration.push(std::fs::read_to_string(repository_root().join("deploy/nats/users.conf"))?);
        Ok(self)
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = self.configuration.clone();
        if !self.users.is_empty() {
            lines.push(format!("authorization {{ users: [ {} ] }}", self.users.join(", ")));
        }
        lines
    }
}

/// A throw-away nats-server with JetStream on loopback, killed when dropped.
#[derive(Debug)]
pub struct Nats {
    // Dropped before the directory it writes to.
    server: Option<Process>,
    command: ProcessOptions,
    port: u16,
    monitor: u16,
    _dir: RunDir,
}

impl Nats {
    /// A server with its defaults (`max_payload` 1 MiB) and JetStream.
    pub async fn start() -> Result<Self> {
        Self::start_with(NatsOptions::default()).await
    }

    /// A server with more configuration.
    pub async fn start_with(options: NatsOptions) -> Result<Self> {
        // Somebody else may take the free port before the server does.
        match Self::try_start(&options).await {
            Ok(nats) => Ok(nats),
            Err(_) => Self::try_start(&options).await,
        }
    }

    async fn try_start(options: &NatsOptions) -> Result<Self> {
        let dir = RunDir::create("nats")?;
        let (port, monitor) = (free_port()?, free_port()?);
        let file = dir.path().join("nats.conf");
        let store = dir.path().join("jetstream");
        let mut lines = options.lines();
        lines.push(format!("listen: \"127.0.0.1:{port}\""));
        lines.push(format!("http: \"127.0.0.1:{monitor}\""));
        lines.push(format!("jetstream {{ store_dir: \"{}\" }}", store.display()));
        std::fs::write(&file, lines.join("\n"))?;
        let command = ProcessOptions::new(binary()?).args(["-c", &file.to_string_lossy()]);
        let mut nats = Self { server: None, command, port, monitor, _dir: dir };
        nats.start_again().await?;
        Ok(nats)
    }

    /// Starts the stopped server on its old port and storage; returns when it takes connections.
    pub async fn start_again(&mut self) -> Result<()> {
        let server = self.command.start()?;
        let port = self.port;
        let ready = eventually_some(PATIENCE, || async {
            match server.exited() {
                Some(status) => Some(Err(anyhow!("{status}:\n{}", server.lines().join("\n")))),
                None => greets(port).await.then_some(Ok(())),
            }
        });
        ready.await.and_then(|outcome| outcome).context("nats-server didn't start")?;
        self.server = Some(server);
        Ok(())
    }

    /// `nats://127.0.0.1:<port>`.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// The same as a user of [`NatsOptions::user`].
    pub fn url_as(&self, user: &str, password: &str) -> String {
        format!("nats://{user}:{password}@127.0.0.1:{}", self.port)
    }

    /// TCP port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Messages that the server has received from all clients since it started, by its own count (`/varz`, `in_msgs`).
    pub async fn received(&self) -> Result<u64> {
        let url = format!("http://127.0.0.1:{}/varz", self.monitor);
        let answer = ProcessOptions::new("curl").args(["--silent", "--show-error", "--fail", &url]).start()?;
        let lines = answer.succeeds(PATIENCE).await?;
        let count = lines.iter().find_map(|line| line.trim().strip_prefix("\"in_msgs\":"));
        count.and_then(|text| text.trim().trim_end_matches(',').parse().ok()).context("no in_msgs in /varz")
    }

    /// SIGTERM, and waits for the end.
    pub async fn stop(&mut self) -> Result<()> {
        let server = self.server.take().context("nats-server doesn't run")?;
        server.signal(Signal::TERM)?;
        server.wait(PATIENCE).await.map(drop)
    }

    /// SIGKILL, and waits for the end.
    pub async fn kill(&mut self) -> Result<()> {
        self.server.take().context("nats-server doesn't run")?.kill().await
    }

    /// SIGSTOP: the kernel still accepts connections and bytes, nobody answers.
    pub fn pause(&self) -> Result<()> {
        self.server.as_ref().context("nats-server doesn't run")?.pause()
    }

    /// SIGCONT.
    pub fn resume(&self) -> Result<()> {
        self.server.as_ref().context("nats-server doesn't run")?.resume()
    }
}

/// A NATS server speaks first.
async fn greets(port: u16) -> bool {
    let Ok(mut socket) = TcpStream::connect(("127.0.0.1", port)).await else { return false };
    let mut greeting = [0; 5];
    socket.read_exact(&mut greeting).await.is_ok() && &greeting == b"INFO "
}

/// `$AURA_NATS_SERVER`, PATH, or the virtual environment that `make test` fills.
fn binary() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).map(|folder| folder.join("nats-server")).find(|file| file.exists());
    let private = repository_root().join(".cache/venv/bin/nats-server");
    std::env::var_os("AURA_NATS_SERVER")
        .map(PathBuf::from)
        .or(in_path)
        .or_else(|| private.exists().then_some(private))
        .context("no nats-server found: `make test` installs one")
}
