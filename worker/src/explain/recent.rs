//! The last changes of an engine and what became of them, so that somebody can still be told why. Bounded in number and
//! bytes; a project that writes much pushes out its own changes, not those of the others.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aura_domain::{Change, ChangeKind, Position, ProjectId, SourceId, explain::RememberedRange};
use aura_pgsource::visibility::Identity;
use aura_wire::GapReason;
use jiff::Timestamp;
use serde_json::{Map, Value};

use super::row;
use crate::{
    engine::{memory_of, registry::RegisteredTable, shard::Row},
    subs::index::TableKey,
};

/// Most changes that are remembered, whatever their size.
const CHANGES: usize = 1000;
/// A row that would take more than this part of the bytes is remembered without its images.
const LARGE: usize = 64;
/// Most identities that are remembered with a row.
const UNJUDGED: usize = 16;
/// What is remembered of a row besides its images.
const OVERHEAD: usize = size_of::<Remembered>();

/// What became of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is being judged, or waits for the source or the bus.
    OnTheWay,
    /// The bus has received it.
    Sent(Timestamp),
    /// Its table was turned off below it.
    Disabled(Timestamp),
    /// Nobody got it, and whom it concerned was told of a gap.
    Lost(Timestamp, GapReason),
}

/// A change that is remembered.
#[derive(Debug, Clone)]
pub(crate) struct Remembered {
    pub(crate) position: Position,
    pub(crate) kind: ChangeKind,
    pub(crate) table: Arc<RegisteredTable>,
    /// `None`: it was too large.
    pub(crate) change: Option<Arc<Change>>,
    pub(crate) fate: Fate,
    /// Who got a gap in its place, since nobody could judge it for them, and why.
    pub(crate) unjudged: Vec<(Arc<Identity>, &'static str)>,
    bytes: usize,
}

#[derive(Debug, Default)]
struct History {
    /// By position.
    changes: VecDeque<Remembered>,
    bytes: usize,
}

#[derive(Debug, Default)]
struct State {
    projects: HashMap<ProjectId, History>,
    changes: usize,
    bytes: usize,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Recent {
    /// `CDC_EXPLAIN_MEMORY`; 0 = nothing is remembered.
    limit: usize,
    gauge: metrics::Gauge,
    state: Mutex<State>,
}

impl Recent {
    pub(crate) fn new(source: SourceId, limit: usize) -> Self {
        let gauge = metrics::gauge!("cdc_explain_bytes", "source" => source.to_string());
        Self { limit, gauge, state: Mutex::default() }
    }

    /// These rows of one project are about to be judged.
    pub(crate) fn begin(&self, rows: &[Row]) {
        let Some(first) = rows.first().filter(|_| self.limit > 0) else { return };
        let project = first.body.table.project.id;
        let mut state = self.lock();
        for row in &rows[rows.len().saturating_sub(CHANGES)..] {
            state.remember(project, self.remembered(row));
        }
        state.forget_beyond(project, self.limit);
        self.gauge.set(u32::try_from(state.bytes).unwrap_or(u32::MAX));
    }

    fn remembered(&self, row: &Row) -> Remembered {
        let change = &row.body.change;
        let whole = OVERHEAD + memory_of(change);
        let fits = whole <= self.limit / LARGE;
        Remembered {
            position: change.position,
            kind: change.kind,
            table: Arc::clone(&row.body.table),
            change: fits.then(|| Arc::clone(change)),
            fate: Fate::OnTheWay,
            unjudged: Vec::new(),
            bytes: if fits { whole } else { OVERHEAD },
        }
    }

    /// This is what became of the rows in the range of which nothing was known.
    pub(crate) fn end(&self, project: ProjectId, range: Option<(Position, Position)>, fate: Fate) {
        let Some((from, to)) = range.filter(|_| self.limit > 0) else { return };
        let mut state = self.lock();
        let Some(history) = state.projects.get_mut(&project) else { return };
        let start = history.changes.partition_point(|known| known.position < from);
        for known in history.changes.range_mut(start..).take_while(|known| known.position <= to) {
            if known.fate == Fate::OnTheWay {
                known.fate = fate;
            }
        }
    }

    /// Nobody could judge the row at a position for these, the first few of whom are remembered.
    pub(crate) fn unjudged(
        &self,
        project: ProjectId,
        position: Position,
        who: impl Iterator<Item = (Arc<Identity>, &'static str)>,
    ) {
        let mut state = self.lock();
        let Some(history) = state.projects.get_mut(&project) else { return };
        let Ok(at) = history.changes.binary_search_by_key(&position, |known| known.position) else { return };
        history.changes[at].unjudged = who.take(UNJUDGED).collect();
    }

    /// The change at a position.
    pub(crate) fn at(&self, project: ProjectId, position: Position) -> Option<Remembered> {
        let state = self.lock();
        let changes = &state.projects.get(&project)?.changes;
        let found = changes.binary_search_by_key(&position, |known| known.position).ok()?;
        changes.get(found).cloned()
    }

    /// The newest change of a table.
    pub(crate) fn newest(&self, key: &TableKey) -> Option<Remembered> {
        let state = self.lock();
        state.projects.get(&key.project)?.changes.iter().rev().find(|known| known.table.key == *key).cloned()
    }

    /// The newest change of a table's row that has these values.
    pub(crate) fn newest_of(&self, key: &TableKey, values: &Map<String, Value>) -> Option<Remembered> {
        let state = self.lock();
        let changes = state.projects.get(&key.project)?.changes.iter().rev();
        changes.filter(|known| known.table.key == *key).find(|known| row::has(known, values)).cloned()
    }

    /// What is remembered of a table.
    pub(crate) fn range(&self, key: &TableKey) -> Option<RememberedRange> {
        let state = self.lock();
        let changes = &state.projects.get(&key.project)?.changes;
        let mut of_table = changes.iter().filter(|known| known.table.key == *key).map(|known| known.position);
        let from = of_table.next()?;
        let (count, to) = of_table.fold((1, from), |(count, _), position| (count + 1, position));
        Some(RememberedRange { from, to, changes: count })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn remember(&mut self, project: ProjectId, new: Remembered) {
        let history = self.projects.entry(project).or_default();
        // A row that is read again is the same row.
        let at = history.changes.partition_point(|known| known.position < new.position);
        let known = history.changes.get_mut(at).filter(|known| known.position == new.position);
        let before = known.as_ref().map_or(0, |known| known.bytes);
        self.changes += usize::from(known.is_none());
        self.bytes = self.bytes + new.bytes - before;
        history.bytes = history.bytes + new.bytes - before;
        match known {
            Some(known) => *known = new,
            None => history.changes.insert(at, new),
        }
    }

    /// Takes the oldest of the project that has just written, if it holds more than its share; else of the largest.
    fn forget_beyond(&mut self, writer: ProjectId, limit: usize) {
        while self.changes > CHANGES || self.bytes > limit {
            let (too_many, share) = (self.changes > CHANGES, self.projects.len());
            let size = |history: &History| if too_many { history.changes.len() } else { history.bytes };
            let total = if too_many { self.changes } else { self.bytes };
            let greedy = self.projects.get(&writer).is_some_and(|history| size(history) * share >= total);
            let largest = || self.projects.iter().max_by_key(|(_, history)| size(history)).map(|(project, _)| *project);
            let whose = if greedy { Some(writer) } else { largest() };
            let Some(whose) = whose else { return };
            self.forget_oldest(whose);
        }
    }

    fn forget_oldest(&mut self, whose: ProjectId) {
        let Some(history) = self.projects.get_mut(&whose) else { return };
        if let Some(oldest) = history.changes.pop_front() {
            self.changes -= 1;
            self.bytes -= oldest.bytes;
            history.bytes -= oldest.bytes;
        }
        if history.changes.is_empty() {
            self.projects.remove(&whose);
        }
    }
}
