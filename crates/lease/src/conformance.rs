//! What every back end must do; each function panics where one doesn't. Names are fresh, so one server serves all.
//! [`lease_conformance`](crate::lease_conformance) makes a test of each. A back end that doesn't exclude
//! ([`LeaseBackend::is_exclusive`]) must let everybody lead instead.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use aura_domain::WorkerId;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{Claim, LeaseBackend, LeaseConfig, Pod, run_with_lease, worker_id};

/// Far above what anything here takes; the suite fails with it, never passes by it.
const PATIENCE: Duration = Duration::from_secs(20);

/// A back end under test.
#[async_trait]
pub trait Rig: Send + Sync {
    /// The back end as the process of that number has it.
    async fn backend(&self, process: usize) -> Arc<dyn LeaseBackend>;

    /// Gives a lease to somebody else, behind everybody's back.
    async fn steal(&self, lease: &str);

    /// Lease duration to test with: long against one call, short enough to wait for, whole seconds.
    fn short(&self) -> Duration {
        Duration::from_secs(1)
    }
}

/// Makes a test of each function of the suite. `$rig` is a future of a [`Rig`].
#[macro_export]
macro_rules! lease_conformance {
    ($rig:expr) => {
        $crate::lease_conformance!($rig;
            r_lease_2_exclusive_until_released, r_lease_2_expires, r_lease_2_renewal_keeps_it,
            r_lease_2_a_restarted_pod_takes_over_at_once, r_lease_2_of_many_takers_one_wins,
            r_lease_1_one_works_at_a_time, r_lease_1_theft_cancels_the_work);
    };
    ($rig:expr; $($name:ident),*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            let rig = $rig.await;
            $crate::conformance::$name(&rig).await;
        }
    )*};
}

fn worker(name: &str) -> WorkerId {
    WorkerId(name.to_owned())
}

fn fresh_name() -> String {
    format!("source-{:016x}", rand::random::<u64>())
}

async fn acquire(backend: &dyn LeaseBackend, name: &str, who: &WorkerId, duration: Duration) -> Option<Claim> {
    backend.try_acquire(name, who, duration).await.expect("the back end answers")
}

async fn acquire_in_the_end(backend: &dyn LeaseBackend, name: &str, who: &WorkerId, duration: Duration) -> Claim {
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

/// True, and checked, if the back end excludes nobody.
async fn everybody_leads(rig: &dyn Rig) -> bool {
    let backend = rig.backend(0).await;
    if backend.is_exclusive() {
        return false;
    }
    let (name, long) = (fresh_name(), Duration::from_secs(3600));
    for who in ["a", "b", "a"] {
        let claim = acquire(&*backend, &name, &worker(who), long).await.expect("everybody gets it");
        assert!(backend.renew(&claim).await.expect("an answer"), "and keeps it");
        assert_eq!(backend.holder(&name).await.expect("an answer"), None, "nobody else is kept out");
        backend.release(claim).await.expect("harmless");
    }
    true
}

/// Held: nobody else gets it, the holder may have it again. Released: at once anybody's.
pub async fn r_lease_2_exclusive_until_released(rig: &dyn Rig) {
    if everybody_leads(rig).await {
        return;
    }
    let (name, long) = (fresh_name(), Duration::from_secs(3600));
    let (one, other) = (rig.backend(1).await, rig.backend(2).await);
    let (a, b) = (worker("a"), worker("b"));
    let first = acquire(&*one, &name, &a, long).await.expect("a free lease");
    assert_eq!((first.name.as_str(), &first.holder, first.duration), (name.as_str(), &a, long));
    assert_eq!(acquire(&*other, &name, &b, long).await, None);
    let again = acquire(&*one, &name, &a, long).await.expect("its own lease");
    assert!(!one.renew(&first).await.expect("an answer"), "an older claim of ours is void");
    assert!(one.renew(&again).await.expect("an answer"));
    let holder = other.holder(&name).await.expect("an answer").expect("somebody holds it");
    assert_eq!(holder.holder, a);
    assert!(holder.remaining > long / 2 && holder.remaining <= long, "{:?}", holder.remaining);
    one.release(first).await.expect("releasing a void claim is harmless");
    assert_eq!(acquire(&*other, &name, &b, long).await, None, "and releases nothing");
    one.release(again).await.expect("released");
    assert_eq!(other.holder(&name).await.expect("an answer"), None);
    let second = acquire(&*other, &name, &b, long).await.expect("hand-over is immediate");
    other.release(second).await.expect("released");
}

/// Not renewed: taken over after its duration, not before; the old claim is void then.
pub async fn r_lease_2_expires(rig: &dyn Rig) {
    if everybody_leads(rig).await {
        return;
    }
    let (name, short) = (fresh_name(), rig.short());
    let (one, other) = (rig.backend(1).await, rig.backend(2).await);
    let started = Instant::now();
    let old = acquire(&*one, &name, &worker("a"), short).await.expect("a free lease");
    // The thief's own duration doesn't matter: the holder's published one does.
    let new = acquire_in_the_end(&*other, &name, &worker("b"), Duration::from_secs(3600)).await;
    assert!(started.elapsed() >= short, "stolen after {:?}", started.elapsed());
    assert!(!one.renew(&old).await.expect("an answer"));
    one.release(old).await.expect("harmless");
    assert!(other.renew(&new).await.expect("an answer"), "the void release took nothing away");
    other.release(new).await.expect("released");
}

/// Renewed: kept beyond its duration.
pub async fn r_lease_2_renewal_keeps_it(rig: &dyn Rig) {
    if everybody_leads(rig).await {
        return;
    }
    let (name, short) = (fresh_name(), rig.short());
    let (one, other) = (rig.backend(1).await, rig.backend(2).await);
    let claim = acquire(&*one, &name, &worker("a"), short).await.expect("a free lease");
    let end = Instant::now() + short * 3;
    while Instant::now() < end {
        assert!(one.renew(&claim).await.expect("an answer"));
        assert_eq!(acquire(&*other, &name, &worker("b"), short).await, None);
        sleep(short / 5).await;
    }
    one.release(claim).await.expect("released");
}

/// A container that the kubelet started again needn't wait for its own old lease; another pod of the same name must.
pub async fn r_lease_2_a_restarted_pod_takes_over_at_once(rig: &dyn Rig) {
    if everybody_leads(rig).await {
        return;
    }
    let (name, long) = (fresh_name(), Duration::from_secs(3600));
    let pod = |uid: &str| Pod { name: "aura-worker-0".to_owned(), uid: uid.to_owned() };
    let (before, after) = (worker_id(Some(&pod("uid-1"))), worker_id(Some(&pod("uid-1"))));
    let (one, other) = (rig.backend(1).await, rig.backend(2).await);
    let old = acquire(&*one, &name, &before, long).await.expect("a free lease");
    assert_eq!(acquire(&*other, &name, &worker_id(Some(&pod("uid-2"))), long).await, None);
    let new = acquire(&*other, &name, &after, long).await.expect("its predecessor is gone");
    assert!(!one.renew(&old).await.expect("an answer"));
    other.release(new).await.expect("released");
}

/// Sixteen take it at once, one gets it.
pub async fn r_lease_2_of_many_takers_one_wins(rig: &dyn Rig) {
    if everybody_leads(rig).await {
        return;
    }
    let (name, long) = (fresh_name(), Duration::from_secs(3600));
    let mut tries = tokio::task::JoinSet::new();
    for n in 0..16 {
        let (backend, name) = (rig.backend(n).await, name.clone());
        tries.spawn(async move { acquire(&*backend, &name, &worker(&format!("w{n}")), long).await });
    }
    let won: Vec<Claim> = tries.join_all().await.into_iter().flatten().collect();
    assert_eq!(won.len(), 1, "{won:?}");
    let holder = rig.backend(0).await.holder(&name).await.expect("an answer").expect("somebody holds it");
    assert_eq!(holder.holder, won[0].holder);
}

/// R-LEASE-1: of many contenders one at a time works, and each gets its turn.
pub async fn r_lease_1_one_works_at_a_time(rig: &dyn Rig) {
    if everybody_leads(rig).await {
        return;
    }
    let (name, short, contenders) = (fresh_name(), rig.short(), 6);
    let (working, turns) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let tasks = TaskTracker::new();
    for n in 0..contenders {
        let (working, turns) = (Arc::clone(&working), Arc::clone(&turns));
        let (backend, config) = (rig.backend(n).await, config(&name, &format!("worker-{n}"), short));
        tasks.spawn(async move {
            let stop = CancellationToken::new();
            run_with_lease(&*backend, &config, stop.clone(), |_, guard| {
                let (working, turns, stop) = (Arc::clone(&working), Arc::clone(&turns), stop.clone());
                async move {
                    assert_eq!(working.fetch_add(1, Ordering::SeqCst), 0, "two at a time");
                    // Past the duration, so that it takes renewals to stay alone.
                    let lost = timeout(short + short / 4, guard.lost().cancelled()).await.is_ok();
                    assert!(!lost, "nobody took it");
                    guard.check().expect("it is ours");
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

/// R-LEASE-1: work is cancelled when somebody else has taken the lease, and nothing of theirs is released.
pub async fn r_lease_1_theft_cancels_the_work(rig: &dyn Rig) {
    if everybody_leads(rig).await {
        return;
    }
    let (name, stop) = (fresh_name(), CancellationToken::new());
    let (backend, versions) = (rig.backend(1).await, Mutex::new(HashSet::new()));
    let config = config(&name, "victim", Duration::from_secs(3));
    let run = run_with_lease(&*backend, &config, stop.clone(), |claim, guard| {
        versions.lock().expect("no panic").insert(claim.version);
        let (stop, name) = (stop.clone(), &name);
        async move {
            rig.steal(name).await;
            timeout(PATIENCE, guard.lost().cancelled()).await.expect("told in time");
            assert!(guard.check().is_err());
            stop.cancel();
        }
    });
    timeout(PATIENCE, run).await.expect("it ends");
    assert_eq!(versions.lock().expect("no panic").len(), 1);
    let holder = rig.backend(2).await.holder(&name).await.expect("an answer").expect("the thief has it");
    assert_eq!(holder.holder, worker("thief"));
}

fn config(name: &str, holder: &str, duration: Duration) -> LeaseConfig {
    LeaseConfig { name: name.to_owned(), holder: worker(holder), duration, retry: duration / 20 }
}
