//! Reads the platform database, plans, and gives each engine's actor its orders; says that this worker is alive.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use aura_domain::{Desired, EngineReport, EngineState, SourceId, WorkerId};
use aura_lease::is_predecessor;
use aura_store::{Engine, NewWorker, Operation, Signal, SignalListener, Source, Store, StoreError, WorkerRow};
use tokio::{
    sync::watch,
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};

use crate::{
    actor::{Actor, Handle, Orders, Row},
    engine::EngineDeps,
    pool::{self, Holder, Member, Wanted},
    settings::WorkerSettings,
    stop::Exit,
};

/// The rows are read this often, signal or not: a stop works without the bus, and with a signal that was lost (R-ENG-3).
const REFRESH: Duration = Duration::from_secs(1);
/// Period of a worker's sign of life (R-LEASE-3).
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(2);
/// A worker that missed three is dead, even if leases are shorter.
const MISSED: Duration = Duration::from_secs(6);
/// A force-close of what is stopped is the api's to look into, at once: a run of ours would come between it and the report of
/// the last one. Where there is no api it is ours after so long.
const API_FIRST_MS: i64 = 2_000;
/// Saying goodbye at the end; whoever is silent is forgotten anyway.
const GOODBYE: Duration = Duration::from_millis(300);

/// See the module.
pub(crate) struct Supervisor {
    deps: EngineDeps,
    process: watch::Receiver<Option<Exit>>,
    actors: HashMap<SourceId, Handle>,
    working: JoinSet<Option<EngineReport>>,
    pool: Pool,
}

/// What one read of the platform database said.
struct View {
    sources: Vec<Source>,
    engines: BTreeMap<SourceId, Arc<Engine>>,
    workers: Vec<WorkerRow>,
    read: Instant,
}

/// What only shows from one look to the next.
struct Pool {
    me: WorkerId,
    dead_after: Duration,
    settle: Duration,
    members: BTreeSet<String>,
    stable_since: Instant,
    orphans: HashMap<SourceId, Instant>,
}

impl Supervisor {
    pub(crate) fn new(deps: EngineDeps, process: watch::Receiver<Option<Exit>>) -> Self {
        let pool = Pool {
            me: deps.worker.clone(),
            dead_after: dead_after(&deps.settings),
            settle: deps.settings.settle,
            members: BTreeSet::new(),
            stable_since: Instant::now(),
            orphans: HashMap::new(),
        };
        Self { deps, process, actors: HashMap::new(), working: JoinSet::new(), pool }
    }

    /// The handles of the actors, for whoever must reach one without the platform database.
    pub(crate) async fn run(mut self, desks: watch::Sender<HashMap<SourceId, Handle>>) -> Vec<EngineReport> {
        let heart = self.beat();
        let mut listener = None;
        while self.process.borrow_and_update().is_none() {
            // The platform database may hang, and the process ends all the same.
            let mut process = self.process.clone();
            let read = tokio::select! {
                biased;
                _ = process.wait_for(Option::is_some) => break,
                read = View::read(&self.deps.store) => read,
            };
            match read {
                Ok(view) => {
                    self.deps.rounds.beat(Instant::now());
                    self.follow(view);
                    desks.send_replace(self.actors.clone());
                }
                Err(error) => tracing::warn!(%error, "can't read the engines, going on with what was ordered"),
            }
            let signal = async {
                if listener.is_none() {
                    listener = self.deps.store.listen().await.ok();
                }
                signalled(&mut listener).await;
            };
            tokio::select! {
                _ = process.wait_for(Option::is_some) => {}
                () = signal => {}
            }
        }
        let reports = self.end().await;
        heart.abort();
        let _ = timeout(GOODBYE, self.deps.store.remove_worker(&self.deps.worker)).await;
        reports
    }

    /// Goes on reading: an operator may still tighten a stop, and actors see who has taken over.
    async fn end(&mut self) -> Vec<EngineReport> {
        let mut reports = Vec::new();
        loop {
            let view = async {
                sleep(REFRESH).await;
                View::read(&self.deps.store).await
            };
            tokio::select! {
                ended = self.working.join_next() => match ended {
                    Some(Ok(report)) => reports.extend(report),
                    Some(Err(error)) => tracing::error!(%error, "an engine's actor ended without a word"),
                    None => return reports,
                },
                // One that fails is no reason not to hear the next.
                view = view => if let Ok(view) = view {
                    self.pass_on(&view, &pool::Plan::default());
                },
            }
        }
    }

    /// A task of its own: reading the rows may take long.
    fn beat(&self) -> JoinHandle<()> {
        let (store, worker, mut process) = (self.deps.store.clone(), self.deps.worker.clone(), self.process.clone());
        let (max_engines, host) = (self.deps.settings.max_engines, host());
        tokio::spawn(async move {
            loop {
                let draining = process.borrow_and_update().is_some();
                let row = NewWorker { id: &worker, host: &host, version: VERSION, max_engines, draining };
                if let Err(error) = store.heartbeat(row).await {
                    tracing::warn!(%error, "the worker's sign of life isn't written");
                }
                tokio::select! {
                    () = sleep(HEARTBEAT) => {}
                    Ok(()) = process.changed() => {}
                }
            }
        })
    }

    fn follow(&mut self, view: View) {
        while let Some(ended) = self.working.try_join_next() {
            if let Err(error) = ended {
                tracing::error!(%error, "an engine's actor ended without a word");
            }
        }
        for source in &view.sources {
            match self.actors.get(&source.id).filter(|handle| handle.is_working()) {
                // One with the old facts ends before one with the new begins: both would be the lease's holder.
                Some(handle) if !handle.source.is_same(source) => handle.dismiss(),
                Some(_) => {}
                None => self.hire(source.clone()),
            }
        }
        let leading = |source: &SourceId| self.actors.get(source).is_some_and(Handle::is_leading);
        let plan = self.pool.plan(&view, leading);
        self.pass_on(&view, &plan);
        // Without orders its actor ends, and drains first if it leads.
        let known: BTreeSet<_> = view.sources.iter().map(|source| source.id).collect();
        self.actors.retain(|source, handle| {
            let gone = !known.contains(source);
            if gone {
                handle.dismiss();
                self.deps.board.forget(*source);
            }
            !gone
        });
    }

    fn hire(&mut self, source: Source) {
        self.deps.board.update(source.id, &source.name, |_| {});
        let id = source.id;
        let (actor, handle) = Actor::new(self.deps.clone(), source, self.process.clone());
        self.actors.insert(id, handle);
        self.working.spawn(actor.work());
    }

    fn pass_on(&self, view: &View, plan: &pool::Plan) {
        for (source, handle) in &self.actors {
            let row = view.engines.get(source).map(|engine| Row { engine: Arc::clone(engine), read: view.read });
            let seek = plan.seek.contains(source);
            let give_up = plan.give_up == Some(*source);
            handle.orders.send_modify(|orders| *orders = Orders { seek, give_up, row, dismissed: orders.dismissed });
        }
    }
}

impl View {
    async fn read(store: &Store) -> Result<Self, StoreError> {
        let (sources, workers) = (store.sources().await?, store.workers().await?);
        // Durations of the rows count from before they were read: a deadline may only come earlier by that.
        let read = Instant::now();
        let engines = store.engines().await?.into_iter().map(|engine| (engine.source, Arc::new(engine))).collect();
        Ok(Self { sources, engines, workers, read })
    }
}

impl Pool {
    fn plan(&mut self, view: &View, leading: impl Fn(&SourceId) -> bool) -> pool::Plan {
        let alive: Vec<_> = view.workers.iter().filter(|worker| self.is_alive(worker)).collect();
        let mut members: Vec<_> = alive.iter().filter(|worker| !worker.draining).map(|worker| member(worker)).collect();
        if !members.iter().any(|member| member.id == self.me) {
            // Our own sign of life is late; we are here.
            members.extend(view.workers.iter().filter(|worker| worker.id == self.me).map(member));
        }
        let ids: BTreeSet<_> = members.iter().map(|member| member.id.0.clone()).collect();
        if ids != self.members {
            (self.members, self.stable_since) = (ids, Instant::now());
        }
        let wanted: Vec<_> = view.engines.values().filter(|engine| is_wanted(engine)).collect();
        self.orphans.retain(|source, _| view.engines.contains_key(source));
        let wanted: Vec<_> = wanted.iter().map(|engine| self.wanted(engine, &alive, &leading)).collect();
        pool::plan(&self.me, &members, &wanted, self.stable_since.elapsed() >= self.settle)
    }

    fn wanted(&mut self, engine: &Engine, alive: &[&WorkerRow], leading: &impl Fn(&SourceId) -> bool) -> Wanted {
        let source = engine.source;
        let runs = |holder: &&WorkerId| match **holder == self.me {
            true => leading(&source),
            // Who has lost a lease writes nothing, that either: its last word gets old.
            false => alive.iter().any(|worker| worker.id == **holder) && !self.is_stale(engine),
        };
        let holder = match engine.holder.as_ref().filter(runs) {
            Some(holder) => {
                self.orphans.remove(&source);
                Holder::Live(holder.clone())
            }
            // A run that has just begun isn't in the row yet.
            None if leading(&source) => Holder::Live(self.me.clone()),
            None => Holder::None(self.orphans.entry(source).or_insert_with(Instant::now).elapsed()),
        };
        Wanted { source, holder }
    }

    fn is_alive(&self, worker: &WorkerRow) -> bool {
        !is_predecessor(&worker.id, &self.me)
            && Duration::from_millis(worker.silent_ms.unsigned_abs()) < self.dead_after
    }

    fn is_stale(&self, engine: &Engine) -> bool {
        engine.live_age_ms.is_some_and(|age| Duration::from_millis(age.unsigned_abs()) >= self.dead_after)
    }
}

/// A worker that has been silent for so long is dead.
pub(crate) fn dead_after(settings: &WorkerSettings) -> Duration {
    settings.lease_duration.max(MISSED)
}

/// To be run; or to be ended in order, though whoever ran it is gone: somebody sees to it that its slot is free. What the
/// api has taken the end of is the api's: two of us would fence each other for ever.
fn is_wanted(engine: &Engine) -> bool {
    let ending = matches!(engine.state, EngineState::Closing | EngineState::ForceClosing | EngineState::Zombie);
    let taken = engine.holder.is_none() && ending;
    let idle = engine.holder.is_none() && engine.state == EngineState::Stopped;
    let by_us = |operation: &Operation| !taken && (!idle || operation.remaining_ms <= -API_FIRST_MS);
    engine.desired == Desired::Running || engine.operation.as_ref().is_some_and(by_us)
}

fn member(worker: &WorkerRow) -> Member {
    Member { id: worker.id.clone(), max_engines: worker.max_engines }
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if name.trim().is_empty() { "unknown".to_owned() } else { name.trim().to_owned() }
}

async fn signalled(listener: &mut Option<SignalListener>) {
    let Some(active) = listener else { return sleep(REFRESH).await };
    let engines = async {
        loop {
            match active.next().await {
                Ok(Signal::Engines | Signal::Lost) => return true,
                Ok(_) => {}
                Err(_) => return false,
            }
        }
    };
    if timeout(REFRESH, engines).await == Ok(false) {
        *listener = None;
    }
}

#[cfg(test)]
mod tests {
    use aura_domain::{Epoch, Generation, OnDeadline, OperationKind};

    use super::*;

    #[test]
    fn r_eng_6_what_the_api_has_taken_the_end_of_is_not_taken_back() {
        let operation = Operation {
            id: 1,
            kind: OperationKind::ForceClose,
            started_at: String::new(),
            deadline_at: String::new(),
            remaining_ms: -1,
            on_deadline: OnDeadline::Force,
        };
        let engine = |state, holder: Option<&str>| Engine {
            source: SourceId(uuid::Uuid::nil()),
            desired: Desired::Stopped,
            state,
            reason: None,
            since: String::new(),
            state_age_ms: 0,
            epoch: Epoch(1),
            generation: Generation(1),
            applied_revision: 0,
            holder: holder.map(|id| WorkerId(id.to_owned())),
            operation: Some(operation.clone()),
            recreate_slot: false,
            nudges: 0,
            last_report: None,
            live: None,
            live_age_ms: None,
        };
        for state in [EngineState::Closing, EngineState::ForceClosing, EngineState::Zombie] {
            assert!(!is_wanted(&engine(state, None)), "{state}");
            assert!(is_wanted(&engine(state, Some("dead"))), "{state}: its worker had it");
        }
        assert!(is_wanted(&engine(EngineState::Failed, None)), "nobody has ended it yet");
        let mut stopped = engine(EngineState::Stopped, None);
        assert!(!is_wanted(&stopped), "the api looks whether it is");
        stopped.operation = Some(Operation { remaining_ms: -API_FIRST_MS, ..operation });
        assert!(is_wanted(&stopped), "there is no api");
    }
}
