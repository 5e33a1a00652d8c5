//! The leader's copy of all fronts' subscriptions of one source, indexed so that a row finds its subscribers without
//! looking at the others (R-RLS-7), see [`table`](super::table).

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use aura_domain::{ChangeKind, EventFilter, FrontId, Image, ProjectId, SubId, SubscriptionSpec};
use aura_pgsource::{
    TableCatalog,
    conditions::{Answers, Compiled, Explained},
    visibility::Identity,
};
use aura_wire::control::Subscription;

use super::table::{Matched, TableIndex};

/// A subscription whose filter was checked; of a wildcard with a filter, its part for one table.
#[derive(Debug, Clone)]
pub(crate) struct ActiveSubscription {
    pub(crate) sub_id: SubId,
    pub(crate) twin: SubId,
    pub(crate) identity: Arc<Identity>,
    pub(crate) event: EventFilter,
    /// Those that PostgreSQL decides come last.
    pub(crate) conditions: Vec<Arc<Compiled>>,
    pub(crate) select: Option<Vec<String>>,
}

impl ActiveSubscription {
    pub(super) fn wants(&self, kind: ChangeKind) -> bool {
        self.event.wants(kind)
    }

    /// For an explanation: which conditions, with which values, matched or not, decided by whom. `image` is the one that
    /// decides: the new one of INSERT and UPDATE, the old one of DELETE. What PostgreSQL decides is taken from `answers`;
    /// what isn't there yet is noted in it and [`Truth::Open`](aura_pgsource::conditions::Truth): ask with
    /// [`VisibilityPool::decide`](aura_pgsource::VisibilityPool::decide), then call again.
    pub(crate) fn explain<'a>(&'a self, image: &Image, answers: &mut Answers) -> Vec<Explained<'a>> {
        self.conditions.iter().map(|condition| condition.explain(image, answers)).collect()
    }
}

/// Where a subscription delivers.
#[derive(Debug, Clone)]
pub(crate) enum Active {
    /// One table.
    Table(TableKey, ActiveSubscription),
    /// A whole schema, or all, without a filter.
    Wildcard(ActiveSubscription),
    /// The same with a filter, which is compiled for each table.
    Filtered(Vec<(TableKey, ActiveSubscription)>),
}

/// A table in the client's words.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct TableKey {
    pub(crate) project: ProjectId,
    pub(crate) schema: String,
    pub(crate) table: String,
}

impl TableKey {
    /// The one table that a subscription names; `None` for a wildcard.
    pub(crate) fn of(spec: &SubscriptionSpec) -> Option<Self> {
        let table = spec.table.as_ref().filter(|_| spec.schema != "*")?;
        Some(Self { project: spec.project, schema: spec.schema.clone(), table: table.clone() })
    }

    /// Whether a subscription is about this table.
    pub(crate) fn is_named_by(&self, spec: &SubscriptionSpec) -> bool {
        let schema = spec.schema == "*" || spec.schema == self.schema;
        spec.project == self.project && schema && spec.table.as_ref().is_none_or(|table| *table == self.table)
    }

    /// The wildcards that this table is one of.
    fn patterns(&self) -> [Pattern; 3] {
        let any = || "*".to_owned();
        let pattern = |schema, table| Pattern { project: self.project, schema, table };
        [pattern(any(), None), pattern(self.schema.clone(), None), pattern(any(), Some(self.table.clone()))]
    }
}

/// What a wildcard names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Pattern {
    project: ProjectId,
    schema: String,
    table: Option<String>,
}

impl Pattern {
    fn of(spec: &SubscriptionSpec) -> Self {
        Self { project: spec.project, schema: spec.schema.clone(), table: spec.table.clone() }
    }
}

#[derive(Debug)]
struct Stored {
    subscription: Subscription,
    fronts: HashSet<FrontId>,
    /// The tables that it is indexed under, all but unfiltered wildcards; `None`: it doesn't deliver (yet).
    active: Option<Vec<TableKey>>,
}

#[derive(Debug, Default)]
struct FrontState {
    rev: u64,
    sub_ids: HashSet<SubId>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct SubscriptionIndex {
    stored: HashMap<SubId, Stored>,
    fronts: HashMap<FrontId, FrontState>,
    tables: HashMap<TableKey, TableIndex>,
    wildcards: HashMap<Pattern, BTreeMap<SubId, Arc<ActiveSubscription>>>,
    /// Wildcards with a filter: in every table's index, too, once compiled for it.
    filtered: HashMap<Pattern, HashSet<SubId>>,
}

impl SubscriptionIndex {
    /// Adds a subscription of a front, or another front's claim to it. `active` of `None` keeps it dormant.
    pub(crate) fn insert(&mut self, front: &FrontId, subscription: Subscription, active: Option<Active>) {
        let sub_id = subscription.sub_id;
        self.fronts.entry(front.clone()).or_default().sub_ids.insert(sub_id);
        let stored =
            self.stored.entry(sub_id).or_insert_with(|| Stored { subscription, fronts: HashSet::new(), active: None });
        stored.fronts.insert(front.clone());
        if let Some(active) = active {
            self.activate(sub_id, active);
        }
    }

    /// Makes a dormant subscription deliver.
    pub(crate) fn activate(&mut self, sub_id: SubId, active: Active) {
        let Some(stored) = self.stored.get_mut(&sub_id).filter(|stored| stored.active.is_none()) else { return };
        stored.active = Some(Vec::new());
        let pattern = Pattern::of(&stored.subscription.spec);
        match active {
            Active::Table(key, active) => self.put(&key, active),
            Active::Wildcard(active) => {
                self.wildcards.entry(pattern).or_default().insert(sub_id, Arc::new(active));
            }
            Active::Filtered(tables) => {
                self.filtered.entry(pattern).or_default().insert(sub_id);
                tables.into_iter().for_each(|(key, active)| self.put(&key, active));
            }
        }
    }

    /// Puts an active subscription under a table, in place of what it was there: its conditions were compiled (again).
    pub(crate) fn put(&mut self, key: &TableKey, active: ActiveSubscription) {
        let sub_id = active.sub_id;
        let stored = self.stored.get_mut(&sub_id).and_then(|stored| stored.active.as_mut());
        let Some(tables) = stored else { return };
        let table = self.tables.entry(key.clone()).or_default();
        if tables.contains(key) {
            table.remove(sub_id);
        } else {
            tables.push(key.clone());
        }
        table.insert(active);
    }

    /// It doesn't deliver any more, until it is asked about again.
    pub(crate) fn deactivate(&mut self, sub_id: SubId) {
        let Some(stored) = self.stored.get_mut(&sub_id) else { return };
        let pattern = Pattern::of(&stored.subscription.spec);
        for key in stored.active.take().into_iter().flatten() {
            let Some(table) = self.tables.get_mut(&key) else { continue };
            table.remove(sub_id);
            if table.is_empty() {
                self.tables.remove(&key);
            }
        }
        if let Some(subs) = self.wildcards.get_mut(&pattern) {
            subs.remove(&sub_id);
            if subs.is_empty() {
                self.wildcards.remove(&pattern);
            }
        }
        if let Some(subs) = self.filtered.get_mut(&pattern) {
            subs.remove(&sub_id);
            if subs.is_empty() {
                self.filtered.remove(&pattern);
            }
        }
    }

    /// A front no longer has these.
    pub(crate) fn remove(&mut self, front: &FrontId, sub_ids: impl IntoIterator<Item = SubId>) {
        for sub_id in sub_ids {
            if let Some(state) = self.fronts.get_mut(front) {
                state.sub_ids.remove(&sub_id);
            }
            let Some(stored) = self.stored.get_mut(&sub_id) else { continue };
            stored.fronts.remove(front);
            if stored.fronts.is_empty() {
                self.deactivate(sub_id);
                self.stored.remove(&sub_id);
            }
        }
    }

    /// Whatever the front had beyond `keep` is gone (the end of a snapshot).
    pub(crate) fn retain(&mut self, front: &FrontId, keep: &HashSet<SubId>) {
        let gone: Vec<_> = match self.fronts.get(front) {
            Some(state) => state.sub_ids.difference(keep).copied().collect(),
            None => return,
        };
        self.remove(front, gone);
    }

    /// The front has left.
    pub(crate) fn forget_front(&mut self, front: &FrontId) {
        self.retain(front, &HashSet::new());
        self.fronts.remove(front);
    }

    /// Revision and number of subscriptions that we have of a front.
    pub(crate) fn front_state(&self, front: &FrontId) -> Option<(u64, usize)> {
        self.fronts.get(front).map(|state| (state.rev, state.sub_ids.len()))
    }

    /// Notes the revision of a front.
    pub(crate) fn set_rev(&mut self, front: &FrontId, rev: u64) {
        self.fronts.entry(front.clone()).or_default().rev = rev;
    }

    /// All fronts with their revisions.
    pub(crate) fn revs(&self) -> Vec<(FrontId, u64)> {
        self.fronts.iter().map(|(front, state)| (front.clone(), state.rev)).collect()
    }

    /// Subscriptions that wait for their table.
    pub(crate) fn dormant(&self) -> Vec<Subscription> {
        self.stored.values().filter(|s| s.active.is_none()).map(|s| s.subscription.clone()).collect()
    }

    /// Whether the subscription delivers.
    pub(crate) fn is_active(&self, sub_id: SubId) -> bool {
        self.stored.get(&sub_id).is_some_and(|stored| stored.active.is_some())
    }

    /// Bindings whose event, table and filter fit the row; the image decides the filter: the new one of INSERT and UPDATE,
    /// the old one of DELETE. What PostgreSQL has not answered yet is noted as open; then the result is only a guess.
    pub(crate) fn matching(&self, key: &TableKey, kind: ChangeKind, image: &Image, answers: &mut Answers) -> Matched {
        let mut matched = Matched::default();
        if let Some(table) = self.tables.get(key) {
            table.matching(kind, image, answers, &mut matched);
        }
        if !self.wildcards.is_empty() {
            let all = key.patterns().into_iter().filter_map(|pattern| self.wildcards.get(&pattern));
            matched.found.extend(all.flat_map(BTreeMap::values).filter(|sub| sub.wants(kind)).cloned());
        }
        matched
    }

    /// Every subscription that delivers from this table, whatever its filter.
    pub(crate) fn of_table(&self, key: &TableKey) -> Vec<Arc<ActiveSubscription>> {
        let wildcards = key.patterns().into_iter().filter_map(|pattern| self.wildcards.get(&pattern));
        let mut found: Vec<_> = wildcards.flat_map(BTreeMap::values).cloned().collect();
        found.extend(self.tables.get(key).into_iter().flat_map(TableIndex::all).cloned());
        found
    }

    /// Wildcards with a filter that isn't compiled for this table yet.
    pub(crate) fn uncompiled(&self, key: &TableKey) -> Vec<Subscription> {
        if self.filtered.is_empty() {
            return Vec::new();
        }
        let named = key.patterns().into_iter().filter_map(|pattern| self.filtered.get(&pattern)).flatten();
        let table = self.tables.get(key);
        let missing = named.filter(|sub_id| table.is_none_or(|table| !table.has(**sub_id)));
        missing.filter_map(|sub_id| self.stored.get(sub_id)).map(|stored| stored.subscription.clone()).collect()
    }

    /// Subscriptions with a condition that was compiled against another type or collation than the column has now.
    pub(crate) fn stale(&self, key: &TableKey, catalog: &TableCatalog) -> Vec<Subscription> {
        let stale = self.tables.get(key).map(|table| table.stale(catalog)).unwrap_or_default();
        stale.iter().filter_map(|id| self.stored.get(id)).map(|stored| stored.subscription.clone()).collect()
    }
}

#[cfg(test)]
mod tests;
