use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;

/// Between two connections that leave: all clients at once would be a storm on the processes that are left.
const PACE: Duration = Duration::from_millis(2);

/// When each connection leaves in a drain: one after the other (R-FRT-8).
#[derive(Debug, Clone, Default)]
pub(crate) struct Departure(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// Between two connections, once the drain has begun.
    pace: watch::Sender<Option<Duration>>,
    turns: AtomicU32,
    hurry: CancellationToken,
}

impl Departure {
    /// Lets `connections` leave within `spread`.
    pub(crate) fn begin(&self, connections: usize, spread: Duration) {
        let connections = u32::try_from(connections).unwrap_or(u32::MAX).max(1);
        self.0.pace.send_replace(Some(PACE.min(spread / connections)));
    }

    /// Lets all that are still here leave now.
    pub(crate) fn hurry(&self) {
        self.0.hurry.cancel();
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.0.pace.borrow().is_some()
    }

    /// Returns when a connection is to leave. One future per connection: each takes a turn of its own.
    pub(crate) async fn turn(self) {
        let mut begun = self.0.pace.subscribe();
        // The sender lives in self.
        let pace = begun.wait_for(Option::is_some).await.ok().and_then(|pace| *pace).unwrap_or_default();
        let turn = self.0.turns.fetch_add(1, Ordering::Relaxed);
        self.0.hurry.run_until_cancelled(sleep(pace * turn)).await;
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::future::join_all;
    use tokio::time::{Instant, timeout};

    use super::*;

    /// When each of `connections` left, in milliseconds.
    async fn leave(departure: &Departure, connections: usize) -> Vec<u128> {
        let began = Instant::now();
        let each = (0..connections).map(|_| {
            let turn = departure.clone().turn();
            async move {
                turn.await;
                began.elapsed().as_millis()
            }
        });
        let mut left = join_all(each).await;
        left.sort_unstable();
        left
    }

    #[tokio::test(start_paused = true)]
    async fn r_frt_8_connections_leave_one_after_the_other_within_the_time() {
        let departure = Departure::default();
        departure.begin(1, Duration::from_secs(12));
        assert_eq!(leave(&departure, 1).await, [0], "a single one needn't wait");

        let departure = Departure::default();
        departure.begin(1000, Duration::from_secs(12));
        let left = leave(&departure, 1000).await;
        assert!(left[499] >= 990 && left[999] <= 2000, "{left:?}");

        let departure = Departure::default();
        departure.begin(1000, Duration::from_millis(500));
        let left = leave(&departure, 1000).await;
        assert!(left[500] >= 240 && left[999] <= 1500, "{left:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn r_sd_4_who_still_waits_leaves_when_it_is_urgent() {
        let departure = Departure::default();
        let mut first = pin!(departure.clone().turn());
        assert!(timeout(Duration::from_secs(60), &mut first).await.is_err(), "nothing drains");
        departure.begin(2, Duration::from_secs(12));
        first.await;
        departure.hurry();
        assert_eq!(leave(&departure, 5).await, [0; 5]);
    }
}
