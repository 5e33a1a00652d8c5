//! The polite end of a stream (F.9): drain, confirm, see it confirmed, close, see the slot inactive. All of it is bounded by
//! the plan, and whoever ordered it ends the engine from outside if it isn't.

use std::time::{Duration, Instant};

use aura_domain::{EngineState, Generation, Lsn, Timed};
use aura_flow::{DrainEvent, DrainPlanner, Phase, Step};
use aura_pgsource::slot;
use tokio::{
    sync::watch,
    time::{sleep_until, timeout, timeout_at},
};

use super::{
    Engine,
    end::Left,
    error::EngineError,
    intake::Intake,
    session::{Session, Stream},
};
use crate::{
    states::Observed,
    stop::{Plan, Stop},
};

/// An answer to CopyDone; inside a transaction it could take as long as that (E7).
const COPY_DONE: Duration = Duration::from_millis(250);
/// The platform database may hang, and what it would be told is known to the server already.
const REMEMBER: Duration = Duration::from_millis(250);
/// Between two lines on a long drain.
const PROGRESS: Duration = Duration::from_secs(5);

/// The plan, and the order that it was made of.
struct Drain<'a> {
    engine: &'a Engine,
    plan: DrainPlanner,
    order: Stop,
    orders: watch::Receiver<Option<Stop>>,
}

impl<'a> Drain<'a> {
    fn new(engine: &'a Engine) -> Self {
        let mut orders = engine.stopping.subscribe();
        let now = Instant::now();
        let order = (*orders.borrow_and_update()).unwrap_or_else(|| Stop::drain(now));
        Self { engine, plan: DrainPlanner::new(order.budget(now), now), order, orders }
    }

    fn on(&mut self, event: DrainEvent) -> Phase {
        let before = self.plan.phase();
        let phase = self.plan.on(event, Instant::now());
        if phase != before {
            self.show();
        }
        phase
    }

    /// The phases that are over, for whoever watches the stop.
    fn show(&self) {
        let phases = self.plan.times().phases.iter().map(|(name, took)| Timed::new(name, *took)).collect();
        let Engine { source, deps, .. } = self.engine;
        deps.board.update(source.id, &source.name, |status| status.live.phases = phases);
    }

    /// Takes a tighter order in.
    fn tighten(&mut self) {
        let now = Instant::now();
        let Some(order) = *self.orders.borrow_and_update() else { return };
        let hurry = order.plan == Plan::Drain && self.order.plan == Plan::Drain && order.by < self.order.by;
        let event = if hurry { DrainEvent::Hurry } else { DrainEvent::Tighten(order.budget(now)) };
        self.order = order;
        self.plan.on(event, now);
    }

    /// Does `work` until the present phase must end.
    async fn bounded<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let phase = self.plan.phase();
        tokio::pin!(work);
        loop {
            if self.plan.phase() != phase {
                return None;
            }
            tokio::select! {
                done = &mut work => return Some(done),
                () = sleep_until(self.plan.ends().into()) => drop(self.on(DrainEvent::Tick)),
                Ok(()) = self.orders.changed() => self.tighten(),
            }
        }
    }
}

impl Session<'_> {
    /// See the module.
    pub(super) async fn leave(&self, mut stream: Stream, intake: &mut Intake) -> Left {
        let engine = self.engine;
        engine.observe(Observed::new(EngineState::Draining, None));
        let mut drain = self.begin(intake);
        let alive = self.drain(&mut drain, Some(&mut stream), intake).await;
        self.abandon(&mut drain);
        let began = Instant::now();
        let verified = if alive { self.verify(&mut drain, &mut stream, intake).await } else { None };
        let verifying = began.elapsed();
        if verified.is_some() {
            self.remember(intake.reader.flushed()).await;
        }
        skip_to(&mut drain, Phase::Leave);
        engine.observe(Observed::new(EngineState::Closing, None));
        let slot_inactive = self.close(&mut drain, stream, intake).await;
        drain.on(DrainEvent::Finished);
        let complete = engine.vitals.is_settled() && verified.is_some();
        Left { complete, verified, verifying, slot_inactive, times: drain.plan.times().clone() }
    }

    /// The end of an engine that has no stream at the moment. What it has read is delivered all the same; it comes again if
    /// that can't be confirmed to the server any more.
    pub(super) async fn leave_without(&self, intake: &mut Intake) -> Left {
        intake.reader.end_session();
        if !self.engine.vitals.is_settled() {
            self.engine.observe(Observed::new(EngineState::Draining, None));
        }
        let mut drain = self.begin(intake);
        self.drain(&mut drain, None, intake).await;
        self.abandon(&mut drain);
        skip_to(&mut drain, Phase::Done);
        let vitals = &self.engine.vitals;
        let complete = vitals.is_settled() && intake.reader.boundary() <= vitals.sent();
        let times = drain.plan.times().clone();
        Left { complete, verified: None, verifying: Duration::ZERO, slot_inactive: false, times }
    }

    /// Nothing is read from here on, and what was read is with the shards.
    fn begin(&self, intake: &mut Intake) -> Drain<'_> {
        let mut drain = Drain::new(self.engine);
        intake.drain();
        skip_to(&mut drain, Phase::Drain);
        drain
    }

    /// From here on nothing more is delivered.
    fn abandon(&self, drain: &mut Drain<'_>) {
        self.engine.vitals.cut();
        self.engine.halt_shards.cancel();
        skip_to(drain, Phase::FinalPosition);
    }

    /// Waits until every row that was read is acknowledged, or time is up. False = the stream is gone.
    async fn drain(&self, drain: &mut Drain<'_>, mut stream: Option<&mut Stream>, intake: &mut Intake) -> bool {
        let vitals = &self.engine.vitals;
        let mut outages = self.engine.outages.watch();
        let mut say = Instant::now() + PROGRESS;
        while drain.plan.phase() == Phase::Drain {
            let now = Instant::now();
            vitals.heartbeat.beat(now);
            let until = match intake.reader.next(now) {
                _ if vitals.is_settled() => {
                    drain.on(DrainEvent::Finished);
                    break;
                }
                Step::Status(status) => {
                    if let Some(stream) = stream.as_deref_mut()
                        && self.send_status(stream, intake, status).await.is_err()
                    {
                        return false;
                    }
                    continue;
                }
                // Nothing moves and nobody knows why: no reason to wait for the rest of the time.
                Step::Fail(_) => return false,
                Step::Wait { until, .. } => until,
                _ => continue,
            };
            if now >= say {
                say = now + PROGRESS;
                let left = drain.plan.ends().saturating_duration_since(now).as_secs();
                tracing::info!(source = %self.engine.source.id, rows = vitals.rows().abandoned, left, "draining");
            }
            let orders = &mut drain.orders;
            tokio::select! {
                () = intake.acked.notified() => intake.reader.acked(Instant::now()),
                () = sleep_until(until.min(say).min(drain.plan.ends()).into()) => {}
                Ok(()) = outages.changed() => intake.reader.outage(*outages.borrow_and_update(), Instant::now()),
                Ok(()) = orders.changed() => drain.tighten(),
            }
            drain.on(DrainEvent::Tick);
        }
        true
    }

    /// Sends the final position and reads it back: a close with unread bytes in the socket would throw the status away
    /// (E4), so reading goes on, into nothing.
    async fn verify(&self, drain: &mut Drain<'_>, stream: &mut Stream, intake: &mut Intake) -> Option<Lsn> {
        let work = async {
            if let Some(status) = intake.reader.final_status(Instant::now()) {
                self.send_status(stream, intake, status).await?;
            }
            let wanted = intake.reader.flushed();
            // The plan bounds it.
            let confirmed =
                slot::wait_confirmed(&stream.sql, &self.engine.source.slot_name, wanted, Duration::from_secs(60));
            let discard = async {
                loop {
                    if let Err(error) = stream.wire.next().await {
                        return error;
                    }
                }
            };
            let verified = tokio::select! {
                confirmed = confirmed => confirmed?,
                error = discard => return Err(EngineError::from(error)),
            };
            Ok(verified)
        };
        match drain.bounded(work).await {
            Some(Ok(verified)) => verified,
            Some(Err(error)) => {
                tracing::warn!(source = %self.engine.source.id, %error, "the final position can't be read back");
                None
            }
            None => None,
        }
    }

    /// For the next run; the server remembers it, too.
    async fn remember(&self, confirmed: Lsn) {
        let generation = self.generation.unwrap_or(Generation(1));
        let (store, source) = (&self.engine.deps.store, self.engine.source.id);
        if !self.engine.gaps.generation_is_open() {
            return;
        }
        let saving = store.save_position(source, self.engine.epoch, generation, confirmed);
        match timeout(REMEMBER, saving).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%source, %error, "the final position is not remembered"),
            Err(_) => tracing::warn!(%source, "the final position is not remembered in time"),
        }
    }

    /// Politely if no transaction is open, and until the slot is seen inactive; the lease is released after that.
    async fn close(&self, drain: &mut Drain<'_>, mut stream: Stream, intake: &Intake) -> bool {
        let work = async {
            if !intake.reader.in_transaction() {
                let by = tokio::time::Instant::now() + COPY_DONE;
                let _ = timeout_at(by, stream.wire.copy_done()).await;
            }
            stream.wire.close().await;
            // The plan bounds it.
            slot::wait_inactive(&stream.sql, &self.engine.source.slot_name, Duration::from_secs(60)).await
        };
        matches!(drain.bounded(work).await, Some(Ok(true)))
    }
}

impl Engine {
    /// A stop comes while a stream is being opened. Rows that are out, or not confirmed, need one: it is opened if the
    /// drain's time allows that.
    pub(super) async fn open_to_leave<S>(&self, opening: impl Future<Output = Result<S, EngineError>>) -> Option<S> {
        if self.vitals.is_settled() && self.vitals.received() <= self.vitals.sent() {
            return None;
        }
        let mut drain = Drain::new(self);
        skip_to(&mut drain, Phase::Drain);
        match drain.bounded(opening).await? {
            Ok(stream) => Some(stream),
            Err(error) => {
                tracing::warn!(source = %self.source.id, %error, "no stream to confirm the last rows with");
                None
            }
        }
    }
}

/// What comes before has nothing to do.
fn skip_to(drain: &mut Drain<'_>, phase: Phase) {
    while drain.plan.phase() < phase {
        drain.on(DrainEvent::Finished);
    }
}
