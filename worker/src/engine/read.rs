//! Reading: the one task that owns the socket does what the [`Reader`](aura_flow::Reader) says.

use std::{sync::Arc, time::Instant};

use aura_domain::{EngineState, Generation};
use aura_flow::{Change, Stall, StatusUpdate, Step, Turn};
use aura_pgsource::{SourceError, SqlConnection, SqlState, Status, StreamMessage};
use aura_store::StoreError;

use super::{
    error::EngineError,
    filter::Filter,
    intake::Intake,
    measure::{self, Holes},
    session::{Read, Session, Stream, names},
};
use crate::states::Observed;

/// Frames that are taken from memory between two looks at timers and signals.
const BURST: usize = 512;

/// What a server that shuts down, or a crash of one of its processes, says to all its sessions.
const LEAVING: [SqlState; 3] = [SqlState::ADMIN_SHUTDOWN, SqlState::CRASH_SHUTDOWN, SqlState::CANNOT_CONNECT_NOW];

impl Session<'_> {
    /// Reads until the filter must change or the engine is stopped.
    pub(super) async fn read(&mut self, stream: &mut Stream, intake: &mut Intake) -> Result<Read, EngineError> {
        let mut outages = self.engine.outages.watch();
        let mut at_risk = self.engine.at_risk.subscribe();
        let (began, mut cut) = (stream.began, self.engine.cut.subscribe());
        intake.reader.outage(*outages.borrow_and_update(), Instant::now());
        loop {
            let (read, until) = match self.next(stream, intake).await? {
                Next::Wait { read, until } => (read, until),
                Next::Refilter => return Ok(Read::Refilter),
            };
            let quota = intake.reader.quota();
            tokio::select! {
                biased;
                () = self.engine.stop.cancelled() => return Ok(Read::Stopped),
                () = self.engine.fenced.cancelled() => return Err(StoreError::Fenced.into()),
                () = intake.acked.notified() => intake.reader.acked(Instant::now()),
                // R-FB-8: a server that shuts down waits for us to have confirmed everything, so go at once.
                () = server_leaves(&stream.sql) => return Err(EngineError::SourceEnds),
                refusal = self.engine.gaps.stalled() => return Err(EngineError::GapRefused(refusal)),
                Ok(_) = cut.wait_for(|cut| *cut == Some(began)) => return Err(EngineError::HalfOpen),
                changed = self.loaded.changed() => {
                    if changed.is_err() {
                        return Ok(Read::Stopped);
                    }
                    self.consider(stream, intake);
                }
                Ok(()) = outages.changed() => intake.reader.outage(*outages.borrow_and_update(), Instant::now()),
                Ok(()) = at_risk.changed() => {
                    if *at_risk.borrow_and_update() {
                        intake.skip_slowest();
                    }
                }
                () = quota.woken(), if !read => {}
                message = stream.wire.next(), if read => self.take_burst(stream, intake, message)?,
                () = tokio::time::sleep_until(until.into()) => {}
            }
        }
    }

    /// Does what there is to do now, in the order in which the reader says it.
    async fn next(&mut self, stream: &mut Stream, intake: &mut Intake) -> Result<Next, EngineError> {
        loop {
            let now = Instant::now();
            self.engine.vitals.heartbeat.beat(now);
            match intake.reader.next(now) {
                Step::Status(status) => {
                    self.send_status(stream, intake, status).await?;
                    self.shrink(stream, intake);
                }
                Step::Covered(e) => {
                    (stream.hole_names, stream.holes) = uncovered(stream);
                    self.engine.observe(Observed::new(EngineState::Running, None));
                    self.engine.look.notify_one();
                    self.engine.report_active(&stream.registry, e);
                }
                Step::Apply => self.apply(stream, intake),
                Step::Refilter => return Ok(Next::Refilter),
                Step::Turn(turn) => self.turn(intake, turn),
                Step::Admit(admission) => intake.unpark(admission),
                Step::Holes => tracing::warn!(source = %self.engine.source.id, holes = stream.holes,
                    tables = ?stream.hole_names, "registered tables that the running filter doesn't cover"),
                Step::Fail(stall) => return Err(self.stalled(stall)),
                Step::Wait { .. } if self.quarantine.release(now) => self.consider(stream, intake),
                Step::Wait { read, until } => {
                    if now >= stream.shown + measure::PERIOD {
                        self.show(stream, intake);
                    }
                    let until = until.min(stream.shown + measure::PERIOD);
                    let until = self.quarantine.due().map_or(until, |due| until.min(due));
                    return Ok(Next::Wait { read, until });
                }
            }
        }
    }

    /// With the culprit's name, if it is known.
    fn stalled(&self, stall: Stall) -> EngineError {
        let refusal = self.engine.gaps.refusal().filter(|_| stall == Stall::Sink);
        refusal.map_or(EngineError::Stalled(stall), EngineError::GapRefused)
    }

    /// What is registered has changed, or a table may leave.
    fn consider(&mut self, stream: &mut Stream, intake: &mut Intake) {
        let began = Instant::now();
        let generation = self.generation.unwrap_or(Generation(1));
        let next = self.registry(generation, intake.reader.flushed());
        let restart = Filter::new(stream.plugin, next.wanted(stream.plugin), Some(&stream.filter)) != stream.filter;
        stream.next = Some(next);
        let (names, holes) = uncovered(stream);
        if intake.reader.is_covered() {
            (stream.hole_names, stream.holes) = (names, holes);
        }
        intake.reader.want(Change { restart, holes }, Instant::now());
        measure::rebuilt(self.engine.source.id, began.elapsed());
    }

    /// A disabled table leaves the filter once the confirmed position has passed it.
    fn shrink(&mut self, stream: &mut Stream, intake: &mut Intake) {
        if stream.next.is_none() && stream.registry.can_shrink(intake.reader.flushed()) {
            self.consider(stream, intake);
        }
    }

    /// Between two transactions: the stream's filter is the same, so it goes on.
    fn apply(&self, stream: &mut Stream, intake: &Intake) {
        let Some(next) = stream.next.take() else { return };
        stream.registry = Arc::clone(&next);
        (stream.hole_names, stream.holes) = (Vec::new(), 0);
        self.engine.registry.send_replace(Arc::clone(&next));
        if intake.reader.is_covered() {
            self.engine.report_active(&next, intake.reader.applies_from());
        }
    }

    pub(super) fn turn(&self, intake: &Intake, turn: Turn) {
        intake.turn(turn);
        let (source, quota) = (self.engine.source.id, intake.reader.quota());
        let (bytes, limit) = (quota.used(), quota.limit());
        let (_, outage) = intake.reader.stalled_for(Instant::now());
        let reason = measure::pause_reason(outage);
        match turn {
            Turn::Paused => {
                measure::paused(source, outage);
                tracing::warn!(%source, reason, bytes, limit, "reading pauses, too much is held");
            }
            Turn::Resumed(paused) => {
                let ms = u64::try_from(paused.as_millis()).unwrap_or(u64::MAX);
                tracing::info!(%source, reason, bytes, limit, paused_ms = ms, "reading goes on");
            }
        }
    }

    /// Takes a message and what is in memory behind it, then hands the rows over.
    fn take_burst(
        &self,
        stream: &mut Stream,
        intake: &mut Intake,
        first: Result<StreamMessage, SourceError>,
    ) -> Result<(), EngineError> {
        let mut message = Some(first);
        for _ in 0..BURST {
            let Some(next) = message.take().or_else(|| stream.wire.buffered()) else { break };
            let next = next?;
            if next == StreamMessage::End {
                return Err(EngineError::SourceEnds);
            }
            let lost = intake.take(&mut stream.decoder, &stream.registry, &next);
            lost.into_iter().for_each(|loss| self.engine.gaps.add(loss));
            if !intake.reader.goes_on() {
                break;
            }
        }
        intake.flush();
        Ok(())
    }

    fn show(&self, stream: &mut Stream, intake: &mut Intake) {
        stream.shown = Instant::now();
        let since = intake.reader.holes_since();
        measure::show(self.engine, intake, Holes { count: stream.holes, since });
    }

    pub(super) async fn send_status(
        &self,
        stream: &mut Stream,
        intake: &mut Intake,
        status: StatusUpdate,
    ) -> Result<(), EngineError> {
        let StatusUpdate { written, flushed, ask, kind, gap } = status;
        stream.wire.send_status(Status { written, flushed, applied: flushed, reply_requested: ask }).await?;
        let engine = self.engine;
        let position = Some((self.generation.unwrap_or(Generation(1)), flushed));
        engine.position.send_if_modified(|last| std::mem::replace(last, position) != position);
        engine.vitals.note_status(intake.reader.resolved(), flushed);
        measure::status(engine.source.id, kind, gap);
        self.show(stream, intake);
        Ok(())
    }
}

/// What [`Session::next`] comes to.
enum Next {
    Wait { read: bool, until: Instant },
    Refilter,
}

/// Tables of the next registry that the running filter doesn't cover: the first names, and how many.
fn uncovered(stream: &Stream) -> (Vec<String>, usize) {
    let Some(next) = &stream.next else { return (Vec::new(), 0) };
    let mut wanted = next.wanted(stream.plugin).names;
    wanted.retain(|relation| !stream.filter.covers(relation));
    wanted.sort_unstable();
    (names(wanted.iter().copied()), wanted.len())
}

/// Waits until the server tells its sessions to go; an end of this one for other reasons says nothing.
async fn server_leaves(sql: &SqlConnection) {
    if !LEAVING.contains(&sql.said_goodbye().await) {
        std::future::pending::<()>().await;
    }
}
