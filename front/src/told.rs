//! What a connection was told by an error that makes stock clients join again: once a join, and never in a hot loop of
//! joining, being told, and joining again.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// The same is told by an error again only after this long, however often the client joins.
const AGAIN: Duration = Duration::from_secs(60);
/// Above so many, those that are too old to matter are forgotten.
const SWEEP_ABOVE: usize = 256;

/// A channel's topic, and the client's schema and table.
type About = (Arc<str>, [String; 2]);

/// Of one connection; it outlives its channels.
#[derive(Debug, Default)]
pub(crate) struct Told(Mutex<HashMap<About, (u64, Instant)>>);

impl Told {
    /// Whether the channel of this number is to be told by an error now.
    pub(crate) fn is_news(&self, topic: &Arc<str>, table: &[String; 2], channel: u64) -> bool {
        self.is_news_at(topic, table, channel, Instant::now())
    }

    fn is_news_at(&self, topic: &Arc<str>, table: &[String; 2], channel: u64, now: Instant) -> bool {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if told.len() > SWEEP_ABOVE {
            told.retain(|_, (_, at)| now.saturating_duration_since(*at) < AGAIN);
        }
        let about = (Arc::clone(topic), table.clone());
        let known = told.get(&about);
        let news = known.is_none_or(|(of, at)| *of != channel && now.saturating_duration_since(*at) >= AGAIN);
        if news {
            told.insert(about, (channel, now));
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn r_rls_4_an_error_is_told_once_a_join_and_not_to_who_joins_again_at_once() {
        let (told, start) = (Told::default(), Instant::now());
        let (topic, other): (Arc<str>, Arc<str>) = ("realtime:a".into(), "realtime:b".into());
        let table = |name: &str| ["public".to_owned(), name.to_owned()];
        let news = |topic, name, channel, seconds| {
            told.is_news_at(topic, &table(name), channel, start + Duration::from_secs(seconds))
        };
        assert!(news(&topic, "t", 1, 0));
        assert!(!news(&topic, "t", 1, 1) && !news(&topic, "t", 1, 3600), "the same join");
        assert!(news(&topic, "u", 1, 1) && news(&other, "t", 2, 1), "another table, another channel");
        let told_again: Vec<_> = (2..=59).filter(|second| news(&topic, "t", 100 + second, *second)).collect();
        assert_eq!(told_again, Vec::<u64>::new(), "a client that joins every second");
        assert!(news(&topic, "t", 200, 61));
    }
}
