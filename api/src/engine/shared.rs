//! One read of an engine for all who wait for it: every piece of news wakes them all at once, and a crowd that reads for
//! itself keeps the platform database from those who make the news.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use aura_domain::SourceId;
use tokio::{sync::Mutex as AsyncMutex, time::Instant};

use crate::error::Result;

/// What was read last, and when that began.
type Last<T> = Arc<AsyncMutex<Option<(Instant, Result<T>)>>>;

/// See the module.
pub(super) struct Shared<T>(Mutex<HashMap<SourceId, Last<T>>>);

impl<T> Default for Shared<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> Shared<T> {
    /// What a read says that began after the call: one's own, or that of somebody who came at the same time.
    pub(super) async fn read(&self, source: SourceId, read: impl Future<Output = Result<T>>) -> Result<T> {
        let came = Instant::now();
        let last = {
            let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(known.entry(source).or_default())
        };
        let mut last = last.lock().await;
        if let Some((_, seen)) = last.as_ref().filter(|(began, _)| *began >= came) {
            return seen.clone();
        }
        let began = Instant::now();
        // A failure is news, too: a database that hangs costs each of the crowd one time-out, not one after the other.
        let seen = read.await;
        *last = Some((began, seen.clone()));
        seen
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_util::future::join_all;

    use super::*;
    use crate::error::ApiError;

    #[tokio::test]
    async fn fifty_that_come_at_once_read_twice_and_nobody_is_told_of_the_past() {
        let (shared, source, reads) = (Shared::default(), SourceId(uuid::Uuid::nil()), Cell::new(0));
        let read = async || {
            reads.set(reads.get() + 1);
            tokio::task::yield_now().await;
            Ok::<_, ApiError>(reads.get())
        };
        let seen = join_all((0..50).map(|_| shared.read(source, read()))).await;
        assert!(seen.into_iter().all(|seen| seen.is_ok()));
        assert_eq!(reads.get(), 2, "whoever came after the first had begun needs another");
        assert_eq!(shared.read(source, read()).await.ok(), Some(3), "what was read before isn't news");
        let fail = async || {
            reads.set(reads.get() + 1);
            tokio::task::yield_now().await;
            Err(ApiError::source_not_found())
        };
        let failed = join_all((0..50).map(|_| shared.read(source, fail()))).await;
        assert!(failed.into_iter().all(|failed| failed.is_err()));
        assert_eq!(reads.get(), 5, "nor does a crowd fail one after the other");
        assert_eq!(shared.read(source, read()).await.ok(), Some(6));
    }
}
