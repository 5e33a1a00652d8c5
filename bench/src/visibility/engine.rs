//! What the worker makes of it: the release binaries, a real server and bus, and a front with S subscriptions; from the
//! commit of a transaction of B rows to the bus.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use aura_testkit::Signal;
use serde_json::{Value, json};
use system_tests::{Project, Split, SplitOptions};
use tokio_postgres::Client;

use super::{
    Options, PEER_CHANGES, PLAIN, POLICIES, Policy, ROOMS, TABLES,
    cpu::{Backends, process_ns},
    front::{Front, Who},
    median, rounded, spread, user,
};
use crate::{show, summary};

/// What the engine's SQL connections are, the stream's apart.
const JUDGES: &str = "backend_type = 'client backend' \
    and (usename like 'p\\_%\\_visibility' or application_name like 'aura-cdc:%')";
const STREAM: &str = "backend_type = 'walsender'";
/// Transactions of a round, and (row, subscriber) pairs at most.
const TRANSACTIONS: usize = 20;
const PAIRS: usize = 2_000_000;

/// One combination.
#[derive(Clone, Copy)]
struct Cell {
    /// `None`: row security is off.
    policy: Option<Policy>,
    /// Each subscriber has an `eq` filter that matches his rows.
    filtered: bool,
    subscribers: usize,
    rows: usize,
}

struct Lab {
    split: Split,
    project: Project,
    sql: Client,
    next_id: i64,
    fronts: u64,
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    let mut lab = Lab::start().await?;
    for &rows in &options.batches {
        for &subscribers in &options.subscribers {
            let cell = |policy, filtered| Cell { policy, filtered, subscribers, rows };
            let [_, select, _, membership] = POLICIES;
            for cell in [
                cell(None, true),
                cell(Some(PLAIN), true),
                cell(Some(PLAIN), false),
                cell(Some(select), false),
                cell(Some(membership), true),
            ] {
                show(&lab.cell(cell, options.visibility_rounds).await?);
            }
        }
    }
    Ok(())
}

impl Lab {
    async fn start() -> Result<Self> {
        let split =
            Split::start_with(SplitOptions::default().postgres("jit", "off").postgres("shared_buffers", "256MB"));
        let split = split.await?;
        // It would take part of the two cores, and nobody is connected to it.
        split.front.signal(Signal::TERM)?;
        split.front.wait(Duration::from_secs(30)).await?;
        let project = split.project("bench").await?;
        let sql = project.sql().await?;
        sql.batch_execute(TABLES).await?;
        let readers = format!("grant select on item, member to \"p_{}_authenticated\"", project.id);
        sql.batch_execute(&readers).await?;
        project.enable("item").await?;
        Ok(Self { split, project, sql, next_id: 0, fronts: 0 })
    }

    async fn cell(&mut self, cell: Cell, rounds: usize) -> Result<Value> {
        self.prepare(cell).await?;
        self.fronts += 1;
        let who: Vec<Who> = (0..cell.subscribers).map(|n| subscriber(n, cell.filtered)).collect();
        let mut front = Front::join(&self.split, &self.project, self.fronts, "item", &who).await?;
        self.transaction(cell, &mut front, &mut Vec::new()).await?;
        let (mut rates, mut costs, mut stream, mut millis) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let round = self.round(cell, &mut front).await?;
            rates.push(round.changes_per_second);
            costs.push(round.us_per_change);
            stream.push(round.walsender_us_per_change);
            for _ in 0..(cell.transactions() / 2).max(2) {
                self.transaction(cell, &mut front, &mut millis).await?;
            }
        }
        front.leave().await?;
        let peer = PEER_CHANGES.iter().find(|(s, _)| *s == cell.subscribers && cell.policy.is_some());
        let peer = peer.map(|(_, rate)| json!({"peer_recorded": rate, "times": rounded(median(&rates) / rate)}));
        Ok(json!({
            "figure": "visibility_engine", "policy": cell.policy.map_or("row security off", |it| it.name),
            "eq_filter": cell.filtered, "subscribers": cell.subscribers, "rows": cell.rows,
            "changes_per_second": spread(&rates), "cpu_us_per_change": spread(&costs),
            "walsender_us_per_change": spread(&stream), "commit_to_bus": summary(millis), "peer": peer,
        }))
    }

    async fn prepare(&self, cell: Cell) -> Result<()> {
        let switch = match cell.policy {
            Some(policy) => format!(
                "alter table item enable row level security; create policy p on item for select using ({})",
                policy.using
            ),
            None => "alter table item disable row level security".to_owned(),
        };
        let members: Vec<String> = (0..cell.subscribers).map(|n| format!("({}, '{}')", n % ROOMS, user(n))).collect();
        let sql = format!(
            "drop policy if exists p on item; {switch}; truncate member; insert into member values {}; analyze member",
            members.join(", ")
        );
        Ok(self.sql.batch_execute(&sql).await?)
    }

    /// Commits a transaction and awaits its rows, each with its subscribers; milliseconds from the commit's answer.
    async fn transaction(&mut self, cell: Cell, front: &mut Front, millis: &mut Vec<f64>) -> Result<()> {
        let first = self.commit(cell).await?;
        let committed = Instant::now();
        for n in 0..cell.rows {
            let row = front.next().await?;
            ensure!(row.id == first + n as i64, "row {} comes instead of {}", row.id, first + n as i64);
            let subscribers = row.subscribers.len();
            ensure!(subscribers == cell.expected(), "{subscribers} see a row, not {}", cell.expected());
            millis.push(row.when.saturating_duration_since(committed).as_secs_f64() * 1e3);
        }
        Ok(())
    }

    /// Answers the first row's id.
    async fn commit(&mut self, cell: Cell) -> Result<i64> {
        let insert = "insert into item (id, owner_id, room_id, title, body)
             select n, ('00000000-0000-4000-8000-' || lpad(to_hex(n % $3), 12, '0'))::uuid, (n % $3) % $4,
                 'item ' || n, repeat('x', 100)
             from generate_series($1::int8, $1 + $2::int8 - 1) n";
        let (rows, subscribers, rooms) = (cell.rows as i64, cell.subscribers as i64, ROOMS as i64);
        // Each transaction begins with the first subscriber's row.
        let first = self.next_id + (subscribers - self.next_id % subscribers) % subscribers;
        self.sql.execute(insert, &[&first, &rows, &subscribers, &rooms]).await?;
        self.next_id = first + rows;
        Ok(first)
    }

    /// Transactions as fast as they can be committed.
    async fn round(&mut self, cell: Cell, front: &mut Front) -> Result<Round> {
        let monitor = self.split.postgres.client("app").await?;
        let (judges, stream) = (Backends::new(&monitor, JUDGES), Backends::new(&monitor, STREAM));
        let worker = self.split.worker.process.pid();
        let before = (process_ns(worker)?, judges.now().await?, stream.now().await?);
        let (began, transactions) = (Instant::now(), cell.transactions());
        let rows = transactions * cell.rows;
        let arrive = async {
            for _ in 0..rows {
                front.next().await?;
            }
            anyhow::Ok(began.elapsed())
        };
        let commit = async {
            for _ in 0..transactions {
                self.commit(cell).await?;
            }
            anyhow::Ok(())
        };
        let (elapsed, ()) = tokio::try_join!(arrive, commit)?;
        let cpu = process_ns(worker)? - before.0 + judges.since(&before.1).await?;
        let per_row = |ns: u64| ns as f64 / 1e3 / rows as f64;
        Ok(Round {
            changes_per_second: rows as f64 / elapsed.as_secs_f64(),
            us_per_change: per_row(cpu),
            walsender_us_per_change: per_row(stream.since(&before.2).await?),
        })
    }
}

struct Round {
    changes_per_second: f64,
    /// Of the worker and the backends that judge for it.
    us_per_change: f64,
    walsender_us_per_change: f64,
}

impl Cell {
    fn transactions(self) -> usize {
        (PAIRS / (self.rows * self.subscribers)).clamp(2, TRANSACTIONS)
    }

    /// Subscribers that see a row.
    fn expected(self) -> usize {
        match self.policy {
            Some(policy) if policy.name == "membership" && !self.filtered => self.subscribers.div_ceil(ROOMS),
            _ => 1,
        }
    }
}

fn subscriber(n: usize, filtered: bool) -> Who {
    let claims = json!({"sub": user(n), "role": "authenticated", "aud": "authenticated"});
    Who { claims, filter: filtered.then(|| format!("owner_id=eq.{}", user(n))) }
}
