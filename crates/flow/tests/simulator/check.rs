//! What must hold, by naive definitions. A violation is an error with the invariant's number (section I).

use std::collections::{BTreeMap, VecDeque};

use aura_domain::ProjectId;
use aura_flow::{Reader, StatusUpdate, Turn};

use crate::{
    bus::Front,
    source::{Ms, Source},
    worker::{Report, Settings},
    world::World,
};

/// What the reading task is late by at most: its own tick.
const TICK: Ms = 100;
/// A deadline that is found so late says that the process slept (ADR 10).
const ASLEEP: Ms = 5000;
/// To announce a skip: a publish, and one that was under way.
const ANNOUNCE: Ms = 3 * crate::bus::ACK_TIMEOUT;
/// The same with a bus that is well, and one batch that is announced before.
const WELL: Ms = 20;

/// Work of one project.
#[derive(Debug, Clone, Copy)]
struct Work {
    rows: usize,
    progress: Ms,
}

/// Watches one worker, step by step.
#[derive(Debug)]
pub(crate) struct Watch {
    settings: Settings,
    /// Largest event that was admitted.
    pub(crate) largest: usize,
    work: BTreeMap<ProjectId, Work>,
    /// Nothing was known to be wrong since then.
    well_since: Ms,
    session: Option<Watched>,
    paused: bool,
    last_read: Option<(u64, u64)>,
    /// The session began where the one before it ended of itself.
    clean: bool,
    acks: u64,
    behind_since: Option<Ms>,
    /// Last acknowledgement, or end of a known outage.
    acked_at: Ms,
    /// Of two sessions, in between: that shows when the next one begins.
    unseen: bool,
    known: bool,
    /// Of a run in which nothing but one project is stuck: ends of transactions that aren't confirmed, and when each was read.
    passing: Option<VecDeque<(u64, Ms)>>,
    pub(crate) statuses: u64,
    pub(crate) failures: u64,
    pub(crate) violations: Vec<String>,
}

/// What is known of a session.
#[derive(Debug, Clone, Copy)]
struct Watched {
    flushed: u64,
    sent: Option<Ms>,
    advanced: Option<Ms>,
    interval: Ms,
    began: Ms,
}

impl Watch {
    pub(crate) fn new(settings: Settings) -> Self {
        Self {
            settings,
            largest: 0,
            work: BTreeMap::new(),
            well_since: 0,
            session: None,
            paused: false,
            last_read: None,
            clean: false,
            acks: 0,
            behind_since: None,
            acked_at: 0,
            unseen: false,
            known: false,
            passing: None,
            statuses: 0,
            failures: 0,
            violations: Vec::new(),
        }
    }

    /// Everything is well but for one project: from here on nothing waits longer for it than it may.
    pub(crate) fn strictly(&mut self) {
        self.passing = Some(VecDeque::new());
    }

    /// A transaction was read to its end.
    pub(crate) fn committed(&mut self, end: u64, now: Ms) {
        if let Some(passing) = &mut self.passing {
            passing.push_back((end, now));
        }
    }

    fn must(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds && self.violations.len() < 5 {
            self.violations.push(what());
        }
    }

    pub(crate) fn started(&mut self, source: &Source, start: u64, confirmed: u64, now: Ms) {
        let interval = (source.timeout() / 4).clamp(100, 10_000);
        self.must(start >= confirmed, || format!("2: starts at {start}, below the confirmed {confirmed}"));
        let late = now.saturating_sub(self.acked_at + self.settings.stall_limit);
        if std::mem::take(&mut self.unseen) || late >= ASLEEP {
            self.acked_at = now;
        }
        self.session = Some(Watched { flushed: confirmed, sent: None, advanced: None, interval, began: now });
        self.behind_since = None;
    }

    /// After an end that was verified only what is behind it comes again (15).
    pub(crate) fn resumed(&mut self, start: u64, verified: Option<u64>) {
        let behind = verified.is_none_or(|verified| start >= verified);
        self.must(behind, || format!("15: verified {verified:?}, and reads from {start} again"));
    }

    pub(crate) fn refiltered(&mut self, reader: &Reader) {
        self.must(!reader.in_transaction(), || "R-HOLE-2: a change of the filter inside a transaction".to_owned());
        self.clean = true;
        self.session = None;
    }

    pub(crate) fn closed(&mut self) {
        (self.session, self.clean) = (None, false);
    }

    pub(crate) fn read(&mut self, end: u64, lsn: u64) {
        let repeated = self.clean && self.last_read.is_some_and(|last| (end, lsn) <= last);
        self.must(!repeated, || format!("R-HOLE-2: row {lsn} comes again after a change of the filter"));
        self.last_read = Some((end, lsn));
    }

    pub(crate) fn admitted(&mut self, project: ProjectId, now: Ms) {
        self.work.entry(project).or_insert(Work { rows: 0, progress: now }).rows += 1;
    }

    pub(crate) fn acked(&mut self, project: ProjectId, rows: usize, now: Ms) {
        self.acks += rows as u64;
        self.progress(now);
        let work = self.work.get_mut(&project).expect("it was admitted");
        work.rows -= rows;
        work.progress = now;
        if work.rows == 0 {
            self.work.remove(&project);
        }
    }

    /// The time of a stall begins anew.
    fn progress(&mut self, now: Ms) {
        self.acked_at = now;
        self.unseen |= self.session.is_none();
    }

    pub(crate) fn abandoned(&mut self) {
        self.work.clear();
        self.last_read = None;
    }

    /// Something is wrong around the worker, which may be known to it.
    pub(crate) fn outage(&mut self, ill: bool, known: bool, now: Ms) {
        if ill {
            self.well_since = now;
        }
        if known || std::mem::replace(&mut self.known, known) {
            self.progress(now);
        }
        self.known = known;
    }

    /// It did not run for a while: nobody can blame it for what it didn't do.
    pub(crate) fn slept(&mut self, now: Ms) {
        self.well_since = now;
        self.progress(now);
        self.behind_since = None;
        if let Some(session) = &mut self.session {
            session.sent = session.sent.map(|_| now);
            session.began = now;
        }
    }

    pub(crate) fn turn(&mut self, reader: &Reader, turn: Turn) {
        let pausing = turn == Turn::Paused;
        let before = std::mem::replace(&mut self.paused, pausing);
        self.must(before != pausing, || format!("7: {turn:?} twice"));
        let (used, quota) = (reader.quota().used(), reader.quota().limit());
        let lines = if pausing { used * 10 >= quota * 8 } else { used * 10 < quota * 5 };
        self.must(lines, || format!("7: {turn:?} at {used} of {quota}"));
    }

    pub(crate) fn status(&mut self, source: &Source, status: StatusUpdate, now: Ms) {
        self.statuses += 1;
        let Some(session) = self.session else { return };
        let flushed = status.flushed.0;
        if let Some(passing) = &mut self.passing {
            while passing.front().is_some_and(|(end, _)| *end <= flushed) {
                passing.pop_front();
            }
        }
        self.must(flushed > 0 && flushed >= session.flushed, || {
            format!("2: flush {flushed} after {}", session.flushed)
        });
        let advanced = flushed > session.flushed;
        if advanced {
            self.behind_since = None;
            let apart = session.advanced.map(|at| now - at);
            let interval = self.settings.advance;
            self.must(apart.is_none_or(|apart| apart >= interval), || format!("12: two advances {apart:?} ms apart"));
            self.must(flushed <= source.wal_end, || format!("1: flush {flushed} beyond the log"));
        }
        self.silence(session, now);
        let advanced = if advanced { Some(now) } else { session.advanced };
        self.session = Some(Watched { flushed, sent: Some(now), advanced, ..session });
    }

    fn silence(&mut self, session: Watched, now: Ms) {
        let silence = now - session.sent.unwrap_or(session.began);
        self.must(silence <= session.interval + TICK, || format!("13: no status for {silence} ms"));
    }

    /// After every step.
    pub(crate) fn step(&mut self, reader: &Reader, held: usize, now: Ms) {
        let quota = reader.quota();
        let (used, limit) = (quota.used(), quota.limit() + self.largest + quota.overdraft());
        self.must(used == held, || format!("5: {used} used and {held} held by live reservations"));
        self.must(used <= limit, || format!("5: {used} used, {limit} allowed"));
        self.must(quota.counts().resume_by_tick == 0, || "8: a wake-up was lost".to_owned());
        if let Some(session) = self.session {
            self.silence(session, now);
            self.trailing(reader, session, now);
            self.stalled(session, now);
        }
        let passes = self.settings.skip_after + self.settings.advance + TICK + WELL;
        if let Some((end, read)) = self.passing.as_ref().and_then(|passing| passing.front().copied()) {
            self.must(now - read <= passes, || format!("10: {end} is not passed after {} ms", now - read));
        }
        let patience = self.settings.skip_after + ANNOUNCE;
        let silent = self.work.iter().map(|(project, work)| (now - work.progress.max(self.well_since), *project)).max();
        if let Some((silent, project)) = silent {
            self.must(silent <= patience, || format!("10: {project} without progress for {silent} ms"));
        }
    }

    /// What is resolved is sent within the interval and a tick, with no further event.
    fn trailing(&mut self, reader: &Reader, session: Watched, now: Ms) {
        if reader.resolved().0 <= session.flushed {
            self.behind_since = None;
            return;
        }
        let since = *self.behind_since.get_or_insert(now);
        let allowed = self.settings.advance + TICK;
        self.must(now - since <= allowed, || format!("12: resolved and not sent for {} ms", now - since));
    }

    /// Whoever has work, moves in no way and knows of no outage lets go of the slot.
    fn stalled(&mut self, session: Watched, now: Ms) {
        let Some(began) = self.work.values().map(|work| work.progress).min() else { return };
        // One that has just begun finds out at its first step.
        let still = (now - began.max(self.acked_at)).min(self.settings.stall_limit + now - session.began);
        self.must(still <= self.settings.stall_limit + TICK, || format!("13: holds the slot, still for {still} ms"));
    }

    /// The machines ended the pipeline.
    pub(crate) fn failed(&mut self, reader: &Reader) {
        self.failures += 1;
        let works = !reader.is_settled() || reader.quota().used() > 0;
        self.must(works, || "13: failed with nothing to do".to_owned());
        self.closed();
    }

    /// Invariant 11, of the whole life: two steps an ack and one a look, and what reading cost (projects of a transaction).
    pub(crate) fn cost(&mut self, reader: &Reader, shard_steps: u64, looks: u64) {
        let admitted = reader.admitted();
        let allowed = 12 * admitted + 2 * looks;
        self.must(reader.steps() <= allowed, || format!("11: {} steps for {admitted} rows", reader.steps()));
        self.must(shard_steps <= 3 * admitted + looks, || format!("11: {shard_steps} steps of shards"));
    }
}

/// Looks at the log from the front, each transaction once: what is confirmed is with the bus (1, and G7).
#[derive(Debug, Default)]
pub(crate) struct Confirmed {
    checked: usize,
}

impl Confirmed {
    /// Every row that was promised and ends at or below `flushed` was received or announced as missing.
    pub(crate) fn check(&mut self, world: &World, flushed: u64) -> Result<(), String> {
        while let Some(transaction) = world.source.log.get(self.checked).filter(|tx| tx.end <= flushed) {
            delivered(world, self.checked).map_err(|row| format!("1: {flushed} was sent and {row} isn't delivered"))?;
            let _ = transaction;
            self.checked += 1;
        }
        Ok(())
    }
}

/// The first promised row of a transaction that nobody has and nobody was told of.
fn delivered(world: &World, transaction: usize) -> Result<(), String> {
    let transaction = &world.source.log[transaction];
    for row in &transaction.rows {
        let front = &world.bus.fronts[world.project(row.table)];
        let here = front.has(transaction.commit, row.lsn, row.table) || front.knows_gap(transaction.commit, row.lsn);
        if world.platform.promised(row.table, transaction.commit) && !here {
            return Err(format!("row {} of table {} (commit {})", row.lsn, row.table, transaction.commit));
        }
    }
    Ok(())
}

/// At the end of everything.
pub(crate) fn at_the_end(world: &World) -> Result<(), String> {
    for transaction in 0..world.source.log.len() {
        delivered(world, transaction).map_err(|row| format!("3: {row} was never delivered"))?;
    }
    for (project, front) in world.bus.fronts.iter().enumerate() {
        for (commit, lsn, table) in &front.rows {
            let fine = world.project(*table) == project && world.platform.eligible(*table, *commit);
            if !fine {
                return Err(format!("R-REG-8: row {lsn} of table {table} (commit {commit}) was delivered"));
            }
        }
        if let Some(place) = front.disorder.iter().find(|place| !front.knows_gap(place.commit, place.lsn)) {
            return Err(format!("4: {place:?} came after a later row of its project"));
        }
    }
    Ok(())
}

/// Whoever is stuck costs nobody else a row (10).
pub(crate) fn only_the_first_misses_anything(world: &World) -> Result<(), String> {
    let other = world.bus.fronts.iter().skip(1).position(|front| !front.gaps.is_empty());
    other.map_or(Ok(()), |project| Err(format!("10: project {} was told of a loss", project + 1)))
}

/// What a worker that was asked to end says (14, 15). `patience` is what it had.
pub(crate) fn report(world: &World, report: &Report, patience: Ms) -> Result<(), String> {
    let took = report.at - report.triggered;
    if took > patience {
        return Err(format!("14: gone after {took} ms"));
    }
    if report.admitted != report.delivered + report.skipped + report.abandoned {
        return Err(format!("14: the rows don't add up: {report:?}"));
    }
    if report.overrun {
        return Err(format!("14: a phase did not obey its limit: {report:?}"));
    }
    let Some((verified, restarts)) = report.verified else { return Ok(()) };
    if world.source.confirmed < verified && world.source.restarts == restarts {
        return Err(format!("15: verified {verified}, and the slot says {}", world.source.confirmed));
    }
    let until = world.source.log.partition_point(|transaction| transaction.end <= verified);
    for transaction in 0..until {
        delivered(world, transaction).map_err(|row| format!("15: verified {verified}, and not {row}"))?;
    }
    Ok(())
}

impl Front {
    fn has(&self, commit: u64, lsn: u64, table: usize) -> bool {
        self.rows.contains(&(commit, lsn, table))
    }

    fn knows_gap(&self, commit: u64, lsn: u64) -> bool {
        let at = (commit, lsn);
        self.gaps.iter().any(|(from, to)| (from.commit, from.lsn) <= at && at <= (to.commit, to.lsn))
    }
}
