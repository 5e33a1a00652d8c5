//! Finding PostgreSQL's programs on this machine.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

/// What brings a missing PostgreSQL, in one line.
const INSTALL: &str = "apt-get install -y postgresql-15 postgresql-15-wal2json";

/// PostgreSQL's server programs of one version.
#[derive(Debug, Clone)]
pub(crate) struct Installation {
    bin: PathBuf,
    /// As the server says it, such as `15.20`.
    pub(crate) version: String,
    /// Whether the server has an allow-list of output plugins (`output_plugin_libraries`, security releases of
    /// autumn 2026 on; by default only pgoutput and test_decoding may be used, even by superusers).
    pub(crate) lists_output_plugins: bool,
    /// Whether the wal2json library is there.
    pub(crate) wal2json: bool,
}

impl Installation {
    /// `explicit`, else PATH, else the newest of the distributions' folders.
    pub(crate) fn find(explicit: Option<&Path>) -> Result<Self> {
        let bin = match explicit {
            Some(bin) if bin.join("postgres").exists() => bin.to_owned(),
            Some(bin) => bail!(
                "{} has no PostgreSQL server: --pg-bin is the folder of initdb and postgres, such as \
                 /usr/lib/postgresql/15/bin",
                bin.display()
            ),
            None => in_path().or_else(newest_of_distribution).with_context(|| {
                format!(
                    "no PostgreSQL server found; install one: {INSTALL}; or name one with --pg-bin or --database-url"
                )
            })?,
        };
        Self::inspect(bin)
    }

    fn inspect(bin: PathBuf) -> Result<Self> {
        let version = run(&bin, "postgres", "--version")?;
        let version = version.split_whitespace().nth(2).context("postgres doesn't tell its version")?.to_owned();
        let lists_output_plugins = run(&bin, "postgres", "--describe-config")?.contains("output_plugin_libraries\t");
        let libraries = run(&bin, "pg_config", "--pkglibdir").map_or_else(|_| bin.join("../lib"), PathBuf::from);
        let wal2json = libraries.join("wal2json.so").exists();
        Ok(Self { bin, version, lists_output_plugins, wal2json })
    }

    /// Path of one of its programs.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }

    /// Major version, such as `15`.
    pub(crate) fn major(&self) -> &str {
        self.version.split('.').next().unwrap_or(&self.version)
    }

    /// What installs wal2json for this version.
    pub(crate) fn wal2json_install(&self) -> String {
        format!("apt-get install -y postgresql-{}-wal2json", self.major())
    }
}

fn run(bin: &Path, program: &str, argument: &str) -> Result<String> {
    let program = bin.join(program);
    let output = Command::new(&program).arg(argument).output();
    let output = output.with_context(|| format!("can't run {}", program.display()))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn in_path() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    // PATH often has links to some of the programs only: their own folder has them all.
    let initdb = std::env::split_paths(&path).find_map(|folder| fs::canonicalize(folder.join("initdb")).ok())?;
    let bin = initdb.parent()?;
    bin.join("postgres").exists().then(|| bin.to_owned())
}

/// Debian and Ubuntu, Red Hat, Homebrew.
fn newest_of_distribution() -> Option<PathBuf> {
    let mut found: Vec<(u32, PathBuf)> =
        [("/usr/lib/postgresql", ""), ("/usr", "pgsql-"), ("/opt/homebrew/opt", "postgresql@")]
            .into_iter()
            .flat_map(|(folder, prefix)| versions_in(Path::new(folder), prefix))
            .filter(|(_, bin)| bin.join("postgres").exists())
            .collect();
    found.sort();
    found.pop().map(|(_, bin)| bin)
}

fn versions_in(folder: &Path, prefix: &str) -> Vec<(u32, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let versions = entries.filter_map(|entry| {
        let version = entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok()?;
        Some((version, entry.path().join("bin")))
    });
    versions.collect()
}
