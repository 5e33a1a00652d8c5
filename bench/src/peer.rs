//! `pg_recvlogical` with the worker's own options: the limit that a client of this server can reach.

use std::{path::PathBuf, process::Stdio};

use anyhow::{Context, Result};
use tokio::process::{Child, Command};

/// A command that streams `slot` with the options that the worker uses for one table.
pub(crate) fn recvlogical(url: &str, slot: &str, table: &str, file: &str) -> Result<Command> {
    let mut command = Command::new(program()?);
    command.args(["--dbname", url, "--slot", slot, "--start", "--no-loop", "--file", file]);
    for option in [
        "format-version=2",
        "include-xids=true",
        "include-timestamp=true",
        "include-lsn=true",
        "include-types=false",
        "include-type-oids=true",
    ] {
        command.args(["--option", option]);
    }
    command.args(["--option", &format!("add-tables={table}")]);
    command.stderr(Stdio::inherit()).kill_on_drop(true);
    Ok(command)
}

/// Starts it with its lines on a pipe.
pub(crate) fn lines(mut command: Command) -> Result<Child> {
    Ok(command.stdout(Stdio::piped()).spawn()?)
}

fn program() -> Result<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").context("no PostgreSQL programs")?;
    let programs = versions.filter_map(|entry| Some(entry.ok()?.path().join("bin/pg_recvlogical")));
    programs.filter(|path| path.exists()).max().context("no pg_recvlogical")
}
