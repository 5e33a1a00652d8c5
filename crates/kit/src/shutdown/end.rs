use std::{
    fs::OpenOptions,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use crate::Failure;

/// Where Kubernetes looks for a container's last words; only written to if it is there.
pub(super) const DEFAULT_TERMINATION_LOG: &str = "/dev/termination-log";
/// Kubernetes keeps 4096 bytes.
const LONGEST: usize = 4000;
/// Standard error may be a pipe that nobody reads.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Ends the process without destructors, exit handlers or flushing: `_exit`, through signal-hook's safe function.
pub(super) fn now(code: u8, failure: &Failure, termination_log: Option<PathBuf>) -> ! {
    let (said, heard) = mpsc::sync_channel(1);
    let failure = failure.clone();
    let speak = move || {
        write_termination_log(termination_log.as_deref(), &failure);
        tracing::error!(component = %failure.component, exit_code = code, "{}", failure.reason);
        said.send(())
    };
    if thread::Builder::new().spawn(speak).is_ok() {
        heard.recv_timeout(LAST_WORDS).ok();
    }
    signal_hook::low_level::exit(i32::from(code))
}

/// Leaves the reason where the orchestrator shows it: in `path` if it was named, else where Kubernetes put the file.
pub(crate) fn write_termination_log(path: Option<&Path>, failure: &Failure) {
    let outcome = match path {
        Some(path) => write(path, true, failure),
        None => write(Path::new(DEFAULT_TERMINATION_LOG), false, failure),
    };
    if let (Err(error), Some(path)) = (outcome, path) {
        tracing::warn!(%error, path = %path.display(), "can't write the termination message");
    }
}

fn write(path: &Path, create: bool, failure: &Failure) -> io::Result<()> {
    let mut text = failure.to_string();
    let end = (0..=LONGEST.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or_default());
    OpenOptions::new().write(true).truncate(true).create(create).open(path)?.write_all(text.as_bytes())
}
