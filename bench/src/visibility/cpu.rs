//! On-CPU time of processes, by the scheduler's own count.

use std::collections::HashMap;

use anyhow::{Context, Result};
use tokio_postgres::Client;

/// Nanoseconds on a CPU of all living threads of a process.
pub(super) fn process_ns(pid: u32) -> Result<u64> {
    let mut total = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may end meanwhile.
        let Ok(text) = std::fs::read_to_string(task?.path().join("schedstat")) else { continue };
        total += text.split(' ').next().context("an empty schedstat")?.parse::<u64>()?;
    }
    Ok(total)
}

/// Server processes whose time counts.
pub(super) struct Backends<'a> {
    sql: &'a Client,
    which: &'static str,
}

/// Nanoseconds of each process when the count began.
pub(super) struct Since(HashMap<u32, u64>);

impl<'a> Backends<'a> {
    /// `which` is a condition on `pg_stat_activity`; `sql` itself is never counted.
    pub(super) fn new(sql: &'a Client, which: &'static str) -> Self {
        Self { sql, which }
    }

    pub(super) async fn now(&self) -> Result<Since> {
        let sql = format!("select pid from pg_stat_activity where pid <> pg_backend_pid() and ({})", self.which);
        let rows = self.sql.query(&sql, &[]).await?;
        let pids = rows.iter().map(|row| u32::try_from(row.get::<_, i32>(0)));
        let mut all = HashMap::new();
        for pid in pids {
            let pid = pid?;
            // One that ends meanwhile doesn't count.
            if let Ok(ns) = process_ns(pid) {
                all.insert(pid, ns);
            }
        }
        Ok(Since(all))
    }

    /// Nanoseconds since then; a process that is new counts from its start.
    pub(super) async fn since(&self, since: &Since) -> Result<u64> {
        let now = self.now().await?;
        let spent = now.0.iter().map(|(pid, ns)| ns.saturating_sub(since.0.get(pid).copied().unwrap_or(0)));
        Ok(spent.sum())
    }
}
