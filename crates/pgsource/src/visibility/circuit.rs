//! Who is not asked for a while, since checks for them ran into the time limit (R-RLS-6).

use std::{
    collections::HashMap,
    hash::Hash,
    time::{Duration, Instant},
};

/// Time-outs in a row of one identity that open its circuit.
const STRIKES: usize = 2;
/// How long a circuit stays open before one more try.
const OPEN: Duration = Duration::from_secs(30);
/// Identities remembered; older ones are forgotten first.
const MAX_STRIKES: usize = 10_000;

/// Recent time-outs by whom or what they are counted for.
pub(super) struct Strikes<K>(HashMap<K, Strike>);

#[derive(Clone, Copy)]
struct Strike {
    count: usize,
    last: Instant,
}

impl<K> Default for Strikes<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Eq + Hash> Strikes<K> {
    /// Whether it has timed out so often, and so lately, that it isn't asked now.
    pub(super) fn is_open(&self, key: &K, now: Instant) -> bool {
        self.0.get(key).is_some_and(|it| it.count >= STRIKES && it.is_recent(now))
    }

    /// It ran into the limit.
    pub(super) fn timed_out(&mut self, key: K, now: Instant) {
        if self.0.len() >= MAX_STRIKES {
            self.0.retain(|_, it| it.is_recent(now));
        }
        let entry = self.0.entry(key).or_insert(Strike { count: 0, last: now });
        *entry = Strike { count: entry.count + 1, last: now };
    }

    /// It went well.
    pub(super) fn went_well(&mut self, key: &K) {
        self.0.remove(key);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Strike {
    fn is_recent(&self, now: Instant) -> bool {
        now.duration_since(self.last) < OPEN
    }
}
