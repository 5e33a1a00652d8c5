//! The end of a run (R-ENG-4): nothing here needs the engine's cooperation or a lock that it may hold. `stopped` is
//! written only after the slot was seen inactive.

use std::time::{Duration, Instant};

use aura_domain::{
    EngineReport, EngineState, Epoch, LsnReport, OnDeadline, OperationKind, Outcome, Rung, Timed, climb_again,
};
use aura_pgsource::{
    SourceUrl,
    ladder::{self, Climb, Freed, Target},
};
use aura_store::{Ending, StoreError};
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::{
    Orders,
    run::{Ended, Run},
};
use crate::{
    engine::{End, How, Running},
    states::Observed,
    stop::{Plan, SQL_AT_LEAST},
};

/// Rungs 1 to 3 take 500 ms at most (R-ENG-4): this for each of two waits. Less, so that the worker's own report of a
/// forced stop comes before the api takes the end over: of a force-close half a second after it was asked for.
const CUT: Duration = Duration::from_millis(100);
/// A stop is answered within its deadline + 5 s: the SQL rungs end before that.
const SQL_RUNGS: Duration = Duration::from_millis(4300);
/// What the SQL rungs get in any case.
const SQL_RUNGS_AT_LEAST: Duration = Duration::from_millis(500);
/// A slot that isn't free is looked at again after 1 s, later every 10 s (R-ENG-7).
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));
/// The states before the last one are written first, but not for long.
const WRITTEN: Duration = Duration::from_secs(1);
/// Giving the lease back, and between two tries to write the last state.
const GIVE_BACK: Duration = Duration::from_secs(1);
/// At the end of the process the last words are tried for so long, and what is written before has half its time.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What writes to the engine's row besides: ended before the last word.
pub(super) type Writers = (AbortOnDropHandle<()>, Option<AbortOnDropHandle<()>>);

/// See the module.
pub(super) struct Finish<'a> {
    run: Run<'a>,
    engine: Option<Running>,
    /// How the engine says that it ended.
    end: Option<End>,
    rungs: Vec<Timed>,
    /// Where there was nothing to run: what is known of the run before, whose slot is freed here.
    before: Option<EngineReport>,
}

/// What the run comes to.
struct Verdict {
    outcome: Outcome,
    reason: Option<String>,
    /// The state once the slot is free.
    then: Observed,
    /// No process of the server is ended.
    abandon: bool,
}

/// How the slot was left.
enum Slot {
    /// Seen inactive.
    Free,
    /// Not, and the process ends, or the source isn't what it was: others have to see to it.
    Left(Observed),
    /// Not ours any more.
    Lost(&'static str),
}

impl<'a> Finish<'a> {
    pub(super) fn new(run: Run<'a>, engine: Option<Running>) -> Self {
        Self { run, engine, end: None, rungs: Vec::new(), before: None }
    }

    /// Ends the run, whatever that takes. Returns when the slot is free, or not ours to free.
    pub(super) async fn ended(mut self, ended: Ended, writers: Writers) -> EngineReport {
        let verdict = match self.verdict(ended) {
            Ok(verdict) => verdict,
            Err(reason) => return self.lost(reason).await,
        };
        self.run.states.take_over();
        let (mut confirmed, mut slot) = (None, Slot::Free);
        if self.left_politely() {
            self.cut();
        } else {
            self.cut_in_steps().await;
            slot = self.free(verdict.abandon, &mut confirmed).await;
        }
        self.note_panics(&verdict).await;
        let report = self.report(&verdict, confirmed, matches!(slot, Slot::Free));
        match slot {
            Slot::Free => self.leave(verdict.then, report, writers).await,
            Slot::Left(observed) => self.leave(observed, report, writers).await,
            Slot::Lost(reason) => self.lost(reason).await,
        }
    }

    /// What follows from how it ended; `Err` = it isn't ours any more.
    fn verdict(&mut self, ended: Ended) -> Result<Verdict, &'static str> {
        let stopped = || Observed::new(EngineState::Stopped, None);
        let (outcome, then) = match ended {
            Ended::Lost(reason) => return Err(reason),
            Ended::NotWanted(engine) => {
                let report = engine.report_from_outside(self.policy());
                (self.before.insert(report).outcome, stopped())
            }
            Ended::Hung => (Outcome::Failed, Observed::new(EngineState::Failed, Some("hung"))),
            Ended::Overdue => (self.overdue(), stopped()),
            Ended::ByItself(end) => {
                let verdict = match &end.how {
                    How::Fenced => return Err("fenced"),
                    How::Failed(observed) => (Outcome::Failed, observed.clone()),
                    How::Stopped if end.is_complete() => (self.stopped_well(), stopped()),
                    How::Stopped => (self.overdue(), stopped()),
                };
                self.end = Some(end);
                verdict
            }
        };
        let abandon = match &self.before {
            Some(_) => self.policy() == OnDeadline::Abandon,
            None => outcome == Outcome::Abandoned,
        };
        Ok(Verdict { outcome, reason: then.reason(), then, abandon })
    }

    /// A slot that is lost and waits for an operator is worth a code of its own.
    fn stopped_well(&self) -> Outcome {
        if self.run.states.now().code == Some("slot_lost") { Outcome::SlotLost } else { Outcome::Drained }
    }

    fn overdue(&self) -> Outcome {
        match self.policy() {
            OnDeadline::Abandon => Outcome::Abandoned,
            OnDeadline::Force => Outcome::Forced,
        }
    }

    /// What may be done to who holds the slot. Nobody asked: it is ours, and ends.
    fn policy(&self) -> OnDeadline {
        let asked = self.run.stop.filter(|(stop, _)| stop.plan != Plan::Force);
        asked.map_or(OnDeadline::Force, |(stop, _)| stop.on_deadline)
    }

    fn left_politely(&self) -> bool {
        self.end.as_ref().and_then(|end| end.left.as_ref()).is_some_and(|left| left.slot_inactive)
    }

    /// Our side: nothing is published or sent from here on.
    fn cut(&self) {
        if let Some(engine) = &self.engine {
            engine.vitals.cut();
            engine.sockets.shutdown_all();
            engine.tasks.abort_all();
            engine.sockets.reset_all();
        }
    }

    /// Rungs 2 and 3; the first one, the polite end, was the engine's own.
    async fn cut_in_steps(&mut self) {
        let ended = self.end.is_some();
        let Some(engine) = self.engine.as_mut().filter(|_| !ended) else { return self.cut() };
        self.run.states.enter(Observed::new(EngineState::ForceClosing, None));
        let began = Instant::now();
        engine.vitals.cut();
        engine.sockets.shutdown_all();
        // Most tasks end by themselves when their sockets do.
        let _ = timeout(CUT, engine.ended()).await;
        self.rungs.push(Timed::new(Rung::Shutdown.as_str(), began.elapsed()));
        let began = Instant::now();
        engine.tasks.abort_all();
        engine.sockets.reset_all();
        let _ = timeout(CUT, engine.sockets.closed()).await;
        self.rungs.push(Timed::new(Rung::Reset.as_str(), began.elapsed()));
    }

    /// Sees the slot inactive: looks, ends who holds it if that is ours, and looks again for as long as it takes.
    async fn free(&mut self, mut abandon: bool, confirmed: &mut Option<aura_domain::Lsn>) -> Slot {
        let (mut pause, longest) = LOOK_AGAIN;
        let mut first = true;
        loop {
            let climb = self.climb(abandon, first).await;
            first = false;
            *confirmed = climb.confirmed().or(*confirmed);
            match &mut self.before {
                Some(report) => climb.tell(report),
                None => climb_again(&mut self.rungs, climb.rungs),
            }
            let Some(observed) = not_free(&self.run.actor.source.slot_name, &climb.freed) else { return Slot::Free };
            tracing::error!(source = %self.run.actor.source.id, state = %observed.state, reason = observed.reason(),
                "the slot could not be freed, looking again");
            self.run.states.enter(observed.clone());
            let (mut orders, mut process, mut force) =
                (self.run.actor.orders.clone(), self.run.actor.process.clone(), self.run.actor.force.clone());
            // Whoever has the source's new facts waits for us, and looks for itself.
            if process.borrow_and_update().is_some() || orders.borrow().dismissed {
                return Slot::Left(observed);
            }
            // The row is read again and again; only what somebody asks anew is worth a look before its time.
            let asked = asked(&orders.borrow_and_update());
            let tightened =
                async { orders.wait_for(|orders| self::asked(orders) != asked || orders.dismissed).await.is_ok() };
            tokio::select! {
                () = self.run.lost.cancelled() => return Slot::Lost("lease_lost"),
                () = self.run.fenced.cancelled() => return Slot::Lost("fenced"),
                () = sleep(pause) => pause = (pause * 2).min(longest),
                Ok(()) = process.changed() => {}
                true = tightened => {}
                Ok(()) = force.changed() => {}
            }
            if orders.borrow().row.as_ref().is_some_and(|row| row.engine.epoch > self.run.epoch) {
                return Slot::Lost("fenced");
            }
            self.run.tighten(&orders.borrow());
            abandon &= self.policy() == OnDeadline::Abandon;
        }
    }

    async fn climb(&self, abandon: bool, first: bool) -> Climb {
        let source = &self.run.actor.source;
        let url = match SourceUrl::from_secret(&source.replication_url) {
            Ok(url) => url,
            Err(error) => return Climb::failed(error),
        };
        let limit = self.time_for_sql(first);
        if abandon {
            return ladder::watch_slot(&url, &source.slot_name, limit).await;
        }
        let target = Target { slot: &source.slot_name, source: source.id, up_to: self.run.epoch };
        ladder::free_slot(&url, target, limit).await
    }

    /// The first time inside what the deadline leaves; nobody waits for the later ones, unless the process ends.
    fn time_for_sql(&self, first: bool) -> Duration {
        let exit = *self.run.actor.process.borrow();
        if let Some(exit) = exit {
            return exit.sql_by().saturating_duration_since(Instant::now()).clamp(SQL_AT_LEAST, SQL_RUNGS);
        }
        let by = self.run.stop.filter(|_| first).map(|(stop, _)| stop.by + SQL_RUNGS);
        let left = by.map_or(SQL_RUNGS, |by| by.saturating_duration_since(Instant::now()));
        left.clamp(SQL_RUNGS_AT_LEAST, SQL_RUNGS)
    }

    fn is_exiting(&self) -> bool {
        self.run.actor.process.borrow().is_some()
    }

    fn patience(&self, usual: Duration) -> Duration {
        if self.is_exiting() { usual / 2 } else { usual }
    }

    /// R-SD-6: the third time over the same row it is skipped.
    async fn note_panics(&self, verdict: &Verdict) {
        let Some(engine) = self.engine.as_ref().filter(|_| verdict.outcome == Outcome::Failed) else { return };
        let (store, source) = (&self.run.actor.deps.store, self.run.actor.source.id);
        for position in engine.vitals.panicked_at() {
            match timeout(GIVE_BACK, store.note_panic(source, self.run.epoch, position)).await {
                Ok(Ok(times)) => tracing::error!(%source, %position, times, "a task panicked here"),
                Ok(Err(error)) => tracing::warn!(%source, %position, %error, "a panic is not noted"),
                Err(_) => tracing::warn!(%source, %position, "a panic is not noted in time"),
            }
        }
    }

    fn report(&self, verdict: &Verdict, confirmed: Option<aura_domain::Lsn>, slot_released: bool) -> EngineReport {
        if let Some(report) = &self.before {
            return report.clone();
        }
        let left = self.end.as_ref().and_then(|end| end.left.as_ref());
        let mut drain = self.engine.as_ref().map(|engine| engine.vitals.rows()).unwrap_or_default();
        let mut lsn = LsnReport { verified: confirmed, ..LsnReport::default() };
        if let Some(engine) = &self.engine {
            (lsn.received, lsn.resolved, lsn.sent) =
                (engine.vitals.received(), engine.vitals.resolved(), engine.vitals.sent());
        }
        if let Some(left) = left {
            lsn.verified = left.verified.or(confirmed);
            lsn.verify_ms = u64::try_from(left.verifying.as_millis()).unwrap_or(u64::MAX);
            drain.phases = left.times.phases.iter().map(|(name, took)| Timed::new(name, *took)).collect();
            drain.overrun = left.times.overrun;
        }
        EngineReport {
            source: self.run.actor.source.id,
            epoch: self.run.epoch,
            outcome: verdict.outcome,
            reason: verdict.reason.clone(),
            drain,
            lsn,
            rungs: self.rungs.clone(),
            slot_released,
            lease_released: false,
        }
    }

    /// Nothing more is said, sent or written: somebody else may run it (R-SD-5).
    async fn lost(mut self, reason: &'static str) -> EngineReport {
        self.run.states.take_over();
        self.cut();
        self.before = None;
        if let Some(engine) = self.engine.as_mut() {
            let _ = timeout(CUT, engine.sockets.closed()).await;
        }
        let then = Observed::new(EngineState::Stopped, Some(reason));
        let verdict = Verdict { outcome: Outcome::LeaseLost, reason: Some(reason.to_owned()), then, abandon: false };
        let report = self.report(&verdict, None, false);
        say(&report);
        report
    }

    /// The last words: the lease goes back if the slot is free (R-SD-9), then the row, which wakes the others.
    async fn leave(self, then: Observed, mut report: EngineReport, writers: Writers) -> EngineReport {
        let written = async {
            while !self.run.states.is_written() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        let _ = timeout(self.patience(WRITTEN), written).await;
        drop(writers);
        let deps = &self.run.actor.deps;
        if report.slot_released {
            let released = timeout(self.patience(GIVE_BACK), deps.lease.release(self.run.claim.clone())).await;
            report.lease_released = matches!(released, Ok(Ok(())));
        }
        self.run.states.enter(then.clone());
        say(&report);
        let reason = then.reason();
        let began = Instant::now();
        loop {
            let ending = Ending { state: then.state, reason: reason.as_deref(), report: Some(&report) };
            let leaving = deps.store.leave_engine(self.run.actor.source.id, self.run.epoch, ending);
            let mut process = self.run.actor.process.clone();
            let exits = async {
                let _ = process.wait_for(Option::is_some).await;
                sleep(GIVE_BACK / 2).await;
            };
            let left = tokio::select! {
                left = leaving => left,
                () = exits => Err(StoreError::Timeout(GIVE_BACK / 2)),
            };
            match left {
                Ok(()) => break,
                Err(StoreError::Fenced) => {
                    tracing::info!(source = %report.source, epoch = %report.epoch, "a newer epoch has taken over");
                    break;
                }
                Err(error) => tracing::error!(source = %report.source, %error, "the end of a run is not written"),
            }
            // Whoever waits for the end of the process waits for no database; a dead worker is noticed, too.
            let over = self.is_exiting() && began.elapsed() >= LAST_WORDS;
            if over || self.run.lost.is_cancelled() {
                break;
            }
            sleep(self.patience(GIVE_BACK)).await;
        }
        report
    }
}

/// What there is to follow for an engine that ends.
fn asked(orders: &Orders) -> (Option<Epoch>, Option<(OperationKind, OnDeadline, String)>) {
    let engine = orders.row.as_ref().map(|row| &row.engine);
    let operation = engine.and_then(|engine| engine.operation.as_ref());
    let terms = operation.map(|open| (open.kind, open.on_deadline, open.deadline_at.clone()));
    (engine.map(|engine| engine.epoch), terms)
}

/// What the engine's row says when the slot isn't free; `None` = it is.
fn not_free(slot: &str, freed: &Freed) -> Option<Observed> {
    let zombie = |code, detail| Observed { state: EngineState::Zombie, code, detail: Some(detail) };
    match freed {
        Freed::Free => None,
        Freed::Held(holder) => Some(zombie(None, ladder::zombie_reason(slot, holder))),
        Freed::Foreign(holder) => Some(zombie(Some("slot_in_use_by_other"), ladder::zombie_reason(slot, holder))),
        Freed::Unknown(error) => Some(Observed {
            state: EngineState::ForceClosing,
            code: Some("source_unreachable"),
            detail: Some(error.to_string()),
        }),
    }
}

/// One line, and the numbers (F.12).
fn say(report: &EngineReport) {
    let EngineReport { source, epoch, outcome, reason, drain, lsn, rungs, .. } = report;
    tracing::info!(%source, %epoch, %outcome, reason, admitted = drain.admitted, delivered = drain.delivered,
        skipped = drain.skipped, abandoned = drain.abandoned, resolved = %lsn.resolved, sent = %lsn.sent,
        verified = lsn.verified.map(|lsn| lsn.to_string()), rungs = rungs.len(),
        slot_released = report.slot_released, lease_released = report.lease_released, "engine ended");
    let label = source.to_string();
    for phase in &drain.phases {
        let labels = [("source", label.clone()), ("phase", phase.name.clone())];
        metrics::gauge!("cdc_drain_phase_seconds", &labels).set(phase.ms as f64 / 1000.0);
    }
    for (shard, rows) in drain.per_shard.iter().enumerate() {
        let labels = [("source", label.clone()), ("shard", shard.to_string())];
        metrics::counter!("cdc_drain_abandoned_rows_total", &labels).increment(rows.abandoned);
    }
    metrics::counter!("cdc_drain_overrun_total", "source" => label).increment(u64::from(drain.overrun));
}
