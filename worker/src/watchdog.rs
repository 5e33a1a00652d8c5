//! A thread outside the runtime that sees to it that engines' tasks and the runtime itself are alive (R-FB-4).

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use aura_domain::{Epoch, SourceId};
use aura_kit::{Failure, ShutdownHandle};
use aura_pgsource::Sockets;
use tokio::runtime;
use tokio_util::sync::CancellationToken;

use crate::engine::{outage::Outages, vitals::Vitals};

/// Between two looks. Each also wakes the runtime: when the thread that waits for events is blocked by a task, the others
/// sleep on and nobody hears of sockets and timers (seen with tokio 1.54), until somebody from outside brings work.
const PERIOD: Duration = Duration::from_millis(250);
/// A look this late means that the whole process stood still: nobody could be alive.
const STOOD_STILL: Duration = Duration::from_secs(2);
const EXIT_WATCHDOG: u8 = 6;
/// An engine's task or the supervisor that was not heard of for so long is not alive (F.11).
pub(crate) const SILENT: Duration = Duration::from_secs(30);
/// Rows that wait for so long without any being done with are stuck (F.11).
const STUCK: Duration = Duration::from_secs(300);

/// An engine under watch; until it is dropped.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) source: SourceId,
    pub(crate) epoch: Epoch,
    pub(crate) vitals: Arc<Vitals>,
    pub(crate) sockets: Sockets,
    pub(crate) outages: Arc<Outages>,
    /// Cancelled when it was found hung.
    pub(crate) hung: CancellationToken,
}

impl Watched {
    /// Its task lives, and rows move or a known outage explains that they don't (F.11).
    pub(crate) fn is_healthy(&self, now: Instant) -> bool {
        self.vitals.heartbeat.age(now) < SILENT && (self.outages.now().any() || self.vitals.stuck_for(now) < STUCK)
    }
}

/// Those under watch. Clones are the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Watchlist(Arc<Mutex<Vec<Weak<Watched>>>>);

impl Watchlist {
    pub(crate) fn add(&self, engine: &Arc<Watched>) {
        let mut list = self.lock();
        list.retain(|watched| watched.strong_count() > 0);
        list.push(Arc::downgrade(engine));
    }

    /// Those that live. One that was cut has nothing more to say, however long its slot can't be freed.
    pub(crate) fn now(&self) -> Vec<Arc<Watched>> {
        let watched = self.lock().iter().filter_map(Weak::upgrade).collect::<Vec<_>>();
        watched.into_iter().filter(|engine| !engine.vitals.is_cut()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Watched>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The running thread; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Watchdog {
    _stop: mpsc::Sender<()>,
}

impl Watchdog {
    /// `limit`: from the last sign of life to the cut.
    pub(crate) fn start(list: Watchlist, limit: Duration, shutdown: ShutdownHandle) -> std::io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let started = Instant::now();
        let round = Round {
            list,
            limit,
            shutdown,
            runtime: runtime::Handle::current(),
            started,
            ticked: Arc::default(),
            awake_since: started,
            last: started,
        };
        thread::Builder::new().name("engine-watchdog".to_owned()).spawn(move || round.run(&stopped))?;
        Ok(Self { _stop: stop })
    }
}

struct Round {
    list: Watchlist,
    limit: Duration,
    shutdown: ShutdownHandle,
    runtime: runtime::Handle,
    started: Instant,
    /// When the runtime last did something for us, in milliseconds since `started`.
    ticked: Arc<AtomicU64>,
    /// The process has not stood still since.
    awake_since: Instant,
    last: Instant,
}

impl Round {
    fn run(mut self, stopped: &mpsc::Receiver<()>) {
        while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
            let now = Instant::now();
            if now - self.last > STOOD_STILL {
                self.awake_since = now;
            }
            self.last = now;
            for engine in self.list.now() {
                self.look_at(&engine, now);
            }
            self.tick(now);
        }
    }

    /// Nobody is blamed for the time in which the process stood still.
    fn silent(&self, age: Duration, now: Instant) -> bool {
        age.min(now - self.awake_since) > self.limit
    }

    fn look_at(&self, engine: &Watched, now: Instant) {
        let age = engine.vitals.heartbeat.age(now);
        if !self.silent(age, now) || engine.hung.is_cancelled() {
            return;
        }
        let (rows, seconds) = (engine.vitals.rows(), age.as_secs());
        tracing::error!(source = %engine.source, epoch = %engine.epoch, seconds, sockets = engine.sockets.open(),
            admitted = rows.admitted, delivered = rows.delivered, skipped = rows.skipped, out = rows.abandoned,
            received = %engine.vitals.received(), resolved = %engine.vitals.resolved(), sent = %engine.vitals.sent(),
            "the engine's task hangs, its sockets are shut");
        metrics::counter!("cdc_watchdog_cuts_total").increment(1);
        engine.vitals.cut();
        engine.sockets.shutdown_all();
        engine.hung.cancel();
    }

    fn tick(&self, now: Instant) {
        let millis = |at: Instant| u64::try_from((at - self.started).as_millis()).unwrap_or(u64::MAX);
        let age = Duration::from_millis(millis(now).saturating_sub(self.ticked.load(Ordering::Relaxed)));
        if self.silent(age, now) && self.shutdown.ends_process() {
            let failure = Failure::new("runtime", "no thread of the runtime is free, the watchdog ended the process");
            self.shutdown.end_process(EXIT_WATCHDOG, &failure);
        }
        let (ticked, started) = (Arc::clone(&self.ticked), self.started);
        self.runtime.spawn(async move {
            let now = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
            ticked.fetch_max(now, Ordering::Relaxed);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched() -> Arc<Watched> {
        Arc::new(Watched {
            source: SourceId(uuid::Uuid::nil()),
            epoch: Epoch(1),
            vitals: Arc::new(Vitals::new(1)),
            sockets: Sockets::new(),
            outages: Arc::default(),
            hung: CancellationToken::new(),
        })
    }

    #[test]
    fn f_11_rows_that_wait_for_a_known_outage_and_engines_that_were_cut_are_no_reason_for_a_restart() {
        let (engine, list) = (watched(), Watchlist::default());
        list.add(&engine);
        let (soon, late) = (Instant::now() + SILENT / 2, Instant::now() + STUCK * 2);
        engine.vitals.admitted(0);
        assert!(engine.is_healthy(soon));
        engine.vitals.heartbeat.beat(late);
        assert!(!engine.is_healthy(late), "stuck");
        engine.outages.source(true);
        assert!(engine.is_healthy(late));
        assert!(!engine.is_healthy(late + SILENT), "its task is silent");
        assert_eq!(list.now().len(), 1);
        engine.vitals.cut();
        assert!(list.now().is_empty(), "it is being ended, and its slot may take long");
    }

    #[tokio::test]
    async fn r_fb_4_an_engine_without_a_sign_of_life_is_cut_and_no_other() {
        let (hangs, lives) = (watched(), watched());
        let list = Watchlist::default();
        list.add(&hangs);
        list.add(&lives);
        let limit = Duration::from_millis(600);
        let _watchdog = Watchdog::start(list, limit, ShutdownHandle::new(Duration::ZERO)).expect("a thread");
        let vitals = Arc::clone(&lives.vitals);
        tokio::spawn(async move { vitals.beating(Duration::from_millis(50)).await });
        hangs.hung.cancelled().await;
        assert!(hangs.sockets.is_shut() && hangs.vitals.is_cut());
        assert!(!lives.hung.is_cancelled() && !lives.sockets.is_shut());
    }
}
