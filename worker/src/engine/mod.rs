//! The engine of one source: slot, reader, shards, visibility, bus, and one resolved LSN.

mod census;
mod end;
mod error;
mod filter;
pub(crate) mod gaps;
mod intake;
mod judge;
mod leave;
mod loader;
mod lookout;
mod matching;
mod measure;
pub(crate) mod outage;
mod partitions;
mod placing;
mod position;
mod preflight;
mod quarantine;
mod queues;
mod read;
pub(crate) mod registry;
pub(crate) mod report;
mod session;
pub(crate) mod shard;
mod slot;
mod tasks;
mod unjudged;
mod verdict_log;
pub(crate) mod vitals;
mod zombie;

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, RwLock},
    time::{Duration, Instant},
};

use aura_bus::SharedBus;
use aura_domain::{EngineState, Epoch, Generation, Lsn, Position, WorkerId};
use aura_flow::{Heartbeat, Reader, ReaderLimits};
use aura_lease::LeaseBackend;
use aura_pgsource::{Sockets, SourceError, SourceUrl, slot as slot_names, visibility::VisibilityPool};
use aura_store::{Source, Store};
use census::Census;
pub(crate) use end::{End, How, Running};
pub(crate) use intake::memory_of;
pub(crate) use shard::BATCH_BYTES;
use tasks::Tasks;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use self::{
    error::EngineError,
    gaps::{Announcer, Gaps, Recorder},
    intake::Intake,
    judge::Judge,
    loader::Loaded,
    lookout::Lookout,
    outage::Outages,
    quarantine::Quarantine,
    registry::Registry,
    session::Session,
    shard::{ShardDeps, ShardQueue},
    vitals::Vitals,
};
use crate::{
    conditions::Conditions,
    explain::{Explainer, Recent},
    settings::WorkerSettings,
    states::{Observed, States},
    status::StatusBoard,
    stop::Stop,
    subs::{
        control::{Control, Streaming},
        index::SubscriptionIndex,
    },
    watchdog::{Watched, Watchlist},
};

/// After a panic the other shards may take this long to deliver what they have (R-SD-6).
const OTHERS_DRAIN: Duration = Duration::from_secs(5);
/// Between two tries to read the registry at the start.
const LOAD_AGAIN: Duration = Duration::from_secs(1);

/// What an engine needs from its worker.
#[derive(Clone)]
pub(crate) struct EngineDeps {
    pub(crate) store: Store,
    pub(crate) bus: SharedBus,
    pub(crate) lease: Arc<dyn LeaseBackend>,
    pub(crate) worker: WorkerId,
    pub(crate) settings: WorkerSettings,
    pub(crate) board: Arc<StatusBoard>,
    /// Fronts heard lately, over all engines: whom a new leader waits for.
    pub(crate) fronts: Arc<crate::fronts::Fronts>,
    pub(crate) watchlist: Watchlist,
    /// When the supervisor last read the engines.
    pub(crate) rounds: Heartbeat,
}

/// What a run brings to its engine.
pub(crate) struct Parts {
    pub(crate) epoch: Epoch,
    pub(crate) states: States,
    /// Somebody has raised the epoch: nothing of this engine counts any more.
    pub(crate) fenced: CancellationToken,
    pub(crate) conditions: Conditions,
}

/// One engine under one lease.
pub(crate) struct Engine {
    deps: EngineDeps,
    source: Source,
    url: SourceUrl,
    admin_url: SourceUrl,
    epoch: Epoch,
    sockets: Sockets,
    control: Arc<Control>,
    vitals: Arc<Vitals>,
    states: States,
    registry: watch::Sender<Arc<Registry>>,
    streaming: watch::Sender<Streaming>,
    reports: watch::Sender<Option<Arc<report::Covered>>>,
    /// What was confirmed last, in which generation.
    position: watch::Sender<Option<(Generation, Lsn)>>,
    fenced: CancellationToken,
    /// See [`Judge::disabling`].
    disabling: Arc<tokio::sync::RwLock<()>>,
    gaps: Arc<Gaps>,
    recent: Arc<Recent>,
    outages: Arc<Outages>,
    conditions: Conditions,
    tasks: Tasks,
    /// Drain, then leave: the order, which may become tighter, and whether there is one.
    stopping: Arc<watch::Sender<Option<Stop>>>,
    stop: CancellationToken,
    /// An operator asked for a new slot, or the old one is gone: no reason to wait any longer.
    new_slot: Arc<Notify>,
    /// Look at the slot now.
    look: Notify,
    /// When the stream that runs now has begun, and of the one that the server has ended without our hearing it.
    stream: watch::Sender<Option<Instant>>,
    cut: watch::Sender<Option<Instant>>,
    /// The server may soon throw away what the slot needs (R-FB-6).
    at_risk: watch::Sender<bool>,
    /// It does no work although it could: to be cut.
    hung: CancellationToken,
    /// Ends the shards.
    halt_shards: CancellationToken,
    /// Ends everything else.
    halt: CancellationToken,
}

/// Starts the engine in tasks of its own. It ends when told to, or since it can't go on; and it can be ended.
pub(crate) fn start(deps: &EngineDeps, source: &Source, parts: Parts) -> Result<Running, SourceError> {
    let (tasks, panicked) = Tasks::new();
    let engine = Arc::new(Engine::new(deps.clone(), source.clone(), parts, tasks)?);
    let (tell, end) = oneshot::channel();
    let watched = Arc::new(Watched {
        source: source.id,
        epoch: engine.epoch,
        vitals: Arc::clone(&engine.vitals),
        sockets: engine.sockets.clone(),
        outages: Arc::clone(&engine.outages),
        hung: engine.hung.clone(),
    });
    deps.watchlist.add(&watched);
    let running = Running {
        sockets: engine.sockets.clone(),
        vitals: Arc::clone(&engine.vitals),
        tasks: engine.tasks.clone(),
        watched,
        stopping: Arc::clone(&engine.stopping),
        stop: engine.stop.clone(),
        new_slot: Arc::clone(&engine.new_slot),
        end: Some(end),
    };
    let tasks = engine.tasks.clone();
    tasks.spawn("intake", async move {
        // Whoever asked may be gone.
        drop(tell.send(Box::pin(engine.drive(panicked)).await));
    });
    Ok(running)
}

impl Engine {
    fn new(deps: EngineDeps, source: Source, parts: Parts, tasks: Tasks) -> Result<Self, SourceError> {
        let Parts { epoch, states, fenced, conditions } = parts;
        let url = SourceUrl::from_secret(&source.replication_url)?;
        let admin_url = source.admin_url.as_ref().map_or_else(|| Ok(url.clone()), SourceUrl::from_secret)?;
        let sockets = Sockets::new();
        let vitals = Arc::new(Vitals::new(deps.settings.shards));
        let (registry, _) = watch::channel(Arc::new(Registry::default()));
        let (streaming, _) = watch::channel(Streaming { on: false, reason: Some("starting".to_owned()) });
        let control = Arc::new(Control {
            source: source.id,
            epoch,
            origin: deps.worker.0.clone(),
            bus: Arc::clone(&deps.bus),
            visibility: Arc::new(VisibilityPool::new(
                url.clone(),
                sockets.clone(),
                slot_names::application_name(source.id, epoch),
                deps.settings.visibility_connections,
            )),
            subscriptions: Arc::new(RwLock::new(SubscriptionIndex::default())),
            registry: registry.subscribe(),
            streaming: streaming.subscribe(),
            vitals: Arc::clone(&vitals),
            seqs: Arc::new(Mutex::new(HashMap::new())),
            partial: Mutex::default(),
            heard: Mutex::default(),
            greeted: tokio::sync::Mutex::new(deps.bus.state().borrow().connects),
        });
        let halt = CancellationToken::new();
        let recent = Arc::new(Recent::new(source.id, deps.settings.explain_memory));
        Ok(Self {
            deps,
            source,
            url,
            admin_url,
            epoch,
            sockets,
            control,
            vitals,
            states,
            registry,
            streaming,
            reports: watch::Sender::new(None),
            position: watch::Sender::new(None),
            fenced,
            disabling: Arc::default(),
            gaps: Arc::default(),
            recent,
            outages: Arc::default(),
            conditions,
            tasks,
            stopping: Arc::new(watch::Sender::new(None)),
            stop: CancellationToken::new(),
            new_slot: Arc::default(),
            look: Notify::new(),
            stream: watch::Sender::new(None),
            cut: watch::Sender::new(None),
            at_risk: watch::Sender::new(false),
            hung: CancellationToken::new(),
            halt_shards: halt.child_token(),
            halt,
        })
    }

    /// Sets the parts going, runs sessions until told otherwise, and takes the parts down again.
    async fn drive(self: Arc<Self>, mut panicked: mpsc::Receiver<String>) -> End {
        let loading = self.stop.run_until_cancelled(Box::pin(self.load())).await;
        let Some((loaded, skips)) = loading else { return End::stopped(None) };
        let (loaded_tx, loaded_rx) = watch::channel(Arc::new(loaded));
        let (ready_tx, ready) = watch::channel(false);
        let mut intake = self.start_parts(loaded_tx, ready_tx, skips);
        self.tasks.spawn("watch", Lookout::new(Arc::clone(&self)).run());
        self.tasks.spawn("census", Census::new(Arc::clone(&self), loaded_rx.clone()).run());
        let mut session = Session::new(&self, loaded_rx);
        let end = {
            let sessions = session.run_all(&mut intake, ready);
            tokio::pin!(sessions);
            tokio::select! {
                end = &mut sessions => end,
                Some(task) = panicked.recv() => {
                    self.vitals.bury(&task);
                    self.end_within(OTHERS_DRAIN);
                    End::panicked(&task, sessions.await)
                }
            }
        };
        self.sockets.shutdown_all();
        self.halt.cancel();
        end
    }

    /// Fronts ask from now on; what is registered is known, even if the source can't be reached yet.
    async fn load(&self) -> (Loaded, HashSet<Position>) {
        loop {
            let loaded = async {
                let (store, source) = (&self.deps.store, self.source.id);
                let (loaded, skips) = (loader::load(store, source).await?, store.positions_to_skip(source).await?);
                Ok::<_, EngineError>((loaded, skips, store.engine(source).await?))
            };
            match loaded.await {
                Ok((loaded, skips, row)) => {
                    let generation = row.map_or(Generation(1), |engine| engine.generation);
                    self.registry.send_replace(Arc::new(Registry::new(
                        &loaded,
                        generation,
                        Lsn::ZERO,
                        &Quarantine::default(),
                    )));
                    return (loaded, skips.into_iter().collect());
                }
                Err(error) => {
                    tracing::warn!(source = %self.source.id, %error, "can't read the registry, trying again");
                    self.observe(error.observed());
                }
            }
            tokio::time::sleep(LOAD_AGAIN).await;
        }
    }

    fn start_parts(
        &self,
        loaded: watch::Sender<Arc<Loaded>>,
        ready: watch::Sender<bool>,
        skips: HashSet<Position>,
    ) -> Intake {
        let (settings, halt) = (&self.deps.settings, &self.halt);
        let acked = Arc::new(Notify::new());
        let judge = Arc::new(self.judge());
        let shards: Vec<Arc<ShardQueue>> = (0..settings.shards).map(|_| Arc::default()).collect();
        for (number, queue) in shards.iter().enumerate() {
            let deps = ShardDeps {
                number,
                queue: Arc::clone(queue),
                judge: Arc::clone(&judge),
                acked: Arc::clone(&acked),
                outages: self.outages.watch(),
                quota: settings.engine_quota(),
                skip_after: settings.skip_after,
                busy: (settings.visibility_connections / settings.shards).max(1),
            };
            self.tasks.spawn(vitals::shard_name(number), shard::run(deps, self.halt_shards.clone()));
        }
        let (outages, bus, stop) = (Arc::clone(&self.outages), Arc::clone(&self.deps.bus), halt.clone());
        self.tasks.spawn("outages", async move { outages.follow(&bus, &stop).await });
        let (store, refresh) = (self.deps.store.clone(), settings.filter_refresh);
        self.tasks.spawn("registry", loader::watch(store, self.source.id, refresh, loaded, halt.clone()));
        self.tasks.spawn("report", report::Reporter::new(self, halt.clone()).run(self.reports.subscribe()));
        let keeper = position::PositionKeeper {
            store: self.deps.store.clone(),
            source: self.source.id,
            epoch: self.epoch,
            fenced: self.fenced.clone(),
            gaps: Arc::clone(&self.gaps),
            stop: halt.clone(),
        };
        self.tasks.spawn("position", keeper.run(self.position.subscribe()));
        let (announced, records) = mpsc::channel(gaps::RECORDS);
        let (control, store) = (Arc::clone(&self.control), self.deps.store.clone());
        self.tasks.spawn("gap records", Recorder { control, store, stop: halt.clone() }.run(records));
        let announcer = Announcer {
            gaps: Arc::clone(&self.gaps),
            control: Arc::clone(&self.control),
            vitals: Arc::clone(&self.vitals),
            acked: Arc::clone(&acked),
            announced,
            stall_limit: settings.stall_limit,
            stop: self.halt_shards.clone(),
        };
        self.tasks.spawn("gaps", announcer.run());
        self.tasks.spawn("control", Arc::clone(&self.control).serve(ready, halt.clone()));
        let (control, recent) = (Arc::clone(&self.control), Arc::clone(&self.recent));
        self.tasks.spawn("explain", Explainer::new(control, recent, self.reports.subscribe()).serve(halt.clone()));
        let limits = ReaderLimits {
            quota: settings.engine_quota(),
            advance_interval: settings.advance_interval,
            stall_limit: settings.stall_limit,
            outage_limit: settings.outage_limit,
        };
        Intake::new(Reader::new(limits, Instant::now()), shards, acked, Arc::clone(&self.vitals), skips)
    }

    fn judge(&self) -> Judge {
        // Room for the envelope around the data.
        let limit = self.deps.bus.max_payload().saturating_sub(64 << 10).max(64 << 10);
        Judge {
            control: Arc::clone(&self.control),
            store: self.deps.store.clone(),
            vitals: Arc::clone(&self.vitals),
            disabling: Arc::clone(&self.disabling),
            max_event_bytes: self.deps.settings.max_event_bytes.min(limit),
            outages: Arc::clone(&self.outages),
            gaps: Arc::clone(&self.gaps),
            recent: Arc::clone(&self.recent),
            explain_log: self.deps.settings.explain_log.clone(),
            issued: Mutex::default(),
        }
    }

    /// Orders the engine to end by itself.
    fn end_within(&self, time: Duration) {
        end::order(&self.stopping, &self.stop, Stop::drain(Instant::now() + time));
    }

    /// R-ENG-2.
    fn application_name(&self) -> String {
        slot_names::application_name(self.source.id, self.epoch)
    }

    /// Shows the state here, in the row and to fronts.
    fn observe(&self, observed: Observed) {
        let fresh = Streaming { on: observed.state == EngineState::Running, reason: observed.code.map(str::to_owned) };
        let now = self.states.now().state;
        if now == EngineState::Zombie && !now.next().contains(&observed.state) {
            // Whoever held the slot has gone.
            self.states.report(Observed::new(EngineState::Starting, None));
        }
        self.states.report(observed);
        self.streaming.send_if_modified(|streaming| {
            let changed = *streaming != fresh;
            *streaming = fresh;
            changed
        });
    }

    /// Waits until the fronts that we know of have sent their subscriptions, at most 2 s (design §9). A process that has
    /// just started knows of none yet and gives them a moment to answer. Who comes later announces a gap by itself.
    async fn hand_over(&self, mut ready: watch::Receiver<bool>) {
        let patience = if self.deps.fronts.any() { Duration::from_secs(2) } else { Duration::from_millis(300) };
        let complete = async {
            let _ = ready.wait_for(|ready| *ready).await;
            loop {
                let expected = self.deps.fronts.with_subscriptions(self.source.id);
                if self.deps.fronts.any() && self.control.fronts() >= expected {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(patience, complete).await.is_err() && self.deps.fronts.any() {
            tracing::info!(source = %self.source.id, "reading without the subscriptions of some fronts, they announce a gap");
        }
    }

    /// Raises the generation when positions have lost their meaning (R-LSN-6).
    async fn generation(
        &self,
        identity: &aura_pgsource::SystemIdentity,
        new_slot: bool,
    ) -> Result<Generation, EngineError> {
        let store = &self.deps.store;
        let (generation, raised) = store
            .confirm_generation(self.source.id, self.epoch, &identity.system_identifier, identity.timeline, new_slot)
            .await?;
        if raised {
            tracing::warn!(source = %self.source.id, %generation, "positions lost their meaning, new generation");
        }
        Ok(generation)
    }
}
