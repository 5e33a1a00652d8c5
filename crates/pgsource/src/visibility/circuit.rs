//! Who is not asked for a while, since checks for them ran into the time limit (R-RLS-6).

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use aura_domain::Relation;

use super::Identity;

/// Time-outs in a row of one identity that open its circuit.
const IDENTITY_STRIKES: usize = 2;
/// Distinct identities of one (table, role) with a time-out within [`ROLE_WINDOW`] that open its circuit.
const ROLE_STRIKES: usize = 3;
const ROLE_WINDOW: Duration = Duration::from_secs(10);
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
        self.0.get(key).is_some_and(|it| it.count >= IDENTITY_STRIKES && it.is_recent(now))
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

/// Recent time-outs of identities, by table.
#[derive(Default)]
pub(super) struct Circuits(Mutex<Strikes<(Relation, Identity)>>);

impl Circuits {
    /// Whether the identity must not be asked about the table now.
    pub(super) fn is_open(&self, relation: &Relation, identity: &Identity, now: Instant) -> bool {
        let strikes = self.lock();
        if strikes.is_empty() {
            return false;
        }
        if strikes.is_open(&(relation.clone(), identity.clone()), now) {
            return true;
        }
        let of_role = |(table, who): &(Relation, Identity)| table == relation && who.role == identity.role;
        let recent = strikes.0.iter().filter(|(key, it)| of_role(key) && it.is_recent(now));
        let mut recent: Vec<Instant> = recent.map(|(_, it)| it.last).collect();
        recent.sort_unstable();
        recent.windows(ROLE_STRIKES).any(|few| few[ROLE_STRIKES - 1] - few[0] <= ROLE_WINDOW)
    }

    /// A check of the identity ran into the limit.
    pub(super) fn timed_out(&self, relation: &Relation, identity: &Identity, now: Instant) {
        self.lock().timed_out((relation.clone(), identity.clone()), now);
    }

    /// A check of the identity went well.
    pub(super) fn went_well(&self, relation: &Relation, identity: &Identity) {
        let mut strikes = self.lock();
        if !strikes.is_empty() {
            strikes.went_well(&(relation.clone(), identity.clone()));
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Strikes<(Relation, Identity)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use aura_domain::{Claims, SqlName};
    use serde_json::json;

    use super::*;

    fn identity(sub: &str) -> Identity {
        let claims = Claims::from_payload(&json!({ "sub": sub })).expect("an object");
        Identity { role: "authenticated".to_owned(), claims }
    }

    fn relation() -> Relation {
        let name = |text: &str| SqlName::new(text).expect("a name");
        Relation { schema: name("s"), table: name("t") }
    }

    #[test]
    fn r_rls_6_two_time_outs_open_the_identity_s_circuit_only() {
        let (circuits, now) = (Circuits::default(), Instant::now());
        circuits.timed_out(&relation(), &identity("a"), now);
        assert!(!circuits.is_open(&relation(), &identity("a"), now));
        circuits.timed_out(&relation(), &identity("a"), now);
        assert!(circuits.is_open(&relation(), &identity("a"), now));
        assert!(!circuits.is_open(&relation(), &identity("b"), now));
        assert!(!circuits.is_open(&relation(), &identity("a"), now + OPEN), "tried again later");
        circuits.went_well(&relation(), &identity("a"));
        assert!(!circuits.is_open(&relation(), &identity("a"), now));
    }

    #[test]
    fn r_rls_6_three_identities_within_ten_seconds_open_the_role_s_circuit() {
        let (circuits, now) = (Circuits::default(), Instant::now());
        for (n, sub) in ["a", "b"].into_iter().enumerate() {
            circuits.timed_out(&relation(), &identity(sub), now + Duration::from_secs(4 * n as u64));
        }
        circuits.timed_out(&relation(), &identity("c"), now + Duration::from_secs(15));
        assert!(!circuits.is_open(&relation(), &identity("new"), now + Duration::from_secs(15)));
        circuits.timed_out(&relation(), &identity("d"), now + Duration::from_secs(9));
        assert!(circuits.is_open(&relation(), &identity("new"), now + Duration::from_secs(15)));
        let anon = Identity { role: "anon".to_owned(), ..identity("new") };
        assert!(!circuits.is_open(&relation(), &anon, now + Duration::from_secs(15)), "another role");
    }
}
