//! One shard (R-SH): its projects are lanes, each in order with one batch on the way at a time, side by side. Decides what
//! becomes a batch and when, and who has held things up for so long that it must be skipped.

mod lane;

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    time::{Duration, Instant},
};

use aura_domain::ProjectId;

use self::lane::{Flight, Lane};
use crate::{row::Row, stall::ASLEEP};

/// What a shard goes by.
#[derive(Debug, Clone, Copy)]
pub struct ShardLimits {
    /// The engine's quota in bytes; hot and skipping are shares of it.
    pub quota: usize,
    /// A project without a single acknowledgement for so long is skipped (R-SH-3).
    pub skip_after: Duration,
    /// Longest wait for company, while the shard is busy (R-ACK-4).
    pub linger: Duration,
    /// So many batches on the way make the shard busy: one more would only queue for a connection.
    pub busy: usize,
    /// Most rows in a batch.
    pub batch_rows: usize,
    /// Most bytes held by a batch; one row always goes, however large it is.
    pub batch_bytes: usize,
}

/// What to do with a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Job {
    /// Judge and publish its rows.
    Deliver,
    /// Announce to the project's subscribers that they miss its rows.
    Skip,
}

/// Rows of one project that go together.
#[derive(Debug)]
pub struct Batch<T> {
    /// Tenant.
    pub project: ProjectId,
    /// What to do.
    pub job: Job,
    /// In order; never empty.
    pub rows: Vec<Row<T>>,
    /// The shard holds so much that it must not look ahead (R-SH-2).
    pub hot: bool,
}

/// What became of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The bus has received it, and for this many of its rows the announcement that they are missing.
    Done {
        /// Rows that were not delivered.
        skipped: usize,
    },
    /// It was given up when [`Shard::cancels`] asked for it.
    Cancelled,
}

/// What a shard holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShardGauges {
    /// Rows.
    pub rows: usize,
    /// Bytes.
    pub bytes: usize,
    /// Since the oldest row was read.
    pub oldest: Duration,
    /// ≥ 0.20 of the quota, and not below 0.10 since.
    pub hot: bool,
    /// Rows that were delivered so far.
    pub delivered: u64,
    /// Rows that were skipped so far.
    pub skipped: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Shard<T> {
    limits: ShardLimits,
    hot_at: usize,
    cool_below: usize,
    lanes: HashMap<ProjectId, Lane<T>>,
    /// Lanes with work that aren't about to be skipped, by their last acknowledgement.
    by_ack: BTreeSet<(Instant, ProjectId)>,
    /// Lanes with work, by their oldest row.
    by_age: BTreeSet<(Instant, ProjectId)>,
    /// Lanes that hold a hot share by themselves: five at most, unless they grew.
    over: BTreeSet<ProjectId>,
    /// Idle lanes whose rows wait for company, in order of arrival.
    ready: VecDeque<(Instant, ProjectId)>,
    /// Idle lanes whose batch is to be sealed whatever the linger.
    sealed: VecDeque<ProjectId>,
    sealing: bool,
    in_flight: usize,
    gauges: ShardGauges,
    outage: bool,
    /// When the last outage ended: nobody is skipped for what was before.
    floor: Option<Instant>,
    steps: u64,
}

impl<T> Shard<T> {
    /// An empty shard.
    pub fn new(limits: ShardLimits) -> Self {
        Self {
            limits,
            hot_at: limits.quota.div_ceil(5),
            cool_below: limits.quota / 10,
            lanes: HashMap::new(),
            by_ack: BTreeSet::new(),
            by_age: BTreeSet::new(),
            over: BTreeSet::new(),
            ready: VecDeque::new(),
            sealed: VecDeque::new(),
            sealing: false,
            in_flight: 0,
            gauges: ShardGauges::default(),
            outage: false,
            floor: None,
            steps: 0,
        }
    }

    /// Takes a row in.
    pub fn push(&mut self, row: Row<T>, now: Instant) {
        let project = row.project();
        let bytes = row.bytes();
        self.steps += 1;
        self.gauges.rows += 1;
        self.gauges.bytes += bytes;
        let lane = self.lanes.entry(project).or_insert_with(|| Lane::new(now));
        if lane.is_empty() {
            row.lead();
            lane.acked = now;
            lane.oldest = row.at();
            self.by_ack.insert((now, project));
            self.by_age.insert((row.at(), project));
        }
        lane.bytes += bytes;
        lane.waiting_bytes += bytes;
        lane.waiting.push_back(row);
        if lane.flight.is_none() {
            if lane.ready_since.is_none() {
                lane.ready_since = Some(now);
                self.ready.push_back((now, project));
            }
            if lane.is_full(&self.limits) && !std::mem::replace(&mut lane.sealed, true) {
                self.sealed.push_back(project);
            }
        }
        self.weigh(project, now);
    }

    /// The next batch to begin, if one is to begin now. Ask until there is none.
    pub fn start(&mut self, now: Instant) -> Option<Batch<T>> {
        let project = self.next_lane(now)?;
        self.steps += 1;
        let hot = self.gauges.hot;
        let limits = self.limits;
        let lane = self.lanes.get_mut(&project)?;
        let job = if lane.skip { Job::Skip } else { Job::Deliver };
        let rows = if lane.skip { lane.take_all() } else { lane.take(&limits) };
        rows.first()?.lead();
        lane.flight = Some(Flight { job, cancelled: false });
        self.in_flight += 1;
        Some(Batch { project, job, rows, hot })
    }

    /// A lane whose batch is to be sealed: skipped ones and full ones first; then all if the shard has nothing better to
    /// do or was told to seal; else only who has waited for the linger.
    fn next_lane(&mut self, now: Instant) -> Option<ProjectId> {
        while let Some(project) = self.sealed.pop_front() {
            if self.ready_since(project).is_some() {
                return Some(project);
            }
        }
        let idle = self.sealing || self.in_flight < self.limits.busy;
        while let Some((since, project)) = self.ready.front().copied() {
            // Else it has been sealed since, or has another place in the line.
            let valid = self.ready_since(project) == Some(since);
            if valid && !idle && now < since + self.limits.linger {
                return None;
            }
            self.ready.pop_front();
            if valid {
                return Some(project);
            }
        }
        None
    }

    /// Since when its rows wait for company.
    fn ready_since(&self, project: ProjectId) -> Option<Instant> {
        self.lanes.get(&project).filter(|lane| lane.flight.is_none())?.ready_since
    }

    /// A batch has ended; its rows come back here, to be acknowledged or to wait again.
    pub fn finish(&mut self, project: ProjectId, rows: Vec<Row<T>>, outcome: Outcome, now: Instant) {
        let Some(lane) = self.lanes.get_mut(&project) else { return };
        let Some(flight) = lane.flight.take() else { return };
        self.in_flight -= 1;
        match outcome {
            Outcome::Done { skipped } => {
                let (count, bytes) = (rows.len(), rows.iter().map(Row::bytes).sum::<usize>());
                lane.bytes -= bytes;
                let skipped = if flight.job == Job::Skip { count } else { skipped.min(count) };
                self.gauges.rows -= count;
                self.gauges.bytes -= bytes;
                self.gauges.skipped += skipped as u64;
                self.gauges.delivered += (count - skipped) as u64;
                lane.skip = false;
                rows.into_iter().for_each(Row::ack);
                self.progressed(project, now);
            }
            Outcome::Cancelled => lane.give_back(rows),
        }
        self.settle(project, now);
    }

    /// The lane's oldest row is another one now, or there is none.
    fn progressed(&mut self, project: ProjectId, now: Instant) {
        let Some(lane) = self.lanes.get_mut(&project) else { return };
        self.by_ack.remove(&(lane.acked, project));
        self.by_age.remove(&(lane.oldest, project));
        lane.acked = now;
        if let Some(first) = lane.waiting.front() {
            first.lead();
            lane.oldest = first.at();
            self.by_age.insert((lane.oldest, project));
            if !lane.skip {
                self.by_ack.insert((now, project));
            }
        }
        self.weigh(project, now);
    }

    /// A lane without a batch on the way: gone if it is empty, else in line.
    fn settle(&mut self, project: ProjectId, now: Instant) {
        let Some(lane) = self.lanes.get_mut(&project) else { return };
        if lane.waiting.is_empty() {
            self.over.remove(&project);
            self.lanes.remove(&project);
            return;
        }
        lane.ready_since = Some(now);
        // What waited for the batch before it has waited enough.
        let ripe = lane.waiting.front().is_some_and(|row| now >= row.at() + self.limits.linger);
        lane.sealed = lane.skip || ripe || lane.is_full(&self.limits);
        if lane.sealed {
            self.sealed.push_back(project);
        } else {
            self.ready.push_back((now, project));
        }
    }

    /// Bytes of the lane or the shard have changed.
    fn weigh(&mut self, project: ProjectId, now: Instant) {
        let bytes = self.gauges.bytes;
        self.gauges.hot = if self.gauges.hot { bytes >= self.cool_below } else { bytes >= self.hot_at };
        let Some(lane) = self.lanes.get_mut(&project) else { return };
        match (lane.bytes >= self.hot_at, lane.over_since) {
            (true, None) => {
                lane.over_since = Some(now);
                self.over.insert(project);
            }
            (false, Some(_)) => {
                lane.over_since = None;
                self.over.remove(&project);
            }
            _ => {}
        }
    }

    /// Projects whose batch on the way is to be given up, since they have held things up for too long. Each is named once;
    /// idle ones of them are skipped without being named.
    pub fn cancels(&mut self, now: Instant) -> Vec<ProjectId> {
        if self.skip_due().is_some_and(|at| now >= at + ASLEEP) {
            self.floor = Some(now);
        }
        let due: Vec<_> = self.overdue(now).collect();
        due.into_iter().filter(|project| self.give_up(*project)).collect()
    }

    /// R-FB-6: the log must not grow on. Gives up on everybody whose oldest row is older than `age`, and on the biggest of
    /// a hot shard; answers as [`Self::cancels`] does.
    pub fn skip_slowest(&mut self, age: Duration, now: Instant) -> Vec<ProjectId> {
        let biggest = self.over.iter().max_by_key(|project| self.lanes.get(project).map(|lane| lane.bytes));
        let mut slow: Vec<_> = biggest.filter(|_| self.gauges.hot).copied().into_iter().collect();
        let old = self.by_age.iter().take_while(|(at, _)| now.saturating_duration_since(*at) >= age);
        slow.extend(old.map(|(_, project)| *project));
        slow.into_iter().filter(|project| self.give_up(*project)).collect()
    }

    fn overdue(&self, now: Instant) -> impl Iterator<Item = ProjectId> {
        let silent = self.by_ack.iter().take_while(move |(acked, _)| self.skip_at(*acked).is_some_and(|at| now >= at));
        let heavy = self.over.iter().filter(move |project| self.too_heavy_at(project).is_some_and(|at| now >= at));
        heavy.copied().chain(silent.map(|(_, project)| *project))
    }

    /// R-SH-3, for a project whose last progress was then; `None` during a known outage, which is nobody's fault.
    fn skip_at(&self, progress: Instant) -> Option<Instant> {
        let progress = self.floor.map_or(progress, |floor| progress.max(floor));
        (!self.outage).then(|| progress + self.limits.skip_after)
    }

    /// A lane that holds a hot share all the time *and* whose oldest row is as old: one that merely has much to do and
    /// gets on is not in anybody's way for so long.
    fn too_heavy_at(&self, project: &ProjectId) -> Option<Instant> {
        let lane = self.lanes.get(project).filter(|lane| !lane.skip)?;
        self.skip_at(lane.over_since?.max(lane.oldest))
    }

    /// True = its batch on the way must be cancelled first.
    fn give_up(&mut self, project: ProjectId) -> bool {
        let Some(lane) = self.lanes.get_mut(&project).filter(|lane| !lane.skip) else { return false };
        self.by_ack.remove(&(lane.acked, project));
        match &mut lane.flight {
            // Announcing is what would be done anyway; it goes on.
            Some(flight) if flight.job == Job::Skip => false,
            Some(flight) => {
                lane.skip = true;
                !std::mem::replace(&mut flight.cancelled, true)
            }
            None => {
                lane.skip = true;
                self.sealed.push_back(project);
                false
            }
        }
    }

    /// When to look again if nothing happens until then: the end of a linger, or somebody's patience.
    pub fn due(&self) -> Option<Instant> {
        let linger = self.ready.front().map(|(since, _)| *since + self.limits.linger);
        [linger, self.skip_due()].into_iter().flatten().min()
    }

    fn skip_due(&self) -> Option<Instant> {
        let silent = self.by_ack.first().and_then(|(acked, _)| self.skip_at(*acked));
        let heavy = self.over.iter().filter_map(|project| self.too_heavy_at(project)).min();
        [silent, heavy].into_iter().flatten().min()
    }

    /// Seals whatever there is and goes on doing so: memory is short, or the engine drains (R-MEM-6).
    pub fn seal(&mut self, sealing: bool) {
        self.sealing = sealing;
    }

    /// What is known to be away now, of whatever delivering needs.
    pub fn outage(&mut self, outage: bool, now: Instant) {
        if self.outage && !outage {
            self.floor = Some(now);
        }
        self.outage = outage;
    }

    /// Drops every row that waits, without acknowledging it, and forgets the batches on the way: the caller drops them.
    pub fn abandon(&mut self) {
        let limits = self.limits;
        let gauges = ShardGauges { rows: 0, bytes: 0, hot: false, ..self.gauges };
        *self = Self { gauges, outage: self.outage, floor: self.floor, steps: self.steps, ..Self::new(limits) };
    }

    /// What the shard holds.
    pub fn gauges(&self, now: Instant) -> ShardGauges {
        let oldest = self.by_age.first().map_or(Duration::ZERO, |(at, _)| now.saturating_duration_since(*at));
        ShardGauges { oldest, ..self.gauges }
    }

    /// Nothing waits and nothing is on the way.
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Rows and batches that were handled: what invariant 11 counts instead of time.
    pub fn steps(&self) -> u64 {
        self.steps
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;
