//! Sessions of an engine: connect, start at the right position with the present filter, read until the filter changes,
//! something fails or the engine is stopped.
//!
//! One task owns the socket, the feedback timer and the intake (R-FB-1): if it dies, the socket closes.

use std::{
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::{Duration, Instant},
};

use aura_domain::{Generation, Lsn, Relation};
use aura_flow::Opening;
use aura_pgsource::{
    Decoder, Plugin, ReplicationConnection, ReplicationStream, SqlConnection, SqlState, connect_sql, pgoutput_options,
    wal2json_options,
};
use aura_store::NewGap;
use aura_wire::GapReason;
use tokio::sync::watch;

use super::{
    Engine,
    end::{End, Left},
    error::{EngineError, MAX_PAUSE, Policy, SOURCE_ENDS},
    filter::Filter,
    gaps::{self, Loss},
    intake::Intake,
    loader::Loaded,
    quarantine::{Quarantine, refuses_names},
    registry::Registry,
    slot::ReadySlot,
};

/// Limit of connecting, to either kind of connection.
pub(super) const CONNECT: Duration = Duration::from_secs(5);
/// How long our own last walsender may need to let go of the slot.
const RELEASE_PATIENCE: Duration = Duration::from_secs(10);
/// After a goodbye, before the server is asked whether it is still there.
const ANSWERS_STILL: Duration = Duration::from_millis(200);
/// Spreads those who come back to a server.
const JITTER_MS: u64 = 5000;
/// Signs of life while something takes its time.
const BEAT: Duration = Duration::from_secs(1);
/// Holes that the log names (R-HOLE-6).
const NAMES: usize = 20;
/// A session that lasted this long has earned a fresh retry pause.
const HEALTHY: Duration = Duration::from_secs(30);

enum Ended {
    /// The filter must change; the next session begins where this one ended.
    Refilter,
    Stopped(Left),
}

/// Why reading ended.
pub(super) enum Read {
    Refilter,
    Stopped,
}

/// What lasts from session to session.
pub(super) struct Session<'e> {
    pub(super) engine: &'e Engine,
    pub(super) loaded: watch::Receiver<Arc<Loaded>>,
    pub(super) generation: Option<Generation>,
    /// Whose gap was handed over for announcement.
    announced: Option<Generation>,
    handed_over: bool,
    /// Nothing critical was found (R-ENG-9).
    inspected: bool,
    pub(super) quarantine: Quarantine,
}

/// One running stream.
pub(super) struct Stream {
    pub(super) wire: ReplicationStream,
    pub(super) sql: SqlConnection,
    pub(super) decoder: Decoder,
    pub(super) registry: Arc<Registry>,
    pub(super) plugin: Plugin,
    pub(super) filter: Filter,
    /// The registry to change to at the next end of a transaction.
    pub(super) next: Option<Arc<Registry>>,
    /// The first few registered tables that the running filter doesn't cover (R-HOLE-6).
    pub(super) hole_names: Vec<String>,
    /// And how many there are.
    pub(super) holes: usize,
    pub(super) began: Instant,
    /// When what flow control does was last shown.
    pub(super) shown: Instant,
}

impl<'e> Session<'e> {
    pub(super) fn new(engine: &'e Engine, loaded: watch::Receiver<Arc<Loaded>>) -> Self {
        let quarantine = Quarantine::default();
        Self { engine, loaded, generation: None, announced: None, handed_over: false, inspected: false, quarantine }
    }

    /// Sessions, one after the other, until the engine is stopped.
    pub(super) async fn run_all(&mut self, intake: &mut Intake, ready: watch::Receiver<bool>) -> End {
        let mut pause = None;
        while !self.engine.stop.is_cancelled() {
            let began = Instant::now();
            let error = match self.run(intake, &ready).await {
                Ok(Ended::Refilter) => continue,
                Ok(Ended::Stopped(left)) => return End::stopped(Some(left)),
                Err(error) => error,
            };
            let policy = error.policy();
            tracing::warn!(source = %self.engine.source.id, reason = policy.reason, %error, "session ended");
            metrics::counter!("cdc_sessions_failed_total", "reason" => policy.reason).increment(1);
            if error.is_fenced() {
                // Nothing of this epoch counts any more: the lease decides who goes on.
                return End::fenced();
            }
            if matches!(error, EngineError::Stalled(_) | EngineError::GapRefused(_)) {
                // Whatever hangs there is dropped, and its rows are read again.
                intake.abandon();
                self.engine.gaps.abandon(&self.engine.vitals);
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
        // Rows that are out, or not confirmed, need a stream once more.
        End::stopped(Some(match self.run(intake, &ready).await {
            Ok(Ended::Stopped(left)) => left,
            Ok(Ended::Refilter) | Err(_) => self.leave_without(intake).await,
        }))
    }

    async fn run(&mut self, intake: &mut Intake, ready: &watch::Receiver<bool>) -> Result<Ended, EngineError> {
        let (stop, vitals) = (self.engine.stop.clone(), Arc::clone(&self.engine.vitals));
        let opened = {
            let engine = self.engine;
            let opening = Box::pin(self.start(intake, ready));
            let opening = async {
                tokio::select! {
                    stream = opening => stream,
                    // However long the server takes: the task is alive.
                    never = vitals.beating(BEAT) => match never {},
                }
            };
            tokio::pin!(opening);
            tokio::select! {
                biased;
                () = stop.cancelled() => engine.open_to_leave(opening).await.map(|stream| (stream, true)),
                stream = &mut opening => Some((stream?, false)),
            }
        };
        let Some((mut stream, stopped)) = opened else {
            return Ok(Ended::Stopped(self.leave_without(intake).await));
        };
        if stopped {
            return Ok(Ended::Stopped(self.leave(stream, intake).await));
        }
        self.engine.stream.send_replace(Some(stream.began));
        let read = self.read(&mut stream, intake).await;
        self.engine.stream.send_replace(None);
        Ok(match read? {
            // The server may be in the middle of sending: a polite end could take as long as its transaction (E7).
            Read::Refilter => Ended::Refilter,
            Read::Stopped => Ended::Stopped(self.leave(stream, intake).await),
        })
    }

    async fn start(&mut self, intake: &mut Intake, ready: &watch::Receiver<bool>) -> Result<Stream, EngineError> {
        let engine = self.engine;
        let name = engine.application_name();
        let sql = connect_sql(&engine.url, &name, Some(&engine.sockets), CONNECT).await?;
        if !self.inspected {
            engine.preflight(&sql).await?;
            self.inspected = true;
        }
        let mut connection = ReplicationConnection::connect(&engine.url, &name, &engine.sockets, CONNECT).await?;
        let identity = connection.identify_system().await?;
        let slot = engine.ensure_slot(&mut connection, &sql, &identity).await?;
        let generation = engine.generation(&identity, false).await?;
        let stored = engine.deps.store.position(engine.source.id).await?;
        self.enter_generation(generation, slot.replaced, intake, stored).await?;
        let stored = stored.filter(|(of, _)| *of == generation).map(|(_, lsn)| lsn);
        let start = intake.reader.start_position(slot.confirmed, stored, identity.wal_end);
        if !std::mem::replace(&mut self.handed_over, true) {
            engine.hand_over(ready.clone()).await;
        }
        let wal_sender_timeout = connection.wal_sender_timeout().await?.unwrap_or_default();
        let (registry, filter, options, holds_from) = self.options(slot.plugin, generation, slot.confirmed).await?;
        engine.registry.send_replace(Arc::clone(&registry));
        let wanted = registry.wanted(slot.plugin);
        let (holes, hole_names) = (wanted.names.len(), names(wanted.names.iter().copied()));
        engine.control.announce_leader(start).await;
        let began = Instant::now();
        let wire = match self.start_streaming(connection, &sql, start, &options).await {
            Err(error) if refuses_names(&error) => {
                self.try_filter(&registry, &filter, (&sql, start)).await?;
                return Err(error);
            }
            other => other?,
        };
        let opening = Opening {
            start,
            confirmed: slot.confirmed,
            wal_end: identity.wal_end,
            holds_from,
            wal_sender_timeout,
            holes,
        };
        intake.begin_session(opening);
        self.show_start(&slot, &registry);
        let decoder = Decoder::new(slot.plugin, generation);
        let plugin = slot.plugin;
        Ok(Stream { wire, sql, decoder, registry, plugin, filter, next: None, hole_names, holes, began, shown: began })
    }

    /// START_REPLICATION, again while our own last walsender still holds the slot.
    pub(super) async fn start_streaming(
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
                other => {
                    let mut stream = other?;
                    stream.set_max_message(engine.deps.settings.max_message());
                    return Ok(stream);
                }
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
            intake.forget();
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

    pub(super) fn registry(&mut self, generation: Generation, confirmed: Lsn) -> Arc<Registry> {
        let loaded = Arc::clone(&self.loaded.borrow_and_update());
        Arc::new(Registry::new(&loaded, generation, confirmed, &self.quarantine))
    }

    /// What is registered without what the source refuses, the filter for it, the plugin's options, and from which position
    /// on they cover it.
    async fn options(
        &mut self,
        plugin: Plugin,
        generation: Generation,
        confirmed: Lsn,
    ) -> Result<(Arc<Registry>, Filter, Vec<(String, String)>, Lsn), EngineError> {
        let (registry, filter) = self.wanted(plugin, generation, confirmed);
        if plugin == Plugin::Wal2json {
            let options = wal2json_options(&filter.entries());
            return Ok((registry, filter, options, Lsn::ZERO));
        }
        let publication = self.engine.sync_publication(&filter.tables()).await?;
        let options = pgoutput_options(&publication.name);
        if publication.refused.is_empty() {
            return Ok((registry, filter, options, publication.from));
        }
        self.keep_out(&registry, &publication.refused).await?;
        let (registry, filter) = self.wanted(plugin, generation, confirmed);
        Ok((registry, filter, options, publication.from))
    }

    fn wanted(&mut self, plugin: Plugin, generation: Generation, confirmed: Lsn) -> (Arc<Registry>, Filter) {
        let registry = self.registry(generation, confirmed);
        let filter = Filter::new(plugin, registry.wanted(plugin), None);
        (registry, filter)
    }

    fn show_start(&self, slot: &ReadySlot, registry: &Registry) {
        let engine = self.engine;
        engine.deps.board.update(engine.source.id, &engine.source.name, |status| {
            status.live.plugin = Some(slot.plugin.library().to_owned());
            status.live.tables = registry.tables().count();
        });
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

/// The first names of a list, for the log.
pub(super) fn names<'a>(tables: impl Iterator<Item = &'a Relation>) -> Vec<String> {
    tables.take(NAMES).map(Relation::quoted).collect()
}
