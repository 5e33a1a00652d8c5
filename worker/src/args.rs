//! The `CDC_*` variables (design §8), shared by the worker's binary and the undivided one.

use std::{sync::Arc, time::Duration};

use aura_kit::Problems;
use aura_lease::{LeaseBackend, Pod};
use aura_store::{NewSource, Plugin, SlotRecreate, Store};
use secrecy::SecretString;

use crate::{
    WorkerSettings, container,
    lease::{LeaseKind, NoBackend},
};

/// A worker's options.
#[derive(Debug, Clone, clap::Args)]
pub struct WorkerArgs {
    /// Registers the source `shared` at start: a login with REPLICATION, no superuser.
    #[arg(long, env = "POSTGRES_REPLICATION_URL", hide_env_values = true, value_name = "URL")]
    postgres_replication_url: Option<SecretString>,
    /// The shared source's URL for bootstrap, project roles and ALTER; the replication URL by default.
    #[arg(long, env = "POSTGRES_ADMIN_URL", hide_env_values = true, value_name = "URL")]
    postgres_admin_url: Option<SecretString>,
    /// Slot of the shared source.
    #[arg(long, env = "CDC_SLOT_NAME", default_value = "aura_cdc_slot", value_name = "NAME")]
    slot_name: String,
    /// Output plugin of the shared source: auto is wal2json if its library is there, else pgoutput.
    #[arg(long, env = "CDC_PLUGIN", default_value = "auto", value_parser = ["auto", "wal2json", "pgoutput"])]
    plugin: String,
    /// What happens when the shared source's slot is lost: auto makes it again and announces a gap, manual waits for an
    /// operator.
    #[arg(long, env = "CDC_SLOT_RECREATE", default_value = "auto", value_parser = ["auto", "manual"])]
    slot_recreate: String,
    /// The registry is read again this often, in milliseconds, signal or not.
    #[arg(long, env = "CDC_FILTER_REFRESH_MS", default_value_t = 3000, value_parser = clap::value_parser!(u64).range(50..))]
    filter_refresh_ms: u64,
    /// Number of shards, by hash of the project.
    #[arg(long, env = "CDC_NUM_SHARDS", default_value_t = 4)]
    num_shards: usize,
    /// Memory for rows in flight, of the process: bytes, or with KiB, MiB, MB, GiB.
    #[arg(long, env = "CDC_MEMORY_QUOTA", default_value = "256MiB", value_parser = bytes)]
    memory_quota: usize,
    /// Engines that share the memory quota.
    #[arg(long, env = "CDC_MAX_ENGINES", default_value_t = 8)]
    max_engines: usize,
    /// Smallest distance of two advances of the confirmed position, in milliseconds.
    #[arg(long, env = "CDC_ADVANCE_INTERVAL_MS", default_value_t = 100)]
    advance_interval_ms: u64,
    /// Who streams from a slot for this long and has never confirmed anything is a zombie: seconds, or with s or m.
    #[arg(long, env = "CDC_ZOMBIE_AFTER", default_value = "5m", value_parser = time)]
    zombie_after: Duration,
    /// Where leases are kept; auto is the cluster in a pod that may talk to it, else the platform database.
    #[arg(long, env = "LEASE_BACKEND", default_value = "auto", value_enum)]
    lease_backend: LeaseKind,
    /// Namespace of a cluster's leases; the pod's own by default.
    #[arg(long, env = "LEASE_NAMESPACE", value_name = "NAME")]
    lease_namespace: Option<String>,
    /// From the last renewal to expiry, in seconds.
    #[arg(long, env = "LEASE_DURATION_SECS", default_value_t = 15)]
    lease_duration_secs: u64,
    /// The pod's metadata.name; with its uid a container that was started again needn't wait for its own lease.
    #[arg(long, env = "POD_NAME", requires = "pod_uid", value_name = "NAME")]
    pod_name: Option<String>,
    /// The pod's metadata.uid.
    #[arg(long, env = "POD_UID", requires = "pod_name", value_name = "UID")]
    pod_uid: Option<String>,
}

impl WorkerArgs {
    /// Adds what is wrong.
    pub fn check(&self, problems: &mut Problems) {
        for problem in self.settings().problems(container::memory_limit()) {
            problems.add(problem);
        }
    }

    /// The back end of the leases.
    ///
    /// # Errors
    /// There is none, or without leases this worker wouldn't be alone.
    pub async fn lease(&self, store: &Store) -> Result<Arc<dyn LeaseBackend>, NoBackend> {
        self.lease_backend.open(store, &self.settings(), self.lease_namespace.clone()).await
    }

    fn pod(&self) -> Option<Pod> {
        Some(Pod { name: self.pod_name.clone()?, uid: self.pod_uid.clone()? })
    }

    /// The source `shared`, if it is given.
    pub fn shared_source(&self) -> Option<NewSource> {
        Some(NewSource {
            name: "shared".to_owned(),
            replication_url: self.postgres_replication_url.clone()?,
            admin_url: self.postgres_admin_url.clone(),
            slot_name: Some(self.slot_name.clone()),
            plugin: match self.plugin.as_str() {
                "wal2json" => Plugin::Wal2json,
                "pgoutput" => Plugin::PgOutput,
                _ => Plugin::Auto,
            },
            slot_recreate: self.slot_recreate.parse().unwrap_or(SlotRecreate::Auto),
        })
    }

    /// The knobs; the drain's time is the process's.
    pub fn settings(&self) -> WorkerSettings {
        WorkerSettings {
            filter_refresh: Duration::from_millis(self.filter_refresh_ms),
            shards: self.num_shards,
            memory_quota: self.memory_quota,
            max_engines: self.max_engines,
            advance_interval: Duration::from_millis(self.advance_interval_ms),
            zombie_after: self.zombie_after,
            lease_duration: Duration::from_secs(self.lease_duration_secs),
            pod: self.pod(),
            ..WorkerSettings::default()
        }
    }
}

/// `256MiB`, `1GiB`, `4096`.
fn bytes(text: &str) -> Result<usize, String> {
    let units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("GB", 1_000_000_000), ("MB", 1_000_000)];
    let (digits, unit) = units
        .iter()
        .find_map(|(suffix, unit)| text.strip_suffix(suffix).map(|digits| (digits, *unit)))
        .unwrap_or((text, 1));
    let number =
        digits.trim().parse::<usize>().map_err(|_| "a number of bytes, or one with KiB, MiB or GiB".to_owned())?;
    number.checked_mul(unit).ok_or_else(|| "too large".to_owned())
}

/// `5m`, `300s`, `300`.
fn time(text: &str) -> Result<Duration, String> {
    let (digits, unit) =
        text.strip_suffix('m').map_or_else(|| (text.strip_suffix('s').unwrap_or(text), 1), |digits| (digits, 60));
    let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    number.map(Duration::from_secs).ok_or_else(|| "a number of seconds, or one with s or m".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_have_units() {
        assert_eq!(bytes("256MiB"), Ok(256 << 20));
        assert_eq!(bytes("1MB"), Ok(1_000_000));
        assert_eq!(bytes("17"), Ok(17));
        assert!(bytes("lots").is_err());
        assert_eq!(time("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(time("90"), time("90s"));
        assert!(time("1h").is_err());
    }
}
