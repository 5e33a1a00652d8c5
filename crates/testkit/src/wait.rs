use std::{future::Future, time::Duration};

use anyhow::{Context, Result};
use tokio::time::{Instant, sleep, timeout_at};

/// Between two looks at a predicate.
const PERIOD: Duration = Duration::from_millis(15);

/// Waits until the predicate holds, at most `within`; an error otherwise. A hung predicate counts as false.
pub async fn eventually<F, Fut>(within: Duration, mut predicate: F) -> Result<()>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = bool>,
{
    eventually_some(within, || {
        let holds = predicate();
        async move { holds.await.then_some(()) }
    })
    .await
}

/// Waits until the closure yields a value, at most `within`; an error otherwise.
pub async fn eventually_some<T, F, Fut>(within: Duration, mut look: F) -> Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Option<T>>,
{
    let deadline = Instant::now() + within;
    let looking = async {
        loop {
            if let Some(value) = look().await {
                return value;
            }
            sleep(PERIOD).await;
        }
    };
    timeout_at(deadline, looking).await.with_context(|| format!("didn't come true within {within:?}"))
}
