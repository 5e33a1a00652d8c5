use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
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

struct Rig {
    platform: Platform,
    lease: Arc<PostgresLease>,
}

impl Rig {
    async fn start() -> Self {
        let (platform, lease) = start().await;
        Self { platform, lease: Arc::new(lease) }
    }
}

#[async_trait]
impl conformance::Rig for Rig {
    async fn backend(&self, _process: usize) -> Arc<dyn LeaseBackend> {
        // It keeps nothing in memory, so one stands for all.
        Arc::clone(&self.lease) as _
    }

    async fn steal(&self, lease: &str) {
        let client = self.platform.postgres.client("platform").await.expect("a superuser");
        let steal = format!("update aura.leases set holder = 'thief', version = version + 1 where name = '{lease}'");
        client.batch_execute(&steal).await.expect("stolen");
    }
}

aura_lease::lease_conformance!(Rig::start());

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
    run_with_lease(&behind, &config, stop.clone(), |_, guard| {
        let (proxy, direct, stop) = (&proxy, &direct, stop.clone());
        async move {
            proxy.set(Flow::Frozen);
            let started = Instant::now();
            guard.lost().cancelled().await;
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
