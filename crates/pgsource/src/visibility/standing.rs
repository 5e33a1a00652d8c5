//! How checks went for whom, so that nobody is held up twice by the same one (R-RLS-6).
//!
//! Who raised an error is asked apart from the others, whose transaction it would abort. Who ran into the time limit is
//! not asked in a batch again before a probe, which nobody waits for, went well.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use aura_domain::Relation;

/// Time-outs in a row after which the next probe has to wait.
const STRIKES: u32 = 2;
/// Distinct ones of a group with a time-out within [`GROUP_WINDOW`] that keep all of it from being asked.
const GROUP_STRIKES: usize = 3;
const GROUP_WINDOW: Duration = Duration::from_secs(10);
/// How long a circuit stays open before the next probe.
const OPEN: Duration = Duration::from_secs(30);
/// Nobody probes for who has left, and an error of long ago says nothing.
const FORGET: Duration = Duration::from_secs(90);
/// Remembered per table; the oldest are forgotten first.
const MAX_REMEMBERED: usize = 10_000;

/// How somebody is to be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    /// With the others.
    Together,
    /// Under a savepoint: the last check raised an error.
    Apart,
    /// Not now.
    Not {
        /// The caller must probe, in the background, and report how it went or that it is put off.
        probe: bool,
    },
}

/// See the module. `K` is asked; the circuit of a `G` opens for all of its members. What is said of one `T`, a table
/// unless said otherwise, says nothing of another.
#[derive(Debug)]
pub(crate) struct Standing<K, G, T = Relation>(Mutex<HashMap<T, HashMap<K, Entry<G>>>>);

#[derive(Debug)]
struct Entry<G> {
    group: G,
    last: Instant,
    fault: Fault,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Raised,
    TimedOut { strikes: u32, probing: bool },
}

impl<K, G, T> Default for Standing<K, G, T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Hash + Eq + Clone, G: PartialEq + Clone, T: Hash + Eq + Clone> Standing<K, G, T> {
    /// How to ask each of `who`, members of the `group`.
    pub(crate) fn how<'k>(
        &self,
        relation: &T,
        group: &G,
        who: impl IntoIterator<Item = &'k K>,
        now: Instant,
    ) -> Vec<Ask>
    where
        K: 'k,
    {
        let mut tables = self.lock();
        let who = who.into_iter();
        let Some(table) = tables.get_mut(relation) else { return who.map(|_| Ask::Together).collect() };
        table.retain(|_, entry| now.duration_since(entry.last) < FORGET);
        let open = group_is_open(table, group);
        let asks = who.map(|key| match table.get_mut(key) {
            Some(entry) => entry.ask(open, now),
            None if open => Ask::Not { probe: false },
            None => Ask::Together,
        });
        asks.collect()
    }

    /// The same where nobody is a member of a group. One pass over what is remembered, however many there are.
    pub(crate) fn how_alone<'k>(&self, relation: &T, who: impl IntoIterator<Item = &'k K>, now: Instant) -> Vec<Ask>
    where
        K: 'k,
    {
        let mut tables = self.lock();
        let mut table = tables.get_mut(relation);
        if let Some(table) = &mut table {
            table.retain(|_, entry| now.duration_since(entry.last) < FORGET);
        }
        let asks = who.into_iter().map(|key| {
            let entry = table.as_mut().and_then(|table| table.get_mut(key));
            entry.map_or(Ask::Together, |entry| entry.ask(false, now))
        });
        asks.collect()
    }

    /// Whether somebody must not be asked though a check has begun.
    pub(crate) fn is_open(&self, relation: &T, group: &G, key: &K) -> bool {
        let tables = self.lock();
        let timed_out = |entry: &Entry<G>| matches!(entry.fault, Fault::TimedOut { .. });
        let open = |table: &HashMap<K, Entry<G>>| table.get(key).is_some_and(timed_out) || group_is_open(table, group);
        tables.get(relation).is_some_and(open)
    }

    /// The check raised an error.
    pub(crate) fn raised(&self, relation: &T, group: &G, key: &K, now: Instant) {
        self.note(relation, group, key, now, |_| Fault::Raised);
    }

    /// The check ran into the limit.
    pub(crate) fn timed_out(&self, relation: &T, group: &G, key: &K, now: Instant) {
        self.note(relation, group, key, now, |before| match before {
            Some(Fault::TimedOut { strikes, .. }) => Fault::TimedOut { strikes: strikes + 1, probing: false },
            _ => Fault::TimedOut { strikes: 1, probing: false },
        });
    }

    /// A probe went well. (Who raised an error stays apart for a while: what it is asked together with others may fail
    /// where it doesn't.)
    pub(crate) fn recovered(&self, relation: &T, key: &K) {
        let mut tables = self.lock();
        let Some(table) = tables.get_mut(relation) else { return };
        table.remove(key);
        if table.is_empty() {
            tables.remove(relation);
        }
    }

    /// A probe could not be started: it is still to be made.
    pub(crate) fn put_off(&self, relation: &T, key: &K) {
        let mut tables = self.lock();
        if let Some(entry) = tables.get_mut(relation).and_then(|table| table.get_mut(key))
            && let Fault::TimedOut { probing, .. } = &mut entry.fault
        {
            *probing = false;
        }
    }

    fn note(&self, relation: &T, group: &G, key: &K, now: Instant, fault: impl FnOnce(Option<Fault>) -> Fault) {
        let mut tables = self.lock();
        let table = tables.entry(relation.clone()).or_default();
        if table.len() >= MAX_REMEMBERED
            && !table.contains_key(key)
            && let Some(oldest) = table.iter().min_by_key(|(_, entry)| entry.last).map(|(key, _)| key.clone())
        {
            table.remove(&oldest);
        }
        let fault = fault(table.get(key).map(|entry| entry.fault));
        table.insert(key.clone(), Entry { group: group.clone(), last: now, fault });
    }

    /// Consistent at every step, so a panic elsewhere doesn't matter.
    fn lock(&self) -> MutexGuard<'_, HashMap<T, HashMap<K, Entry<G>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<G> Entry<G> {
    fn ask(&mut self, open: bool, now: Instant) -> Ask {
        let Fault::TimedOut { strikes, probing } = &mut self.fault else {
            return if open { Ask::Not { probe: false } } else { Ask::Apart };
        };
        // A probe that never reported was dropped with its process' runtime, or is about to.
        let due = *strikes < STRIKES || now.duration_since(self.last) >= OPEN;
        let probe = due && !*probing;
        *probing |= probe;
        Ask::Not { probe }
    }
}

/// Whether enough distinct ones timed out within the window; each stays counted until its probe went well.
fn group_is_open<K, G: PartialEq>(table: &HashMap<K, Entry<G>>, group: &G) -> bool {
    let timed_out = |entry: &&Entry<G>| entry.group == *group && matches!(entry.fault, Fault::TimedOut { .. });
    let mut recent: Vec<Instant> = table.values().filter(timed_out).map(|entry| entry.last).collect();
    recent.sort_unstable();
    recent.windows(GROUP_STRIKES).any(|few| few[GROUP_STRIKES - 1] - few[0] <= GROUP_WINDOW)
}

#[cfg(test)]
mod tests {
    use aura_domain::SqlName;

    use super::*;

    type Roles = Standing<&'static str, &'static str>;

    const NOT: Ask = Ask::Not { probe: false };
    const PROBE: Ask = Ask::Not { probe: true };

    fn relation() -> Relation {
        let name = |text: &str| SqlName::new(text).expect("a name");
        Relation { schema: name("s"), table: name("t") }
    }

    fn how(standing: &Roles, group: &'static str, key: &'static str, now: Instant) -> Ask {
        standing.how(&relation(), &group, [&key], now)[0]
    }

    #[test]
    fn r_rls_6_who_raised_is_asked_apart_for_a_while() {
        let (standing, now) = (Roles::default(), Instant::now());
        assert_eq!(how(&standing, "user", "a", now), Ask::Together);
        standing.raised(&relation(), &"user", &"a", now);
        assert_eq!((how(&standing, "user", "a", now), how(&standing, "user", "b", now)), (Ask::Apart, Ask::Together));
        assert!(!standing.is_open(&relation(), &"user", &"a"));
        assert_eq!(how(&standing, "user", "a", now + FORGET), Ask::Together, "an old error is forgotten");
    }

    #[test]
    fn r_rls_6_who_timed_out_is_probed_once_at_a_time_and_after_two_strikes_later() {
        let (standing, now) = (Roles::default(), Instant::now());
        standing.timed_out(&relation(), &"user", &"a", now);
        assert_eq!((how(&standing, "user", "a", now), how(&standing, "user", "a", now)), (PROBE, NOT), "one probe");
        standing.put_off(&relation(), &"a");
        assert_eq!(
            (how(&standing, "user", "a", now), how(&standing, "user", "a", now)),
            (PROBE, NOT),
            "its turn again"
        );
        assert_eq!(how(&standing, "user", "b", now), Ask::Together, "nobody else is concerned");
        standing.timed_out(&relation(), &"user", &"a", now);
        assert_eq!(how(&standing, "user", "a", now), NOT, "two time-outs: the circuit is open");
        assert!(standing.is_open(&relation(), &"user", &"a") && !standing.is_open(&relation(), &"user", &"b"));
        assert_eq!(how(&standing, "user", "a", now + OPEN), PROBE);
        standing.recovered(&relation(), &"a");
        assert_eq!(how(&standing, "user", "a", now + OPEN), Ask::Together);
    }

    #[test]
    fn r_rls_6_three_within_ten_seconds_open_the_circuit_of_their_role() {
        let (standing, now) = (Roles::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        standing.timed_out(&relation(), &"user", &"a", at(0));
        standing.timed_out(&relation(), &"user", &"b", at(4));
        standing.timed_out(&relation(), &"user", &"c", at(15));
        assert_eq!(how(&standing, "user", "new", at(15)), Ask::Together);
        standing.timed_out(&relation(), &"user", &"d", at(9));
        assert_eq!(how(&standing, "user", "new", at(15)), NOT);
        assert_eq!(how(&standing, "anon", "new", at(15)), Ask::Together, "another role");
        assert_eq!(how(&standing, "user", "b", at(15)), PROBE, "somebody finds out when it is over");
        standing.recovered(&relation(), &"b");
        assert_eq!(how(&standing, "user", "new", at(15)), Ask::Together);
        standing.timed_out(&relation(), &"user", &"b", at(16));
        assert_eq!(how(&standing, "user", "new", at(16) + FORGET), Ask::Together, "all three have left");
    }
    #[test]
    fn r_rls_6_who_is_no_member_of_a_group_suffers_from_nobody_else() {
        let (standing, now) = (Standing::<&str, (), u8>::default(), Instant::now());
        for key in ["a", "b", "c"] {
            standing.timed_out(&1, &(), &key, now);
        }
        standing.raised(&1, &(), &"d", now);
        let how = |table, now| standing.how_alone(&table, &["a", "b", "c", "d", "new"], now);
        assert_eq!(how(1, now), [PROBE, PROBE, PROBE, Ask::Apart, Ask::Together]);
        assert_eq!(how(1, now), [NOT, NOT, NOT, Ask::Apart, Ask::Together], "one probe of each");
        assert_eq!((how(2, now), how(1, now + FORGET)), (vec![Ask::Together; 5], vec![Ask::Together; 5]));
    }
}
