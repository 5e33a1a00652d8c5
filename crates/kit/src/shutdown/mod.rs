//! Shutdown: one trigger, one deadline, ordered phases, and an end that doesn't depend on the runtime.
//!
//! The first signal starts the drain, the second leaves it 1 s, the third ends the process. Signals and the watchdog have
//! OS threads of their own, so that they work when every thread of the runtime is blocked.

mod args;
mod end;
mod phases;
mod signals;
mod watchdog;

use std::{
    panic::AssertUnwindSafe,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use aura_domain::{EngineReport, Timed, Trigger};
use futures_util::FutureExt;
use tokio::{sync::watch, task::JoinHandle, time::Instant};
use tokio_util::sync::CancellationToken;

pub use args::ShutdownArgs;
pub(crate) use end::write_termination_log;

pub use phases::{Cap, Phases};
use watchdog::Watchdog;

use crate::{Failure, exit};

/// What the second signal leaves of the drain.
const HURRIED: Duration = Duration::from_secs(1);

/// How a process shuts down.
#[derive(Debug, Clone, Default)]
pub struct ShutdownOptions {
    /// From the trigger to the deadline.
    pub drain_timeout: Duration,
    /// Whether SIGINT and SIGTERM are ours; false in tests, which trigger by the handle.
    pub handle_signals: bool,
    /// Whether an OS thread ends the process with exit code 6, 2 s after the deadline.
    pub watchdog: bool,
    /// Takes the last words on why the process ends, for the orchestrator.
    pub termination_log: Option<PathBuf>,
    /// As [`ShutdownArgs::strict_exit_codes`].
    pub strict_exit_codes: bool,
}

/// The process's shutdown. Cheap to clone; every method may be called from any thread.
#[derive(Debug, Clone)]
pub struct ShutdownHandle {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Set once, by the trigger: readiness reads this and nothing else.
    cause: OnceLock<Trigger>,
    started: CancellationToken,
    deadline: watch::Sender<Option<Instant>>,
    signals: AtomicU8,
    failure: OnceLock<Failure>,
    phases: Mutex<Vec<Timed>>,
    watchdog: OnceLock<Watchdog>,
    options: ShutdownOptions,
}

impl ShutdownHandle {
    /// A shutdown whose drain may take `drain_timeout`, without signals and watchdog.
    pub fn new(drain_timeout: Duration) -> Self {
        Self::unarmed(ShutdownOptions { drain_timeout, ..ShutdownOptions::default() })
    }

    /// A shutdown with the threads that `options` ask for.
    ///
    /// # Errors
    /// A thread or a signal handler could not be set up.
    pub fn start(options: ShutdownOptions) -> std::io::Result<Self> {
        let (handle_signals, watchdog) = (options.handle_signals, options.watchdog);
        let handle = Self::unarmed(options);
        if watchdog {
            let thread = Watchdog::start(handle.inner.options.clone())?;
            // Nobody else has the handle yet.
            drop(handle.inner.watchdog.set(thread));
        }
        if handle_signals {
            signals::follow(handle.clone())?;
        }
        Ok(handle)
    }

    fn unarmed(options: ShutdownOptions) -> Self {
        let inner = Inner {
            cause: OnceLock::new(),
            started: CancellationToken::new(),
            deadline: watch::Sender::new(None),
            signals: AtomicU8::new(0),
            failure: OnceLock::new(),
            phases: Mutex::default(),
            watchdog: OnceLock::new(),
            options,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Starts the drain. Later calls change nothing.
    pub fn trigger(&self) {
        self.begin(Trigger::Handle, self.drain_timeout());
    }

    /// A component can't go on: starts the drain, and the report says why. The first failure is the one that counts.
    pub fn fail(&self, failure: Failure) {
        tracing::error!(component = %failure.component, "{}", failure.reason);
        drop(self.inner.failure.set(failure));
        self.begin(Trigger::Fatal, self.drain_timeout());
    }

    /// Shortens the rest of the drain to 1 s, starting it if need be.
    pub fn hurry(&self) {
        self.begin(Trigger::Handle, HURRIED);
        self.limit(HURRIED);
    }

    /// Whether the drain has started; readiness is off from that instant.
    pub fn is_triggered(&self) -> bool {
        self.inner.cause.get().is_some()
    }

    /// What started the drain.
    pub fn cause(&self) -> Option<Trigger> {
        self.inner.cause.get().copied()
    }

    /// The first failure that was reported.
    pub fn failure(&self) -> Option<&Failure> {
        self.inner.failure.get()
    }

    /// SIGINTs and SIGTERMs so far.
    pub fn signals_seen(&self) -> u8 {
        self.inner.signals.load(Ordering::SeqCst)
    }

    /// Cancelled when the drain starts: stop taking work, finish what is there.
    pub fn token(&self) -> CancellationToken {
        self.inner.started.clone()
    }

    /// From the trigger to the deadline, unless somebody hurries.
    pub fn drain_timeout(&self) -> Duration {
        self.inner.options.drain_timeout
    }

    /// When the drain must be over; `None` before it started. May move to an earlier instant.
    pub fn deadline(&self) -> Option<Instant> {
        *self.inner.deadline.borrow()
    }

    /// The deadline and its changes.
    pub fn deadlines(&self) -> watch::Receiver<Option<Instant>> {
        self.inner.deadline.subscribe()
    }

    /// Returns when the deadline has passed. Cancel-safe.
    pub async fn expired(&self) {
        phases::passed(self.deadlines(), |deadline, _| deadline).await;
    }

    /// What `work` yields, or `None` if the drain starts first: for start-up, which must not hold up a shutdown.
    pub async fn unless_triggered<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        self.inner.started.run_until_cancelled(work).await
    }

    /// Runs a part of the process that lives until the drain. If it panics or ends before, the process fails and says which
    /// part it was.
    pub fn spawn<T: Send + 'static>(
        &self,
        component: &'static str,
        work: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<Option<T>> {
        let handle = self.clone();
        tokio::spawn(async move {
            let outcome = AssertUnwindSafe(work).catch_unwind().await;
            match &outcome {
                Err(panic) => handle.fail(Failure::of_panic(component, &**panic)),
                Ok(_) if !handle.is_triggered() => handle.fail(Failure::new(component, "it ended by itself")),
                Ok(_) => {}
            }
            outcome.ok()
        })
    }

    /// The phases of the drain that has started or will.
    pub fn phases(&self) -> Phases {
        Phases::new(self.clone())
    }

    /// Phases that are over, in order.
    pub fn phases_done(&self) -> Vec<Timed> {
        self.phases_list().clone()
    }

    fn phase_done(&self, phase: Timed) {
        self.phases_list().push(phase);
    }

    fn phases_list(&self) -> MutexGuard<'_, Vec<Timed>> {
        // A list that is pushed to is whole, whoever panicked.
        self.inner.phases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the process is ours to end: a watchdog was asked for.
    pub fn ends_process(&self) -> bool {
        self.inner.options.watchdog
    }

    /// The engines have ended: shows the exit code as `cdc_exit_code` to whoever still reads the metrics (F.12). Only what
    /// fails after this changes it.
    pub fn foretell(&self, engines: &[EngineReport]) {
        let report = exit::report(self, Ok(engines.to_vec()));
        metrics::gauge!("cdc_exit_code").set(report.exit_code(self.inner.options.strict_exit_codes));
    }

    /// Ends the process at once, without destructors and whatever its other threads do. Says why first, if that takes no
    /// longer than a blocked standard error lets it.
    pub fn end_process(&self, code: u8, failure: &Failure) -> ! {
        end::now(code, failure, self.inner.options.termination_log.clone())
    }

    pub(crate) fn termination_log(&self) -> Option<&Path> {
        self.inner.options.termination_log.as_deref()
    }

    /// One more SIGINT or SIGTERM.
    fn signalled(&self, number: i32) {
        match self.inner.signals.fetch_add(1, Ordering::SeqCst) {
            0 => self.begin(Trigger::Signal(number), self.drain_timeout()),
            1 => {
                self.begin(Trigger::Signal(number), HURRIED);
                self.limit(HURRIED);
                tracing::warn!("second signal, 1 s left");
            }
            _ => {
                let code = u8::try_from(128 + number).unwrap_or(u8::MAX);
                self.end_process(code, &Failure::new("signal", "third signal, ended at once"));
            }
        }
    }

    /// The first call wins. The order matters: readiness, then who must end us, then who must know, then words.
    fn begin(&self, cause: Trigger, left: Duration) {
        if self.inner.cause.set(cause).is_err() {
            return;
        }
        self.limit(left);
        self.inner.started.cancel();
        let deadline = jiff::Timestamp::now() + left;
        let seconds = left.as_secs_f64();
        tracing::info!(?cause, "draining until {deadline:.3}, at most {seconds} s; a second signal leaves 1 s");
    }

    /// Moves the deadline to at most `left` from now.
    fn limit(&self, left: Duration) {
        let at = Instant::now() + left;
        self.inner.deadline.send_if_modified(|deadline| {
            let earlier = deadline.is_none_or(|old| at < old);
            if earlier {
                *deadline = Some(at);
            }
            earlier
        });
        if let Some(watchdog) = self.inner.watchdog.get() {
            watchdog.arm(left);
        }
    }
}

#[cfg(test)]
mod tests {
    use aura_domain::{DrainReport, Epoch, LsnReport, Outcome, SourceId};
    use metrics_exporter_prometheus::PrometheusBuilder;
    use uuid::Uuid;

    use super::*;

    #[test]
    fn f_12_the_exit_code_is_shown_before_the_process_ends() {
        let forced = EngineReport {
            source: SourceId(Uuid::nil()),
            epoch: Epoch(1),
            outcome: Outcome::Forced,
            reason: None,
            drain: DrainReport { admitted: 1, abandoned: 1, ..DrainReport::default() },
            lsn: LsnReport::default(),
            rungs: vec![],
            slot_released: true,
            lease_released: true,
        };
        let shown = |strict_exit_codes, failed: bool| {
            let shutdown = ShutdownHandle::unarmed(ShutdownOptions { strict_exit_codes, ..ShutdownOptions::default() });
            if failed {
                shutdown.fail(Failure::new("bus", "gone"));
            }
            let recorder = PrometheusBuilder::new().build_recorder();
            metrics::with_local_recorder(&recorder, || shutdown.foretell(std::slice::from_ref(&forced)));
            let text = recorder.handle().render();
            text.lines().find_map(|line| line.strip_prefix("cdc_exit_code ").map(str::to_owned))
        };
        assert_eq!(shown(true, false).as_deref(), Some("3"), "a row comes again");
        assert_eq!(shown(false, false).as_deref(), Some("0"));
        assert_eq!(shown(true, true).as_deref(), Some("1"));
    }

    #[tokio::test]
    async fn r_sd_4_the_second_signal_shortens_the_drain_and_nothing_lengthens_it() {
        let shutdown = ShutdownHandle::new(Duration::from_secs(25));
        assert!(shutdown.deadline().is_none() && !shutdown.is_triggered());
        shutdown.signalled(15);
        assert!(shutdown.is_triggered());
        let first = shutdown.deadline().unwrap();
        shutdown.signalled(2);
        let hurried = shutdown.deadline().unwrap();
        assert!(hurried < first && hurried <= Instant::now() + HURRIED);
        shutdown.trigger();
        shutdown.hurry();
        assert_eq!(shutdown.deadline(), Some(hurried));
        assert_eq!((shutdown.cause(), shutdown.signals_seen()), (Some(Trigger::Signal(15)), 2));
    }

    #[test]
    fn r_sd_7_the_trigger_is_idempotent_and_works_from_any_thread() {
        let shutdown = ShutdownHandle::new(Duration::from_secs(25));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| shutdown.trigger());
            }
        });
        let deadline = shutdown.deadline();
        assert!(shutdown.token().is_cancelled() && deadline.is_some());
        shutdown.fail(Failure::new("bus", "gone"));
        assert_eq!((shutdown.deadline(), shutdown.cause()), (deadline, Some(Trigger::Handle)));
        assert_eq!(shutdown.failure().map(|failure| &*failure.component), Some("bus"));
    }

    #[tokio::test]
    async fn r_sd_6_a_part_that_ends_or_panics_before_the_drain_fails_the_process() {
        let shutdown = ShutdownHandle::new(Duration::from_secs(25));
        let until = shutdown.token();
        let good = shutdown.spawn("good", async move { until.cancelled().await });
        assert_eq!(shutdown.spawn("bad", async { panic!("oh") }).await.unwrap(), None::<()>);
        assert_eq!(shutdown.failure(), Some(&Failure::new("bad", "panicked: oh")));
        assert_eq!((good.await.unwrap(), shutdown.cause()), (Some(()), Some(Trigger::Fatal)));

        let shutdown = ShutdownHandle::new(Duration::from_secs(25));
        assert_eq!(shutdown.spawn("early", async { 7 }).await.unwrap(), Some(7));
        assert_eq!(shutdown.failure(), Some(&Failure::new("early", "it ended by itself")));
    }

    #[tokio::test]
    async fn who_waits_for_the_deadline_learns_of_an_earlier_one() {
        let shutdown = ShutdownHandle::new(Duration::from_secs(600));
        shutdown.trigger();
        let waiter = tokio::spawn({
            let shutdown = shutdown.clone();
            async move { shutdown.expired().await }
        });
        shutdown.limit(Duration::ZERO);
        tokio::time::timeout(Duration::from_secs(5), waiter).await.unwrap().unwrap();
    }
}
