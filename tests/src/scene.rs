//! The usual scene: the production binaries, one project whose table `events` is live, somebody who watches it, and the
//! account of what was committed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use aura_testkit::{Flow, SlotWatch, TcpProxy, eventually};
use tokio_postgres::Client as Sql;

use crate::{Audit, Ledger, PATIENCE, Project, Split, SplitOptions, Subscriber, Writer};

/// An engine's default share of the memory quota: 256 MiB for 8 engines.
pub const QUOTA: u64 = 32 << 20;

/// Most memory that a process has had, in bytes.
pub fn peak(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").trim().parse::<u64>()? << 10)
}

/// See the module.
pub struct Scene {
    /// Everything running.
    pub split: Split,
    /// The tenant.
    pub project: Project,
    /// Follows `events`.
    pub subscriber: Subscriber,
    /// Superuser in the source, until that goes away.
    pub sql: Sql,
    /// The slot, until the source goes away.
    pub slot: SlotWatch,
    /// What was committed to `events`.
    pub ledger: Ledger,
}

impl Scene {
    /// Starts it all; the subscriber is live.
    pub async fn start(options: SplitOptions) -> Result<Self> {
        let split = Split::start_with(options).await?;
        let project = split.project("tenant").await?;
        project.table("events").await?;
        project.table("ballast").await?;
        let subscriber = Subscriber::start(&project, "events").await?;
        let (sql, slot) = (project.sql().await?, split.slot().await?);
        Ok(Self { split, project, subscriber, sql, slot, ledger: Ledger::default() })
    }

    /// Commits so many more rows to `events` in one transaction.
    pub async fn insert(&mut self, rows: i64) -> Result<()> {
        self.ledger.insert(&self.sql, "events", rows, 0).await
    }

    /// The same, until the server has sent them to the worker.
    pub async fn insert_sent(&mut self, rows: i64) -> Result<()> {
        self.insert(rows).await?;
        let end = self.slot.log_end().await?;
        let sent = self.slot.wait(PATIENCE, |state| state.is_some_and(|state| state.sent >= Some(end))).await;
        sent.map(drop).with_context(|| self.split.logs())
    }

    /// The same, until the worker has read them: a stop ends reading at once.
    pub async fn insert_read(&mut self, rows: i64) -> Result<()> {
        self.insert_sent(rows).await?;
        let (end, worker) = (self.slot.log_end().await?, &self.split.worker);
        let read = || async { worker.metric("cdc_received_lsn").await.is_ok_and(|lsn| lsn >= Some(end as f64)) };
        eventually(PATIENCE, read).await.with_context(|| self.split.logs())
    }

    /// Commits rows of 8 KB, see [`Self::ballast_of`].
    pub async fn ballast(&self, rows: i64) -> Result<()> {
        self.ballast_of(rows, 8000).await
    }

    /// Commits rows to the live table `ballast` that nobody watches: whom they went to would be a slow consumer,
    /// whose queue holds 1 MiB.
    pub async fn ballast_of(&self, rows: i64, bytes: i32) -> Result<()> {
        self.sql
            .execute(
                "insert into ballast select (select coalesce(max(id), 0) from ballast) + n, repeat('x', $2::int4)
                 from generate_series(1, $1::int8) n",
                &[&rows, &bytes],
            )
            .await?;
        Ok(())
    }

    /// Between the workers and the source, of [`SplitOptions::source_proxy`].
    pub fn source_proxy(&self) -> Result<&TcpProxy> {
        self.split.source_proxy.as_ref().context("a scene with a proxy")
    }

    /// The engine's SQL connections to the source hang; its stream doesn't, nor whoever comes from outside to end it.
    pub fn freeze_sql(&self) -> Result<()> {
        let spared = ["replication\0", "\0aura-ladder\0", "\0aura-look\0"];
        let is_spared = move |said: &str| spared.iter().any(|name| said.contains(name));
        self.source_proxy()?.set_where(Flow::Frozen, move |said| !is_spared(said));
        Ok(())
    }

    /// Between the workers and the bus, of [`SplitOptions::bus_proxy`].
    pub fn bus_proxy(&self) -> Result<&TcpProxy> {
        self.split.bus_proxy.as_ref().context("a scene with a proxy")
    }

    /// Single rows at a rate, until [`Self::stop_writing`]; needs a table that nothing was committed to.
    pub fn write(&self, per_second: u32) -> Writer {
        Writer::start(&self.project, "events", per_second)
    }

    /// Stops the writer; what it committed is the account.
    pub async fn stop_writing(&mut self, writer: Writer) -> Result<()> {
        self.ledger = writer.stop().await?;
        Ok(())
    }

    /// Waits until the last row has arrived, and proves that everything before it did, or was announced as lost.
    pub async fn arrives(&self) -> Result<Audit> {
        let arrived = self.subscriber.wait(self.ledger.last()).await;
        arrived.with_context(|| self.split.logs())?;
        self.ledger.audit(&self.subscriber.seen())
    }

    /// The same where the last rows may be among the lost: commits one row after the other until one of them arrives.
    pub async fn arrives_again(&mut self) -> Result<Audit> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.insert(1).await?;
            let arrived = self.subscriber.wait_within(self.ledger.last(), Duration::from_millis(500)).await;
            if arrived.is_ok() || Instant::now() >= deadline {
                return arrived.and_then(|()| self.ledger.audit(&self.subscriber.seen()));
            }
        }
    }

    /// The same, and nothing is missing.
    pub async fn all_arrive(&self) -> Result<Audit> {
        let audit = self.arrives().await?;
        anyhow::ensure!(audit.arrived == self.ledger.rows(), "{audit:?}: {:?}", self.subscriber.seen().gaps);
        Ok(audit)
    }

    /// The same, and nobody was told of a loss.
    pub async fn all_arrive_without_a_gap(&self) -> Result<()> {
        let audit = self.all_arrive().await?;
        anyhow::ensure!(audit.gaps == 0, "{audit:?}: {:?}", self.subscriber.seen().gaps);
        Ok(())
    }

    /// Waits until the slot has confirmed all that is in the log now.
    pub async fn confirmed(&self) -> Result<u64> {
        let end = self.slot.log_end().await?;
        let state = self.slot.wait(PATIENCE, |state| state.is_some_and(|state| state.confirmed >= Some(end))).await;
        state.with_context(|| self.split.logs())?;
        Ok(end)
    }
}
