//! The worker: holds leases of sources and runs their engines — slot, reader, shards, visibility, bus.

mod actor;
mod args;
mod conditions;
mod container;
mod encode;
mod engine;
mod explain;
mod fronts;
mod http;
mod lease;
mod live;
mod pool;
mod register;
mod settings;
mod states;
mod status;
mod stop;
mod subs;
mod supervisor;
mod watchdog;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

pub use args::WorkerArgs;
use aura_bus::SharedBus;
use aura_domain::{EngineReport, EngineState, SourceId, WorkerId};
use aura_flow::Heartbeat;
use aura_kit::{Failure, ShutdownHandle};
use aura_lease::{LeaseBackend, worker_id};
use aura_store::{Store, StoreError};
use axum::Router;
pub use explain::ExplainLog;
pub use lease::{LeaseKind, NoBackend};
pub use register::{RegisterError, register};
use secrecy::SecretString;
use serde_json::json;
pub use settings::WorkerSettings;
pub use status::EngineStatus;
use tokio::{sync::watch, task::JoinError, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    actor::Handle,
    engine::EngineDeps,
    fronts::Fronts,
    status::StatusBoard,
    stop::Exit,
    supervisor::Supervisor,
    watchdog::{Watchdog, Watchlist},
};

/// Nothing keeps two workers apart, and this may not be the only one.
#[derive(Debug, thiserror::Error)]
pub enum NotAlone {
    /// Another one is alive.
    #[error("LEASE_BACKEND=none is for a single worker, and {rival} on {host} is alive, too")]
    Rival {
        /// It.
        rival: WorkerId,
        /// Where.
        host: String,
    },
    /// Nobody knows.
    #[error(transparent)]
    Unknown(#[from] StoreError),
}

/// For workers without leases (R-LEASE-3): makes sure that no other one is registered. One that has just died is waited
/// for, as long as that takes to show.
///
/// # Errors
/// There is another one, or the platform database can't be read.
pub async fn ensure_alone(store: &Store, settings: &WorkerSettings) -> Result<(), NotAlone> {
    let dead_after = supervisor::dead_after(settings);
    let patience = Instant::now() + dead_after + Duration::from_secs(1);
    loop {
        let alive = |silent_ms: i64| Duration::from_millis(silent_ms.unsigned_abs()) < dead_after;
        let rival = store.workers().await?.into_iter().find(|worker| !worker.draining && alive(worker.silent_ms));
        match rival {
            None => return Ok(()),
            Some(rival) if Instant::now() >= patience => {
                return Err(NotAlone::Rival { rival: rival.id, host: rival.host });
            }
            Some(rival) => {
                tracing::info!(rival = %rival.id, host = %rival.host, "waiting whether another worker is alive");
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// What a worker needs.
pub struct WorkerDeps {
    /// Platform database.
    pub store: Store,
    /// Where changes go and subscriptions come from.
    pub bus: SharedBus,
    /// Back end of the leases.
    pub lease: Arc<dyn LeaseBackend>,
    /// Knobs.
    pub settings: WorkerSettings,
}

/// A worker of the pool; runs the engines whose leases it holds.
pub struct Worker {
    deps: EngineDeps,
    desks: watch::Sender<HashMap<SourceId, Handle>>,
}

impl Worker {
    /// A worker with an identity of its own; nothing runs yet.
    pub fn new(deps: WorkerDeps) -> Self {
        let WorkerDeps { store, bus, lease, settings } = deps;
        // Unique per start: a restarted process is another holder and gets another epoch.
        let worker = worker_id(settings.pod.as_ref());
        let (board, fronts) = (Arc::new(StatusBoard::default()), Arc::new(Fronts::default()));
        let watchlist = Watchlist::default();
        let rounds = Heartbeat::new(std::time::Instant::now());
        let deps = EngineDeps { store, bus, lease, worker, settings, board, fronts, watchlist, rounds };
        Self { deps, desks: watch::Sender::default() }
    }

    /// A handle on what the engines are doing.
    pub fn status(&self) -> WorkerStatus {
        WorkerStatus {
            worker: self.deps.worker.clone(),
            board: Arc::clone(&self.deps.board),
            watchlist: self.deps.watchlist.clone(),
            bus: Arc::clone(&self.deps.bus),
            rounds: self.deps.rounds.clone(),
        }
    }

    /// What reaches the engines' actors without the platform database.
    pub fn desk(&self) -> Desk {
        Desk { handles: self.desks.subscribe() }
    }

    /// `/engine/{source}/start|stop|force-close`, for holders of platform keys; without their secret nobody is let in.
    pub fn routes(&self, platform_secret: Option<SecretString>) -> Router {
        http::Verbs { desk: self.desk(), store: self.deps.store.clone(), secret: platform_secret }.router()
    }

    /// Runs until the shutdown, then drains every engine before its deadline, frees its slot and releases its lease.
    /// Answers how the engines ended.
    pub async fn run(self, shutdown: ShutdownHandle) -> Vec<EngineReport> {
        let tasks = TaskTracker::new();
        let (fronts, bus, listening) =
            (Arc::clone(&self.deps.fronts), Arc::clone(&self.deps.bus), CancellationToken::new());
        let listener_stop = listening.clone();
        tasks.spawn(async move { fronts.listen(bus, listener_stop).await });
        let limit = self.deps.settings.watchdog_limit;
        let watchdog = Watchdog::start(self.deps.watchlist.clone(), limit, shutdown.clone());
        let _watchdog = watchdog.inspect_err(|error| tracing::error!(%error, "no thread for the watchdog"));
        if !self.deps.lease.is_exclusive() {
            let (store, me) = (self.deps.store.clone(), self.deps.worker.clone());
            let alone = lease::stay_alone(store, me, shutdown.clone());
            tasks.spawn(listening.clone().run_until_cancelled_owned(alone));
        }
        let (exit, process) = watch::channel(None);
        tasks.spawn(pass_on(shutdown.deadlines(), exit));
        let reports = Supervisor::new(self.deps, process).run(self.desks).await;
        listening.cancel();
        tasks.close();
        tasks.wait().await;
        reports
    }
}

/// What the engines said at the end, of the task that [`ShutdownHandle::spawn`] made of [`Worker::run`]; `None` = it was cut
/// off. Then nobody can say that nothing was abandoned, and the process fails (F.10).
pub fn reports(
    ended: Option<Result<Option<Vec<EngineReport>>, JoinError>>,
    shutdown: &ShutdownHandle,
) -> Vec<EngineReport> {
    if ended.is_none() {
        shutdown.fail(Failure::new("engines", "they did not end in time and were cut off"));
    }
    // Without a word it has panicked, and the shutdown knows.
    ended.and_then(Result::ok).flatten().unwrap_or_default()
}

/// Reaches the actors of this process's engines; cheap to clone.
#[derive(Debug, Clone)]
pub struct Desk {
    handles: watch::Receiver<HashMap<SourceId, Handle>>,
}

impl Desk {
    /// A source that this worker knows, by id or name.
    pub fn find(&self, word: &str) -> Option<SourceId> {
        let handles = self.handles.borrow();
        let named =
            |(id, handle): (&SourceId, &Handle)| (handle.source.name == word || id.to_string() == word).then_some(*id);
        handles.iter().find_map(named)
    }

    /// Ends a source's engine here at once, without the platform database; never waits. False = it doesn't run here.
    pub fn force_close(&self, source: SourceId) -> bool {
        let handles = self.handles.borrow();
        let Some(handle) = handles.get(&source).filter(|handle| handle.is_leading()) else { return false };
        handle.force_close();
        true
    }
}

/// When the engines must have drained: some of the time is kept for those that have to be cut (R-ENG-4).
async fn pass_on(mut deadlines: watch::Receiver<Option<Instant>>, exit: watch::Sender<Option<Exit>>) {
    loop {
        let deadline = *deadlines.borrow_and_update();
        if let Some(at) = deadline {
            exit.send_replace(Some(Exit::by(at.into_std(), std::time::Instant::now())));
        }
        tokio::select! {
            Ok(()) = deadlines.changed() => {}
            () = exit.closed() => return,
        }
    }
}

/// What a worker tells of itself; cheap to clone.
#[derive(Clone)]
pub struct WorkerStatus {
    worker: WorkerId,
    board: Arc<StatusBoard>,
    watchlist: Watchlist,
    bus: SharedBus,
    rounds: Heartbeat,
}

impl WorkerStatus {
    /// The holder's name in leases.
    pub fn worker(&self) -> &WorkerId {
        &self.worker
    }

    /// Every source's engine as this worker sees it.
    pub fn engines(&self) -> BTreeMap<SourceId, EngineStatus> {
        self.board.read()
    }

    /// The body of `/health` and `/status`.
    pub fn report(&self) -> serde_json::Value {
        let engines: Vec<_> =
            self.engines().into_iter().map(|(source, engine)| json!({"source": source, "engine": engine})).collect();
        json!({"worker": self.worker, "cdc_active": self.cdc_active(), "engines": engines})
    }

    /// False until the slot of every engine that this worker leads is confirmed to be healthy, and while it leads none.
    pub fn cdc_active(&self) -> bool {
        let engines = self.board.read();
        let mut led = engines.values().filter(|engine| engine.is_led()).peekable();
        led.peek().is_some() && led.all(|engine| engine.cdc_active)
    }

    /// Whether a restart would do no good: every engine's task lives, and rows move, or a known outage explains that they
    /// don't. Also while paused and while draining.
    pub fn is_healthy(&self) -> bool {
        self.watchlist.now().iter().all(|engine| engine.is_healthy(std::time::Instant::now()))
    }

    /// Whether it can run engines, now or when its turn comes: the platform database was read lately, the bus is there, and
    /// nothing that it leads has failed. A standby is ready (F.11).
    pub fn is_ready(&self) -> bool {
        let failed = self.board.read().values().any(|engine| engine.is_led() && engine.state == EngineState::Failed);
        self.bus.state().borrow().connected && self.rounds.age(std::time::Instant::now()) < watchdog::SILENT && !failed
    }
}
