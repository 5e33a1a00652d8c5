//! When each front was heard, and on which of its connections.

use std::{collections::HashMap, time::Duration};

use aura_domain::FrontId;
use tokio::time::Instant;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Hearing(HashMap<FrontId, Heard>);

#[derive(Debug)]
struct Heard {
    /// Any word of it.
    at: Instant,
    /// A request. It comes on the connection on which the front gets its events, behind its subscriptions; heartbeats come
    /// on the other one, which may be back earlier (ADR 5).
    asked: Option<Instant>,
}

impl Hearing {
    /// A sign of life.
    pub(crate) fn heartbeat(&mut self, front: &FrontId, now: Instant) {
        self.0.entry(front.clone()).or_insert(Heard { at: now, asked: None }).at = now;
    }

    /// A join, leave or snapshot.
    pub(crate) fn request(&mut self, front: &FrontId, now: Instant) {
        self.0.insert(front.clone(), Heard { at: now, asked: Some(now) });
    }

    pub(crate) fn forget(&mut self, front: &FrontId) {
        self.0.remove(front);
    }

    /// Fronts that were silent for longer than `limit`.
    pub(crate) fn silent(&self, limit: Duration, now: Instant) -> Vec<FrontId> {
        let silent = self.0.iter().filter(|(_, heard)| now.duration_since(heard.at) > limit);
        silent.map(|(front, _)| front.clone()).collect()
    }

    /// Fronts that have asked for something, but not since then, and weren't silent for longer than `limit`.
    pub(crate) fn not_back_since(&self, since: Instant, limit: Duration, now: Instant) -> Vec<FrontId> {
        let is_out = |heard: &Heard| heard.asked.is_some_and(|asked| asked < since);
        let out = self.0.iter().filter(|(_, heard)| is_out(heard) && now.duration_since(heard.at) <= limit);
        out.map(|(front, _)| front.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_frt_4_a_front_is_back_when_it_asks_and_not_when_its_heart_beats() {
        let (front, limit, start) = (FrontId("f".to_owned()), Duration::from_secs(15), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut hearing = Hearing::default();
        hearing.heartbeat(&front, start);
        assert_eq!(hearing.not_back_since(at(1), limit, at(1)), [], "it has no subscriptions that it could miss");
        hearing.request(&front, at(1));
        hearing.heartbeat(&front, at(4));
        assert_eq!(hearing.not_back_since(at(3), limit, at(5)), *std::slice::from_ref(&front));
        assert_eq!(hearing.not_back_since(at(3), limit, at(20)), [], "three heartbeats missed: it is gone");
        assert_eq!(hearing.silent(limit, at(20)), *std::slice::from_ref(&front));
        hearing.request(&front, at(5));
        assert_eq!(hearing.not_back_since(at(3), limit, at(5)), []);
    }
}
