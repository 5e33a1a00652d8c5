//! Leases in a cluster: the workers against an API server that this process plays.

use std::time::Duration;

use anyhow::{Context, Result};
use aura_testkit::{FakeKubernetes, ServedKubernetes, Signal, eventually, http_status};
use serde_json::{Value, json};
use system_tests::{PATIENCE, SLOT, Split, SplitOptions};

/// A lease that nobody could wait for.
const LONG: &str = "120";

struct Cluster {
    fake: FakeKubernetes,
    served: ServedKubernetes,
}

impl Cluster {
    async fn start() -> Result<Self> {
        let fake = FakeKubernetes::new();
        let served = fake.serve().await?;
        Ok(Self { fake, served })
    }

    fn options(&self, lease_seconds: &str) -> Result<SplitOptions> {
        let kubeconfig = self.served.kubeconfig("worker")?;
        Ok(SplitOptions::default()
            .worker("LEASE_BACKEND", "kubernetes")
            .worker("LEASE_DURATION_SECS", lease_seconds)
            .worker("KUBECONFIG", &kubeconfig.to_string_lossy()))
    }

    /// Who holds the one lease.
    fn holder(&self) -> Value {
        self.fake.leases("default").first().map(|lease| lease["spec"]["holderIdentity"].clone()).unwrap_or_default()
    }
}

#[tokio::test]
async fn r_lease_2_workers_share_the_leases_of_a_cluster_and_hand_over_at_once() -> Result<()> {
    let cluster = Cluster::start().await?;
    let split = Split::start_with(cluster.options(LONG)?).await?;
    assert_eq!(split.worker.status().await["worker"], cluster.holder());
    assert_eq!(split.engine().await?["lease"]["holder"], cluster.holder());
    let second = split.another_worker()?;
    eventually(PATIENCE, || async { http_status(second.port, "/ready").await.is_ok_and(|status| status == 200) })
        .await
        .with_context(|| second.process.lines().join("\n"))?;
    split.worker.process.signal(Signal::TERM)?;
    assert_eq!(split.worker.process.wait(PATIENCE).await?.code(), Some(0), "{}", split.logs());
    eventually(Duration::from_secs(5), || second.is_streaming())
        .await
        .with_context(|| second.process.lines().join("\n"))?;
    assert_eq!(second.status().await["worker"], cluster.holder());
    second.process.signal(Signal::TERM)?;
    assert_eq!(second.process.wait(PATIENCE).await?.code(), Some(0));
    assert_eq!(cluster.holder(), json!(null), "released");
    Ok(())
}

#[tokio::test]
async fn r_lease_2_a_container_that_was_started_again_need_not_wait_for_its_own_lease() -> Result<()> {
    let cluster = Cluster::start().await?;
    let options = cluster.options(LONG)?.worker("POD_NAME", "aura-worker-0").worker("POD_UID", "0f9c1c50");
    let mut split = Split::start_with(options).await?;
    let before = cluster.holder();
    assert!(before.as_str().is_some_and(|holder| holder.starts_with("aura-worker-0_0f9c1c50_")), "{before}");
    split.worker.process.kill().await?;
    split.start_worker()?;
    split.wait_until_streaming().await?;
    assert_ne!(cluster.holder(), before);
    Ok(())
}

#[tokio::test]
async fn r_lease_1_an_api_server_that_hangs_stops_the_engine_before_the_lease_expires_and_not_the_worker() -> Result<()>
{
    let cluster = Cluster::start().await?;
    let split = Split::start_with(cluster.options("6")?).await?;
    let sql = split.postgres.client("postgres").await?;
    let active = async || -> Result<bool> {
        let query = "select active from pg_replication_slots where slot_name = $1";
        Ok(sql.query_one(query, &[&SLOT]).await?.get(0))
    };
    assert!(active().await?);
    cluster.fake.freeze(true);
    // Counted from the last renewal, which is a little in the past.
    let stopped = || async { active().await.is_ok_and(|active| !active) };
    eventually(Duration::from_secs(6), stopped).await.with_context(|| split.logs())?;
    assert_eq!(http_status(split.worker.port, "/health").await?, 200, "R-SD-5: the process goes on");
    cluster.fake.freeze(false);
    split.wait_until_streaming().await
}
