//! Directories of this user's test runs under the system's temporary directory.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result};

use crate::is_running;

/// `<tmp>/aura-testkit-<uid>`: templates and the directories of running tests. Searchable for the `postgres` user.
pub(crate) fn base() -> Result<PathBuf> {
    let base = std::env::temp_dir().join(format!("aura-testkit-{}", rustix::process::geteuid().as_raw()));
    fs::create_dir_all(&base).with_context(|| format!("can't create {}", base.display()))?;
    fs::set_permissions(&base, fs::Permissions::from_mode(0o755))?;
    Ok(base)
}

/// A directory that is removed when dropped, or by a later run if this process was killed.
#[derive(Debug)]
pub(crate) struct RunDir(PathBuf);

impl RunDir {
    pub(crate) fn create(what: &str) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let base = base()?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        if number == 0 {
            sweep(&base);
        }
        let path = base.join(format!("run-{}-{number}-{what}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("can't create {}", path.display()))?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        // A server that was just killed may still write its last file: what stays is swept by a later run.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Removes what killed test processes left.
fn sweep(base: &Path) {
    let Ok(entries) = fs::read_dir(base) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix("run-")).and_then(|rest| rest.split('-').next());
        if pid.and_then(|pid| pid.parse().ok()).is_some_and(|pid| !is_running(pid)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Gives a directory tree's top to a user.
pub(crate) fn give_to(path: &Path, ids: Option<(u32, u32)>) -> io::Result<()> {
    match ids {
        Some((uid, gid)) => std::os::unix::fs::chown(path, Some(uid), Some(gid)),
        None => Ok(()),
    }
}
