//! Who is not asked for a while, since checks for them ran into the time limit (R-RLS-6).

use std::{
    collections::HashMap,
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

/// Recent time-outs.
#[derive(Default)]
pub(super) struct Circuits(Mutex<HashMap<(Relation, Identity), Strikes>>);

#[derive(Clone, Copy)]
struct Strikes {
    count: usize,
    last: Instant,
}

impl Circuits {
    /// Whether the identity must not be asked about the table now.
    pub(super) fn is_open(&self, relation: &Relation, identity: &Identity, now: Instant) -> bool {
        let strikes = self.lock();
        if strikes.is_empty() {
            return false;
        }
        let open = |it: &Strikes| now.duration_since(it.last) < OPEN;
        let own = strikes.get(&(relation.clone(), identity.clone()));
        if own.is_some_and(|it| it.count >= IDENTITY_STRIKES && open(it)) {
            return true;
        }
        let mut recent: Vec<Instant> = strikes
            .iter()
            .filter(|((table, who), it)| table == relation && who.role == identity.role && open(it))
            .map(|(_, it)| it.last)
            .collect();
        recent.sort_unstable();
        recent.windows(ROLE_STRIKES).any(|few| few[ROLE_STRIKES - 1] - few[0] <= ROLE_WINDOW)
    }

    /// A check of the identity ran into the limit.
    pub(super) fn timed_out(&self, relation: &Relation, identity: &Identity, now: Instant) {
        let mut strikes = self.lock();
        if strikes.len() >= MAX_STRIKES {
            strikes.retain(|_, it| now.duration_since(it.last) < OPEN);
        }
        let entry = strikes.entry((relation.clone(), identity.clone())).or_insert(Strikes { count: 0, last: now });
        *entry = Strikes { count: entry.count + 1, last: now };
    }

    /// A check of the identity went well.
    pub(super) fn went_well(&self, relation: &Relation, identity: &Identity) {
        let mut strikes = self.lock();
        if !strikes.is_empty() {
            strikes.remove(&(relation.clone(), identity.clone()));
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<(Relation, Identity), Strikes>> {
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
