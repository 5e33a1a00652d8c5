//! The bus: accepts, delays, disconnects, stops (accepts bytes and answers nothing); reorders nothing on one connection and
//! loses what had no receipt when it disconnects. Behind it a front that follows each project.

use std::collections::{BTreeMap, BTreeSet};

use crate::{chance::Chance, source::Ms};

/// A publish without a receipt is given up after this (R-ACK-2).
pub(crate) const ACK_TIMEOUT: Ms = 5000;

/// Where a row is in the log: orders and identifies it (R-LSN-6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) generation: u64,
    pub(crate) commit: u64,
    pub(crate) lsn: u64,
}

#[derive(Debug, Clone)]
pub(crate) enum Message {
    /// `stretch` counts workers, and pipelines that a worker gave up: within one, rows go out in order.
    Row {
        project: usize,
        table: usize,
        place: Place,
        stretch: u64,
    },
    Gap {
        project: usize,
        from: Place,
        to: Place,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Up,
    /// Accepts bytes and answers nothing, until then.
    Stopped(Ms),
    Disconnected(Ms),
}

/// A batch that was published and has no receipt yet.
#[derive(Debug)]
struct Published {
    messages: Vec<Message>,
    sent: Ms,
    /// When the server has it and the receipt is back; `None` while it is stopped.
    arrives: Option<Ms>,
    /// Given up by its publisher; the bytes are still on their way.
    orphan: bool,
}

/// What became of a publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Receipt {
    Pending,
    Received,
    Failed,
}

/// What subscribers of one project have.
#[derive(Debug, Default)]
pub(crate) struct Front {
    /// Rows that were accepted: a front drops what isn't above the last one (R-FRT-5).
    /// Whatever generation they came in: (commit, LSN, table).
    pub(crate) rows: BTreeSet<(u64, u64, usize)>,
    /// And all that ever came.
    arrived: BTreeSet<(u64, u64, usize)>,
    /// Rows that came for the first time after a later one of their project, in one stretch.
    pub(crate) disorder: Vec<Place>,
    pub(crate) gaps: Vec<(Place, Place)>,
    /// Per table.
    last: BTreeMap<usize, Place>,
    last_of_stretch: Option<(u64, Place)>,
}

#[derive(Debug)]
pub(crate) struct Bus {
    mode: Mode,
    slow_until: Ms,
    published: BTreeMap<u64, Published>,
    ended: BTreeMap<u64, Receipt>,
    next: u64,
    pub(crate) fronts: Vec<Front>,
    chance: Chance,
    /// When it was last anything but well.
    pub(crate) ill_at: Ms,
}

impl Bus {
    pub(crate) fn new(projects: usize, chance: Chance) -> Self {
        Self {
            mode: Mode::Up,
            slow_until: 0,
            published: BTreeMap::new(),
            ended: BTreeMap::new(),
            next: 1,
            fronts: (0..projects).map(|_| Front::default()).collect(),
            chance,
            ill_at: 0,
        }
    }

    /// What the client library reports.
    pub(crate) fn is_connected(&self) -> bool {
        !matches!(self.mode, Mode::Disconnected(_))
    }

    pub(crate) fn is_well(&self, now: Ms) -> bool {
        self.mode == Mode::Up && now >= self.slow_until
    }

    pub(crate) fn publish(&mut self, messages: Vec<Message>, now: Ms) -> u64 {
        let id = self.next;
        self.next += 1;
        if !self.is_connected() {
            self.ended.insert(id, Receipt::Failed);
            return id;
        }
        let arrives = (self.mode == Mode::Up).then(|| self.arrival(now));
        self.published.insert(id, Published { messages, sent: now, arrives, orphan: false });
        id
    }

    fn arrival(&mut self, now: Ms) -> Ms {
        let last = self.published.values().filter_map(|batch| batch.arrives).max().unwrap_or(0);
        let delay = if now < self.slow_until { self.chance.range(200, 3000) } else { self.chance.range(1, 4) };
        // One connection: nothing overtakes.
        (now + delay).max(last)
    }

    /// What became of a publish, once it is decided.
    pub(crate) fn receipt(&mut self, id: u64) -> Receipt {
        self.ended.remove(&id).unwrap_or(Receipt::Pending)
    }

    /// Its publisher is gone.
    pub(crate) fn forget(&mut self, id: u64) {
        if let Some(batch) = self.published.get_mut(&id) {
            batch.orphan = true;
        }
        self.ended.remove(&id);
    }

    pub(crate) fn stop(&mut self, until: Ms) {
        if self.mode == Mode::Up {
            self.mode = Mode::Stopped(until);
            self.published.values_mut().for_each(|batch| batch.arrives = None);
        }
    }

    pub(crate) fn slow(&mut self, until: Ms) {
        self.slow_until = until;
    }

    /// The connection breaks: of what had no receipt, some of the first messages had arrived.
    pub(crate) fn disconnect(&mut self, until: Ms) {
        self.mode = Mode::Disconnected(until);
        let mut alive = true;
        for (id, batch) in std::mem::take(&mut self.published) {
            let arrived = if alive { self.chance.range(0, batch.messages.len() as u64 + 1) } else { 0 };
            alive = alive && arrived == batch.messages.len() as u64;
            let arrived = usize::try_from(arrived).expect("small");
            batch.messages.into_iter().take(arrived).for_each(|message| self.deliver(message));
            if !batch.orphan {
                self.ended.insert(id, Receipt::Failed);
            }
        }
    }

    pub(crate) fn run(&mut self, now: Ms) {
        if !self.is_well(now) {
            self.ill_at = now;
        }
        match self.mode {
            Mode::Stopped(until) if now >= until => {
                self.mode = Mode::Up;
                let waiting: Vec<_> = self.published.keys().copied().collect();
                for id in waiting {
                    let arrival = self.arrival(now);
                    self.published.get_mut(&id).expect("listed").arrives = Some(arrival);
                }
            }
            Mode::Disconnected(until) if now >= until => self.mode = Mode::Up,
            _ => {}
        }
        let arrived = self.published.iter().filter(|(_, batch)| batch.arrives.is_some_and(|at| at <= now));
        let arrived: Vec<_> = arrived.map(|(id, _)| *id).collect();
        for id in arrived {
            let batch = self.published.remove(&id).expect("listed");
            batch.messages.into_iter().for_each(|message| self.deliver(message));
            if !batch.orphan {
                self.ended.insert(id, Receipt::Received);
            }
        }
        for (id, batch) in &mut self.published {
            if !batch.orphan && now >= batch.sent + ACK_TIMEOUT {
                batch.orphan = true;
                self.ended.insert(*id, Receipt::Failed);
            }
        }
    }

    pub(crate) fn due(&self) -> Option<Ms> {
        let mode = match self.mode {
            Mode::Up => None,
            Mode::Stopped(until) | Mode::Disconnected(until) => Some(until),
        };
        let batches = self.published.values().flat_map(|batch| {
            let timeout = (!batch.orphan).then_some(batch.sent + ACK_TIMEOUT);
            [batch.arrives, timeout]
        });
        batches.flatten().chain(mode).min()
    }

    fn deliver(&mut self, message: Message) {
        match message {
            Message::Row { project, table, place, stretch } => self.fronts[project].take(table, place, stretch),
            Message::Gap { project, from, to } => self.fronts[project].gaps.push((from, to)),
        }
    }
}

impl Front {
    fn take(&mut self, table: usize, place: Place, stretch: u64) {
        let row = (place.commit, place.lsn, table);
        if !self.arrived.insert(row) {
            return;
        }
        match self.last_of_stretch {
            // What an earlier stretch had sent arrives late.
            Some((of, _)) if stretch < of => {}
            Some((of, last)) if stretch == of && place < last => self.disorder.push(place),
            _ => self.last_of_stretch = Some((stretch, place)),
        }
        if self.last.get(&table).is_some_and(|last| place.generation == last.generation && place <= *last) {
            return;
        }
        self.last.insert(table, place);
        self.rows.insert(row);
    }
}
