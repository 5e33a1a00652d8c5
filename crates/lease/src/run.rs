use std::{future::Future, pin::pin, time::Duration};

use aura_domain::WorkerId;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;

use crate::{Claim, LeaseBackend};

/// How to hold one lease.
#[derive(Debug, Clone)]
pub struct LeaseConfig {
    /// Name of the lease.
    pub name: String,
    /// Us.
    pub holder: WorkerId,
    /// From a successful write to expiry; `LEASE_DURATION_SECS`, 15 s by default.
    pub duration: Duration,
    /// Pause between two tries while somebody else has it.
    pub retry: Duration,
}

/// Who was told to stop waits no longer than this for a back end: a lease expires.
const AT_STOP: Duration = Duration::from_millis(500);

impl LeaseConfig {
    /// Until the next renewal: a third of the duration, a little less so that the renewals of leases that were won together
    /// spread.
    fn renew_after(&self) -> Duration {
        (self.duration / 3).mul_f64(1.0 - rand::random::<f64>() / 10.0)
    }

    /// Longest wait for one call (3 s of 15 s): one that hangs must not use up the time in which a second could succeed.
    fn patience(&self) -> Duration {
        self.duration / 5
    }

    /// When a holder whose last successful write was sent at `sent` must have begun to stop: it needs time to do so, and
    /// clocks may differ in rate (5 s of 15 s). Counted from before the write, on our monotonic clock: the back end can
    /// only have stamped it later (R-LEASE-1).
    fn give_up_at(&self, sent: Instant) -> Instant {
        sent + self.duration - self.duration / 3
    }
}

/// What becomes of the lease after the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leave {
    /// It is given back: somebody else may have it at once.
    Release,
    /// What it guards isn't seen free: it expires (R-SD-9).
    Expire,
}

impl From<()> for Leave {
    fn from((): ()) -> Self {
        Self::Release
    }
}

/// The lease is not ours any more, or can't be proved to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the lease is lost")]
pub struct LeaseLost;

/// What work under a lease looks at. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Guard {
    lost: CancellationToken,
    valid_until: watch::Receiver<Instant>,
}

impl Guard {
    /// Cancelled when the lease is lost, or soon can be: the work ends then without draining.
    pub fn lost(&self) -> &CancellationToken {
        &self.lost
    }

    /// To be asked before each effect on others. Unlike the token it also says no in a process that was stopped for a while
    /// and hasn't got round to anything yet.
    ///
    /// # Errors
    /// The lease is lost.
    pub fn check(&self) -> Result<(), LeaseLost> {
        let valid = !self.lost.is_cancelled() && Instant::now() < *self.valid_until.borrow();
        if valid { Ok(()) } else { Err(LeaseLost) }
    }
}

/// Runs `work` whenever, and only while, the lease is ours, until `stop` (R-LEASE-1).
///
/// The guard's token is cancelled when the lease is lost, and a third of the duration *before* it can expire if the back end
/// fails or hangs; `work` then ends without draining. It isn't cancelled by `stop`: renewals go on while `work`, which
/// watches its own stop signal, drains. The lease is released only after `work` has returned, so `work` returns after it
/// has seen its slot inactive (R-SD-9), or says [`Leave::Expire`]. If `work` returns by itself the lease is released and sought
/// again after `retry`.
pub async fn run_with_lease<F, Fut>(backend: &dyn LeaseBackend, config: &LeaseConfig, stop: CancellationToken, work: F)
where
    F: Fn(Claim, Guard) -> Fut,
    Fut: Future,
    Fut::Output: Into<Leave>,
{
    while let Some((claim, sent)) = acquire(backend, config, &stop).await {
        let lost = CancellationToken::new();
        let (extend, valid_until) = watch::channel(config.give_up_at(sent));
        let guard = Guard { lost: lost.clone(), valid_until };
        let left = {
            let mut work = pin!(work(claim.clone(), guard));
            let left = tokio::select! {
                // Whether the work has just ended or not, a lost lease is lost.
                biased;
                () = keep(backend, config, &claim, sent, &extend) => None,
                left = &mut work => Some(left.into()),
            };
            if left.is_none() {
                tracing::warn!(lease = %config.name, "lease lost, stopping the work");
                lost.cancel();
                work.await;
            }
            left
        };
        if left == Some(Leave::Release) {
            release(backend, config, &stop, claim).await;
        }
        // Not sooner, whatever changes hands: work that fails at once must not go round among the workers like a top.
        stop.run_until_cancelled(sleep(config.retry)).await;
    }
}

/// Tries until the lease is won. `None` = stopped. The instant is from before the winning write was sent.
async fn acquire(
    backend: &dyn LeaseBackend,
    config: &LeaseConfig,
    stop: &CancellationToken,
) -> Option<(Claim, Instant)> {
    while !stop.is_cancelled() {
        let sent = Instant::now();
        // An acquisition is a read and a write.
        let patience = config.patience() * 2;
        match bounded(patience, stop, backend.try_acquire(&config.name, &config.holder, config.duration)).await {
            Some(Ok(Some(claim))) if stop.is_cancelled() => release(backend, config, stop, claim).await,
            Some(Ok(Some(claim))) => return Some((claim, sent)),
            Some(Ok(None)) => {}
            Some(Err(error)) => tracing::warn!(lease = %config.name, %error, "could not try to acquire the lease"),
            None => tracing::warn!(lease = %config.name, "the lease back end hangs"),
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = sleep(config.retry) => {}
            () = backend.changed_hands(&config.name) => {}
        }
    }
    None
}

/// Renews every third; returns when the lease is lost or can't be proved to be ours for long enough.
async fn keep(
    backend: &dyn LeaseBackend,
    config: &LeaseConfig,
    claim: &Claim,
    sent: Instant,
    valid_until: &watch::Sender<Instant>,
) {
    let mut next = sent + config.renew_after();
    loop {
        let give_up = *valid_until.borrow();
        tokio::select! {
            () = sleep_until(next.min(give_up)) => {}
            () = backend.changed_hands(&config.name) => {}
        }
        let now = Instant::now();
        if now >= give_up {
            return;
        }
        match timeout_at(give_up.min(now + config.patience()), backend.renew(claim)).await {
            Ok(Ok(true)) => {
                valid_until.send_replace(config.give_up_at(now));
                next = now + config.renew_after();
            }
            Ok(Ok(false)) => return,
            Ok(Err(error)) => {
                tracing::warn!(lease = %config.name, %error, "could not renew the lease");
                next = Instant::now() + config.duration / 15;
            }
            Err(_) => next = Instant::now(),
        }
    }
}

/// Best effort: a lease that couldn't be released expires.
async fn release(backend: &dyn LeaseBackend, config: &LeaseConfig, stop: &CancellationToken, claim: Claim) {
    match bounded(config.patience() * 2, stop, backend.release(claim)).await {
        Some(Ok(())) => {}
        Some(Err(error)) => tracing::warn!(lease = %config.name, %error, "could not release the lease"),
        None => tracing::warn!(lease = %config.name, "the lease back end hangs, the lease will expire"),
    }
}

/// What a call answers within `limit`, and, once there is to be an end, not much later. `None` = it hangs.
async fn bounded<T>(limit: Duration, stop: &CancellationToken, call: impl Future<Output = T>) -> Option<T> {
    let stopped = async {
        stop.cancelled().await;
        sleep(AT_STOP).await;
    };
    tokio::select! {
        biased;
        answer = timeout(limit, call) => answer.ok(),
        () = stopped => None,
    }
}
