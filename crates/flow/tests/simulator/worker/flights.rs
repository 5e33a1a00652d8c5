//! Batches on their way to the bus, and the shards that make them.

use aura_domain::ProjectId;
use aura_flow::{Batch, Job, Outcome, Reservation, Row};

use super::{Payload, Worker};
use crate::{
    bus::{Message, Receipt},
    source::Ms,
    world::World,
};

#[derive(Debug)]
pub(super) enum Stage {
    /// Judged then; `None` = never.
    Check(Option<Ms>),
    Publish(u64),
    Again(Ms),
}

/// A batch on its way.
#[derive(Debug)]
pub(super) struct Flight {
    shard: usize,
    project: ProjectId,
    job: Job,
    rows: Vec<Row<Payload>>,
    pub(super) growth: Reservation,
    pub(super) stage: Stage,
    pause: Ms,
}

impl Worker {
    /// Moves the batches on.
    pub(super) fn fly(&mut self, world: &mut World, now: Ms) -> bool {
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
    pub(super) fn proceed(&mut self, world: &mut World, now: Ms) -> bool {
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
