//! The end of a worker that was asked for it.

use std::time::Duration;

use aura_flow::{Budget, DrainEvent, DrainPlanner, Phase, Shard, StatusUpdate};

use super::{State, Worker};
use crate::{source::Ms, world::World};

#[derive(Debug)]
pub(super) struct Drain {
    pub(super) plan: DrainPlanner,
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

impl Worker {
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

    pub(super) fn begin_drain(&mut self, triggered: Ms, now: Ms) {
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

    pub(super) fn drain(&mut self, world: &mut World, now: Ms) -> bool {
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

    pub(super) fn die(&mut self, world: &mut World, triggered: Option<Ms>, now: Ms) {
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
}
