//! The engine of one source: slot, reader, shards, visibility, bus, and one resolved LSN.

mod error;
mod intake;
mod judge;
mod leave;
mod loader;
mod position;
pub(crate) mod registry;
mod report;
mod session;
mod shard;
mod slot;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, RwLock, atomic::AtomicU64},
    time::Duration,
};

use aura_bus::SharedBus;
use aura_domain::{EngineState, Epoch, Generation, Lsn, WorkerId};
use aura_lease::{Claim, LeaseBackend};
use aura_pgsource::{Sockets, SourceUrl, slot as slot_names, visibility::VisibilityPool};
use aura_store::{Source, Store, StoreError};
use tokio::sync::{Notify, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{error::EngineError, intake::Intake, judge::Judge, registry::Registry, session::Session, shard::ShardQueue};
use crate::{
    settings::WorkerSettings,
    status::StatusBoard,
    subs::{
        control::{Control, Streaming},
        index::SubscriptionIndex,
    },
};

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
    registry: watch::Sender<Arc<Registry>>,
    streaming: watch::Sender<Streaming>,
    reports: watch::Sender<Option<Arc<report::Covered>>>,
    /// What was confirmed last, in which generation.
    position: watch::Sender<Option<(Generation, Lsn)>>,
    /// Somebody has raised the epoch: nothing of this engine counts any more.
    fenced: CancellationToken,
    received: Arc<AtomicU64>,
    /// See [`Judge::disabling`].
    disabling: Arc<tokio::sync::RwLock<()>>,
    tasks: TaskTracker,
    /// Drain, then leave.
    stop: CancellationToken,
    /// Publish nothing more, write nothing more.
    lost: CancellationToken,
}

/// Runs the engine until `stop` or until the lease is lost.
pub(crate) async fn run(
    deps: EngineDeps,
    source: Source,
    claim: Claim,
    lost: CancellationToken,
    stop: CancellationToken,
) {
    let name = source.name.clone();
    let id = source.id;
    if let Err(error) = lead(&deps, source, &claim, lost, stop).await {
        tracing::error!(source = %id, error = %error, "the engine can't start");
        deps.board.update(id, &name, |status| {
            status.state = EngineState::Failed.as_str();
            status.reason = Some(error.policy().reason.to_owned());
        });
    }
}

async fn lead(
    deps: &EngineDeps,
    source: Source,
    claim: &Claim,
    lost: CancellationToken,
    stop: CancellationToken,
) -> Result<(), EngineError> {
    let epoch = deps.store.take_engine(source.id, &deps.worker).await?;
    // R-LEASE-2: the epoch is raised after the lease is won; if the lease isn't ours now, the raise fenced a successor.
    let holder = deps.lease.holder(&claim.name).await.map_err(|_| StoreError::Fenced)?;
    if holder.is_some_and(|holder| holder.holder != deps.worker) {
        return Ok(());
    }
    tracing::info!(source = %source.id, name = %source.name, %epoch, "leading");
    let loaded = loader::load(&deps.store, source.id).await?;
    let generation = deps.store.engine(source.id).await?.map_or(Generation(1), |engine| engine.generation);
    let engine = Engine::new(deps.clone(), source, epoch, lost, stop)?;
    // Fronts ask from now on; what is registered is known, even if the source can't be reached yet.
    engine.registry.send_replace(Arc::new(Registry::new(&loaded, generation, Lsn::ZERO)));
    engine.drive(loaded, CancellationToken::new()).await;
    Ok(())
}

impl Engine {
    fn new(
        deps: EngineDeps,
        source: Source,
        epoch: Epoch,
        lost: CancellationToken,
        stop: CancellationToken,
    ) -> Result<Self, EngineError> {
        let url = SourceUrl::from_secret(&source.replication_url)?;
        let admin_url = source.admin_url.as_ref().map_or_else(|| Ok(url.clone()), SourceUrl::from_secret)?;
        let sockets = Sockets::new();
        let (registry, _) = watch::channel(Arc::new(Registry::default()));
        let (streaming, _) = watch::channel(Streaming { on: false, reason: Some("starting".to_owned()) });
        let (reports, _) = watch::channel(None);
        let received = Arc::new(AtomicU64::new(0));
        let control = Arc::new(Control {
            source: source.id,
            epoch,
            origin: deps.worker.0.clone(),
            bus: Arc::clone(&deps.bus),
            visibility: Arc::new(VisibilityPool::new(
                url.clone(),
                sockets.clone(),
                deps.settings.visibility_connections,
            )),
            subscriptions: Arc::new(RwLock::new(SubscriptionIndex::default())),
            registry: registry.subscribe(),
            streaming: streaming.subscribe(),
            received: Arc::clone(&received),
            seqs: Arc::new(Mutex::new(HashMap::new())),
            partial: Mutex::default(),
            heard: Mutex::default(),
            greeted: tokio::sync::Mutex::new(deps.bus.state().borrow().connects),
        });
        let tasks = TaskTracker::new();
        Ok(Self {
            deps,
            source,
            url,
            admin_url,
            epoch,
            sockets,
            control,
            registry,
            streaming,
            reports,
            position: watch::Sender::new(None),
            fenced: CancellationToken::new(),
            received,
            disabling: Arc::default(),
            tasks,
            stop,
            lost,
        })
    }

    /// Sets the parts going, runs sessions until told otherwise, and takes the parts down again.
    async fn drive(&self, loaded: loader::Loaded, halt: CancellationToken) {
        let (loaded_tx, loaded_rx) = watch::channel(Arc::new(loaded));
        let acked = Arc::new(Notify::new());
        let judge = Arc::new(self.judge());
        let shards: Vec<Arc<ShardQueue>> = (0..self.deps.settings.shards).map(|_| Arc::default()).collect();
        for shard in &shards {
            let (shard, judge, acked) = (Arc::clone(shard), Arc::clone(&judge), Arc::clone(&acked));
            self.tasks.spawn(shard::run(shard, judge, acked, halt.clone()));
        }
        let refresh = self.deps.settings.filter_refresh;
        self.tasks.spawn(loader::watch(self.deps.store.clone(), self.source.id, refresh, loaded_tx, halt.clone()));
        let reporter = report::Reporter::new(self, halt.clone());
        self.tasks.spawn(reporter.run(self.reports.subscribe()));
        let keeper = position::PositionKeeper {
            store: self.deps.store.clone(),
            source: self.source.id,
            epoch: self.epoch,
            fenced: self.fenced.clone(),
            stop: halt.clone(),
        };
        self.tasks.spawn(keeper.run(self.position.subscribe()));
        let (ready_tx, ready) = watch::channel(false);
        self.tasks.spawn(Arc::clone(&self.control).serve(ready_tx, halt.clone()));

        let mut intake = Intake::new(shards, acked, self.deps.settings.engine_quota(), Arc::clone(&self.received));
        let mut session = Session::new(self, loaded_rx);
        tokio::select! {
            () = session.run_all(&mut intake, ready) => {}
            () = self.lost.cancelled() => tracing::warn!(source = %self.source.id, "lease lost, leaving at once"),
        }
        self.sockets.shutdown_all();
        halt.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        self.set_status(EngineState::Stopped, Some("standby"));
        if !self.lost.is_cancelled() {
            self.save_state(EngineState::Stopped, None).await;
        }
    }

    fn judge(&self) -> Judge {
        // Room for the envelope around the data.
        let limit = self.deps.bus.max_payload().saturating_sub(64 << 10).max(64 << 10);
        Judge {
            control: Arc::clone(&self.control),
            store: self.deps.store.clone(),
            disabling: Arc::clone(&self.disabling),
            max_event_bytes: self.deps.settings.max_event_bytes.min(limit),
        }
    }

    /// R-ENG-2.
    fn application_name(&self) -> String {
        slot_names::application_name(self.source.id, self.epoch)
    }

    /// Shows the state here and to fronts.
    fn set_status(&self, state: EngineState, reason: Option<&str>) {
        self.deps.board.update(self.source.id, &self.source.name, |status| {
            status.state = state.as_str();
            status.reason = reason.map(str::to_owned);
            status.cdc_active = state == EngineState::Running;
            status.epoch = Some(self.epoch);
        });
        let on = state == EngineState::Running;
        self.streaming.send_if_modified(|streaming| {
            let fresh = Streaming { on, reason: reason.map(str::to_owned) };
            let changed = *streaming != fresh;
            *streaming = fresh;
            changed
        });
    }

    /// Best effort: the row is for operators; what must be fenced is fenced by its own writes.
    async fn save_state(&self, state: EngineState, reason: Option<&str>) {
        if let Err(error) = self.deps.store.set_engine_state(self.source.id, self.epoch, state, reason).await {
            tracing::warn!(source = %self.source.id, %error, "engine state not saved");
        }
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
