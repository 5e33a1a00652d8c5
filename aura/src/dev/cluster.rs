//! The private PostgreSQL cluster of `dev`.

use std::{
    fs::{self, OpenOptions},
    io::Write,
    net::{Ipv4Addr, TcpListener},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::Child,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::{Instant, sleep};
use tokio_postgres::NoTls;

use super::{
    child::{self, User},
    data_dir::DataDir,
    installation::Installation,
};

/// Crash recovery of a large cluster may take this long.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// For each of: fast shutdown, immediate shutdown.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two looks at a starting or stopping server.
const POLL: Duration = Duration::from_millis(20);

/// A running server, reachable on loopback only.
#[derive(Debug)]
pub(crate) struct Cluster {
    child: Child,
    port: u16,
    superuser_password: String,
    directory: PathBuf,
    user: Option<User>,
}

impl Cluster {
    /// Creates the cluster at the first call, then starts it, on `preferred_port` if that is free. Waits until it
    /// takes connections.
    pub(crate) async fn start(
        dir: &DataDir,
        installation: &Installation,
        user: Option<User>,
        preferred_port: u16,
    ) -> Result<Self> {
        let superuser_password = dir.secrets()?.postgres_password;
        let directory = dir.cluster(user.as_ref())?;
        if directory.exists() {
            check_version(&directory, installation)?;
            end_leftovers(&directory).await?;
        } else {
            initdb(installation, &directory, user.as_ref(), &superuser_password)?;
        }
        let port = free_port(preferred_port)?;
        let log = dir.path().join("postgres.log");
        let child = run_server(installation, &directory, user.as_ref(), port, &log)?;
        let mut cluster = Self { child, port, superuser_password, directory, user };
        match cluster.wait_until_ready(&log).await {
            Ok(()) => Ok(cluster),
            Err(error) => {
                cluster.stop().await?;
                Err(error)
            }
        }
    }

    /// URL for a user.
    pub(crate) fn url(&self, user: &str, password: &str, database: &str) -> String {
        // Passwords are ours: hexadecimal.
        format!("postgres://{user}:{password}@127.0.0.1:{}/{database}", self.port)
    }

    /// URL of the superuser.
    pub(crate) fn superuser_url(&self, database: &str) -> String {
        self.url("postgres", &self.superuser_password, database)
    }

    /// Pid of the postmaster.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// TCP port on 127.0.0.1.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Where its files are.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The user that runs it if we are root.
    pub(crate) fn user(&self) -> Option<&User> {
        self.user.as_ref()
    }

    async fn wait_until_ready(&mut self, log: &Path) -> Result<()> {
        let url = self.superuser_url("postgres");
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("PostgreSQL ended with {status}; {} says:\n{}", log.display(), last_lines(log));
            }
            match tokio_postgres::connect(&url, NoTls).await {
                Ok(_) => return Ok(()),
                // The server itself answers "starting up", until it is time to give up.
                Err(_) if Instant::now() < deadline => sleep(POLL).await,
                Err(error) => return Err(error).context("PostgreSQL doesn't take connections"),
            }
        }
    }

    /// Fast shutdown, then harder.
    pub(crate) async fn stop(mut self) -> Result<()> {
        for signal in [Signal::INT, Signal::QUIT, Signal::KILL] {
            if self.child.try_wait()?.is_none() {
                send(self.child.id(), signal);
            }
            let deadline = Instant::now() + STOP_TIMEOUT;
            while Instant::now() < deadline {
                if self.child.try_wait()?.is_some() {
                    return Ok(());
                }
                sleep(POLL).await;
            }
        }
        bail!("PostgreSQL (pid {}) doesn't end", self.child.id())
    }
}

fn send(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        // It may have ended by itself.
        let _ = kill_process(pid, signal);
    }
}

/// Makes the cluster beside its place and moves it there, so that a half-made one is never taken for good.
fn initdb(installation: &Installation, directory: &Path, user: Option<&User>, password: &str) -> Result<()> {
    let fresh = directory.with_extension("new");
    let _ = fs::remove_dir_all(&fresh);
    fs::create_dir(&fresh).with_context(|| format!("can't create {}", fresh.display()))?;
    User::own(user, &fresh)?;
    let password_file = directory.with_extension("password");
    let _ = fs::remove_file(&password_file);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&password_file)?;
    file.write_all(password.as_bytes())?;
    User::own(user, &password_file)?;
    let mut initdb = child::command(&installation.program("initdb"), user, "KILL");
    initdb.args(["--no-locale", "--encoding=UTF8", "--username=postgres", "--auth=scram-sha-256", "--no-sync"]);
    initdb.arg("-D").arg(&fresh).arg(format!("--pwfile={}", password_file.display()));
    let made = child::output(initdb);
    fs::remove_file(password_file)?;
    made.context("initdb failed")?;
    Ok(fs::rename(fresh, directory)?)
}

fn run_server(
    installation: &Installation,
    directory: &Path,
    user: Option<&User>,
    port: u16,
    log: &Path,
) -> Result<Child> {
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(log)?;
    // SIGINT is a fast shutdown: PostgreSQL ends its own children.
    let mut server = child::command(&installation.program("postgres"), user, "INT");
    server.arg("-D").arg(directory).arg("-c").arg(format!("port={port}"));
    for setting in [
        // Loopback only, and no socket file whose path could be too long.
        "listen_addresses=127.0.0.1",
        "unix_socket_directories=",
        "wal_level=logical",
        // A stopped `dev` keeps its slot: WAL must not fill the disk meanwhile.
        "max_slot_wal_keep_size=1GB",
        "max_replication_slots=20",
        "max_wal_senders=20",
        "max_connections=200",
    ] {
        server.args(["-c", setting]);
    }
    if installation.lists_output_plugins {
        server.args(["-c", "output_plugin_libraries=pgoutput,test_decoding,wal2json"]);
    }
    child::start(server, log)
}

fn check_version(directory: &Path, installation: &Installation) -> Result<()> {
    let version = fs::read_to_string(directory.join("PG_VERSION"))
        .with_context(|| format!("{} isn't a PostgreSQL cluster", directory.display()))?;
    if version.trim() != installation.major() {
        let (version, installed) = (version.trim(), &installation.version);
        let place = directory.display();
        bail!(
            "{place} was made by PostgreSQL {version}, this is {installed}: name the other with --pg-bin or remove it"
        );
    }
    Ok(())
}

/// A killed `dev` leaves a server that is just shutting down, or, after a reboot, a pid file with somebody else's pid.
async fn end_leftovers(directory: &Path) -> Result<()> {
    let file = directory.join("postmaster.pid");
    let Some(pid) = fs::read_to_string(&file).ok().and_then(|text| text.lines().next()?.trim().parse().ok()) else {
        return Ok(());
    };
    let deadline = Instant::now() + STOP_TIMEOUT;
    while child::is_running(pid) {
        if !is_server_of(pid, directory) {
            return fs::remove_file(&file).context("can't remove a stale postmaster.pid");
        }
        if Instant::now() > deadline {
            bail!("a PostgreSQL server (pid {pid}) still runs on {}", directory.display());
        }
        sleep(POLL).await;
    }
    Ok(())
}

fn is_server_of(pid: u32, directory: &Path) -> bool {
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    command.split(|byte| *byte == 0).any(|argument| argument == directory.as_os_str().as_encoded_bytes())
}

fn free_port(preferred: u16) -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, preferred))
        .or_else(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
        .context("no free port for PostgreSQL")?;
    Ok(listener.local_addr()?.port())
}

fn last_lines(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}
