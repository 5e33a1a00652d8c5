//! Sessions of an engine: connect, start at the right position with the present filter, read until the filter changes,
//! something fails or the engine is stopped.
//!
//! One task owns the socket, the feedback timer and the intake (R-FB-1): if it dies, the socket closes.

use std::{
    collections::BTreeSet,
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::{Duration, Instant},
};

use aura_domain::{EngineState, Generation, Lsn, Relation};
use aura_flow::Feedback;
use aura_pgsource::{
    Decoder, FilterEntry, Plugin, ReplicationConnection, ReplicationStream, SourceError, SqlConnection, SqlState,
    Status, StreamMessage, connect_sql, pgoutput_options, wal2json_options,
};
use aura_store::{NewGap, StoreError};
use aura_wire::GapReason;
use tokio::sync::watch;

use super::{
    Engine,
    end::{End, Left},
    error::{EngineError, MAX_PAUSE, Policy, SOURCE_ENDS},
    gaps::{self, Loss},
    intake::Intake,
    loader::Loaded,
    registry::Registry,
    slot::ReadySlot,
};
use crate::states::Observed;

/// Limit of connecting, to either kind of connection.
pub(super) const CONNECT: Duration = Duration::from_secs(5);
/// How long our own last walsender may need to let go of the slot.
const RELEASE_PATIENCE: Duration = Duration::from_secs(10);
/// Frames that are taken from memory between two looks at timers and signals.
const BURST: usize = 512;
/// After a goodbye, before the server is asked whether it is still there.
const ANSWERS_STILL: Duration = Duration::from_millis(200);
/// Spreads those who come back to a server.
const JITTER_MS: u64 = 5000;
/// Signs of life while something takes its time.
const BEAT: Duration = Duration::from_secs(1);
/// A session that lasted this long has earned a fresh retry pause.
const HEALTHY: Duration = Duration::from_secs(30);

/// What a server that shuts down, or a crash of one of its processes, says to all its sessions.
const LEAVING: [SqlState; 3] = [SqlState::ADMIN_SHUTDOWN, SqlState::CRASH_SHUTDOWN, SqlState::CANNOT_CONNECT_NOW];

enum Ended {
    /// The filter must change; the next session begins where this one ended.
    Refilter,
    /// With the end of its stream, if there was one.
    Stopped(Option<Left>),
}

/// Why reading ended.
enum Read {
    Refilter,
    Stopped,
}

/// What lasts from session to session.
pub(super) struct Session<'e> {
    pub(super) engine: &'e Engine,
    loaded: watch::Receiver<Arc<Loaded>>,
    pub(super) generation: Option<Generation>,
    /// Whose gap was handed over for announcement.
    announced: Option<Generation>,
    handed_over: bool,
    /// Debounce of filter changes (R-HOLE-3).
    refilter_after: Instant,
    /// Time from START to the first frame, of the last restart.
    restart_cost: Duration,
}

/// One running stream.
pub(super) struct Stream {
    pub(super) wire: ReplicationStream,
    pub(super) sql: SqlConnection,
    decoder: Decoder,
    pub(super) feedback: Feedback,
    registry: Arc<Registry>,
    filter: BTreeSet<Relation>,
    /// The registry to change to at the next end of a transaction.
    next: Option<Arc<Registry>>,
    started: Instant,
    /// E of R-HOLE-2: from here on the filter covers what is registered.
    e: Lsn,
    /// The first frame at or above `e` has arrived.
    covered: bool,
    /// The end of the server's log, as far as it was told.
    server_end: Lsn,
}

impl Stream {
    /// Registered tables that the running filter doesn't cover (R-HOLE-1).
    fn holes(&self) -> usize {
        if !self.covered {
            return self.filter.len();
        }
        self.next.as_ref().map_or(0, |next| next.filter().difference(&self.filter).count())
    }
}

impl<'e> Session<'e> {
    pub(super) fn new(engine: &'e Engine, loaded: watch::Receiver<Arc<Loaded>>) -> Self {
        let refilter_after = Instant::now();
        Self {
            engine,
            loaded,
            generation: None,
            announced: None,
            handed_over: false,
            refilter_after,
            restart_cost: Duration::ZERO,
        }
    }

    /// Sessions, one after the other, until the engine is stopped.
    pub(super) async fn run_all(&mut self, intake: &mut Intake, ready: watch::Receiver<bool>) -> End {
        let mut pause = None;
        while !self.engine.stop.is_cancelled() {
            let began = Instant::now();
            let error = match self.run(intake, &ready).await {
                Ok(Ended::Refilter) => continue,
                Ok(Ended::Stopped(left)) => return End::stopped(left),
                Err(error) => error,
            };
            let policy = error.policy();
            tracing::warn!(source = %self.engine.source.id, reason = policy.reason, %error, "session ended");
            metrics::counter!("cdc_sessions_failed_total", "reason" => policy.reason).increment(1);
            if error.is_fenced() {
                // Nothing of this epoch counts any more: the lease decides who goes on.
                return End::fenced();
            }
            self.engine.observe(error.observed());
            let wait = pause.filter(|_| began.elapsed() < HEALTHY).unwrap_or(policy.pause);
            pause = Some((wait * 2).min(MAX_PAUSE));
            tokio::select! {
                () = self.engine.stop.cancelled() => {}
                () = self.engine.pause(&policy, wait) => {}
                () = self.engine.new_slot.notified() => {}
                never = self.engine.vitals.beating(BEAT) => match never {},
            }
        }
        End::stopped(None)
    }

    async fn run(&mut self, intake: &mut Intake, ready: &watch::Receiver<bool>) -> Result<Ended, EngineError> {
        let (stop, vitals) = (self.engine.stop.clone(), Arc::clone(&self.engine.vitals));
        let mut stream = {
            let starting = Box::pin(self.start(intake, ready));
            tokio::select! {
                () = stop.cancelled() => return Ok(Ended::Stopped(None)),
                stream = starting => stream?,
                // However long the server takes: the task is alive.
                never = vitals.beating(BEAT) => match never {},
            }
        };
        Ok(match self.read(&mut stream, intake).await? {
            // The server may be in the middle of sending: a polite end could take as long as its transaction (E7).
            Read::Refilter => Ended::Refilter,
            Read::Stopped => Ended::Stopped(Some(self.leave(stream, intake).await)),
        })
    }

    async fn start(&mut self, intake: &mut Intake, ready: &watch::Receiver<bool>) -> Result<Stream, EngineError> {
        let engine = self.engine;
        let name = engine.application_name();
        let mut connection = ReplicationConnection::connect(&engine.url, &name, &engine.sockets, CONNECT).await?;
        let sql = connect_sql(&engine.url, &name, Some(&engine.sockets), CONNECT).await?;
        let identity = connection.identify_system().await?;
        let slot = engine.ensure_slot(&mut connection, &sql, &identity).await?;
        let generation = engine.generation(&identity, false).await?;
        let stored = engine.deps.store.position(engine.source.id).await?;
        self.enter_generation(generation, slot.replaced, intake, stored).await?;
        let start = start_position(&slot, generation, intake, stored).min(identity.wal_end.max(slot.confirmed));
        if !std::mem::replace(&mut self.handed_over, true) {
            engine.hand_over(ready.clone()).await;
        }
        let registry = self.registry(generation, slot.confirmed);
        engine.registry.send_replace(Arc::clone(&registry));
        let wal_sender_timeout = connection.wal_sender_timeout().await?.unwrap_or_default();
        let filter = registry.filter();
        let (options, holds_from) = self.options(slot.plugin, &registry).await?;
        engine.control.announce_leader(start).await;
        let started = Instant::now();
        let wire = self.start_streaming(connection, &sql, start, &options).await?;
        intake.begin_session(start);
        self.show_start(&slot, &registry);
        let feedback = Feedback::new(slot.confirmed, wal_sender_timeout, engine.deps.settings.advance_interval);
        let decoder = Decoder::new(slot.plugin, generation);
        let next = None;
        let e = start.max(holds_from);
        let server_end = identity.wal_end.max(slot.confirmed);
        let covered = false;
        Ok(Stream { wire, sql, decoder, feedback, registry, filter, next, started, e, covered, server_end })
    }

    /// START_REPLICATION, again while our own last walsender still holds the slot.
    async fn start_streaming(
        &self,
        connection: ReplicationConnection,
        sql: &SqlConnection,
        start: Lsn,
        options: &[(String, String)],
    ) -> Result<ReplicationStream, EngineError> {
        let engine = self.engine;
        let deadline = Instant::now() + RELEASE_PATIENCE;
        let mut pause = Duration::from_millis(5);
        let mut next = Some(connection);
        loop {
            let name = engine.application_name();
            let connection = match next.take() {
                Some(connection) => connection,
                None => ReplicationConnection::connect(&engine.url, &name, &engine.sockets, CONNECT).await?,
            };
            match connection.start(&engine.source.slot_name, start, options).await {
                Err(error) if error.sqlstate() == Some(&SqlState::OBJECT_IN_USE) && Instant::now() < deadline => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(200));
                    // An older epoch may have come back meanwhile.
                    engine.end_older(sql).await;
                }
                other => return Ok(other?),
            }
        }
    }

    /// `replaced`: the slot was made in place of another one, which is recorded already.
    async fn enter_generation(
        &mut self,
        generation: Generation,
        replaced: bool,
        intake: &mut Intake,
        stored: Option<(Generation, Lsn)>,
    ) -> Result<(), EngineError> {
        self.engine.vitals.enter_generation(generation);
        if self.generation.replace(generation).is_some_and(|old| old != generation) {
            intake.reset();
        }
        // Once a position of the new generation is stored, the gap was announced and a restart has nothing to add.
        let announced = stored.is_some_and(|(of, _)| of == generation) || self.announced == Some(generation);
        if generation.0 == 1 || announced {
            return Ok(());
        }
        let reason = if replaced { GapReason::SlotRecreated } else { GapReason::NewGeneration };
        let (store, source) = (&self.engine.deps.store, self.engine.source.id);
        if !replaced {
            let gap = NewGap { source, project: None, from: None, to: None, reason: &gaps::word(reason) };
            store.record_gap(self.engine.epoch, gap).await?;
        }
        for project in self.loaded.borrow().projects.keys() {
            self.engine.gaps.add(Loss { opens_generation: true, ..Loss::up_to_now(*project, reason, None) });
        }
        self.announced = Some(generation);
        Ok(())
    }

    fn registry(&mut self, generation: Generation, confirmed: Lsn) -> Arc<Registry> {
        let loaded = Arc::clone(&self.loaded.borrow_and_update());
        Arc::new(Registry::new(&loaded, generation, confirmed))
    }

    /// The plugin's options, and from which position on they cover the filter.
    async fn options(&self, plugin: Plugin, registry: &Registry) -> Result<(Vec<(String, String)>, Lsn), EngineError> {
        let tables = registry.filter().into_iter();
        if plugin == Plugin::Wal2json {
            let entries: Vec<_> = tables.map(FilterEntry::Table).collect();
            return Ok((wal2json_options(&entries), Lsn::ZERO));
        }
        let (name, from) = self.engine.sync_publication(&tables.collect::<Vec<_>>()).await?;
        Ok((pgoutput_options(&name), from))
    }

    fn show_start(&self, slot: &ReadySlot, registry: &Registry) {
        let engine = self.engine;
        engine.deps.board.update(engine.source.id, &engine.source.name, |status| {
            status.live.plugin = Some(slot.plugin.library().to_owned());
            status.live.tables = registry.tables().count();
        });
    }

    /// Reads until the filter must change or the engine is stopped.
    async fn read(&mut self, stream: &mut Stream, intake: &mut Intake) -> Result<Read, EngineError> {
        // The reply proves that the stream lives, and tells its position when there is nothing to send.
        self.send_status(stream, intake, true).await?;
        loop {
            if !intake.tracker.in_transaction() && self.change_registry(stream, intake) {
                return Ok(Read::Refilter);
            }
            self.engine.vitals.heartbeat.beat(Instant::now());
            let resolved = intake.tracker.resolve();
            if stream.feedback.is_due(resolved, Instant::now()).is_some() {
                self.send_status(stream, intake, false).await?;
            }
            let reads = intake.ready();
            let wake = self.wake_at(stream, resolved);
            tokio::select! {
                biased;
                () = self.engine.stop.cancelled() => return Ok(Read::Stopped),
                () = self.engine.fenced.cancelled() => return Err(StoreError::Fenced.into()),
                () = intake.acked.notified() => {}
                // R-FB-8: a server that shuts down waits for us to have confirmed everything, so go at once.
                () = server_leaves(&stream.sql) => return Err(EngineError::SourceEnds),
                changed = self.loaded.changed() => {
                    if changed.is_err() {
                        return Ok(Read::Stopped);
                    }
                    let generation = self.generation.unwrap_or(Generation(1));
                    stream.next = Some(self.registry(generation, stream.feedback.flushed()));
                }
                () = intake.quota.woken(), if !reads => {}
                message = stream.wire.next(), if reads => self.take_burst(stream, intake, message)?,
                () = tokio::time::sleep_until(wake.into()) => self.tick(stream, intake).await?,
            }
        }
    }

    fn wake_at(&self, stream: &Stream, resolved: Lsn) -> Instant {
        let due = stream.feedback.due(resolved, Instant::now());
        if !stream.covered {
            return due.min(Instant::now() + Duration::from_millis(20));
        }
        match &stream.next {
            Some(_) => due.min(self.refilter_after),
            None => due,
        }
    }

    async fn tick(&mut self, stream: &mut Stream, intake: &mut Intake) -> Result<(), EngineError> {
        if !stream.covered {
            self.send_status(stream, intake, true).await?;
        }
        let confirmed = stream.feedback.flushed();
        if stream.next.is_none() && stream.registry.can_shrink(confirmed) {
            stream.next = Some(self.registry(self.generation.unwrap_or(Generation(1)), confirmed));
        }
        Ok(())
    }

    /// Takes a message and what is in memory behind it, then hands the rows over.
    fn take_burst(
        &mut self,
        stream: &mut Stream,
        intake: &mut Intake,
        first: Result<StreamMessage, SourceError>,
    ) -> Result<(), EngineError> {
        let mut message = Some(first);
        for _ in 0..BURST {
            let Some(next) = message.take().or_else(|| stream.wire.buffered()) else { break };
            self.take(stream, intake, next?)?;
            if !intake.ready() || (stream.next.is_some() && !intake.tracker.in_transaction()) {
                break;
            }
        }
        intake.flush();
        Ok(())
    }

    fn take(&mut self, stream: &mut Stream, intake: &mut Intake, message: StreamMessage) -> Result<(), EngineError> {
        let reached = match message {
            StreamMessage::Data { start, end, payload } => {
                let lost = intake.data(&mut stream.decoder, &stream.registry, start, end, &payload);
                lost.into_iter().for_each(|loss| self.engine.gaps.add(loss));
                end.max(start)
            }
            StreamMessage::Keepalive { end, reply_requested } => {
                if reply_requested {
                    stream.feedback.ask();
                }
                intake.keepalive(end);
                end
            }
            StreamMessage::Oversize { start, bytes, prefix } => {
                let event = stream.decoder.oversize(&prefix);
                let lost = intake.skip(event, start, bytes, &stream.registry);
                lost.into_iter().for_each(|loss| self.engine.gaps.add(loss));
                start
            }
            StreamMessage::End => return Err(EngineError::SourceEnds),
        };
        stream.server_end = stream.server_end.max(intake.boundary()).max(reached);
        if !stream.covered && reached >= stream.e {
            self.cover(stream);
        }
        Ok(())
    }

    /// The stream has reached E: the filter covers what is registered, and the engine runs.
    fn cover(&mut self, stream: &mut Stream) {
        stream.covered = true;
        self.restart_cost = stream.started.elapsed();
        self.refilter_after =
            Instant::now() + (self.restart_cost * 10).clamp(Duration::from_secs(1), Duration::from_secs(60));
        self.engine.observe(Observed::new(EngineState::Running, None));
        self.engine.look.notify_one();
        self.engine.report_active(&stream.registry, stream.e);
    }

    /// Between two transactions: true = a new session is needed. A change that leaves the list of names as it is takes
    /// effect at once.
    fn change_registry(&mut self, stream: &mut Stream, intake: &Intake) -> bool {
        let Some(next) = &stream.next else { return false };
        if next.filter() != stream.filter {
            return stream.covered && Instant::now() >= self.refilter_after;
        }
        let next = Arc::clone(next);
        stream.next = None;
        stream.registry = Arc::clone(&next);
        self.engine.registry.send_replace(Arc::clone(&next));
        if stream.covered {
            self.engine.report_active(&next, intake.boundary().max(stream.e));
        }
        false
    }

    pub(super) async fn send_status(
        &self,
        stream: &mut Stream,
        intake: &mut Intake,
        reply: bool,
    ) -> Result<(), EngineError> {
        // Never beyond what the server itself has (control-plane.md, finding 9).
        let resolved = intake.tracker.resolve().min(stream.server_end);
        let flushed = stream.feedback.send(resolved, Instant::now());
        let written = flushed.max(intake.received());
        stream.wire.send_status(Status { written, flushed, applied: flushed, reply_requested: reply }).await?;
        let engine = self.engine;
        let position = Some((self.generation.unwrap_or(Generation(1)), flushed));
        engine.position.send_if_modified(|last| std::mem::replace(last, position) != position);
        engine.vitals.note_status(resolved, flushed);
        engine.deps.board.update(engine.source.id, &engine.source.name, |status| {
            let live = &mut status.live;
            live.received_lsn = intake.received();
            live.resolved_lsn = resolved;
            live.confirmed_lsn = flushed;
            live.flow.used_bytes = intake.quota.used() as u64;
            let paused = intake.quota.paused_since().is_some();
            live.flow.paused_since = paused.then(|| live.flow.paused_since.take().unwrap_or_else(crate::status::now));
            live.holes = stream.holes();
            status.measure(engine.source.id);
        });
        Ok(())
    }
}

impl Engine {
    /// Waits before the next try. A lost slot, a kill and a shutdown all say 57P01: a server that still answers is to be
    /// looked at, and only one that is gone to be left alone (R-ENG-8, R-FB-8).
    async fn pause(&self, policy: &Policy, wait: Duration) {
        if policy.reason != "source_shutting_down" {
            return tokio::time::sleep(wait).await;
        }
        // A moment, so that a shutdown that has just begun shows.
        tokio::time::sleep(ANSWERS_STILL).await;
        let name = self.application_name();
        if let Err(error) = connect_sql(&self.url, &name, Some(&self.sockets), CONNECT).await {
            tracing::info!(source = %self.source.id, %error, "the source is away");
            let jitter = RandomState::new().hash_one(self.epoch.0) % JITTER_MS;
            tokio::time::sleep(SOURCE_ENDS + Duration::from_millis(jitter)).await;
        }
    }
}

/// Waits until the server tells its sessions to go; an end of this one for other reasons says nothing.
async fn server_leaves(sql: &SqlConnection) {
    if !LEAVING.contains(&sql.said_goodbye().await) {
        std::future::pending::<()>().await;
    }
}

/// Where a session reads from: nothing that was confirmed or read before comes again (R-LSN-7, R-HOLE-2).
fn start_position(slot: &ReadySlot, generation: Generation, intake: &Intake, stored: Option<(Generation, Lsn)>) -> Lsn {
    let stored = stored.filter(|(of, _)| *of == generation).map_or(Lsn::ZERO, |(_, lsn)| lsn);
    slot.confirmed.max(stored).max(intake.boundary())
}
