use std::time::Duration;

use aura_lease::Pod;

use crate::engine::BATCH_BYTES;

/// What a worker needs besides the rows that it holds (R-MEM-9).
const BESIDES: u64 = 64 << 20;

/// Knobs of a worker, with the defaults of the `CDC_*` variables (design §8).
#[derive(Debug, Clone)]
pub struct WorkerSettings {
    /// `CDC_FILTER_REFRESH_MS`: the registry is read again this often, signal or not.
    pub filter_refresh: Duration,
    /// `POD_NAME`, `POD_UID`: part of the worker's name in leases.
    pub pod: Option<Pod>,
    /// `CDC_NUM_SHARDS`.
    pub shards: usize,
    /// `CDC_MEMORY_QUOTA` in bytes, of the process.
    pub memory_quota: usize,
    /// `CDC_MAX_ENGINES`: each has its fixed share of the quota.
    pub max_engines: usize,
    /// `CDC_ADVANCE_INTERVAL_MS`.
    pub advance_interval: Duration,
    /// `CDC_DRAIN_TIMEOUT`, the final position included.
    pub drain_timeout: Duration,
    /// `CDC_ZOMBIE_AFTER`: who streams for this long and has never confirmed anything is a zombie (R-ENG-7 Z1).
    pub zombie_after: Duration,
    /// An engine's task without a sign of life for this long is cut off (R-FB-4).
    pub watchdog_limit: Duration,
    /// Sources are taken from nobody before the pool has been the same for this long (R-LEASE-3).
    pub settle: Duration,
    /// A project without a single acknowledgement for so long is skipped with an announced gap (R-SH-3).
    pub skip_after: Duration,
    /// An engine whose work stands still for so long, though nothing is known to be away, fails (R-SH-5).
    pub stall_limit: Duration,
    /// A known outage may last so long.
    pub outage_limit: Duration,
    /// `LEASE_DURATION_SECS`.
    pub lease_duration: Duration,
    /// Largest event in bytes; a larger one is reduced (R-BIG-4).
    pub max_event_bytes: usize,
    /// Visibility connections per source (R-RLS-9).
    pub visibility_connections: usize,
}

impl Default for WorkerSettings {
    fn default() -> Self {
        Self {
            filter_refresh: Duration::from_secs(3),
            pod: None,
            shards: 4,
            memory_quota: 256 << 20,
            max_engines: 8,
            advance_interval: Duration::from_millis(100),
            drain_timeout: Duration::from_secs(25),
            zombie_after: Duration::from_secs(300),
            watchdog_limit: Duration::from_secs(30),
            settle: Duration::from_secs(30),
            skip_after: Duration::from_secs(60),
            stall_limit: Duration::from_secs(120),
            outage_limit: Duration::from_secs(900),
            lease_duration: Duration::from_secs(15),
            max_event_bytes: 8 << 20,
            visibility_connections: 16,
        }
    }
}

impl WorkerSettings {
    /// One engine's share of the quota.
    pub fn engine_quota(&self) -> usize {
        self.memory_quota / self.max_engines.max(1)
    }

    /// What can't work, in words for the operator (R-MEM-9); `container` is the memory of the container in bytes.
    pub fn problems(&self, container: Option<u64>) -> Vec<String> {
        let mut problems = Vec::new();
        let (quota, event) = (self.engine_quota(), self.max_event_bytes);
        if quota < 4 * event {
            problems.push(format!(
                "CDC_MEMORY_QUOTA / CDC_MAX_ENGINES is {quota} bytes, it must be at least four times the largest event ({event} bytes)"
            ));
        }
        let process = self.memory_quota as u64 * 5 / 4 + BESIDES;
        if let Some(container) = container.filter(|container| process > *container) {
            problems.push(format!(
                "CDC_MEMORY_QUOTA is {} bytes: the worker may need {process} with it, and its container has {container}",
                self.memory_quota
            ));
        }
        // Every shard may have a batch on its way and one that waits, of two projects; reading resumes below half.
        let batches = 2 * self.shards * 2 * BATCH_BYTES;
        if batches > quota / 2 {
            problems.push(format!(
                "CDC_NUM_SHARDS is {}: their batches hold {batches} bytes, more than half of CDC_MEMORY_QUOTA / CDC_MAX_ENGINES ({quota} bytes)",
                self.shards
            ));
        }
        if self.shards == 0 {
            problems.push("CDC_NUM_SHARDS must be at least 1".to_owned());
        }
        if self.lease_duration < Duration::from_secs(3) {
            problems.push("LEASE_DURATION_SECS must be at least 3".to_owned());
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_mem_9_what_can_t_work_is_said_at_the_start() {
        let fine = WorkerSettings::default();
        assert_eq!(fine.problems(None), Vec::<String>::new());
        assert_eq!(fine.problems(Some(384 << 20)), Vec::<String>::new(), "256 MiB and a quarter, and 64 MiB");
        let cases = [
            (fine.clone(), Some((384 << 20) - 1), "container"),
            (WorkerSettings { memory_quota: (256 << 20) - 8, ..fine.clone() }, None, "four times the largest event"),
            (WorkerSettings { shards: 5, ..fine.clone() }, None, "CDC_NUM_SHARDS is 5"),
            (WorkerSettings { shards: 0, ..fine }, None, "at least 1"),
        ];
        for (settings, container, words) in cases {
            let problems = settings.problems(container);
            assert!(problems.iter().any(|problem| problem.contains(words)), "{words}: {problems:?}");
        }
    }
}
