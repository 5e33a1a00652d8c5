//! The task that owns the socket: sessions, and what they read.

use std::time::Duration;

use aura_domain::Lsn;
use aura_flow::{Admission, Change, DrainEvent, Opening, Owner, Phase, Shard, Step, Turn};

use super::{Payload, State, Worker, flights::Stage};
use crate::{
    bus::Place,
    source::{Frame, Gone, Ms},
    world::World,
};

/// Frames between two looks at everything else.
const BURST: usize = 64;

impl Worker {
    /// The task that owns the socket.
    pub(super) fn session(&mut self, world: &mut World, now: Ms) -> bool {
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
    pub(super) fn steps(&mut self, world: &mut World, now: Ms) -> bool {
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
                self.watch.committed(end, now);
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
}
