//! One run: an epoch under a lease, from the raise of the epoch to the engine's end.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aura_domain::{Desired, EngineReport, EngineState, Epoch};
use aura_lease::Claim;
use aura_store::{Engine, StoreError};
use tokio::time::sleep_until;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use super::{Actor, Orders, Row, finish::Finish};
use crate::{
    conditions::Conditions,
    engine::{self, Running},
    live::Live,
    states::{Of, States},
    stop::{Plan, Stop},
};

/// The platform database takes part in the beginning of a run: not for longer than this.
const BEGIN: Duration = Duration::from_secs(10);
/// With a deadline of 0 the final position and a polite end may still take this long.
const AT_ONCE: Duration = Duration::from_millis(500);
/// What the engine's last step may take longer. Short: soon after the deadline of an operation others come.
const SLACK: Duration = Duration::from_millis(50);

/// Why the actor turns to ending the engine.
#[derive(Debug)]
pub(super) enum Ended {
    /// There was nothing to run: it is stopped, and the slot is to be seen inactive. The engine as it was left before.
    NotWanted(Box<Engine>),
    /// It ended by itself: told to, or since it can't go on.
    ByItself(engine::End),
    /// It didn't end in time.
    Overdue,
    /// The watchdog found it hung.
    Hung,
    /// The lease is lost, or somebody has raised the epoch.
    Lost(&'static str),
}

/// What a run is made of besides the engine.
pub(super) struct Run<'a> {
    pub(super) actor: &'a Actor,
    pub(super) claim: Claim,
    pub(super) epoch: Epoch,
    pub(super) states: States,
    pub(super) lost: CancellationToken,
    /// Somebody has raised the epoch.
    pub(super) fenced: CancellationToken,
    /// The tightest order to end so far, and since when it holds.
    pub(super) stop: Option<(Stop, Instant)>,
    force_seen: u64,
    nudges_seen: i64,
}

/// Runs the engine until it ends; the lease may be released afterwards.
pub(super) async fn run(actor: &Actor, claim: Claim, lost: CancellationToken) -> Option<EngineReport> {
    let (force_seen, nudges_seen) = (*actor.force.borrow(), actor.orders.borrow().nudges());
    let Taken { epoch, before, row } = match Box::pin(lost.run_until_cancelled(take(actor, &claim))).await? {
        Ok(taken) => taken?,
        Err(error) => {
            tracing::warn!(source = %actor.source.id, %error, "the engine can't be taken");
            return None;
        }
    };
    tracing::info!(source = %actor.source.id, name = %actor.source.name, %epoch, "leading");
    let of =
        Of { source: actor.source.id, name: actor.source.name.clone(), epoch, board: Arc::clone(&actor.deps.board) };
    let (states, fenced) = (States::begin(of), CancellationToken::new());
    let (stop, fence) = (None, fenced.clone());
    let mut run =
        Run { actor, claim, epoch, states: states.clone(), lost, fenced: fence, stop, force_seen, nudges_seen };
    let writing = states.clone().write(actor.deps.store.clone(), fenced);
    // Ends with the run, whatever the database does.
    let writer = AbortOnDropHandle::new(tokio::spawn(writing));
    let conditions = Conditions::default();
    let mut engine = None;
    let mut speaking = None;
    let ended = match row.engine.desired {
        Desired::Stopped => {
            run.stop = row.stop().map(|stop| (stop, row.read));
            Ended::NotWanted(before)
        }
        Desired::Running => {
            let (states, fenced) = (run.states.clone(), run.fenced.clone());
            let parts = engine::Parts { epoch, states, fenced, conditions: conditions.clone() };
            match engine::start(&actor.deps, &actor.source, parts) {
                Ok(started) => {
                    speaking = Some(run.speak(conditions, &started));
                    run.watch(engine.insert(started)).await
                }
                Err(error) => Ended::ByItself(engine::End::unstartable(error)),
            }
        }
    };
    // What the engine says of itself goes on while it is ended, and may take long.
    let report = Finish::new(run, engine).ended(ended, (writer, speaking)).await;
    states.end();
    Some(report)
}

/// An engine that is ours now.
struct Taken {
    epoch: Epoch,
    /// As whoever had it has left it.
    before: Box<Engine>,
    /// As it is: somebody may have stopped it while we were waiting.
    row: Row,
}

/// Raises the epoch. `None` = the lease isn't ours any more: the raise fenced a successor, who raises it again.
async fn take(actor: &Actor, claim: &Claim) -> Result<Option<Taken>, StoreError> {
    let (deps, source) = (&actor.deps, actor.source.id);
    let taking = async {
        let (epoch, before) = deps.store.take_engine(source, &deps.worker).await?;
        // R-LEASE-2: read again after the raise. What can't be read isn't ours.
        let holder = deps.lease.holder(&claim.name).await.map_err(|_| StoreError::Fenced)?;
        if deps.lease.is_exclusive() && holder.is_none_or(|holder| holder.holder != deps.worker) {
            return Ok(None);
        }
        let read = Instant::now();
        let engine = deps.store.engine(source).await?.ok_or(StoreError::NotFound("engine"))?;
        Ok(Some(Taken { epoch, before: Box::new(before), row: Row { engine: Arc::new(engine), read } }))
    };
    tokio::time::timeout(BEGIN, taking).await.unwrap_or(Err(StoreError::Timeout(BEGIN)))
}

impl Run<'_> {
    /// The engine's live status, in a task of its own: the platform database may hang.
    fn speak(&self, conditions: Conditions, engine: &Running) -> AbortOnDropHandle<()> {
        let deps = &self.actor.deps;
        let live = Live {
            source: self.actor.source.id,
            name: self.actor.source.name.clone(),
            epoch: self.epoch,
            board: Arc::clone(&deps.board),
            store: deps.store.clone(),
            bus: Arc::clone(&deps.bus),
            conditions,
            vitals: Arc::clone(&engine.vitals),
            fenced: self.fenced.clone(),
        };
        AbortOnDropHandle::new(tokio::spawn(live.keep(self.states.clone())))
    }

    /// Watches over the running engine until it has ended or is to be ended.
    async fn watch(&mut self, engine: &mut Running) -> Ended {
        let (mut orders, mut process, mut force) =
            (self.actor.orders.clone(), self.actor.process.clone(), self.actor.force.clone());
        let hung = engine.hung();
        loop {
            self.follow(&orders.borrow_and_update(), engine);
            process.borrow_and_update();
            force.borrow_and_update();
            let overdue_at = self.ladder_at();
            if overdue_at.is_some_and(|at| at <= Instant::now()) {
                return Ended::Overdue;
            }
            let overdue = async {
                match overdue_at {
                    Some(at) => sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = self.lost.cancelled() => return Ended::Lost("lease_lost"),
                () = self.fenced.cancelled() => return Ended::Lost("fenced"),
                end = engine.ended() => return Ended::ByItself(end),
                () = hung.cancelled() => return Ended::Hung,
                () = overdue => return Ended::Overdue,
                // Whoever gave orders is gone: the process ends, and says so.
                Ok(()) = orders.changed() => {}
                Ok(()) = process.changed() => {}
                Ok(()) = force.changed() => {}
            }
        }
    }

    /// Takes in what is ordered now; an order to end is never taken back.
    fn follow(&mut self, orders: &Orders, engine: &Running) {
        if let Some(row) = &orders.row {
            if row.engine.epoch > self.epoch {
                self.fenced.cancel();
            }
            let nudged = row.engine.nudges > self.nudges_seen && self.states.now().state != EngineState::Running;
            self.nudges_seen = row.engine.nudges;
            if (nudged || row.engine.recreate_slot) && row.engine.epoch == self.epoch {
                engine.try_again();
            }
        }
        if self.tighten(orders) {
            self.stop.into_iter().for_each(|(stop, _)| engine.stop(stop));
        }
    }

    /// True = there is a tighter order to end than before.
    pub(super) fn tighten(&mut self, orders: &Orders) -> bool {
        let now = Instant::now();
        let drain = self.actor.deps.settings.drain_timeout;
        let process = self.actor.process.borrow().map(|exit| Stop::drain(exit.drained_by));
        let forced = (*self.actor.force.borrow() != self.force_seen).then(|| Stop::force(now));
        // The first word counts, else a drain that is given up begins anew with each order.
        let begun = self.stop.map(|(stop, _)| stop);
        let given_up = ((orders.give_up || orders.dismissed) && begun.is_none()).then(|| Stop::drain(now + drain));
        let row = orders.row.as_ref().filter(|row| row.engine.epoch == self.epoch);
        let unasked = row.is_some_and(|row| row.engine.desired == Desired::Stopped) && begun.is_none();
        let asked = row.and_then(Row::stop).or_else(|| unasked.then(|| Stop::drain(now + drain)));
        let all = [begun, process, forced, given_up, asked].into_iter().flatten().reduce(Stop::and);
        let tighter = all != begun;
        if tighter {
            // The same operation, read again, seems to end some milliseconds sooner or later: that is no new order.
            let same = |(held, _): &(Stop, Instant)| all.is_some_and(|stop| stop.is_like(*held));
            let since = self.stop.filter(same).map_or(now, |(_, since)| since);
            self.stop = all.map(|stop| (stop, since));
        }
        tighter
    }

    /// From when on the engine is ended from outside.
    fn ladder_at(&self) -> Option<Instant> {
        let (stop, since) = self.stop?;
        Some(match stop.plan {
            Plan::Force => since,
            Plan::Drain => stop.by + SLACK,
            Plan::Operation => stop.by.max(since + AT_ONCE) + SLACK,
        })
    }
}
