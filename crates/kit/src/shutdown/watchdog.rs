use std::{
    io,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use super::{ShutdownOptions, end};
use crate::Failure;

/// Exit code of a process whose drain didn't end by itself.
pub(crate) const EXIT_WATCHDOG: u8 = 6;
/// After the deadline: the runtime's own end takes 1 s of it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Ends the process if its shutdown doesn't. The thread exists from the start: at the trigger there may be none to get.
#[derive(Debug)]
pub(super) struct Watchdog {
    deadlines: Sender<Instant>,
}

impl Watchdog {
    pub(super) fn start(options: ShutdownOptions) -> io::Result<Self> {
        let (deadlines, news) = mpsc::channel();
        thread::Builder::new().name("watchdog".to_owned()).spawn(move || watch(&news, &options))?;
        Ok(Self { deadlines })
    }

    /// The process must be gone 2 s after `left` from now.
    pub(super) fn arm(&self, left: Duration) {
        // The thread ends only with the process.
        self.deadlines.send(Instant::now() + left + PATIENCE).ok();
    }
}

fn watch(news: &Receiver<Instant>, options: &ShutdownOptions) {
    let Ok(mut end) = news.recv() else { return };
    loop {
        match news.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(earlier) => end = end.min(earlier),
            Err(RecvTimeoutError::Timeout) => break,
            // Nobody holds the shutdown any more: the process lives on without it, as tests do.
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
    let failure = Failure::new("shutdown", "the drain did not end, the watchdog ended the process");
    end::now(EXIT_WATCHDOG, &failure, options.termination_log.clone())
}
