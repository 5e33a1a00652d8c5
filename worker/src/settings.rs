use std::time::Duration;

use aura_lease::Pod;

use crate::{engine::BATCH_BYTES, explain::ExplainLog};

/// What a worker needs besides the rows that it holds (R-MEM-9), what eight engines remember by default included.
const BESIDES: u64 = 64 << 20;
/// Recent changes of an engine in bytes: about the last thousand small ones.
const EXPLAIN_MEMORY: usize = 4 << 20;

/// Signs of life are 1 s apart, and a busy machine makes them late.
const SHORTEST_WATCHDOG: Duration = Duration::from_secs(10);
/// A reduced row has room in it: its key, its small columns, and what is around them.
const SMALLEST_EVENT: usize = 64 << 10;

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
    /// `CDC_WATCHDOG_LIMIT`: an engine's task without a sign of life for this long is cut off (R-FB-4).
    pub watchdog_limit: Duration,
    /// Sources are taken from nobody before the pool has been the same for this long (R-LEASE-3).
    pub settle: Duration,
    /// `CDC_SKIP_AFTER`: a project without a single acknowledgement for so long is skipped with an announced gap (R-SH-3).
    pub skip_after: Duration,
    /// `CDC_STALL_LIMIT`: an engine whose work stands still for so long, though nothing is known to be away, fails (R-SH-5).
    pub stall_limit: Duration,
    /// `CDC_OUTAGE_LIMIT`: a known outage may last so long.
    pub outage_limit: Duration,
    /// `LEASE_DURATION_SECS`.
    pub lease_duration: Duration,
    /// `CDC_MAX_EVENT_BYTES`: largest event in bytes; a larger one is reduced (R-BIG-4).
    pub max_event_bytes: usize,
    /// `CDC_EXPLAIN_MEMORY`: bytes of recent changes that each engine keeps, to tell why somebody did or did not get one.
    pub explain_memory: usize,
    /// `CDC_EXPLAIN`: whose verdicts are logged, one line per (change, subscription).
    pub explain_log: ExplainLog,
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
            explain_memory: EXPLAIN_MEMORY,
            explain_log: ExplainLog::Off,
            visibility_connections: 16,
        }
    }
}

impl WorkerSettings {
    /// One engine's share of the quota.
    pub fn engine_quota(&self) -> usize {
        self.memory_quota / self.max_engines.max(1)
    }

    /// Largest message of the log in bytes that is read at all: an update has both images, of which only one goes out. It is
    /// held several times over while it is decoded and sent on.
    pub fn max_message(&self) -> usize {
        2 * self.max_event_bytes
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
        let remembered = self.explain_memory.saturating_sub(EXPLAIN_MEMORY) * self.max_engines;
        let process = self.memory_quota as u64 * 5 / 4 + BESIDES + remembered as u64;
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
        if event < SMALLEST_EVENT {
            problems.push(format!("CDC_MAX_EVENT_BYTES is {event}, it must be at least {SMALLEST_EVENT} (64KiB)"));
        }
        problems.extend(self.limits_out_of_order());
        problems
    }

    /// A project is skipped before it is a stall of its engine, and an outage is waited for longer than what nobody can
    /// explain.
    fn limits_out_of_order(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let limits = [
            ("CDC_SKIP_AFTER", self.skip_after),
            ("CDC_STALL_LIMIT", self.stall_limit),
            ("CDC_OUTAGE_LIMIT", self.outage_limit),
        ];
        if self.skip_after.is_zero() {
            problems.push("CDC_SKIP_AFTER must be more than 0 s".to_owned());
        }
        for ((shorter, less), (longer, more)) in limits.iter().zip(&limits[1..]) {
            if less >= more {
                let (less, more) = (less.as_secs_f64(), more.as_secs_f64());
                problems.push(format!("{shorter} is {less} s, it must be shorter than {longer}, which is {more} s"));
            }
        }
        if self.watchdog_limit < SHORTEST_WATCHDOG {
            let (limit, least) = (self.watchdog_limit.as_secs_f64(), SHORTEST_WATCHDOG.as_secs());
            problems.push(format!("CDC_WATCHDOG_LIMIT is {limit} s, it must be at least {least} s"));
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

    #[test]
    fn f_13_limits_are_in_order_and_none_is_too_short() {
        let s = Duration::from_secs;
        let with = |skip, stall, outage| WorkerSettings {
            skip_after: s(skip),
            stall_limit: s(stall),
            outage_limit: s(outage),
            ..WorkerSettings::default()
        };
        let fine = WorkerSettings { watchdog_limit: s(10), max_event_bytes: 64 << 10, ..with(1, 2, 3) };
        assert_eq!(fine.problems(None), Vec::<String>::new());
        let cases = [
            (with(0, 120, 900), "CDC_SKIP_AFTER must be more than 0 s"),
            (with(120, 120, 900), "CDC_SKIP_AFTER is 120 s, it must be shorter than CDC_STALL_LIMIT, which is 120 s"),
            (with(60, 900, 900), "CDC_STALL_LIMIT is 900 s, it must be shorter than CDC_OUTAGE_LIMIT, which is 900 s"),
            (
                WorkerSettings { watchdog_limit: s(9), ..fine.clone() },
                "CDC_WATCHDOG_LIMIT is 9 s, it must be at least 10 s",
            ),
            (
                WorkerSettings { max_event_bytes: 65_535, ..fine },
                "CDC_MAX_EVENT_BYTES is 65535, it must be at least 65536",
            ),
        ];
        for (settings, words) in cases {
            let problems = settings.problems(None);
            assert!(problems.len() == 1 && problems[0].starts_with(words), "{words}: {problems:?}");
        }
    }
}
