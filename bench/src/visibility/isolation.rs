//! What others notice when some identities' policies raise or sleep: commit to bus for the good ones, in the same run
//! first without the bad ones, then with them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aura_testkit::Signal;
use serde_json::{Value, json};
use system_tests::{Split, SplitOptions};
use tokio::time::{MissedTickBehavior, interval};

use super::{
    Options,
    front::{Front, Who},
    rounded, user,
};
use crate::summary;

/// Events per second.
const RATE: u32 = 40;
/// Seconds in which the bad ones may be found out: nobody can know that a policy sleeps before it has.
const FIRST: usize = 10;
/// Identities that are judged without trouble.
const GOOD: usize = 17;
/// Good for most, bad for who says so of himself. A function, since the planner evaluates constants.
const SETUP: &str = "
    create table board (id bigint primary key, body text);
    create function fail() returns bool language plpgsql as $$ begin raise 'bad luck'; end $$;
    alter table board enable row level security;
    create policy p on board for select using (
        case current_setting('request.jwt.claims')::json ->> 'kind'
            when 'raise' then fail()
            when 'sleep' then pg_sleep(60) is not null
            else (current_setting('request.jwt.claims')::json ->> 'sub')::uuid is not null
        end)";

pub(crate) async fn run(options: &Options) -> Result<Value> {
    let split = Split::start_with(SplitOptions::default().postgres("jit", "off")).await?;
    split.front.signal(Signal::TERM)?;
    split.front.wait(Duration::from_secs(30)).await?;
    let project = split.project("bench").await?;
    let sql = project.sql().await?;
    let role = format!("\"p_{}_authenticated\"", project.id);
    sql.batch_execute(&format!("{SETUP}; grant select on board to {role}")).await?;
    project.enable("board").await?;
    let good = |n: usize| who(json!({"sub": user(n), "role": "authenticated"}));
    let mut all: Vec<Who> = (0..GOOD).map(good).collect();
    let time = Duration::from_secs(options.isolation_seconds);
    let mut front = Front::join(&split, &project, 1, "board", &all).await?;
    let mut next = 0;
    let baseline = phase(&sql, &mut front, &mut next, time / 3).await?;
    front.leave().await?;
    all.extend([
        who(json!({"sub": user(100), "role": "authenticated", "kind": "raise"})),
        who(json!({"sub": "not-a-uuid", "role": "authenticated"})),
        who(json!({"sub": user(102), "role": "authenticated", "kind": "sleep"})),
    ]);
    let mut front = Front::join(&split, &project, 2, "board", &all).await?;
    let with_bad = phase(&sql, &mut front, &mut next, time).await?;
    let later = with_bad.get(FIRST * RATE as usize..).unwrap_or_default().to_vec();
    let (before, after) = (summary(baseline), summary(with_bad));
    let p99 = |value: &Value| value["p99_ms"].as_f64().context("no p99");
    let ratio = rounded(p99(&after)? / p99(&before)?);
    Ok(json!({
        "figure": "isolation", "rate": RATE, "good_identities": GOOD, "bad": ["raises", "sub is no uuid", "pg_sleep(60)"],
        "baseline": before, "with_bad": after, "with_bad_after_ten_seconds": summary(later),
        "ratio_of_p99": ratio,
    }))
}

fn who(claims: Value) -> Who {
    Who { claims, filter: None }
}

/// Rows at a steady rate; milliseconds from the commit's answer to the bus, each row for every good identity and no other.
async fn phase(sql: &tokio_postgres::Client, front: &mut Front, next: &mut i64, time: Duration) -> Result<Vec<f64>> {
    let statement = sql.prepare("insert into board values ($1, repeat('x', 100))").await?;
    let first = *next;
    let count = i64::try_from(time.as_millis())? * i64::from(RATE) / 1000;
    let write = async {
        let mut ticks = interval(Duration::from_secs(1) / RATE);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut committed = Vec::new();
        for id in first..first + count {
            ticks.tick().await;
            sql.execute(&statement, &[&id]).await?;
            committed.push(Instant::now());
        }
        anyhow::Ok(committed)
    };
    let read = async {
        let mut arrived = Vec::new();
        for id in first..first + count {
            let row = front.next().await?;
            ensure!(row.id == id, "row {} comes instead of {id}", row.id);
            let mut subscribers = row.subscribers;
            subscribers.sort_unstable();
            ensure!(subscribers.iter().copied().eq(0..GOOD as u64), "row {id} is for {subscribers:?}");
            arrived.push(row.when);
        }
        anyhow::Ok(arrived)
    };
    let (committed, arrived) = tokio::try_join!(write, read)?;
    *next += count;
    let pairs = committed.iter().zip(&arrived);
    Ok(pairs.map(|(commit, at)| at.saturating_duration_since(*commit).as_secs_f64() * 1e3).collect())
}
