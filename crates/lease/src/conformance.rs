//! What every back end must do; each function panics where one doesn't. Names are fresh, so one server serves all.
//!
//! `short` is the lease duration to test with: long against one call of the back end, short enough to wait for.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use aura_domain::WorkerId;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{Claim, LeaseBackend, LeaseConfig, run_with_lease};

/// Far above what anything here takes; the suite fails with it, never passes by it.
const PATIENCE: Duration = Duration::from_secs(20);

fn worker(name: &str) -> WorkerId {
    WorkerId(name.to_owned())
}

async fn acquire(backend: &dyn LeaseBackend, name: &str, who: &str, duration: Duration) -> Option<Claim> {
    backend.try_acquire(name, &worker(who), duration).await.expect("the back end answers")
}

async fn acquire_in_the_end(backend: &dyn LeaseBackend, name: &str, who: &str, duration: Duration) -> Claim {
    let won = async {
        loop {
            if let Some(claim) = acquire(backend, name, who, duration).await {
                return claim;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, won).await.expect("the lease becomes free")
}

/// Held: nobody else gets it, the holder may have it again. Released: at once anybody's.
pub async fn exclusive_until_released(backend: &dyn LeaseBackend, name: &str) {
    let long = Duration::from_secs(3600);
    let first = acquire(backend, name, "a", long).await.expect("a free lease");
    assert_eq!((first.name.as_str(), &first.holder, first.duration), (name, &worker("a"), long));
    assert_eq!(acquire(backend, name, "b", long).await, None);
    let again = acquire(backend, name, "a", long).await.expect("its own lease");
    assert!(!backend.renew(&first).await.expect("an answer"), "an older claim of ours is void");
    assert!(backend.renew(&again).await.expect("an answer"));
    let holder = backend.holder(name).await.expect("an answer").expect("somebody holds it");
    assert_eq!(holder.holder, worker("a"));
    assert!(holder.remaining > long / 2 && holder.remaining <= long, "{:?}", holder.remaining);
    backend.release(first).await.expect("releasing a void claim is harmless");
    assert_eq!(acquire(backend, name, "b", long).await, None, "and releases nothing");
    backend.release(again).await.expect("released");
    assert_eq!(backend.holder(name).await.expect("an answer"), None);
    let second = acquire(backend, name, "b", long).await.expect("hand-over is immediate");
    backend.release(second).await.expect("released");
}

/// Not renewed: taken over after its duration, not before; the old claim is void then.
pub async fn expires(backend: &dyn LeaseBackend, name: &str, short: Duration) {
    let started = Instant::now();
    let old = acquire(backend, name, "a", short).await.expect("a free lease");
    // The thief's own duration doesn't matter: the holder's published one does.
    let new = acquire_in_the_end(backend, name, "b", Duration::from_secs(3600)).await;
    assert!(started.elapsed() >= short, "stolen after {:?}", started.elapsed());
    assert!(!backend.renew(&old).await.expect("an answer"));
    backend.release(old).await.expect("harmless");
    assert!(backend.renew(&new).await.expect("an answer"), "the void release took nothing away");
    backend.release(new).await.expect("released");
}

/// Renewed: kept beyond its duration.
pub async fn renewal_keeps_it(backend: &dyn LeaseBackend, name: &str, short: Duration) {
    let claim = acquire(backend, name, "a", short).await.expect("a free lease");
    let end = Instant::now() + short * 3;
    while Instant::now() < end {
        assert!(backend.renew(&claim).await.expect("an answer"));
        assert_eq!(acquire(backend, name, "b", short).await, None);
        sleep(short / 5).await;
    }
    backend.release(claim).await.expect("released");
}

/// R-LEASE-1: of many contenders one at a time works, and each gets its turn.
pub async fn one_works_at_a_time(backend: Arc<dyn LeaseBackend>, name: &str, short: Duration) {
    let contenders = 8;
    let (working, turns) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let tasks = TaskTracker::new();
    for n in 0..contenders {
        let (backend, working, turns) = (Arc::clone(&backend), Arc::clone(&working), Arc::clone(&turns));
        let config = config(name, &format!("worker-{n}"), short);
        tasks.spawn(async move {
            let stop = CancellationToken::new();
            run_with_lease(&*backend, &config, stop.clone(), |_, lost| {
                let (working, turns, stop) = (Arc::clone(&working), Arc::clone(&turns), stop.clone());
                async move {
                    assert_eq!(working.fetch_add(1, Ordering::SeqCst), 0, "two at a time");
                    // Past the duration, so that it takes renewals to stay alone.
                    let lost = timeout(short + short / 4, lost.cancelled()).await.is_ok();
                    assert!(!lost, "nobody took it");
                    working.fetch_sub(1, Ordering::SeqCst);
                    turns.fetch_add(1, Ordering::SeqCst);
                    stop.cancel();
                }
            })
            .await;
        });
    }
    tasks.close();
    timeout(PATIENCE * 2, tasks.wait()).await.expect("everybody gets a turn");
    assert_eq!(turns.load(Ordering::SeqCst), contenders, "a panicked contender has no turn");
}

/// R-LEASE-1: work is cancelled when somebody else has taken the lease.
pub async fn theft_cancels_the_work(backend: &dyn LeaseBackend, name: &str, steal: impl AsyncFn()) {
    let stop = CancellationToken::new();
    let config = config(name, "victim", Duration::from_secs(3));
    let versions = std::sync::Mutex::new(HashSet::new());
    let run = run_with_lease(backend, &config, stop.clone(), |claim, lost| {
        versions.lock().expect("no panic").insert(claim.version);
        let stop = stop.clone();
        let steal = &steal;
        async move {
            steal().await;
            timeout(PATIENCE, lost.cancelled()).await.expect("told in time");
            stop.cancel();
        }
    });
    timeout(PATIENCE, run).await.expect("it ends");
    assert_eq!(versions.lock().expect("no panic").len(), 1);
}

fn config(name: &str, holder: &str, duration: Duration) -> LeaseConfig {
    LeaseConfig { name: name.to_owned(), holder: worker(holder), duration, retry: duration / 20 }
}
