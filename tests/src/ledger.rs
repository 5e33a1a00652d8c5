//! What was committed, and the proof that a subscriber got it: every row arrived or lies in an announced gap, nothing
//! arrived twice, and all of it in the order of the commits.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aura_testkit::eventually;
use tokio::{
    task::JoinHandle,
    time::{MissedTickBehavior, interval, sleep},
};
use tokio_postgres::{Client, Statement};
use tokio_util::sync::CancellationToken;

use crate::{
    PATIENCE, Project,
    socket::{Announcement, Seen},
};

/// One transaction of inserts.
#[derive(Debug, Clone)]
struct Commit {
    ids: RangeInclusive<i64>,
    /// The log's end when the rows were written: the commit's position is not below.
    before: u64,
    began: Instant,
}

/// What one writer has committed to a table of its own, in order.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    commits: Vec<Commit>,
}

/// What became of a ledger's rows at one subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Audit {
    /// Rows that arrived.
    pub arrived: usize,
    /// Rows that lie in an announced gap.
    pub announced: usize,
    /// Announced gaps.
    pub gaps: usize,
}

impl Ledger {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.commits.iter().map(|commit| commit.ids.clone().count()).sum()
    }

    /// The last id; 0 = nothing was written.
    pub fn last(&self) -> i64 {
        self.commits.last().map_or(0, |commit| *commit.ids.end())
    }

    /// Inserts the next `rows` rows, each with `bytes` bytes of text, in one transaction into a table of
    /// [`Project::table`].
    pub async fn insert(&mut self, sql: &Client, table: &str, rows: i64, bytes: i32) -> Result<()> {
        let statement = sql.prepare(&insert_statement(table)).await?;
        let first = self.last() + 1;
        self.commits.push(write(sql, &statement, first..=first + rows - 1, bytes).await?);
        Ok(())
    }

    /// Proves a subscriber's record: nothing was invented, nothing came twice, all came in the order of the commits, and
    /// what didn't come lies in an announced gap.
    pub fn audit(&self, seen: &Seen) -> Result<Audit> {
        let committed: BTreeSet<i64> = self.commits.iter().flat_map(|commit| commit.ids.clone()).collect();
        let arrived: BTreeSet<i64> = seen.changes.iter().map(|change| change.id).collect();
        let invented: Vec<_> = arrived.difference(&committed).take(5).collect();
        ensure!(invented.is_empty(), "never committed: {invented:?}");
        for pair in seen.changes.windows(2) {
            let [one, next] = pair else { continue };
            ensure!(
                one.at < next.at && one.id < next.id,
                "{} at {} came before {} at {}",
                one.id,
                one.at,
                next.id,
                next.at
            );
        }
        let mut lost = BTreeMap::new();
        let mut announced = 0;
        for (number, commit) in self.commits.iter().enumerate() {
            let missing = commit.ids.clone().filter(|id| !arrived.contains(id));
            let after = self.commits.get(number + 1).map_or(u64::MAX, |next| next.before);
            match missing.clone().next() {
                Some(_) if seen.gaps.iter().any(|gap| covers(gap, commit, after)) => announced += missing.count(),
                Some(first) => drop(lost.insert(first, missing.count())),
                None => {}
            }
        }
        ensure!(
            lost.is_empty(),
            "lost in silence (first id, rows of its transaction): {lost:?}; gaps: {:?}",
            seen.gaps
        );
        Ok(Audit { arrived: arrived.len(), announced, gaps: seen.gaps.len() })
    }
}

/// Whether a gap's range has room for a transaction whose position is in `before..after`.
fn covers(gap: &Announcement, commit: &Commit, after: u64) -> bool {
    let begins = gap.from.is_none_or(|from| from.commit <= after);
    let ends = gap.to.map_or(commit.began <= gap.when, |to| to.commit >= commit.before);
    begins && ends
}

async fn write(sql: &Client, statement: &Statement, ids: RangeInclusive<i64>, bytes: i32) -> Result<Commit> {
    let began = Instant::now();
    let row = sql.query_one(statement, &[ids.start(), ids.end(), &bytes]).await?;
    Ok(Commit { ids, before: row.get::<_, i64>(0).cast_unsigned(), began })
}

fn insert_statement(table: &str) -> String {
    format!(
        "with written as (insert into {table} (id, body) select id, repeat('x', $3::int4) from generate_series($1::int8, $2::int8) id)
         select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::int8"
    )
}

/// Inserts rows one by one at a rate, also across restarts of the server.
pub struct Writer {
    ledger: Arc<Mutex<Ledger>>,
    stop: CancellationToken,
    task: JoinHandle<Result<()>>,
}

impl Writer {
    /// Writes single-row transactions into a table of [`Project::table`], that nobody else writes to.
    pub fn start(project: &Project, table: &str, per_second: u32) -> Self {
        Self::start_wide(project, table, per_second, 0)
    }

    /// The same with rows of `bytes` bytes.
    pub fn start_wide(project: &Project, table: &str, per_second: u32, bytes: i32) -> Self {
        let (ledger, stop) = (Arc::default(), CancellationToken::new());
        let work = Work { project: project.clone(), table: table.to_owned(), per_second, bytes };
        let task = tokio::spawn(work.run(Arc::clone(&ledger), stop.clone()));
        Self { ledger, stop, task }
    }

    /// The last id whose commit was answered.
    pub fn last(&self) -> i64 {
        locked(&self.ledger).last()
    }

    /// Waits until so many more rows are committed.
    pub async fn more(&self, rows: i64) -> Result<()> {
        let wanted = self.last() + rows;
        let written = eventually(PATIENCE, || async { self.last() >= wanted || self.task.is_finished() }).await;
        ensure!(!self.task.is_finished(), "the writer gave up");
        written.context("the writer is stuck")
    }

    /// Stops, and answers what was committed.
    pub async fn stop(self) -> Result<Ledger> {
        self.stop.cancel();
        self.task.await??;
        Ok(std::mem::take(&mut *locked(&self.ledger)))
    }
}

fn locked(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Work {
    project: Project,
    table: String,
    per_second: u32,
    bytes: i32,
}

impl Work {
    async fn run(self, ledger: Arc<Mutex<Ledger>>, stop: CancellationToken) -> Result<()> {
        while !stop.is_cancelled() {
            if let Err(error) = self.session(&ledger, &stop).await {
                let gone = error.downcast_ref::<tokio_postgres::Error>();
                // What the server says of a row is a fault of the test; that it is away is a part of the scene.
                let row = gone.and_then(tokio_postgres::Error::code).is_some_and(|code| code.code().starts_with("23"));
                ensure!(!row, "the writer can't write: {error:#}");
                sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(())
    }

    async fn session(&self, shared: &Mutex<Ledger>, stop: &CancellationToken) -> Result<()> {
        let sql = self.project.sql().await?;
        let statement = sql.prepare(&insert_statement(&self.table)).await?;
        // The commit whose answer the last session missed may have been made.
        let last: i64 = sql.query_one(&format!("select coalesce(max(id), 0) from {}", self.table), &[]).await?.get(0);
        let mut next = last + 1;
        {
            let mut ledger = locked(shared);
            if let Some(known) = ledger.commits.last().filter(|commit| *commit.ids.end() < last).cloned() {
                ledger.commits.push(Commit { ids: last..=last, ..known });
            }
        }
        let mut ticks = interval(Duration::from_secs(1) / self.per_second);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            let commit = write(&sql, &statement, next..=next, self.bytes).await?;
            locked(shared).commits.push(commit);
            next += 1;
        }
        Ok(())
    }
}
