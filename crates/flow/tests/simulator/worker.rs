//! A worker: does what the machines say, as the real one's tasks do, and carries batches to the fakes.

mod drain;
mod flights;
mod session;

use std::time::{Duration, Instant};

use aura_flow::{Outage, Phase, Reader, ReaderLimits, Shard, ShardLimits};

pub(crate) use self::drain::Report;
use self::{
    drain::Drain,
    flights::{Flight, Stage},
};
use crate::{bus::Place, chance::Chance, check::Watch, platform::Registry, source::Ms, world::World};

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
enum State {
    /// Connects then.
    Waiting(Ms),
    Running,
    Draining(Box<Drain>),
    Dead,
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
