//! The holder's loop against a scripted back end and a paused clock: what it does at which moment.

use std::{
    future::{Ready, ready},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use aura_domain::WorkerId;
use aura_lease::{Claim, Holder, LeaseBackend, LeaseConfig, LeaseError, Leave, NoLease, run_with_lease};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Yes,
    No,
    Fails,
    Hangs,
}

/// A lease that is free, and a script of how renewals go; after the script the last answer repeats.
struct Scripted {
    script: Mutex<Vec<Answer>>,
    acquired: AtomicU64,
    released: AtomicU64,
    working: Arc<AtomicBool>,
}

impl Scripted {
    fn new(script: &[Answer]) -> Self {
        let mut script = script.to_vec();
        script.reverse();
        Self {
            script: Mutex::new(script),
            acquired: AtomicU64::new(0),
            released: AtomicU64::new(0),
            working: Arc::default(),
        }
    }

    fn next(&self) -> Answer {
        let mut script = self.script.lock().expect("no panic");
        if script.len() > 1 { script.pop().expect("not empty") } else { script[0] }
    }
}

#[async_trait]
impl LeaseBackend for Scripted {
    async fn try_acquire(
        &self,
        name: &str,
        holder: &WorkerId,
        duration: Duration,
    ) -> Result<Option<Claim>, LeaseError> {
        assert!(!self.working.load(Ordering::SeqCst), "no acquiring while work runs");
        let version = self.acquired.fetch_add(1, Ordering::SeqCst) as i64;
        Ok(Some(Claim { name: name.to_owned(), holder: holder.clone(), version, duration }))
    }

    async fn renew(&self, _claim: &Claim) -> Result<bool, LeaseError> {
        match self.next() {
            Answer::Yes => Ok(true),
            Answer::No => Ok(false),
            Answer::Fails => Err(LeaseError::Backend("away".into())),
            Answer::Hangs => std::future::pending().await,
        }
    }

    async fn release(&self, _claim: Claim) -> Result<(), LeaseError> {
        assert!(!self.working.load(Ordering::SeqCst), "R-SD-9: released only after the work has returned");
        self.released.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    async fn holder(&self, _name: &str) -> Result<Option<Holder>, LeaseError> {
        Ok(None)
    }
}

const DURATION: Duration = Duration::from_secs(15);

fn config() -> LeaseConfig {
    LeaseConfig {
        name: "source".to_owned(),
        holder: WorkerId("w".to_owned()),
        duration: DURATION,
        retry: Duration::from_secs(1),
    }
}

/// Runs until the work was cancelled once; answers how long after winning that was.
async fn cancelled_after(backend: &Scripted) -> Duration {
    let stop = CancellationToken::new();
    let after = Mutex::new(None);
    run_with_lease(backend, &config(), stop.clone(), |_, guard| {
        let (stop, working, after) = (stop.clone(), Arc::clone(&backend.working), &after);
        async move {
            let started = Instant::now();
            working.store(true, Ordering::SeqCst);
            guard.lost().cancelled().await;
            *after.lock().expect("no panic") = Some(started.elapsed());
            working.store(false, Ordering::SeqCst);
            stop.cancel();
        }
    })
    .await;
    after.into_inner().expect("no panic").expect("work ran")
}

#[tokio::test(start_paused = true)]
async fn r_lease_1_a_hanging_backend_cancels_the_work_before_expiry() {
    let after = cancelled_after(&Scripted::new(&[Answer::Hangs])).await;
    assert_eq!(after, Duration::from_secs(10), "a third of the duration is left to stop in");
}

#[tokio::test(start_paused = true)]
async fn r_lease_1_a_failing_backend_cancels_the_work_before_expiry() {
    let after = cancelled_after(&Scripted::new(&[Answer::Fails])).await;
    assert_eq!(after, Duration::from_secs(10));
}

#[tokio::test(start_paused = true)]
async fn r_lease_1_the_time_left_counts_from_the_last_success() {
    let after = cancelled_after(&Scripted::new(&[Answer::Yes, Answer::Yes, Answer::Hangs])).await;
    // Renewed twice, each a little before a third was over.
    assert!(after > Duration::from_secs(9 + 10) && after <= Duration::from_secs(10 + 10), "{after:?}");
}

#[tokio::test(start_paused = true)]
async fn r_lease_1_one_hung_or_failed_call_is_survived() {
    for bad in [Answer::Hangs, Answer::Fails] {
        // Each renewal comes a little before a third is over: four of them are more than the whole in any case.
        let script = [bad, Answer::Yes, Answer::Yes, Answer::Yes, Answer::No];
        let after = cancelled_after(&Scripted::new(&script)).await;
        assert!(after > DURATION, "{bad:?}: {after:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn r_lease_1_a_lost_lease_cancels_at_once_and_is_sought_again() {
    let backend = Scripted::new(&[Answer::No, Answer::Yes]);
    let stop = CancellationToken::new();
    let cancelled = AtomicU64::new(0);
    run_with_lease(&backend, &config(), stop.clone(), |claim, guard| {
        let (stop, cancelled) = (stop.clone(), &cancelled);
        async move {
            if claim.version == 0 {
                let started = Instant::now();
                guard.lost().cancelled().await;
                let elapsed = started.elapsed();
                assert!(
                    elapsed > DURATION * 3 / 10 && elapsed <= DURATION / 3,
                    "the first renewal says so: {elapsed:?}"
                );
                cancelled.fetch_add(1, Ordering::SeqCst);
            } else {
                sleep(DURATION * 4).await;
                assert!(guard.check().is_ok(), "renewed all the time");
                stop.cancel();
            }
        }
    })
    .await;
    assert_eq!((cancelled.into_inner(), backend.acquired.into_inner()), (1, 2));
    assert_eq!(backend.released.into_inner(), 1, "only what we still had");
}

#[tokio::test(start_paused = true)]
async fn r_sd_9_stop_lets_the_work_drain_under_the_lease() {
    let backend = Scripted::new(&[Answer::Yes]);
    let stop = CancellationToken::new();
    stop.cancel();
    run_with_lease(&backend, &config(), stop.clone(), |_, _| -> Ready<()> { panic!("stopped before it was won") })
        .await;
    let stop = CancellationToken::new();
    run_with_lease(&backend, &config(), stop.clone(), |_, guard| {
        let (stop, working) = (stop.clone(), Arc::clone(&backend.working));
        async move {
            working.store(true, Ordering::SeqCst);
            stop.cancel();
            sleep(DURATION * 2).await;
            assert!(guard.check().is_ok(), "renewals go on while draining");
            working.store(false, Ordering::SeqCst);
        }
    })
    .await;
    assert_eq!(backend.released.into_inner(), 1);
}

#[tokio::test(start_paused = true)]
async fn r_sd_9_what_is_not_seen_free_keeps_its_lease_until_that_expires() {
    let backend = Scripted::new(&[Answer::Yes]);
    let stop = CancellationToken::new();
    run_with_lease(&backend, &config(), stop.clone(), |_, _| {
        stop.cancel();
        ready(Leave::Expire)
    })
    .await;
    assert_eq!((backend.acquired.into_inner(), backend.released.into_inner()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn none_leads_always() {
    let stop = CancellationToken::new();
    run_with_lease(&NoLease, &config(), stop.clone(), |_, guard| {
        let stop = stop.clone();
        async move {
            sleep(DURATION * 10).await;
            assert!(guard.check().is_ok());
            stop.cancel();
        }
    })
    .await;
}
