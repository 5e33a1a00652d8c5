use std::{sync::Arc, time::Duration};

use aura_domain::WorkerId;
use aura_lease::{LeaseBackend, LeaseConfig, LeaseError, conformance, run_with_lease};
use aura_store::{PostgresLease, Store};
use aura_testkit::{Flow, TcpProxy};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{Platform, key, platform};

/// Long against a query, short to wait for.
const SHORT: Duration = Duration::from_secs(1);

async fn start() -> (Platform, PostgresLease) {
    let platform = platform().await;
    let lease = PostgresLease::new(&platform.store);
    (platform, lease)
}

#[tokio::test]
async fn r_lease_2_exclusive_until_released() {
    let (_platform, lease) = start().await;
    conformance::exclusive_until_released(&lease, "source-a").await;
}

#[tokio::test]
async fn r_lease_2_expires() {
    let (_platform, lease) = start().await;
    conformance::expires(&lease, "source-a", SHORT).await;
}

#[tokio::test]
async fn r_lease_2_renewal_keeps_it() {
    let (_platform, lease) = start().await;
    conformance::renewal_keeps_it(&lease, "source-a", SHORT).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r_lease_1_one_works_at_a_time() {
    let (_platform, lease) = start().await;
    conformance::one_works_at_a_time(Arc::new(lease), "source-a", SHORT).await;
}

#[tokio::test]
async fn r_lease_1_theft_cancels_the_work() {
    let (platform, lease) = start().await;
    let client = platform.postgres.client("platform").await.expect("a superuser");
    let steal = async || {
        let steal = "update aura.leases set holder = 'thief', version = version + 1 where name = 'source-a'";
        client.batch_execute(steal).await.expect("stolen");
    };
    conformance::theft_cancels_the_work(&lease, "source-a", steal).await;
}

#[tokio::test]
async fn r_lease_1_a_network_that_swallows_everything_cancels_the_work_before_expiry() {
    let platform = platform().await;
    let proxy = TcpProxy::start(platform.postgres.port()).await.expect("a proxy");
    let direct = format!(":{}/", platform.postgres.port());
    let through = platform.url.replace(&direct, &format!(":{}/", proxy.port()));
    let behind = PostgresLease::new(&Store::connect(&through, key()).await.expect("connected"));
    let duration = Duration::from_secs(2);
    let config = LeaseConfig {
        name: "source-a".to_owned(),
        holder: WorkerId("cut off".to_owned()),
        duration,
        retry: Duration::from_millis(50),
    };
    let direct = PostgresLease::new(&platform.store);
    let stop = CancellationToken::new();
    run_with_lease(&behind, &config, stop.clone(), |_, lost| {
        let (proxy, direct, stop) = (&proxy, &direct, stop.clone());
        async move {
            proxy.set(Flow::Frozen);
            let started = Instant::now();
            lost.cancelled().await;
            assert!(started.elapsed() < duration, "{:?}", started.elapsed());
            let holder = direct.holder("source-a").await.expect("an answer").expect("still ours");
            assert!(holder.remaining > Duration::ZERO, "cancelled before anybody else could take it");
            stop.cancel();
        }
    })
    .await;
}

#[tokio::test]
async fn an_unreachable_database_is_an_error_and_not_a_loss() {
    let (mut platform, lease) = start().await;
    let holder = WorkerId("w".to_owned());
    let claim = lease.try_acquire("source-a", &holder, SHORT).await.expect("an answer").expect("free");
    platform.postgres.stop(aura_testkit::Shutdown::Fast).await.expect("stopped");
    let renewed = lease.renew(&claim).await;
    assert!(matches!(renewed, Err(LeaseError::Backend(_) | LeaseError::Timeout(_))), "{renewed:?}");
}
