//! The `CDC_*` variables (design §8), shared by the worker's binary and the undivided one.

use std::{sync::Arc, time::Duration};

use aura_kit::Problems;
use aura_lease::{LeaseBackend, Pod};
use aura_pgsource::SourceUrl;
use aura_store::{NewSource, Plugin, SlotRecreate, Store};
use clap::Parser;
use secrecy::SecretString;

use crate::{
    ExplainLog, WorkerSettings, container,
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
    /// A project without a single acknowledgement for this long is skipped with an announced gap: seconds, or with s or m.
    #[arg(long, env = "CDC_SKIP_AFTER", default_value = "60s", value_parser = time)]
    skip_after: Duration,
    /// An engine whose work stands still for this long, though nothing is known to be away, fails: seconds, or with s or m.
    #[arg(long, env = "CDC_STALL_LIMIT", default_value = "2m", value_parser = time)]
    stall_limit: Duration,
    /// A bus or source that is known to be away may be so for this long before the engine fails: seconds, or with s or m.
    #[arg(long, env = "CDC_OUTAGE_LIMIT", default_value = "15m", value_parser = time)]
    outage_limit: Duration,
    /// An engine's task without a sign of life for this long is cut off: seconds, or with s or m.
    #[arg(long, env = "CDC_WATCHDOG_LIMIT", default_value = "30s", value_parser = time)]
    watchdog_limit: Duration,
    /// Largest event that is sent whole, a larger one is reduced: bytes, or with KiB, MiB, MB, GiB. What the bus takes bounds
    /// it, too.
    #[arg(long, env = "CDC_MAX_EVENT_BYTES", default_value = "8MiB", value_parser = bytes)]
    max_event_bytes: usize,
    /// Recent changes that each engine remembers, to tell why somebody did or did not get one: bytes, or with KiB, MiB, GiB.
    /// 0 = none.
    #[arg(long, env = "CDC_EXPLAIN_MEMORY", default_value = "4MiB", value_parser = bytes)]
    explain_memory: usize,
    /// Logs every verdict, one line per change and subscription without a row's values, of these projects: ids separated by
    /// commas, or all.
    #[arg(long, env = "CDC_EXPLAIN", default_value = "", value_name = "PROJECTS")]
    explain: ExplainLog,
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
        let urls = [
            ("POSTGRES_REPLICATION_URL", &self.postgres_replication_url),
            ("POSTGRES_ADMIN_URL", &self.postgres_admin_url),
        ];
        for (name, url) in urls {
            if let Some(Err(error)) = url.as_ref().map(SourceUrl::from_secret) {
                problems.add(format!("{name}: {error}"));
            }
        }
    }

    /// What the environment alone says, for whoever has other options: problems go to `problems`.
    pub fn from_environment(problems: &mut Problems) -> Option<Self> {
        #[derive(Debug, clap::Parser)]
        struct Alone {
            #[command(flatten)]
            worker: WorkerArgs,
        }
        match Alone::try_parse_from([""]) {
            Ok(Alone { worker }) => {
                worker.check(problems);
                Some(worker)
            }
            Err(error) => {
                problems.add(error.to_string().trim_start_matches("error: ").trim_end());
                None
            }
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
            skip_after: self.skip_after,
            stall_limit: self.stall_limit,
            outage_limit: self.outage_limit,
            watchdog_limit: self.watchdog_limit,
            max_event_bytes: self.max_event_bytes,
            explain_memory: self.explain_memory,
            explain_log: self.explain.clone(),
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
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Alone {
        #[command(flatten)]
        worker: WorkerArgs,
    }

    fn parse(options: &[&str]) -> WorkerArgs {
        Alone::try_parse_from(["worker"].iter().chain(options)).expect("valid").worker
    }

    fn limits(settings: &WorkerSettings) -> ([u64; 4], usize) {
        let times = [settings.skip_after, settings.stall_limit, settings.outage_limit, settings.watchdog_limit];
        (times.map(|time| time.as_secs()), settings.max_event_bytes)
    }

    #[test]
    fn f_13_the_limits_have_their_options_and_their_defaults() {
        let options = [
            ("--skip-after", "10s"),
            ("--stall-limit", "20"),
            ("--outage-limit", "3m"),
            ("--watchdog-limit", "40s"),
            ("--max-event-bytes", "1MiB"),
        ];
        let given: Vec<_> = options.iter().flat_map(|(name, value)| [*name, *value]).collect();
        assert_eq!(limits(&parse(&given).settings()), ([10, 20, 180, 40], 1 << 20));
        assert_eq!(limits(&parse(&[]).settings()), limits(&WorkerSettings::default()));
        assert_eq!(limits(&WorkerSettings::default()), ([60, 120, 900, 30], 8 << 20));
    }

    #[test]
    fn f_13_a_limit_that_can_t_work_is_a_problem_of_the_configuration() {
        let mut problems = Problems::default();
        parse(&["--skip-after", "5m"]).check(&mut problems);
        assert!(problems.list().iter().any(|problem| problem.contains("CDC_SKIP_AFTER")), "{:?}", problems.list());
    }

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
