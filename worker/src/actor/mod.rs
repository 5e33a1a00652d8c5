//! One actor per engine: it owns the lease loop, the runs and the verbs (R-ENG-1). Who asks for something leaves an order;
//! who wants to know something reads the board; nobody waits for the actor, and the actor waits for nothing that a stuck
//! engine could hold.

mod finish;
mod run;

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use aura_domain::{EngineReport, Outcome};
use aura_lease::{Guard, LeaseConfig, Leave, run_with_lease};
use aura_store::{Engine, Source};
use tokio::{sync::watch, time::sleep_until};
use tokio_util::sync::CancellationToken;

use crate::{
    engine::EngineDeps,
    stop::{Exit, Stop},
};

/// First and longest pause after a run that failed.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A run that lasted this long has earned a fresh pause.
const HEALTHY: Duration = Duration::from_secs(60);
/// Between two tries for a lease: who gives one up tells, so this is only for the moment in between.
const RETRY: Duration = Duration::from_millis(200);

/// What the pool's plan and the platform database say.
#[derive(Debug, Clone, Default)]
pub(crate) struct Orders {
    /// Try for the lease.
    pub(crate) seek: bool,
    /// Drain and leave the source to another worker.
    pub(crate) give_up: bool,
    /// The engine's row.
    pub(crate) row: Option<Row>,
    /// The source is gone, or isn't what it was: drain, and end.
    pub(crate) dismissed: bool,
}

impl Orders {
    /// How often an operator has asked for the engine so far.
    fn nudges(&self) -> i64 {
        self.row.as_ref().map_or(0, |row| row.engine.nudges)
    }

    /// What was read before a run's end was about that run.
    fn are_newer_than(&self, ended: Option<Instant>) -> bool {
        let Some(ended) = ended else { return true };
        self.row.as_ref().is_some_and(|row| row.read >= ended)
    }
}

/// An engine's row, and when it was read: its durations count from then.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) engine: Arc<Engine>,
    pub(crate) read: Instant,
}

impl Row {
    fn stop(&self) -> Option<Stop> {
        self.engine.operation.as_ref().map(|operation| Stop::operation(operation, self.read))
    }
}

/// The supervisor's end.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    /// As the actor has it.
    pub(crate) source: Source,
    pub(crate) orders: watch::Sender<Orders>,
    force: watch::Sender<u64>,
    leading: Arc<AtomicBool>,
}

impl Handle {
    /// The actor hasn't ended.
    pub(crate) fn is_working(&self) -> bool {
        !self.orders.is_closed()
    }

    /// Ends the run at once, without the platform database.
    pub(crate) fn force_close(&self) {
        self.force.send_modify(|count| *count += 1);
    }

    /// For good.
    pub(crate) fn dismiss(&self) {
        self.orders.send_modify(|orders| orders.dismissed = true);
    }

    /// A run is under way.
    pub(crate) fn is_leading(&self) -> bool {
        self.leading.load(Ordering::SeqCst)
    }
}

/// See the module.
pub(crate) struct Actor {
    deps: EngineDeps,
    source: Source,
    orders: watch::Receiver<Orders>,
    /// Counts the requests to end at once.
    force: watch::Receiver<u64>,
    /// Set once the process ends.
    process: watch::Receiver<Option<Exit>>,
    leading: Arc<AtomicBool>,
    /// What came before the last run failed is worked off.
    nudges_seen: i64,
}

impl Actor {
    pub(crate) fn new(deps: EngineDeps, source: Source, process: watch::Receiver<Option<Exit>>) -> (Self, Handle) {
        let (orders, force, leading) = (watch::Sender::default(), watch::Sender::new(0), Arc::default());
        let actor = Self {
            deps,
            source: source.clone(),
            orders: orders.subscribe(),
            force: force.subscribe(),
            process,
            leading: Arc::clone(&leading),
            nudges_seen: 0,
        };
        (actor, Handle { source, orders, force, leading })
    }

    /// Runs until the process ends or nobody gives orders any more; answers how its last run ended, if that is of the
    /// process's concern.
    pub(crate) async fn work(mut self) -> Option<EngineReport> {
        let mut pause = PAUSE.0;
        let mut last: Option<EngineReport> = None;
        let mut not_before = Instant::now();
        let mut ended = None;
        while self.is_to_seek(not_before, ended).await {
            let began = Instant::now();
            let report = self.seek().await;
            let now = Instant::now();
            ended = Some(now);
            let Some(report) = report else { continue };
            let failed = matches!(report.outcome, Outcome::Failed | Outcome::SlotLost);
            if !failed || began.elapsed() > HEALTHY {
                pause = PAUSE.0;
            }
            if failed {
                self.nudges_seen = self.orders.borrow().nudges();
                not_before = now + pause;
                pause = (pause * 2).min(PAUSE.1);
            }
            // What ended before the process did is told in the engine's row.
            last = self.process.borrow().is_some().then_some(report);
        }
        last
    }

    /// Waits for an order to seek; false = it is over.
    async fn is_to_seek(&mut self, not_before: Instant, ended: Option<Instant>) -> bool {
        loop {
            if self.process.borrow_and_update().is_some() {
                return false;
            }
            let (seek, dismissed, nudged) = {
                let orders = self.orders.borrow_and_update();
                let seek = orders.seek && orders.are_newer_than(ended);
                (seek, orders.dismissed, orders.nudges() > self.nudges_seen)
            };
            if dismissed {
                return false;
            }
            if seek && (nudged || Instant::now() >= not_before) {
                return true;
            }
            tokio::select! {
                changed = self.orders.changed() => if changed.is_err() { return false },
                changed = self.process.changed() => if changed.is_err() { return false },
                () = sleep_until(not_before.into()), if seek => {}
            }
        }
    }

    /// Tries for the lease for as long as the order stands; one run if it is won. `None` = it wasn't.
    async fn seek(&mut self) -> Option<EngineReport> {
        let config = LeaseConfig {
            name: format!("source-{}", self.source.id),
            holder: self.deps.worker.clone(),
            duration: self.deps.settings.lease_duration,
            retry: RETRY,
        };
        let (seeking, report) = (CancellationToken::new(), Arc::new(Mutex::new(None)));
        let actor = &*self;
        let work = |claim, guard: Guard| {
            // One run a time: what comes after it is for the next order to say.
            seeking.cancel();
            let report = Arc::clone(&report);
            async move {
                actor.leading.store(true, Ordering::SeqCst);
                let ended = Box::pin(run::run(actor, claim, guard.lost().clone())).await;
                let freed = ended.as_ref().is_none_or(|report| report.slot_released);
                *report.lock().unwrap_or_else(PoisonError::into_inner) = ended;
                actor.leading.store(false, Ordering::SeqCst);
                if freed { Leave::Release } else { Leave::Expire }
            }
        };
        let running = run_with_lease(&*actor.deps.lease, &config, seeking.clone(), work);
        tokio::pin!(running);
        tokio::select! {
            () = &mut running => {}
            () = actor.is_called_off() => {
                seeking.cancel();
                running.await;
            }
        }
        report.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Returns when the lease isn't to be sought any more. During a run that is the run's own matter.
    async fn is_called_off(&self) {
        let (mut orders, mut process) = (self.orders.clone(), self.process.clone());
        let called_off = async {
            let _ = orders.wait_for(|orders| !orders.seek || orders.dismissed).await;
        };
        tokio::select! {
            () = called_off => {}
            _ = process.wait_for(Option::is_some) => {}
        }
    }
}
