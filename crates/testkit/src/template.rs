//! What is made once per machine user and then copied: an empty cluster, and an installation without wal2json.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};

use crate::{dirs, process::ProcessOptions};

/// Password of the superuser `postgres` in every test cluster.
pub(crate) const PASSWORD: &str = "testkit";

/// An installation of PostgreSQL and the user that runs it.
#[derive(Debug, Clone)]
pub(crate) struct Installation {
    /// Folder of `postgres` and `initdb`.
    pub(crate) bin: PathBuf,
    /// PostgreSQL refuses to run as root.
    pub(crate) user: Option<&'static str>,
    /// That user's uid and gid.
    pub(crate) ids: Option<(u32, u32)>,
}

impl Installation {
    /// `$AURA_TEST_PG_BIN`, PATH, or the newest of Debian's folders.
    pub(crate) fn find() -> Result<Self> {
        let bin = std::env::var_os("AURA_TEST_PG_BIN").map(PathBuf::from).or_else(in_path).or_else(debian);
        let bin = bin.context("no PostgreSQL server found: apt-get install postgresql-15 postgresql-15-wal2json")?;
        if !rustix::process::geteuid().is_root() {
            return Ok(Self { bin, user: None, ids: None });
        }
        let ids = ids_of("postgres").context("no user postgres to run the server as")?;
        Ok(Self { bin, user: Some("postgres"), ids: Some(ids) })
    }

    fn version(&self) -> Result<String> {
        let output = Command::new(self.bin.join("postgres")).arg("--version").output().context("postgres --version")?;
        Ok(String::from_utf8_lossy(&output.stdout).chars().filter(char::is_ascii_alphanumeric).collect())
    }

    /// Whether the server has an allow-list of output plugins (security releases of September 2026 on: by default
    /// only `pgoutput` and `test_decoding` may be used, by superusers, too).
    pub(crate) fn lists_output_plugins(&self) -> Result<bool> {
        let output = Command::new(self.bin.join("postgres")).arg("--describe-config").output()?;
        Ok(String::from_utf8_lossy(&output.stdout).contains("output_plugin_libraries\t"))
    }

    /// The server program.
    pub(crate) fn server(&self, wal2json: bool) -> Result<PathBuf> {
        if wal2json { Ok(self.bin.join("postgres")) } else { self.without_wal2json() }
    }

    /// An empty cluster, made by initdb the first time.
    pub(crate) fn cluster(&self) -> Result<PathBuf> {
        let cluster = dirs::base()?.join(format!("cluster-{}", self.version()?));
        once(&cluster, |fresh| self.initdb(fresh))?;
        Ok(cluster)
    }

    fn initdb(&self, fresh: &Path) -> Result<()> {
        fs::create_dir(fresh)?;
        dirs::give_to(fresh, self.ids)?;
        let password = fresh.with_extension("password");
        fs::write(&password, PASSWORD)?;
        dirs::give_to(&password, self.ids)?;
        let output = ProcessOptions::new(self.bin.join("initdb"))
            .args(["--no-sync", "--no-locale", "-E", "UTF8", "-U", "postgres", "-A", "scram-sha-256", "-D"])
            .arg(fresh.to_string_lossy())
            .arg(format!("--pwfile={}", password.display()))
            .user(self.user)
            .directory("/")
            .command()
            .output()?;
        fs::remove_file(password)?;
        if !output.status.success() {
            bail!("initdb failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(())
    }

    /// PostgreSQL finds its libraries relative to its own resolved path: a copy of the program beside a folder of links
    /// to all libraries but one runs, and lacks that one.
    pub(crate) fn without_wal2json(&self) -> Result<PathBuf> {
        let root = dirs::base()?.join(format!("no-wal2json-2-{}", self.version()?));
        let bin = fs::canonicalize(&self.bin)?;
        once(&root, |fresh| {
            let lib = pg_config(&bin, "--pkglibdir")?;
            let (new_bin, new_lib) = (below(fresh, &bin), below(fresh, &lib));
            fs::create_dir_all(&new_bin)?;
            fs::create_dir_all(&new_lib)?;
            // initdb and pg_config for whoever makes a cluster of their own.
            for program in ["postgres", "initdb", "pg_config"] {
                fs::copy(bin.join(program), new_bin.join(program))?;
            }
            for entry in fs::read_dir(&lib)?.flatten().filter(|entry| entry.file_name() != "wal2json.so") {
                symlink(entry.path(), new_lib.join(entry.file_name()))?;
            }
            let share = pg_config(&bin, "--sharedir")?;
            let new_share = below(fresh, &share);
            fs::create_dir_all(new_share.parent().context("a share directory has a parent")?)?;
            Ok(symlink(share, new_share)?)
        })?;
        Ok(below(&root, &bin).join("postgres"))
    }
}

fn below(root: &Path, absolute: &Path) -> PathBuf {
    root.join(absolute.strip_prefix("/").unwrap_or(absolute))
}

fn pg_config(bin: &Path, what: &str) -> Result<PathBuf> {
    let output = Command::new(bin.join("pg_config")).arg(what).output().context("pg_config")?;
    Ok(PathBuf::from(String::from_utf8(output.stdout)?.trim()))
}

/// Makes `path` with `make` unless it exists, once among all test processes; a half-made one is never seen.
fn once(path: &Path, make: impl Fn(&Path) -> Result<()>) -> Result<()> {
    let lock = fs::File::create(path.with_extension("lock"))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    if path.exists() {
        return Ok(());
    }
    let fresh = path.with_extension("fresh");
    let _ = fs::remove_dir_all(&fresh);
    make(&fresh)?;
    Ok(fs::rename(fresh, path)?)
}

fn in_path() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    // Folders of PATH often hold links to some of the programs only.
    let initdb = std::env::split_paths(&path).find_map(|folder| fs::canonicalize(folder.join("initdb")).ok())?;
    Some(initdb.parent()?.to_owned())
}

fn debian() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?.flatten();
    let newest = versions.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()).max()?;
    Some(PathBuf::from(format!("/usr/lib/postgresql/{newest}/bin")))
}

fn ids_of(user: &str) -> Option<(u32, u32)> {
    let passwd = fs::read_to_string("/etc/passwd").ok()?;
    let fields: Vec<&str> = passwd.lines().map(|line| line.split(':').collect()).find(|f: &Vec<&str>| f[0] == user)?;
    Some((fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?))
}

/// Copies a template, with owners and modes.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("cp").arg("-a").arg(from).arg(to).status()?;
    if !status.success() {
        bail!("can't copy {} to {}", from.display(), to.display());
    }
    fs::set_permissions(to, fs::Permissions::from_mode(0o700))?;
    Ok(())
}
