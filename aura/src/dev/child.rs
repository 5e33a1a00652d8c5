//! Child processes that never outlive us, whatever ends us.

use std::{
    fs::File,
    io,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{OnceLock, mpsc},
};

use anyhow::{Context, Result, anyhow, bail};

/// The unprivileged user of a child, by name, with its ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: &'static str,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl User {
    /// Who runs PostgreSQL when we are root, which it refuses to be; `None` when we aren't root.
    pub(crate) fn to_drop_to() -> Result<Option<Self>> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let passwd = std::fs::read_to_string("/etc/passwd").context("can't read /etc/passwd")?;
        let found = ["postgres", "nobody"].into_iter().find_map(|name| Self::in_passwd(&passwd, name));
        found.map(Some).context("PostgreSQL refuses to run as root, and there is no user postgres or nobody")
    }

    fn in_passwd(passwd: &str, name: &'static str) -> Option<Self> {
        let line = passwd.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut ids = line.split(':').skip(2).map(str::parse);
        Some(Self { name, uid: ids.next()?.ok()?, gid: ids.next()?.ok()? })
    }

    /// Gives a file or directory to a user, if there is one to drop to.
    pub(crate) fn own(user: Option<&Self>, path: &Path) -> Result<()> {
        let Some(user) = user else { return Ok(()) };
        std::os::unix::fs::chown(path, Some(user.uid), Some(user.gid))
            .with_context(|| format!("can't give {} to {}", path.display(), user.name))
    }
}

/// A command behind setpriv, which sets the death signal, drops privileges and execs: the pid is the program's.
pub(crate) fn command(program: &Path, user: Option<&User>, death_signal: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.arg(format!("--pdeathsig={death_signal}"));
    if let Some(user) = user {
        command.args(["--reuid", user.name, "--regid", &user.gid.to_string(), "--clear-groups"]);
    }
    command.arg("--").arg(program).current_dir("/").stdin(Stdio::null());
    command
}

/// Runs to the end; an error holds what it wrote to stderr.
pub(crate) fn output(mut command: Command) -> Result<String> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = spawn(command)?.wait_with_output()?;
    if !output.status.success() {
        bail!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Starts a server that logs to `log`, in a process group of its own: Ctrl-C in a terminal goes to the whole foreground
/// group, and the database must outlive our drain.
pub(crate) fn start(mut command: Command, log: File) -> Result<Child> {
    use std::os::unix::process::CommandExt;
    command.stdout(log.try_clone()?).stderr(log).process_group(0);
    spawn(command)
}

/// Spawns on a thread that lives as long as the process: the death signal follows the spawning *thread*, and a thread
/// of the runtime may end earlier.
fn spawn(command: Command) -> Result<Child> {
    type Order = (Command, mpsc::SyncSender<io::Result<Child>>);
    static SPAWNER: OnceLock<mpsc::SyncSender<Order>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, inbox) = mpsc::sync_channel::<Order>(4);
        std::thread::spawn(move || {
            for (mut command, answer) in inbox {
                // Nobody waits any more: the child is dropped and dies with us.
                drop(answer.send(command.spawn()));
            }
        });
        orders
    });
    let program = command.get_program().to_owned();
    let (answer, spawned) = mpsc::sync_channel(1);
    spawner.send((command, answer)).map_err(|_| anyhow!("the spawning thread is gone"))?;
    spawned.recv()?.with_context(|| format!("can't run {}", program.display()))
}

/// Whether a process exists and isn't a zombie.
pub(crate) fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // pid (name) state …; the name may hold parentheses.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_to_drop_to_has_the_ids_of_passwd() {
        let passwd = "root:x:0:0::/root:/bin/sh\npostgres:x:103:107:PostgreSQL,,,:/var/lib/postgresql:/bin/bash\n";
        assert_eq!(User::in_passwd(passwd, "postgres"), Some(User { name: "postgres", uid: 103, gid: 107 }));
        assert_eq!(User::in_passwd(passwd, "nobody"), None);
    }

    #[test]
    fn a_failing_command_tells_why() {
        let mut shell = command(Path::new("sh"), None, "KILL");
        shell.args(["-c", "echo because >&2; exit 3"]);
        assert!(output(shell).is_err_and(|error| error.to_string().contains("because")));
    }
}
