use std::{future::Future, pin::pin, time::Duration};

use aura_domain::WorkerId;
use tokio::time::{Instant, sleep, timeout, timeout_at};
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

impl LeaseConfig {
    /// Renewal period: every third.
    fn renew_every(&self) -> Duration {
        self.duration / 3
    }

    /// How long before expiry the work is told to stop: it needs time to do so (3 s of 15 s).
    fn margin(&self) -> Duration {
        self.duration / 5
    }

    /// When a holder whose last successful write was sent at `sent` must have begun to stop. Counted from before the
    /// write, on our monotonic clock: the back end can only have stamped it later (R-LEASE-1).
    fn give_up_at(&self, sent: Instant) -> Instant {
        sent + self.duration - self.margin()
    }
}

/// Runs `work` whenever, and only while, the lease is ours, until `stop` (R-LEASE-1).
///
/// The token that `work` gets is cancelled when the lease is lost, and a fifth of the duration *before* it can expire
/// if the back end fails or hangs; `work` then ends without draining. It isn't cancelled by `stop`: renewals go on while
/// `work`, which watches its own stop signal, drains. The lease is released only after `work` has returned, so `work`
/// returns after it has seen its slot inactive (R-SD-9). If `work` returns by itself the lease is released and sought
/// again after `retry`.
pub async fn run_with_lease<F, Fut>(backend: &dyn LeaseBackend, config: &LeaseConfig, stop: CancellationToken, work: F)
where
    F: Fn(Claim, CancellationToken) -> Fut,
    Fut: Future<Output = ()>,
{
    while let Some((claim, sent)) = acquire(backend, config, &stop).await {
        let lost = CancellationToken::new();
        let held = {
            let mut work = pin!(work(claim.clone(), lost.clone()));
            let held = tokio::select! {
                () = &mut work => true,
                () = keep(backend, config, &claim, sent) => false,
            };
            if !held {
                tracing::warn!(lease = %config.name, "lease lost, stopping the work");
                lost.cancel();
                work.await;
            }
            held
        };
        if held {
            release(backend, config, claim).await;
        }
        if pause(config.retry, &stop).await {
            return;
        }
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
        match timeout(config.renew_every(), backend.try_acquire(&config.name, &config.holder, config.duration)).await {
            Ok(Ok(Some(claim))) if stop.is_cancelled() => release(backend, config, claim).await,
            Ok(Ok(Some(claim))) => return Some((claim, sent)),
            Ok(Ok(None)) => {}
            Ok(Err(error)) => tracing::warn!(lease = %config.name, %error, "could not try to acquire the lease"),
            Err(_) => tracing::warn!(lease = %config.name, "the lease back end hangs"),
        }
        pause(config.retry, stop).await;
    }
    None
}

/// Renews every third; returns when the lease is lost or can't be proved to be ours for long enough.
async fn keep(backend: &dyn LeaseBackend, config: &LeaseConfig, claim: &Claim, mut sent: Instant) {
    let mut next = sent + config.renew_every();
    loop {
        let give_up = config.give_up_at(sent);
        tokio::time::sleep_until(next.min(give_up)).await;
        let now = Instant::now();
        if now >= give_up {
            return;
        }
        // One hanging call must not use up the time in which a second one could still succeed.
        let patience = give_up.min(now + config.renew_every());
        match timeout_at(patience, backend.renew(claim)).await {
            Ok(Ok(true)) => {
                sent = now;
                next = now + config.renew_every();
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
async fn release(backend: &dyn LeaseBackend, config: &LeaseConfig, claim: Claim) {
    match timeout(config.renew_every(), backend.release(claim)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(lease = %config.name, %error, "could not release the lease"),
        Err(_) => tracing::warn!(lease = %config.name, "the lease back end hangs, the lease will expire"),
    }
}

/// Sleeps; true = stopped.
async fn pause(duration: Duration, stop: &CancellationToken) -> bool {
    tokio::select! {
        () = stop.cancelled() => true,
        () = sleep(duration) => false,
    }
}
