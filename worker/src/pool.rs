//! Which sources a worker should run (R-LEASE-3): a pure function of what the platform database says, so every worker
//! that sees the same comes to the same plan. The leases decide; a plan made from an old view costs a refused try.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use aura_domain::{SourceId, WorkerId};

/// A worker leaves an orphan to each one before it in the order of preference for so long: they may not see it yet, or
/// have died without anybody knowing.
const PATIENCE: Duration = Duration::from_secs(2);

/// A worker that is alive and stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) id: WorkerId,
    pub(crate) max_engines: usize,
}

/// A source whose engine is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) source: SourceId,
    pub(crate) holder: Holder,
}

/// Who runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Holder {
    /// A worker that is alive; it may be leaving.
    Live(WorkerId),
    /// Nobody, for so long.
    None(Duration),
}

/// What to do now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Try to win these sources' leases.
    pub(crate) seek: Vec<SourceId>,
    /// Drain this one and leave it to others.
    pub(crate) give_up: Option<SourceId>,
}

/// `settled`: the members have been the same for a while. Before, sources are taken from nobody: a rolling update would move
/// each of them many times.
pub(crate) fn plan(me: &WorkerId, members: &[Member], wanted: &[Wanted], settled: bool) -> Plan {
    let mut loads = Loads::new(members, wanted);
    let orphans = loads.orphans(wanted);
    let seek = orphans.iter().filter(|(source, since)| loads.assign(*source, *since, me)).map(|(source, _)| *source);
    let seek: Vec<_> = seek.collect();
    let give_up = (orphans.is_empty() && settled).then(|| loads.surplus(me, wanted)).flatten();
    Plan { seek, give_up }
}

/// Engines that each member runs, or is expected to take.
struct Loads<'a> {
    members: &'a [Member],
    engines: HashMap<&'a WorkerId, usize>,
}

impl<'a> Loads<'a> {
    fn new(members: &'a [Member], wanted: &[Wanted]) -> Self {
        let held = |member: &Member| wanted.iter().filter(|wanted| wanted.holder.is(&member.id)).count();
        let engines = members.iter().map(|member| (&member.id, held(member))).collect();
        Self { members, engines }
    }

    /// In an order that all agree on.
    fn orphans(&self, wanted: &[Wanted]) -> Vec<(SourceId, Duration)> {
        let since = |wanted: &Wanted| match wanted.holder {
            Holder::None(since) => Some((wanted.source, since)),
            Holder::Live(_) => None,
        };
        let mut orphans: Vec<_> = wanted.iter().filter_map(since).collect();
        orphans.sort_by_key(|(source, _)| *source);
        orphans
    }

    fn of(&self, member: &Member) -> usize {
        self.engines.get(&member.id).copied().unwrap_or(0)
    }

    /// Members with room, the one that should take the source first: the least loaded, among equals by rendezvous.
    fn preference(&self, source: SourceId) -> Vec<&'a Member> {
        let mut able: Vec<_> = self.members.iter().filter(|member| self.of(member) < member.max_engines).collect();
        able.sort_by_key(|member| (self.of(member), std::cmp::Reverse(score(&member.id, source)), member.id.0.clone()));
        able
    }

    /// Counts the orphan as its favourite's. Whether `me` should try for it: as the favourite, or since those before it in
    /// the order had their time.
    fn assign(&mut self, source: SourceId, since: Duration, me: &WorkerId) -> bool {
        let order = self.preference(source);
        let Some(first) = order.first() else { return false };
        *self.engines.entry(&first.id).or_default() += 1;
        let rank = order.iter().position(|member| member.id == *me);
        rank.and_then(|rank| u32::try_from(rank).ok()).is_some_and(|rank| since >= PATIENCE * rank)
    }

    /// What `me`, the most loaded of all, should leave to the least loaded that has room.
    fn surplus(&self, me: &WorkerId, wanted: &[Wanted]) -> Option<SourceId> {
        let most = self.members.iter().max_by_key(|member| (self.of(member), member.id.0.clone()))?;
        let able = self.members.iter().filter(|member| self.of(member) < member.max_engines);
        let least = able.min_by_key(|member| (self.of(member), member.id.0.clone()))?;
        if most.id != *me || self.of(most) < self.of(least) + 2 {
            return None;
        }
        let mine = wanted.iter().filter(|wanted| wanted.holder.is(me)).map(|wanted| wanted.source);
        mine.max_by_key(|source| (score(&least.id, *source), *source))
    }
}

impl Holder {
    fn is(&self, worker: &WorkerId) -> bool {
        matches!(self, Self::Live(holder) if holder == worker)
    }
}

/// Rendezvous hashing: the same for all workers of a version; different ones only cost a refused try.
fn score(worker: &WorkerId, source: SourceId) -> u64 {
    let mut hasher = DefaultHasher::new();
    (&worker.0, source).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests;
