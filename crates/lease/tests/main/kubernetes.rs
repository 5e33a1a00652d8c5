//! The Kubernetes back end: the suite over the network, and what it does when answers get lost, on a paused clock.

use std::{sync::Arc, time::Duration};

use aura_domain::WorkerId;
use aura_lease::{Claim, KubernetesLease, KubernetesOptions, LeaseBackend, LeaseConfig, LeaseError, run_with_lease};
use aura_testkit::{FakeKubernetes, Fault, On};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::{Client, Config};
use serde_json::json;
use tokio::{
    sync::Notify,
    time::{Instant, advance, sleep},
};
use tokio_util::sync::CancellationToken;

use crate::server::{Server, local_backend, local_client, options, stored};

mod suite {
    use super::Server;

    aura_lease::lease_conformance!(Server::start());
}

const NAME: &str = "source-a";
const DURATION: Duration = Duration::from_secs(15);

fn worker(name: &str) -> WorkerId {
    WorkerId(name.to_owned())
}

async fn acquire(backend: &KubernetesLease, who: &str) -> Result<Option<Claim>, LeaseError> {
    backend.try_acquire(NAME, &worker(who), DURATION).await
}

fn holder(fake: &FakeKubernetes) -> serde_json::Value {
    stored(fake, NAME)["spec"]["holderIdentity"].clone()
}

#[tokio::test(start_paused = true)]
async fn r_lease_2_a_write_without_an_answer_is_looked_up() {
    let fake = FakeKubernetes::new();
    let backend = local_backend(&fake, "a");
    let switches = fake.client("a");
    switches.once(On::Write, Fault::Drop);
    assert!(matches!(acquire(&backend, "a").await, Err(LeaseError::Timeout(_))), "it may come yet");
    switches.once(On::Write, Fault::ApplyAndDrop);
    let claim = acquire(&backend, "a").await.expect("an answer").expect("it was applied");
    for fault in [Fault::ApplyAndDrop, Fault::Drop, Fault::ServerError] {
        switches.once(On::Write, fault);
        let before = stored(&fake, NAME)["metadata"]["resourceVersion"].clone();
        assert!(backend.renew(&claim).await.expect("it is ours"), "{fault:?}");
        assert_ne!(stored(&fake, NAME)["metadata"]["resourceVersion"], before, "{fault:?}: and it was renewed");
    }
    switches.once(On::Write, Fault::ApplyAndDrop);
    backend.release(claim).await.expect("released");
    assert_eq!(holder(&fake), json!(null));
}

#[tokio::test(start_paused = true)]
async fn r_lease_1_no_call_is_longer_than_its_limit_and_nothing_is_tried_again_behind_our_back() {
    let fake = FakeKubernetes::new();
    let backend = local_backend(&fake, "a");
    let claim = acquire(&backend, "a").await.expect("an answer").expect("free");
    let switches = fake.client("a");
    for fault in [Fault::TooManyRequests, Fault::Unauthorized] {
        let (asked, before) = (Instant::now(), switches.requests(On::Write));
        switches.once(On::Write, fault);
        assert!(matches!(backend.renew(&claim).await, Err(LeaseError::Backend(_))), "{fault:?}");
        assert_eq!((switches.requests(On::Write), asked.elapsed()), (before + 1, Duration::ZERO), "{fault:?}");
    }
    switches.freeze(true);
    let asked = Instant::now();
    assert!(matches!(backend.holder(NAME).await, Err(LeaseError::Timeout(_))));
    assert_eq!(asked.elapsed(), Duration::from_secs(3));
}

#[tokio::test(start_paused = true)]
async fn r_lease_2_a_write_that_arrives_late_takes_nothing_back() {
    let fake = FakeKubernetes::new();
    let (a, b) = (local_backend(&fake, "a"), local_backend(&fake, "b"));
    let claim = acquire(&a, "a").await.expect("an answer").expect("free");
    fake.client("a").once(On::Write, Fault::Delay(Duration::from_secs(60)));
    // Its caller loses patience.
    assert!(tokio::time::timeout(Duration::from_secs(1), a.renew(&claim)).await.is_err());
    a.release(claim).await.expect("released");
    let other = acquire(&b, "b").await.expect("an answer").expect("free");
    sleep(Duration::from_secs(61)).await;
    assert_eq!(holder(&fake), json!("b"));
    assert!(b.renew(&other).await.expect("an answer"));
}

#[tokio::test(start_paused = true)]
async fn r_lease_2_a_release_compares_with_what_is_there_now() {
    let fake = FakeKubernetes::new();
    let (a, b) = (local_backend(&fake, "a"), local_backend(&fake, "b"));
    let old = acquire(&a, "a").await.expect("an answer").expect("free");
    // The holder hears of nothing; its memory says that it holds the lease.
    fake.client("a").freeze(true);
    assert_eq!(acquire(&b, "b").await.expect("an answer"), None);
    advance(DURATION).await;
    acquire(&b, "b").await.expect("an answer").expect("expired");
    fake.client("a").heal();
    a.release(old).await.expect("harmless");
    assert_eq!(holder(&fake), json!("b"));
}

#[tokio::test(start_paused = true)]
async fn r_lease_1_clocks_may_be_an_hour_apart() {
    let clocks: [fn() -> Timestamp; 2] =
        [|| Timestamp::now() - SignedDuration::from_hours(1), || Timestamp::now() + SignedDuration::from_hours(1)];
    for (n, (mine, theirs)) in [(clocks[0], clocks[1]), (clocks[1], clocks[0])].into_iter().enumerate() {
        let fake = FakeKubernetes::new();
        let with =
            |token, clock| KubernetesLease::new(local_client(&fake, token), KubernetesOptions { clock, ..options() });
        let (a, b) = (with("a", mine), with("b", theirs));
        let claim = acquire(&a, "a").await.expect("an answer").expect("free");
        assert_eq!(acquire(&b, "b").await.expect("an answer"), None, "{n}: robbed at once");
        advance(DURATION - Duration::from_millis(10)).await;
        assert_eq!(acquire(&b, "b").await.expect("an answer"), None, "{n}");
        assert!(a.renew(&claim).await.expect("an answer"));
        assert_eq!(b.holder(NAME).await.expect("an answer").expect("a").remaining, DURATION, "{n}");
        advance(DURATION).await;
        assert!(acquire(&b, "b").await.expect("an answer").is_some(), "{n}: waited for too long");
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_was_deleted_or_made_anew_is_lost() {
    for anew in [false, true] {
        let fake = FakeKubernetes::new();
        let a = local_backend(&fake, "a");
        let claim = acquire(&a, "a").await.expect("an answer").expect("free");
        let object = stored(&fake, NAME)["metadata"]["name"].as_str().expect("a name").to_owned();
        assert!(fake.delete("default", &object));
        if anew {
            let b = local_backend(&fake, "b");
            acquire(&b, "b").await.expect("an answer").expect("b never saw a's lease");
        }
        assert!(!a.renew(&claim).await.expect("an answer"));
        a.release(claim).await.expect("harmless");
        assert_eq!(holder(&fake), if anew { json!("b") } else { json!(null) });
    }
}

/// A candidate that tries every minute by itself, and what it tells.
async fn patient_candidate(
    backend: Arc<KubernetesLease>,
    won: Arc<Notify>,
    lost: Arc<Notify>,
    stop: CancellationToken,
) {
    let retry = Duration::from_secs(60);
    let config = LeaseConfig { name: NAME.to_owned(), holder: worker("b"), duration: DURATION, retry };
    let work = |_, guard: aura_lease::Guard| {
        let (won, lost, stop) = (Arc::clone(&won), Arc::clone(&lost), stop.clone());
        async move {
            won.notify_one();
            guard.lost().cancelled().await;
            lost.notify_one();
            stop.cancel();
        }
    };
    run_with_lease(&*backend, &config, stop.clone(), work).await;
}

#[tokio::test(start_paused = true)]
async fn r_lease_3_the_watch_tells_of_a_release_and_of_a_theft_at_once_and_saves_asking() {
    let fake = FakeKubernetes::new();
    let (a, b) = (local_backend(&fake, "a"), Arc::new(local_backend(&fake, "b")));
    let claim = acquire(&a, "a").await.expect("an answer").expect("free");
    let (won, lost, stop) = (Arc::new(Notify::new()), Arc::new(Notify::new()), CancellationToken::new());
    let candidate = patient_candidate(Arc::clone(&b), Arc::clone(&won), Arc::clone(&lost), stop);
    let candidate = tokio::spawn(candidate);
    sleep(Duration::from_secs(1)).await;
    let asked = fake.client("b").requests(On::Get);
    for _ in 0..20 {
        assert!(a.renew(&claim).await.expect("an answer"));
        assert_eq!(acquire(&b, "b").await.expect("an answer"), None);
        sleep(Duration::from_secs(5)).await;
    }
    assert_eq!(fake.client("b").requests(On::Get), asked, "a lease that is told to be held needn't be asked for");
    let released = Instant::now();
    a.release(claim).await.expect("released");
    won.notified().await;
    assert!(released.elapsed() < Duration::from_millis(100), "{:?}", released.elapsed());

    sleep(Duration::from_secs(1)).await;
    let object = stored(&fake, NAME)["metadata"]["name"].as_str().expect("a name").to_owned();
    let deleted = Instant::now();
    fake.delete("default", &object);
    lost.notified().await;
    assert!(deleted.elapsed() < Duration::from_millis(100), "{:?}", deleted.elapsed());
    candidate.await.expect("no panic");
}

#[tokio::test(start_paused = true)]
async fn a_broken_watch_is_not_believed() {
    let fake = FakeKubernetes::new();
    let (a, b) = (local_backend(&fake, "a"), local_backend(&fake, "b"));
    let claim = acquire(&a, "a").await.expect("an answer").expect("free");
    assert_eq!(acquire(&b, "b").await.expect("an answer"), None);
    let switches = fake.client("b");
    switches.fail(On::List, Fault::ServerError);
    switches.cut_watches();
    sleep(Duration::from_secs(1)).await;
    a.release(claim).await.expect("released");
    assert!(acquire(&b, "b").await.expect("an answer").is_some());
}

#[tokio::test]
async fn a_client_with_tls_can_be_made_and_fails_without_a_panic() {
    let mut config = Config::new("https://127.0.0.1:1".parse().expect("a URL"));
    config.default_retry = false;
    let backend = KubernetesLease::new(Client::try_from(config).expect("a client"), options());
    assert!(matches!(backend.holder(NAME).await, Err(LeaseError::Backend(_))));
}
