//! A worker: does what the machines say, as the real one's tasks do, and carries batches to the fakes.

use std::time::{Duration, Instant};

use aura_domain::{Lsn, ProjectId};
use aura_flow::{
    Admission, Batch, Budget, Change, DrainEvent, DrainPlanner, Job, Opening, Outage, Outcome, Owner, Phase, Reader,
    ReaderLimits, Reservation, Row, Shard, ShardLimits, StatusUpdate, Step, Turn,
};

use crate::{
    bus::{Message, Place, Receipt},
    chance::Chance,
    check::Watch,
    platform::Registry,
    source::{Frame, Gone, Ms},
    world::World,
};

/// Frames between two looks at everything else.
const BURST: usize = 64;

/// What a run goes by.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) quota: usize,
    pub(crate) shards: usize,
    pub(crate) advance: Ms,
    pub(crate) skip_after: Ms,
    pub(crate) stall_limit: Ms,
    pub(crate) outage_limit: Ms,
    pub(crate) drain_timeout: Ms,
    pub(crate) batch_rows: usize,
    pub(crate) busy: usize,
}

#[derive(Debug)]
pub(crate) struct Payload {
    pub(crate) table: usize,
    pub(crate) place: Place,
    stretch: u64,
}

#[derive(Debug)]
enum Stage {
    /// Judged then; `None` = never.
    Check(Option<Ms>),
    Publish(u64),
    Again(Ms),
}

/// A batch on its way.
#[derive(Debug)]
struct Flight {
    shard: usize,
    project: ProjectId,
    job: Job,
    rows: Vec<Row<Payload>>,
    growth: Reservation,
    stage: Stage,
    pause: Ms,
}

#[derive(Debug)]
enum State {
    /// Connects then.
    Waiting(Ms),
    Running,
    Draining(Box<Drain>),
    Dead,
}

#[derive(Debug)]
struct Drain {
    plan: DrainPlanner,
    entered: Option<Phase>,
    sent: Option<StatusUpdate>,
    /// With the source's restarts until then.
    verified: Option<(u64, u64)>,
}

/// What it says at its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) at: Ms,
    pub(crate) triggered: Ms,
    /// And how often the source had restarted by then.
    pub(crate) verified: Option<(u64, u64)>,
    pub(crate) slot_inactive: bool,
    pub(crate) admitted: u64,
    pub(crate) delivered: u64,
    pub(crate) skipped: u64,
    pub(crate) abandoned: u64,
    pub(crate) overrun: bool,
}

pub(crate) struct Worker {
    pub(crate) reader: Reader,
    pub(crate) shards: Vec<Shard<Payload>>,
    settings: Settings,
    flights: Vec<Flight>,
    connection: Option<u64>,
    state: State,
    parked: Option<Payload>,
    pub(crate) registry: Registry,
    next_registry: Option<Registry>,
    filter: Vec<bool>,
    generation: u64,
    /// See [`Message::Row`].
    stretch: u64,
    /// Of the transaction that is read.
    commit: u64,
    until: Option<Ms>,
    outage: Outage,
    pub(crate) frozen_until: Ms,
    triggered: Option<Ms>,
    signals: u8,
    pub(crate) report: Option<Report>,
    chance: Chance,
    pub(crate) watch: Watch,
    saved: Ms,
    /// Of rows that a stall made it forget.
    forgotten: u64,
    base: Instant,
}

impl Worker {
    pub(crate) fn new(number: u64, settings: Settings, base: Instant, chance: Chance, now: Ms) -> Self {
        let ms = Duration::from_millis;
        let limits = ReaderLimits {
            quota: settings.quota,
            advance_interval: ms(settings.advance),
            stall_limit: ms(settings.stall_limit),
            outage_limit: ms(settings.outage_limit),
        };
        let shard = ShardLimits {
            quota: settings.quota,
            skip_after: ms(settings.skip_after),
            linger: ms(20),
            busy: settings.busy,
            batch_rows: settings.batch_rows,
            batch_bytes: settings.quota / 16,
        };
        Self {
            reader: Reader::new(limits, base + ms(now)),
            shards: (0..settings.shards).map(|_| Shard::new(shard)).collect(),
            watch: Watch::new(settings.clone()),
            settings,
            flights: Vec::new(),
            connection: None,
            state: State::Waiting(now + 1),
            parked: None,
            registry: Registry::default(),
            next_registry: None,
            filter: Vec::new(),
            generation: 0,
            stretch: number * 1000,
            commit: 0,
            until: None,
            outage: Outage::default(),
            frozen_until: 0,
            triggered: None,
            signals: 0,
            report: None,
            chance,
            saved: now,
            forgotten: 0,
            base,
        }
    }

    fn at(&self, now: Ms) -> Instant {
        self.base + Duration::from_millis(now)
    }

    fn ms(&self, at: Instant) -> Ms {
        // A deadline between two milliseconds has passed at the second one.
        let passed = at.saturating_duration_since(self.base);
        u64::try_from(passed.as_nanos().div_ceil(1_000_000)).expect("not so long")
    }

    pub(crate) fn is_dead(&self) -> bool {
        matches!(self.state, State::Dead)
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(self.state, State::Running)
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    /// Bytes that live reservations hold.
    pub(crate) fn held(&self) -> usize {
        let rows: usize = self.shards.iter().map(|shard| shard.gauges(self.base).bytes).sum();
        rows + self.flights.iter().map(|flight| flight.growth.bytes()).sum::<usize>()
    }

    /// Everything that follows from what has happened, until nothing does at this moment.
    pub(crate) fn run(&mut self, world: &mut World, now: Ms) {
        if now < self.frozen_until || self.is_dead() {
            return;
        }
        self.look_for_outages(world, now);
        loop {
            let mut moved = self.fly(world, now);
            moved |= self.proceed(world, now);
            moved |= self.session(world, now);
            world.source.run(now);
            self.watch.step(&self.reader, self.held(), now);
            if !moved || self.is_dead() {
                return;
            }
        }
    }

    pub(crate) fn due(&self, world: &World, now: Ms) -> Option<Ms> {
        if self.is_dead() {
            return None;
        }
        if now < self.frozen_until {
            return Some(self.frozen_until);
        }
        let flights = self.flights.iter().filter_map(|flight| match flight.stage {
            Stage::Check(at) => at,
            Stage::Again(at) => Some(at),
            Stage::Publish(_) => None,
        });
        let shards = self.shards.iter().filter_map(Shard::due).map(|at| self.ms(at));
        let state = match &self.state {
            State::Waiting(_) | State::Running if self.triggered.is_some() => Some(now),
            State::Waiting(at) => Some(*at),
            // It asks by SQL, again and again.
            State::Draining(drain) if drain.plan.phase() >= Phase::FinalPosition => Some(now + 10),
            State::Draining(drain) => Some(self.ms(drain.plan.ends())),
            State::Running | State::Dead => None,
        };
        let outage = [world.source.sql_down_until].into_iter().filter(|at| *at > now);
        flights.chain(shards).chain(state).chain(self.until).chain(outage).min()
    }

    /// It didn't run until now.
    pub(crate) fn thawed(&mut self, now: Ms) {
        self.watch.slept(now);
    }

    fn look_for_outages(&mut self, world: &World, now: Ms) {
        // A check finds out.
        let asks = self.flights.iter().any(|flight| matches!(flight.stage, Stage::Check(_)));
        let source = !world.source.sql_connects(now) && (asks || self.outage.source);
        let outage = Outage { bus: !world.bus.is_connected(), source };
        if outage != self.outage {
            self.outage = outage;
            let at = self.at(now);
            self.reader.outage(outage, at);
            self.shards.iter_mut().for_each(|shard| shard.outage(outage.any(), at));
        }
        let ill = outage.any() || !world.bus.is_well(now) || !world.source.sql(now);
        self.watch.outage(ill, outage.any(), now);
    }

    /// Moves the batches on.
    fn fly(&mut self, world: &mut World, now: Ms) -> bool {
        let mut moved = false;
        let mut n = 0;
        while n < self.flights.len() {
            let flight = &mut self.flights[n];
            let next = match flight.stage {
                Stage::Check(Some(at)) if now >= at => {
                    let busy = world.until_judged(flight.rows[0].body.table, now);
                    Some(match () {
                        () if busy > now => Stage::Check(Some(busy)),
                        // Its connection was lost: no verdict, so it is made again (R-SH-4).
                        () if self.chance.one_in(100) => Stage::Check(Some(now + 5)),
                        () => flight.publish(world, now),
                    })
                }
                Stage::Again(at) if now >= at => Some(flight.publish(world, now)),
                Stage::Publish(id) => match world.bus.receipt(id) {
                    Receipt::Pending => None,
                    Receipt::Failed => {
                        flight.pause = (flight.pause * 2).min(1000);
                        Some(Stage::Again(now + flight.pause))
                    }
                    Receipt::Received => {
                        let flight = self.flights.swap_remove(n);
                        self.land(flight, Outcome::Done { skipped: 0 }, now);
                        moved = true;
                        continue;
                    }
                },
                _ => None,
            };
            if let Some(next) = next {
                flight.stage = next;
                moved = true;
            }
            n += 1;
        }
        moved
    }

    fn land(&mut self, flight: Flight, outcome: Outcome, now: Ms) {
        let at = self.at(now);
        let Flight { shard, project, rows, growth, .. } = flight;
        drop(growth);
        if outcome != Outcome::Cancelled {
            self.watch.acked(project, rows.len(), now);
            self.reader.acked(at);
        }
        self.shards[shard].finish(project, rows, outcome, at);
    }

    /// The shards' turn.
    fn proceed(&mut self, world: &mut World, now: Ms) -> bool {
        let at = self.at(now);
        let mut moved = false;
        for n in 0..self.shards.len() {
            for project in self.shards[n].cancels(at) {
                let found = self.flights.iter().position(|flight| flight.project == project);
                let flight = self.flights.swap_remove(found.expect("it is on its way"));
                if let Stage::Publish(id) = flight.stage {
                    world.bus.forget(id);
                }
                self.land(flight, Outcome::Cancelled, now);
                moved = true;
            }
            while let Some(batch) = self.shards[n].start(at) {
                self.take_off(n, batch, world, now);
                moved = true;
            }
        }
        moved
    }

    fn take_off(&mut self, shard: usize, batch: Batch<Payload>, world: &mut World, now: Ms) {
        let Batch { project, job, rows, .. } = batch;
        let latency = world.latency(rows[0].body.table, now, &mut self.chance);
        let mut growth = rows[0].growth();
        let stage = match job {
            Job::Deliver => {
                growth.grow(rows.iter().map(Row::bytes).sum::<usize>() / 2);
                Stage::Check(latency.map(|latency| now + latency))
            }
            Job::Skip => Stage::Again(now),
        };
        self.flights.push(Flight { shard, project, job, rows, growth, stage, pause: 10 });
    }

    /// The task that owns the socket.
    fn session(&mut self, world: &mut World, now: Ms) -> bool {
        match &self.state {
            State::Dead => false,
            State::Waiting(at) => {
                if self.triggered.is_some() {
                    self.die(world, None, now);
                    return true;
                }
                now >= *at && self.start(world, now)
            }
            State::Running => self.read(world, now),
            State::Draining(_) => self.drain(world, now),
        }
    }

    fn start(&mut self, world: &mut World, now: Ms) -> bool {
        let again = now + 200;
        self.state = State::Waiting(again);
        if !world.source.sql(now) {
            return false;
        }
        if world.source.lost {
            if world.source.is_active() {
                return false;
            }
            world.recreate_slot();
        }
        if self.generation != world.platform.generation {
            self.generation = world.platform.generation;
            self.parked = None;
            self.reader.forget(self.at(now));
        }
        let confirmed = world.source.confirmed;
        let stored = world.platform.stored.filter(|(generation, _)| *generation == self.generation);
        let stored = stored.map(|(_, lsn)| Lsn(lsn));
        let start = self.reader.start_position(Lsn(confirmed), stored, Lsn(world.source.wal_end));
        let registry = world.platform.registry(confirmed);
        let filter = registry.filter();
        let Some(id) = world.source.start(start.0, filter.clone(), now) else { return false };
        self.watch.started(&world.source, start.0, confirmed, now);
        let verified = world.verified.filter(|(generation, _)| *generation == self.generation);
        self.watch.resumed(start.0, verified.map(|(_, lsn)| lsn));
        self.connection = Some(id);
        let holes = filter.iter().filter(|listed| **listed).count();
        world.platform.applied(&registry, world.source.wal_end);
        (self.registry, self.next_registry, self.filter) = (registry, None, filter);
        self.parked = None;
        let opening = Opening {
            start,
            confirmed: Lsn(confirmed),
            wal_end: Lsn(world.source.wal_end),
            holds_from: Lsn::ZERO,
            wal_sender_timeout: Duration::from_millis(world.timeout),
            holes,
        };
        self.reader.begin_session(opening, self.at(now));
        self.state = State::Running;
        true
    }

    /// What is registered has changed, and somebody has told us.
    pub(crate) fn registry_changed(&mut self, world: &World, now: Ms) {
        if !self.is_running() {
            return;
        }
        let next = world.platform.registry(self.reader.flushed().0);
        let filter = next.filter();
        let holes = filter.iter().zip(&self.filter).filter(|(wanted, has)| **wanted && !**has).count();
        self.reader.want(Change { restart: filter != self.filter, holes }, self.at(now));
        self.next_registry = Some(next);
    }

    fn read(&mut self, world: &mut World, now: Ms) -> bool {
        if let Some(triggered) = self.triggered {
            self.begin_drain(triggered, now);
            return true;
        }
        let moved = self.steps(world, now);
        if self.is_running() && self.next_registry.is_none() && self.registry.can_shrink(self.reader.flushed().0) {
            self.registry_changed(world, now);
        }
        if now >= self.saved + 5000 && self.is_running() {
            self.saved = now;
            world.platform.stored = Some((self.generation, self.reader.flushed().0));
        }
        moved
    }

    /// Does what the reader says. True = something has changed for others.
    fn steps(&mut self, world: &mut World, now: Ms) -> bool {
        let at = self.at(now);
        let mut moved = false;
        loop {
            let Some(id) = self.connection else { return moved };
            match self.reader.next(at) {
                Step::Status(status) => {
                    if let Some(how) = world.source.gone(id) {
                        self.lose_connection(how, now);
                        return true;
                    }
                    self.watch.status(&world.source, status, now);
                    world.source.status(id, status, now);
                }
                Step::Covered(e) => self.registry.promise(&mut world.platform, e.0),
                Step::Apply => {
                    self.registry = self.next_registry.take().expect("a change was wanted");
                    world.platform.applied(&self.registry, world.source.wal_end);
                    if self.reader.is_covered() {
                        self.registry.promise(&mut world.platform, self.reader.applies_from().0);
                    }
                }
                Step::Refilter => {
                    world.source.close(id, now);
                    self.connection = None;
                    self.watch.refiltered(&self.reader);
                    self.state = State::Waiting(now);
                    return true;
                }
                Step::Turn(turn) => {
                    self.watch.turn(&self.reader, turn);
                    self.shards.iter_mut().for_each(|shard| shard.seal(turn == Turn::Paused));
                    moved = true;
                }
                Step::Admit(admission) => {
                    let payload = self.parked.take().expect("a row waits");
                    self.push(admission, payload, now);
                    moved = true;
                }
                Step::Holes => {}
                Step::Fail(_) => {
                    self.watch.failed(&self.reader);
                    self.abandon(world, now);
                    world.source.close(id, now);
                    self.connection = None;
                    self.state = State::Waiting(now + 3000);
                    return true;
                }
                Step::Wait { read, until } => {
                    self.until = Some(self.ms(until));
                    if !read || !world.source.readable(id, now) {
                        return moved;
                    }
                    self.burst(world, id, now);
                    moved = true;
                }
            }
        }
    }

    fn burst(&mut self, world: &mut World, id: u64, now: Ms) {
        for _ in 0..BURST {
            match world.source.read(id, now) {
                Some(frame) => self.take(world, frame, now),
                None => {
                    if let Some(how) = world.source.gone(id) {
                        self.lose_connection(how, now);
                    }
                    return;
                }
            }
            world.source.run(now);
            if !self.reader.goes_on() {
                return;
            }
        }
    }

    fn take(&mut self, world: &World, frame: Frame, now: Ms) {
        let at = self.at(now);
        match frame {
            Frame::Begin => self.reader.begin(),
            Frame::Commit { end } => {
                self.reader.commit(Lsn(end));
                self.reader.frame(Lsn(end), at);
            }
            Frame::Keepalive { end, reply } => self.reader.keepalive(Lsn(end), reply, at),
            Frame::Row { transaction, row } => {
                let commit = world.source.log[transaction].commit;
                self.commit = commit;
                self.watch.read(world.source.log[transaction].end, row.lsn);
                if self.registry.admits(row.table, commit) {
                    let place = Place { generation: self.generation, commit, lsn: row.lsn };
                    let payload = Payload { table: row.table, place, stretch: self.stretch };
                    let project = world.project_id(row.table);
                    let owner = Owner { shard: world.project(row.table) % self.shards.len(), project };
                    self.watch.largest = self.watch.largest.max(row.bytes);
                    match self.reader.admit(owner, Lsn(row.lsn), row.bytes, at) {
                        Some(admission) => self.push(admission, payload, now),
                        None => self.parked = Some(payload),
                    }
                }
                self.reader.frame(Lsn(row.lsn), at);
            }
        }
    }

    fn push(&mut self, admission: Admission, payload: Payload, now: Ms) {
        let (shard, row) = (admission.shard(), admission.carry(payload));
        self.watch.admitted(row.project(), now);
        let at = self.at(now);
        self.shards[shard].push(row, at);
    }

    fn lose_connection(&mut self, how: Gone, now: Ms) {
        self.connection = None;
        self.watch.closed();
        if let State::Draining(drain) = &mut self.state {
            // What was acknowledged is not said any more; the rest is left to the next start.
            while drain.plan.phase() < Phase::Leave {
                drain.plan.on(DrainEvent::Finished, self.base + Duration::from_millis(now));
            }
            return;
        }
        let wait = match how {
            Gone::Closed => self.chance.range(100, 300),
            // R-FB-8.
            Gone::ShuttingDown => self.chance.range(10_000, 15_000),
        };
        self.state = State::Waiting(now + wait);
    }

    /// Drops every row on its way.
    fn abandon(&mut self, world: &mut World, now: Ms) {
        let rows: usize = self.shards.iter().map(|shard| shard.gauges(self.base).rows).sum();
        self.forgotten += rows as u64;
        for flight in self.flights.drain(..) {
            if let Stage::Publish(id) = flight.stage {
                world.bus.forget(id);
            }
        }
        self.shards.iter_mut().for_each(Shard::abandon);
        self.parked = None;
        self.stretch += 1;
        self.watch.abandoned();
        self.reader.forget(self.base + Duration::from_millis(now));
    }

    /// A signal, or `trigger()`. The first drains, the second hurries, the third ends at once.
    pub(crate) fn signal(&mut self, world: &mut World, now: Ms) {
        self.signals += 1;
        self.triggered = self.triggered.or(Some(now));
        match (&mut self.state, self.signals) {
            (State::Draining(drain), 2) => {
                let _ = drain.plan.on(DrainEvent::Hurry, self.base + Duration::from_millis(now));
            }
            (_, 3..) => self.kill(world, now),
            _ => {}
        }
    }

    fn begin_drain(&mut self, triggered: Ms, now: Ms) {
        let budget = Budget::shutdown(Duration::from_millis(self.settings.drain_timeout));
        let mut plan = DrainPlanner::new(budget, self.at(triggered));
        plan.on(DrainEvent::Tick, self.at(now));
        if self.signals >= 2 {
            plan.on(DrainEvent::Hurry, self.at(now));
        }
        self.reader.drain();
        self.shards.iter_mut().for_each(|shard| shard.seal(true));
        let drain = Drain { plan, entered: None, sent: None, verified: None };
        self.state = State::Draining(Box::new(drain));
    }

    fn drain(&mut self, world: &mut World, now: Ms) -> bool {
        let at = self.at(now);
        let State::Draining(drain) = &mut self.state else { return false };
        let phase = drain.plan.on(DrainEvent::Tick, at);
        let entered = drain.entered.replace(phase) != Some(phase);
        let finished = match phase {
            Phase::IntakeStop | Phase::Seal => true,
            Phase::Drain => {
                let moved = self.steps(world, now);
                let settled = self.reader.is_settled();
                let empty = self.shards.iter().all(Shard::is_empty);
                if !self.is_draining() || (moved && !settled) {
                    return moved;
                }
                assert!(!empty || settled, "all is acknowledged and the position doesn't know");
                settled
            }
            Phase::Abandon => true,
            Phase::FinalPosition => return self.final_position(world, entered, now),
            Phase::Leave => {
                if entered {
                    self.leave(world, now);
                }
                !world.source.is_active() && world.source.sql(now)
            }
            Phase::Done => {
                self.die(world, self.triggered, now);
                return true;
            }
        };
        if finished && let State::Draining(drain) = &mut self.state {
            drain.plan.on(DrainEvent::Finished, at);
        }
        finished
    }

    fn is_draining(&self) -> bool {
        matches!(self.state, State::Draining(_))
    }

    /// Says what is resolved and reads it back, reading on into nothing (E4).
    fn final_position(&mut self, world: &mut World, entered: bool, now: Ms) -> bool {
        let at = self.at(now);
        let Some(id) = self.connection else { return false };
        if entered && let Some(status) = self.reader.final_status(at) {
            world.source.status(id, status, now);
            // Bounded by the plan from here on.
            self.watch.closed();
            if let State::Draining(drain) = &mut self.state {
                drain.sent = Some(status);
            }
        }
        while world.source.read(id, now).is_some() {
            world.source.run(now);
        }
        let State::Draining(drain) = &mut self.state else { return false };
        let Some(sent) = drain.sent else { return false };
        let seen = world.source.sql(now) && world.source.confirmed >= sent.flushed.0;
        if seen {
            drain.verified = Some((sent.flushed.0, world.source.restarts));
            world.platform.stored = Some((self.generation, sent.flushed.0));
            world.verified = Some((self.generation, sent.flushed.0));
            drain.plan.on(DrainEvent::Finished, at);
        }
        seen
    }

    fn leave(&mut self, world: &mut World, now: Ms) {
        if let Some(id) = self.connection.take() {
            if !self.reader.in_transaction() {
                world.source.copy_done(id);
            }
            world.source.close(id, now);
            self.watch.closed();
        }
    }

    fn die(&mut self, world: &mut World, triggered: Option<Ms>, now: Ms) {
        let (verified, overrun) = match &self.state {
            State::Draining(drain) => (drain.verified, drain.plan.times().overrun),
            _ => (None, false),
        };
        let sum = |of: fn(&aura_flow::ShardGauges) -> u64| {
            self.shards.iter().map(|shard| of(&shard.gauges(self.base))).sum::<u64>()
        };
        let (delivered, skipped) = (sum(|gauges| gauges.delivered), sum(|gauges| gauges.skipped));
        self.report = Some(Report {
            at: now,
            triggered: triggered.or(self.triggered).unwrap_or(now),
            verified,
            slot_inactive: !world.source.is_active(),
            admitted: self.reader.admitted(),
            delivered,
            skipped,
            abandoned: sum(|gauges| gauges.rows as u64) + self.forgotten,
            overrun,
        });
        self.kill(world, now);
    }

    /// Whatever it was doing: it is gone, and its sockets with it.
    pub(crate) fn kill(&mut self, world: &mut World, now: Ms) {
        for flight in self.flights.drain(..) {
            if let Stage::Publish(id) = flight.stage {
                world.bus.forget(id);
            }
        }
        if let Some(id) = self.connection.take() {
            world.source.close(id, now);
        }
        self.shards.iter_mut().for_each(Shard::abandon);
        self.parked = None;
        assert_eq!(self.reader.quota().used(), 0, "invariant 6: something is still held");
        self.state = State::Dead;
    }
}

impl Flight {
    fn publish(&self, world: &mut World, now: Ms) -> Stage {
        let project = world.project(self.rows[0].body.table);
        let places = || self.rows.iter().map(|row| row.body.place);
        let messages = match self.job {
            Job::Deliver => {
                let row = |row: &Row<Payload>| Message::Row {
                    project,
                    table: row.body.table,
                    place: row.body.place,
                    stretch: row.body.stretch,
                };
                self.rows.iter().map(row).collect()
            }
            Job::Skip => {
                let (from, to) = (places().min().expect("rows"), places().max().expect("rows"));
                vec![Message::Gap { project, from, to }]
            }
        };
        Stage::Publish(world.bus.publish(messages, now))
    }
}
