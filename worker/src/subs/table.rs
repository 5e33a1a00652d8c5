//! Subscriptions of one table. Those with an `eq` or `in` that has keys are found under column and value; the others share
//! what is evaluated: each distinct condition once per row, however many have it. So cost follows the matching ones.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use aura_domain::{ChangeKind, Image, SubId};
use aura_pgsource::{
    TableCatalog,
    conditions::{Answers, Compiled, DecidedBy, Key, Lookup, Operator, Shape, Truth},
};

use super::index::ActiveSubscription;

type Subs = BTreeMap<SubId, Arc<ActiveSubscription>>;

/// What became of a row.
#[derive(Debug, Default)]
pub(crate) struct Matched {
    pub(crate) found: Vec<Arc<ActiveSubscription>>,
    /// Whose filter could not be decided, while nothing else in it excludes the row: they are to be told (R-RLS-6), if they
    /// may see the row at all.
    pub(crate) failed: Vec<Arc<ActiveSubscription>>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct TableIndex {
    all: Subs,
    unfiltered: Subs,
    keyed: HashMap<Lookup, HashMap<Key, Subs>>,
    /// Those without a key, under their first condition.
    scanned: HashMap<Arc<Compiled>, Subs>,
    /// One of each distinct condition, and how many have it: equal conditions are the same one.
    conditions: HashMap<Arc<Compiled>, usize>,
    /// What conditions were compiled against, and how many.
    shapes: HashMap<(String, Shape), usize>,
}

/// Conditions of one row that were evaluated, by address: equal ones share it.
type Evaluated = HashMap<*const Compiled, Truth>;

impl TableIndex {
    pub(super) fn insert(&mut self, mut sub: ActiveSubscription) {
        for condition in &mut sub.conditions {
            let (shared, count) = match self.conditions.get_key_value(condition) {
                Some((shared, count)) => (Arc::clone(shared), count + 1),
                None => (Arc::clone(condition), 1),
            };
            *self.shapes.entry((condition.column().to_owned(), condition.shape())).or_default() += 1;
            *condition = Arc::clone(&shared);
            self.conditions.insert(shared, count);
        }
        let sub = Arc::new(sub);
        self.all.insert(sub.sub_id, Arc::clone(&sub));
        if let Some((lookup, keys)) = key_condition(&sub) {
            let values = self.keyed.entry(lookup).or_default();
            for key in keys {
                values.entry(key.clone()).or_default().insert(sub.sub_id, Arc::clone(&sub));
            }
        } else if let Some(first) = sub.conditions.first() {
            self.scanned.entry(Arc::clone(first)).or_default().insert(sub.sub_id, sub);
        } else {
            self.unfiltered.insert(sub.sub_id, sub);
        }
    }

    pub(super) fn remove(&mut self, sub_id: SubId) {
        let Some(sub) = self.all.remove(&sub_id) else { return };
        if let Some((lookup, keys)) = key_condition(&sub) {
            if let Some(values) = self.keyed.get_mut(&lookup) {
                keys.iter().for_each(|key| take_out(values, key, sub_id));
                if values.is_empty() {
                    self.keyed.remove(&lookup);
                }
            }
        } else if let Some(first) = sub.conditions.first() {
            take_out(&mut self.scanned, first, sub_id);
        } else {
            self.unfiltered.remove(&sub_id);
        }
        for condition in &sub.conditions {
            count_down(&mut self.shapes, &(condition.column().to_owned(), condition.shape()));
            count_down(&mut self.conditions, condition);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn has(&self, sub_id: SubId) -> bool {
        self.all.contains_key(&sub_id)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<ActiveSubscription>> {
        self.all.values()
    }

    /// Adds the subscriptions that want the row.
    pub(super) fn matching(&self, kind: ChangeKind, image: &Image, answers: &mut Answers, matched: &mut Matched) {
        matched.found.extend(self.unfiltered.values().filter(|sub| sub.wants(kind)).cloned());
        let mut row = Row { image, answers, evaluated: HashMap::new() };
        for (lookup, values) in &self.keyed {
            match lookup.key(image) {
                Ok(key) => row.sort(kind, key.and_then(|key| values.get(&key)).into_iter(), matched),
                // Of another type than that of the conditions: they fail, unless another one excludes the row.
                Err(_) => row.sort(kind, values.values(), matched),
            }
        }
        for (first, subs) in &self.scanned {
            if subs.values().any(|sub| sub.wants(kind)) && !matches!(row.truth(first), Truth::False | Truth::Null) {
                row.sort(kind, std::iter::once(subs), matched);
            }
        }
    }

    /// Columns that have keys, and conditions that are evaluated for every row.
    #[cfg(test)]
    pub(super) fn groups(&self) -> (usize, usize) {
        (self.keyed.len(), self.scanned.len())
    }

    #[cfg(test)]
    pub(super) fn distinct_conditions(&self) -> usize {
        self.conditions.len()
    }

    /// Subscriptions with a condition on a column that has another type or collation now, or is gone.
    pub(super) fn stale(&self, catalog: &TableCatalog) -> Vec<SubId> {
        let is_stale = |(column, shape): &(String, Shape)| {
            catalog.column(column).is_none_or(|n| Shape::of(&catalog.columns[n]) != *shape)
        };
        if !self.shapes.keys().any(is_stale) {
            return Vec::new();
        }
        let stale = |sub: &&Arc<ActiveSubscription>| {
            sub.conditions.iter().any(|condition| is_stale(&(condition.column().to_owned(), condition.shape())))
        };
        self.all.values().filter(stale).map(|sub| sub.sub_id).collect()
    }
}

/// A row on its way through the index.
struct Row<'a> {
    image: &'a Image,
    answers: &'a mut Answers,
    evaluated: Evaluated,
}

impl Row<'_> {
    fn truth(&mut self, condition: &Arc<Compiled>) -> Truth {
        if let Some(truth) = self.evaluated.get(&Arc::as_ptr(condition)) {
            return *truth;
        }
        let truth = condition.truth(self.image, self.answers);
        self.evaluated.insert(Arc::as_ptr(condition), truth);
        truth
    }

    fn sort<'s>(&mut self, kind: ChangeKind, subs: impl Iterator<Item = &'s Subs>, matched: &mut Matched) {
        for sub in subs.flat_map(BTreeMap::values).filter(|sub| sub.wants(kind)) {
            match self.all_hold(sub) {
                Truth::True => matched.found.push(Arc::clone(sub)),
                Truth::Failed => matched.failed.push(Arc::clone(sub)),
                _ => {}
            }
        }
    }

    /// All conditions together. One that excludes the row does so whatever became of the others.
    fn all_hold(&mut self, sub: &ActiveSubscription) -> Truth {
        let mut all = Truth::True;
        for condition in &sub.conditions {
            match (self.truth(condition), all) {
                (Truth::False | Truth::Null, _) => return Truth::False,
                (Truth::Open, _) => all = Truth::Open,
                (Truth::Failed, Truth::True) => all = Truth::Failed,
                _ => {}
            }
        }
        all
    }
}

/// The condition that a subscription is found by: an `eq` if there is one, else an `in`.
fn key_condition(sub: &ActiveSubscription) -> Option<(Lookup, &[Key])> {
    let keyed = |condition: &&Arc<Compiled>| condition.decided_by() == DecidedBy::Us && condition.lookup().is_some();
    let eq = |condition: &&Arc<Compiled>| condition.condition().operator == Operator::Eq;
    let best = sub.conditions.iter().filter(keyed).find(eq).or_else(|| sub.conditions.iter().find(keyed));
    best.and_then(|condition| condition.lookup())
}

fn take_out<K: std::hash::Hash + Eq>(map: &mut HashMap<K, Subs>, key: &K, sub_id: SubId) {
    if let Some(subs) = map.get_mut(key) {
        subs.remove(&sub_id);
        if subs.is_empty() {
            map.remove(key);
        }
    }
}

fn count_down<K: std::hash::Hash + Eq>(counts: &mut HashMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}
