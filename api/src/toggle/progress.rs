use std::{future::Future, time::Duration};

use aura_store::{StatusListener, Store, StoreError};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::error::Result;

/// How often a waiter looks without being told to: a signal may be lost.
const POLL: Duration = Duration::from_millis(200);
/// Pause before listening again after the connection was lost.
const AGAIN: Duration = Duration::from_secs(1);

/// News of the workers' progress, shared by all waiting requests: one connection listens for all of them.
#[derive(Default)]
pub(crate) struct Progress(watch::Sender<u64>);

impl Progress {
    /// Listens until `stop`.
    pub(crate) async fn follow(&self, store: &Store, stop: &CancellationToken) {
        while let Some(Err(error)) = stop.run_until_cancelled(Box::pin(self.listen(store))).await {
            tracing::warn!(%error, "not told of progress, polling");
            stop.run_until_cancelled(tokio::time::sleep(AGAIN)).await;
        }
    }

    /// Changes whenever something may have.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.0.subscribe()
    }

    async fn listen(&self, store: &Store) -> std::result::Result<(), StoreError> {
        let mut listener: StatusListener = store.listen_status().await?;
        loop {
            listener.next().await?;
            self.0.send_modify(|news| *news = news.wrapping_add(1));
        }
    }

    /// Looks with `probe` at every piece of news until it finds something or `deadline` has passed (`None`). Looks at
    /// least once.
    pub(crate) async fn wait<T, F, Fut>(&self, deadline: Instant, mut probe: F) -> Result<Option<T>>
    where
        F: FnMut() -> Fut,
        Fut: Future<Output = Result<Option<T>>>,
    {
        let mut news = self.0.subscribe();
        loop {
            // Before looking: what changes while we look wakes us again.
            news.borrow_and_update();
            if let Some(found) = probe().await? {
                return Ok(Some(found));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            let look = deadline.min(Instant::now() + POLL);
            // Both ends mean "look again".
            let _ = tokio::time::timeout_at(look, news.changed()).await;
        }
    }
}
