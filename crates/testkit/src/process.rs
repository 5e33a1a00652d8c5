use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::{eventually, eventually_some};

/// How to run a child.
#[derive(Debug, Clone)]
pub struct ProcessOptions {
    program: PathBuf,
    args: Vec<String>,
    env: Vec<(String, String)>,
    directory: Option<PathBuf>,
    /// As this user when we are root.
    user: Option<&'static str>,
    /// What the child gets when we die.
    death_signal: &'static str,
    /// Whether [`Process::write_line`] works.
    writable: bool,
}

impl ProcessOptions {
    /// Any program, found through PATH unless it has a slash.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        let program = program.into();
        Self { program, args: vec![], env: vec![], directory: None, user: None, death_signal: "KILL", writable: false }
    }

    /// A binary of this workspace, of the same `target/<profile>` as the running program.
    pub fn binary(name: &str) -> Result<Self> {
        let this = std::env::current_exe()?;
        // Test binaries are one deeper than others.
        let profile = this.ancestors().skip(1).find(|folder| !folder.ends_with("deps"));
        let profile = profile.context("the running program has no target directory")?;
        let program = profile.join(name);
        if !program.exists() {
            bail!("{} isn't built: cargo build --workspace --bins", program.display());
        }
        Ok(Self::new(program))
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<String>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets an environment variable of the child.
    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// The child's working directory.
    #[must_use]
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = Some(directory.into());
        self
    }

    /// Keeps the child's standard input open for [`Process::write_line`]; else it is empty.
    #[must_use]
    pub fn writable(mut self) -> Self {
        self.writable = true;
        self
    }

    pub(crate) fn user(mut self, user: Option<&'static str>) -> Self {
        self.user = user;
        self
    }

    pub(crate) fn death_signal(mut self, signal: &'static str) -> Self {
        self.death_signal = signal;
        self
    }

    /// The command behind setpriv, which drops privileges and execs, so the pid is the program's.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new("setpriv");
        command.arg(format!("--pdeathsig={}", self.death_signal));
        if let Some(user) = self.user {
            command.arg(format!("--reuid={user}")).arg(format!("--regid={user}")).arg("--clear-groups");
        }
        command.arg("--").arg(&self.program).args(&self.args);
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        if let Some(directory) = &self.directory {
            command.current_dir(directory);
        }
        command
    }

    /// Starts it.
    pub fn start(&self) -> Result<Process> {
        let mut command = self.command();
        command.stdin(if self.writable { Stdio::piped() } else { Stdio::null() });
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = spawn(command).with_context(|| format!("can't run {}", self.program.display()))?;
        let lines = Arc::new(Mutex::new(vec![]));
        if let Some(stdout) = child.stdout.take() {
            capture(stdout, Arc::clone(&lines));
        }
        if let Some(stderr) = child.stderr.take() {
            capture(stderr, Arc::clone(&lines));
        }
        let (pid, stdin) = (child.id(), Mutex::new(child.stdin.take()));
        Ok(Process { child: Mutex::new(child), pid, stdin, lines })
    }
}

/// Spawns on a thread that lives as long as the process: the death signal follows the spawning *thread*, and a thread of
/// a runtime may end long before.
fn spawn(command: Command) -> Result<Child> {
    type Order = (Command, mpsc::SyncSender<std::io::Result<Child>>);
    static SPAWNER: OnceLock<mpsc::SyncSender<Order>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, inbox) = mpsc::sync_channel::<Order>(16);
        std::thread::spawn(move || {
            for (mut command, answer) in inbox {
                let _ = answer.send(command.spawn());
            }
        });
        orders
    });
    let (answer, spawned) = mpsc::sync_channel(1);
    spawner.send((command, answer)).map_err(|_| anyhow!("the spawning thread is gone"))?;
    Ok(spawned.recv()??)
}

fn capture(pipe: impl Read + Send + 'static, lines: Arc<Mutex<Vec<String>>>) {
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            locked(&lines).push(String::from_utf8_lossy(&line).into_owned());
        }
    });
}

/// A panicked holder leaves a list of lines that is still good.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running child; killed when dropped, or when this process dies.
#[derive(Debug)]
pub struct Process {
    child: Mutex<Child>,
    pid: u32,
    stdin: Mutex<Option<ChildStdin>>,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Process {
    /// Process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Everything it wrote so far, stdout and stderr, by line.
    pub fn lines(&self) -> Vec<String> {
        locked(&self.lines).clone()
    }

    /// Writes a line to its standard input ([`ProcessOptions::writable`]).
    pub fn write_line(&self, line: &str) -> Result<()> {
        let mut stdin = locked(&self.stdin);
        let stdin = stdin.as_mut().context("the child's standard input isn't open")?;
        Ok(writeln!(stdin, "{line}")?)
    }

    /// Closes its standard input.
    pub fn close_stdin(&self) {
        locked(&self.stdin).take();
    }

    /// The first line that has the property, waiting for it; what the child said instead is in the error.
    pub async fn line(&self, within: Duration, matches: impl Fn(&str) -> bool) -> Result<String> {
        let found = eventually_some(within, || {
            let line = locked(&self.lines).iter().find(|line| matches(line)).cloned();
            async { line }
        });
        found.await.with_context(|| format!("no such line; the child said:\n{}", self.lines().join("\n")))
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.pid.cast_signed()).context("not a pid")?;
        kill_process(pid, signal).with_context(|| format!("can't signal {}", self.pid))
    }

    /// SIGSTOP: it stands still with all its connections open.
    pub fn pause(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// SIGCONT.
    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// How it ended, if it has.
    pub fn exited(&self) -> Option<ExitStatus> {
        locked(&self.child).try_wait().ok().flatten()
    }

    /// Waits for its end; what it said is in the error.
    pub async fn wait(&self, within: Duration) -> Result<ExitStatus> {
        eventually_some(within, || async { self.exited() })
            .await
            .with_context(|| format!("still runs; the child said:\n{}", self.lines().join("\n")))
    }

    /// Waits for its end where nothing can be awaited.
    pub(crate) fn wait_blocking(&self, within: Duration) -> Result<ExitStatus> {
        let (ended, waiting) = mpsc::sync_channel(1);
        std::thread::scope(|scope| {
            scope.spawn(move || ended.send(locked(&self.child).wait()));
            let outcome = waiting.recv_timeout(within);
            if outcome.is_err() {
                self.signal(Signal::KILL)?;
            }
            Ok(outcome??)
        })
    }

    /// SIGKILL, and waits for the end.
    pub async fn kill(&self) -> Result<()> {
        self.signal(Signal::KILL)?;
        self.wait(Duration::from_secs(10)).await.map(drop)
    }

    /// Waits for a successful end; an error has the exit status and what the child said.
    pub async fn succeeds(&self, within: Duration) -> Result<Vec<String>> {
        let status = self.wait(within).await?;
        // The pipes may hold more than the threads have read.
        eventually(Duration::from_secs(2), || async { Arc::strong_count(&self.lines) == 1 }).await.ok();
        if !status.success() {
            let how =
                status.code().map_or_else(|| format!("signal {:?}", status.signal()), |code| format!("exit {code}"));
            bail!("{how}; the child said:\n{}", self.lines().join("\n"));
        }
        Ok(self.lines())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let mut child = locked(&self.child);
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Whether a process exists and isn't a zombie (a dead child whose parent didn't reap it yet counts as gone).
pub fn is_running(pid: u32) -> bool {
    stat(pid).is_some_and(|(state, _)| state != 'Z' && state != 'X')
}

/// Running processes below `pid`, at any depth.
pub fn children_of(pid: u32) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return vec![] };
    let all: Vec<u32> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let mut family = vec![pid];
    // Each round finds one more depth.
    loop {
        let new: Vec<u32> = all
            .iter()
            .copied()
            .filter(|pid| !family.contains(pid) && stat(*pid).is_some_and(|(_, parent)| family.contains(&parent)))
            .collect();
        if new.is_empty() {
            break;
        }
        family.extend(new);
    }
    family.into_iter().skip(1).filter(|pid| is_running(*pid)).collect()
}

/// (state, parent) from `/proc/<pid>/stat`; the command's name may hold spaces and parentheses.
fn stat(pid: u32) -> Option<(char, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}
