//! The data directory of `dev`: who runs on it, its secrets, and where the cluster lives.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::child::{self, User};

/// Where the cluster goes when its user can't reach the data directory.
const ELSEWHERE: &str = "/var/lib/aura";

/// Who runs here; by this file a data directory is known.
const LOCK: &str = "lock";

/// An opened data directory; nobody else can open it until this is dropped.
#[derive(Debug)]
pub(crate) struct DataDir {
    path: PathBuf,
    lock: File,
}

/// What was made up at the first start, kept in `secrets.json` (0600).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Secrets {
    pub(crate) master_key: String,
    pub(crate) platform_jwt_secret: String,
    pub(crate) postgres_password: String,
    pub(crate) platform_password: String,
    pub(crate) worker_password: String,
}

impl DataDir {
    /// Creates the directory if need be (0700) and takes it for this process.
    ///
    /// # Errors
    /// Another `dev` runs on it: the error says which. Or it holds other things: it would be given away to `user`.
    pub(crate) fn open(path: &Path, user: Option<&User>) -> Result<Self> {
        if !path.join(LOCK).exists() && fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some()) {
            bail!("{} isn't empty and no data directory of `aura-realtime dev`: name another", path.display());
        }
        fs::create_dir_all(path).with_context(|| format!("can't create {}", path.display()))?;
        let path = fs::canonicalize(path)?;
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path.join(LOCK))
            .with_context(|| format!("can't write to {}", path.display()))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            let mut runner = String::new();
            lock.read_to_string(&mut runner)?;
            bail!(
                "another `aura-realtime dev` runs on {}: {}; stop it, or give this one --data-dir and --port",
                path.display(),
                runner.trim()
            );
        }
        // Only now: the owner changes nothing for a `dev` that already runs.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700))?;
        User::own(user, &path)?;
        let mut dir = Self { path, lock };
        dir.announce("starting")?;
        Ok(dir)
    }

    /// Tells a second `dev` who runs here.
    pub(crate) fn announce(&mut self, what: &str) -> Result<()> {
        self.lock.set_len(0)?;
        self.lock.rewind()?;
        Ok(writeln!(self.lock, "pid {}, {what}", std::process::id())?)
    }

    /// Canonical path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The secrets, made up at the first call.
    pub(crate) fn secrets(&self) -> Result<Secrets> {
        let file = self.path.join("secrets.json");
        if let Ok(text) = fs::read(&file) {
            return serde_json::from_slice(&text).with_context(|| format!("{} is damaged", file.display()));
        }
        let secrets = Secrets {
            master_key: random(),
            platform_jwt_secret: random(),
            postgres_password: random(),
            platform_password: random(),
            worker_password: random(),
        };
        self.write_private("secrets.json", &secrets)?;
        Ok(secrets)
    }

    /// Writes a JSON file that only we can read, whole or not at all.
    pub(crate) fn write_private(&self, name: &str, content: &impl Serialize) -> Result<()> {
        let fresh = self.path.join(format!("{name}.new"));
        let _ = fs::remove_file(&fresh);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
        serde_json::to_writer_pretty(&mut file, content)?;
        file.write_all(b"\n")?;
        Ok(fs::rename(fresh, self.path.join(name))?)
    }

    /// Where the cluster lives: in here, unless an ancestor isn't searchable for the user who runs it.
    pub(crate) fn cluster(&self, user: Option<&User>) -> Result<PathBuf> {
        let Some(user) = user else { return Ok(self.path.join("postgres")) };
        if searchable(&self.path, user) {
            return Ok(self.path.join("postgres"));
        }
        let digest = Sha256::digest(self.path.as_os_str().as_encoded_bytes());
        let hash: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let elsewhere = Path::new(ELSEWHERE).join(hash);
        fs::create_dir_all(&elsewhere).with_context(|| format!("can't create {}", elsewhere.display()))?;
        fs::set_permissions(&elsewhere, fs::Permissions::from_mode(0o700))?;
        User::own(Some(user), &elsewhere)?;
        Ok(elsewhere.join("postgres"))
    }
}

fn searchable(path: &Path, user: &User) -> bool {
    let mut test = child::command(Path::new("test"), Some(user), "KILL");
    test.arg("-x").arg(path);
    child::output(test).is_ok()
}

/// 256 random bits in hex.
fn random() -> String {
    let bytes: [u8; 32] = rand::random();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("aura-data-dir-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        path
    }

    #[test]
    fn a_second_dev_learns_who_runs() -> Result<()> {
        let path = scratch("second");
        let mut first = DataDir::open(&path, None)?;
        first.announce("http://127.0.0.1:54321")?;
        let error = DataDir::open(&path, None).expect_err("it is taken").to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
        assert!(error.contains("http://127.0.0.1:54321"), "{error}");
        drop(first);
        DataDir::open(&path, None)?;
        Ok(fs::remove_dir_all(path)?)
    }

    #[test]
    fn a_directory_with_other_things_is_left_alone() -> Result<()> {
        let path = scratch("others");
        fs::create_dir_all(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        fs::write(path.join("letter.txt"), "dear")?;
        let error = DataDir::open(&path, None).expect_err("it isn't ours").to_string();
        assert!(error.contains("isn't empty"), "{error}");
        assert_eq!(fs::metadata(&path)?.permissions().mode() & 0o777, 0o755);
        assert_eq!(fs::read_dir(&path)?.count(), 1);
        Ok(fs::remove_dir_all(path)?)
    }

    #[test]
    fn secrets_are_private_and_kept() -> Result<()> {
        let path = scratch("secrets");
        let dir = DataDir::open(&path, None)?;
        let first = dir.secrets()?;
        assert_eq!(first.master_key, dir.secrets()?.master_key);
        assert_ne!(first.master_key, first.platform_jwt_secret);
        let mode = |name: &str| fs::metadata(path.join(name)).map(|data| data.permissions().mode() & 0o777);
        assert_eq!((mode("")?, mode("secrets.json")?), (0o700, 0o600));
        Ok(fs::remove_dir_all(path)?)
    }
}
