//! What we saw of the leases, and since when each is as it is: by our monotonic clock, never by a time in a record.

use std::{collections::HashMap, time::Duration};

use aura_domain::WorkerId;
use k8s_openapi::api::coordination::v1::Lease;
use tokio::{sync::watch, time::Instant};

use super::record;
use crate::is_predecessor;

/// Of one lease.
#[derive(Debug)]
struct Seen {
    /// Its last state; kept when the object is deleted.
    lease: Option<Lease>,
    gone: bool,
    /// When it became so.
    since: Instant,
    /// The running watch has told of it.
    watched: bool,
    /// Our acquisition that made it anew, and when it counts: somebody may hold the one that was deleted and not know yet.
    probation: Option<(i64, Instant)>,
    /// Rises when it changes hands.
    hands: watch::Sender<u64>,
}

/// What may be done about a lease.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Verdict {
    /// It is somebody's, for so long if nothing changes.
    Held(Duration),
    /// It may be taken from this state.
    Take(Box<Lease>),
    /// There is none; it may be made. If there was one, whoever held it may believe so for this long.
    Create(Option<Duration>),
    /// It is ours, but doesn't count yet.
    Wait(Box<Lease>),
}

/// All leases by object name.
#[derive(Debug, Default)]
pub(super) struct Sightings(HashMap<String, Seen>);

impl Sightings {
    /// The server's own answer: the truth a moment ago.
    pub(super) fn read(&mut self, object: &str, lease: Option<&Lease>, now: Instant) {
        self.entry(object, now).observe(lease, now);
    }

    /// From a list or watch, which may lag behind what we read or wrote.
    pub(super) fn told(&mut self, object: &str, lease: Option<&Lease>, now: Instant) {
        let seen = self.entry(object, now);
        seen.watched = true;
        let newer = match (lease.and_then(record::version), seen.lease.as_ref().and_then(record::version)) {
            (Some(told), Some(known)) => told >= known,
            _ => true,
        };
        if newer {
            seen.observe(lease, now);
        }
    }

    /// A complete list: what isn't on it is gone.
    pub(super) fn listed(&mut self, leases: &[Lease], now: Instant) {
        for (object, seen) in &mut self.0 {
            if !leases.iter().any(|lease| lease.metadata.name.as_ref() == Some(object)) {
                seen.observe(None, now);
            }
        }
        for lease in leases {
            if let Some(object) = lease.metadata.name.clone() {
                self.told(&object, Some(lease), now);
            }
        }
    }

    /// No watch tells us anything any more.
    pub(super) fn unwatched(&mut self) {
        self.0.values_mut().for_each(|seen| seen.watched = false);
    }

    /// The last state of a lease that exists.
    pub(super) fn last(&self, object: &str) -> Option<&Lease> {
        self.0.get(object).filter(|seen| !seen.gone)?.lease.as_ref()
    }

    /// What `worker` may do about it.
    pub(super) fn verdict(&self, object: &str, worker: &WorkerId, now: Instant) -> Verdict {
        let Some(seen) = self.0.get(object) else { return Verdict::Create(None) };
        let Some(lease) = &seen.lease else { return Verdict::Create(None) };
        if seen.gone {
            return Verdict::Create(record::duration(lease));
        }
        let others = record::holder(lease)
            .map(|holder| WorkerId(holder.to_owned()))
            .filter(|holder| holder != worker && !is_predecessor(holder, worker));
        let left = remaining(lease, seen.since, now);
        match (others, seen.probation) {
            (Some(_), _) if !left.is_zero() => Verdict::Held(left),
            (None, Some((token, until))) if record::is_held_by(lease, worker, token) && now < until => {
                Verdict::Wait(Box::new(lease.clone()))
            }
            _ => Verdict::Take(Box::new(lease.clone())),
        }
    }

    /// For how long it is somebody else's, if the watch is to be believed: then there's no need to ask.
    pub(super) fn is_told_held(&self, object: &str, worker: &WorkerId, now: Instant) -> bool {
        self.0.get(object).is_some_and(|seen| seen.watched && !seen.gone)
            && matches!(self.verdict(object, worker, now), Verdict::Held(_))
    }

    /// Who holds it, and how long that holds by our clock.
    pub(super) fn holder(&self, object: &str, now: Instant) -> Option<(String, Duration)> {
        let lease = self.last(object)?;
        let since = self.0.get(object)?.since;
        Some((record::holder(lease)?.to_owned(), remaining(lease, since, now)))
    }

    /// Our acquisition `token`, which made the lease anew, counts from `until` on.
    pub(super) fn on_probation(&mut self, object: &str, token: i64, until: Instant) {
        if let Some(seen) = self.0.get_mut(object) {
            seen.probation = Some((token, until));
        }
    }

    /// Follows changes of hands.
    pub(super) fn hands(&mut self, object: &str, now: Instant) -> watch::Receiver<u64> {
        self.entry(object, now).hands.subscribe()
    }

    fn entry(&mut self, object: &str, now: Instant) -> &mut Seen {
        self.0.entry(object.to_owned()).or_insert_with(|| Seen {
            lease: None,
            gone: true,
            since: now,
            watched: false,
            probation: None,
            hands: watch::Sender::new(0),
        })
    }
}

impl Seen {
    fn observe(&mut self, lease: Option<&Lease>, now: Instant) {
        let Some(lease) = lease else {
            if !self.gone {
                self.gone = true;
                self.changed_hands();
            }
            return;
        };
        let before = self.lease.replace(lease.clone());
        let again = before.as_ref().filter(|_| !self.gone);
        self.gone = false;
        if !again.is_some_and(|before| record::same(before, lease)) {
            self.since = now;
        }
        let in_hands = |lease: &Lease| (record::holder(lease).map(str::to_owned), record::acquisition(lease));
        if again.map(in_hands) != Some(in_hands(lease)) {
            self.changed_hands();
        }
    }

    fn changed_hands(&self) {
        self.hands.send_modify(|hands| *hands += 1);
    }
}

/// A lease without a duration expires at once: nobody of us writes such a one.
fn remaining(lease: &Lease, since: Instant, now: Instant) -> Duration {
    let duration = record::duration(lease).unwrap_or_default();
    duration.saturating_sub(now.saturating_duration_since(since))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::{SignedDuration, Timestamp};

    use super::*;
    use crate::{Claim, Pod, worker_id};

    const SECOND: Duration = Duration::from_secs(1);

    fn worker(name: &str) -> WorkerId {
        WorkerId(name.to_owned())
    }

    fn held(by: &WorkerId, clock_off: SignedDuration) -> Lease {
        let claim = Claim { name: "l".to_owned(), holder: by.clone(), version: 7, duration: 15 * SECOND };
        let mut lease = record::taken(None, "o", &claim, Timestamp::now() + clock_off);
        lease.metadata.uid = Some("u".to_owned());
        lease.metadata.resource_version = Some("1".to_owned());
        lease
    }

    #[test]
    fn r_lease_1_a_lease_expires_by_our_clock_after_the_holders_duration_without_change() {
        let now = Instant::now();
        for hours in [-1, 0, 1] {
            let mut sightings = Sightings::default();
            let lease = held(&worker("a"), SignedDuration::from_hours(hours));
            sightings.read("o", Some(&lease), now);
            sightings.read("o", Some(&lease), now + 10 * SECOND);
            assert_eq!(sightings.verdict("o", &worker("b"), now + 14 * SECOND), Verdict::Held(SECOND), "{hours} h");
            let expired = sightings.verdict("o", &worker("b"), now + 15 * SECOND);
            assert_eq!(expired, Verdict::Take(Box::new(lease.clone())));
            // A holder whose clock stands still renews all the same.
            let mut renewed = record::renewed(lease, Timestamp::now());
            renewed.spec.as_mut().unwrap().renew_time = None;
            sightings.read("o", Some(&renewed), now + 14 * SECOND);
            assert_eq!(sightings.verdict("o", &worker("b"), now + 15 * SECOND), Verdict::Held(14 * SECOND));
        }
    }

    #[test]
    fn a_lease_that_we_made_anew_counts_after_a_while() {
        let (mut sightings, now) = (Sightings::default(), Instant::now());
        assert_eq!(sightings.verdict("o", &worker("b"), now), Verdict::Create(None), "never seen");
        sightings.read("o", Some(&held(&worker("a"), SignedDuration::ZERO)), now);
        sightings.read("o", None, now + SECOND);
        assert_eq!(sightings.verdict("o", &worker("b"), now + SECOND), Verdict::Create(Some(15 * SECOND)));
        assert_eq!(sightings.holder("o", now + SECOND), None);
        let ours = held(&worker("b"), SignedDuration::ZERO);
        sightings.read("o", Some(&ours), now + SECOND);
        sightings.on_probation("o", 7, now + 16 * SECOND);
        let wait = Verdict::Wait(Box::new(ours.clone()));
        assert_eq!(sightings.verdict("o", &worker("b"), now + 15 * SECOND), wait);
        assert!(matches!(sightings.verdict("o", &worker("c"), now + 15 * SECOND), Verdict::Held(_)));
        assert_eq!(sightings.verdict("o", &worker("b"), now + 16 * SECOND), Verdict::Take(Box::new(ours)));
    }

    #[test]
    fn free_ours_and_our_predecessors_leases_may_be_taken_at_once() {
        let (mut sightings, now) = (Sightings::default(), Instant::now());
        let pod = Pod { name: "p".to_owned(), uid: "u".to_owned() };
        let (before, after) = (worker_id(Some(&pod)), worker_id(Some(&pod)));
        let lease = held(&before, SignedDuration::ZERO);
        sightings.read("o", Some(&lease), now);
        let take = Verdict::Take(Box::new(lease.clone()));
        assert_eq!(sightings.verdict("o", &before, now), take);
        assert_eq!(sightings.verdict("o", &after, now), take);
        let other = worker_id(Some(&Pod { uid: "u2".to_owned(), ..pod }));
        assert!(matches!(sightings.verdict("o", &other, now), Verdict::Held(_)));
        sightings.read("o", Some(&record::freed(lease, Timestamp::now())), now);
        assert!(matches!(sightings.verdict("o", &other, now), Verdict::Take(_)));
    }

    #[test]
    fn a_lagging_watch_does_not_undo_what_was_read_and_is_believed_only_while_it_runs() {
        let (mut sightings, now) = (Sightings::default(), Instant::now());
        let old = held(&worker("a"), SignedDuration::ZERO);
        let mut new = record::freed(old.clone(), Timestamp::now());
        new.metadata.resource_version = Some("2".to_owned());
        sightings.read("o", Some(&new), now);
        sightings.told("o", Some(&old), now);
        assert_eq!(sightings.last("o"), Some(&new));
        let mut newest = old;
        newest.metadata.resource_version = Some("3".to_owned());
        sightings.read("o", Some(&newest), now);
        assert!(sightings.is_told_held("o", &worker("b"), now));
        sightings.unwatched();
        assert!(!sightings.is_told_held("o", &worker("b"), now));
    }

    #[test]
    fn a_change_of_hands_is_told_and_a_renewal_is_not() {
        let (mut sightings, now) = (Sightings::default(), Instant::now());
        let mut hands = sightings.hands("o", now);
        let lease = held(&worker("a"), SignedDuration::ZERO);
        let mut changed = |sightings: &mut Sightings, lease: Option<&Lease>| {
            sightings.read("o", lease, now);
            let changed = hands.has_changed().unwrap();
            hands.mark_unchanged();
            changed
        };
        assert!(changed(&mut sightings, Some(&lease)));
        assert!(!changed(&mut sightings, Some(&record::renewed(lease.clone(), Timestamp::now()))));
        assert!(changed(&mut sightings, Some(&record::freed(lease, Timestamp::now()))));
        assert!(changed(&mut sightings, None));
        assert!(!changed(&mut sightings, None));
    }
}
