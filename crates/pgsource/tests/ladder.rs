use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use aura_domain::{Epoch, SourceId};
use aura_pgsource::{
    Plugin, SqlState, connect_sql,
    ladder::{Climb, Freed, Target, free_slot},
    slot,
};
use aura_testkit::eventually;

use crate::lab::{APP, Lab, PATIENCE, SLOT, table};

/// What `stop` grants after its deadline, less a margin for the answer.
const LIMIT: Duration = Duration::from_millis(4500);

async fn free(lab: &Lab, source: &str, up_to: i64) -> Result<Climb> {
    let source: SourceId = source.parse()?;
    Ok(free_slot(&lab.url, Target { slot: SLOT, source, up_to: Epoch(up_to) }, LIMIT).await)
}

const OURS: &str = "0191d0a0-0000-7000-8000-000000000001";
const OTHER: &str = "0191d0a0-0000-7000-8000-000000000002";

fn names(climb: &Climb) -> Vec<&str> {
    climb.rungs.iter().map(|rung| rung.name.as_str()).collect()
}

#[tokio::test]
async fn r_eng_6_only_ours_up_to_the_epoch_is_ended() -> Result<()> {
    let lab = Lab::start().await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    assert!(matches!(free(&lab, OURS, 1).await?.freed, Freed::Free), "nobody holds it");
    let mut tail = lab.tail(created, &[]).await?;
    for (source, epoch) in [(OURS, 0), (OTHER, 9)] {
        let climb = free(&lab, source, epoch).await?;
        assert!(matches!(&climb.freed, Freed::Foreign(holder) if holder.application_name == APP), "{climb:?}");
        assert!(climb.rungs.is_empty() && climb.ended.is_none(), "{climb:?}");
    }
    assert!(slot::status(&lab.sql, SLOT).await?.context("slot")?.active);
    let climb = free(&lab, OURS, 1).await?;
    assert!(matches!(climb.freed, Freed::Free), "{climb:?}");
    assert_eq!(names(&climb), ["terminate", "poll"]);
    assert_eq!(climb.ended.context("nobody was ended")?.application_name, APP);
    let error = loop {
        if let Err(error) = tail.stream.next().await {
            break error;
        }
    };
    assert_eq!(error.sqlstate(), Some(&SqlState::ADMIN_SHUTDOWN));
    assert!(error.is_connection_error());
    Ok(())
}

/// The first time only moves it from WalSenderWriteData to ClientWrite.
#[tokio::test]
async fn r_eng_4_a_walsender_that_is_blocked_writing_is_freed_by_terminating_twice() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run("create table t (id int primary key, big text)").await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    lab.run("insert into t select g, repeat('x', 20000000) from generate_series(1, 2) g").await?;
    // Nobody reads, and the rest of a row is more than the socket takes.
    let _tail = lab.tail(created, &[table("public", "t")?]).await?;
    eventually(PATIENCE, || async {
        let holder = slot::status(&lab.sql, SLOT).await.ok().flatten().and_then(|status| status.holder);
        holder.and_then(|holder| holder.wait_event).as_deref() == Some("WalSenderWriteData")
    })
    .await?;
    let began = Instant::now();
    let climb = free(&lab, OURS, 1).await?;
    assert!(matches!(climb.freed, Freed::Free), "{climb:?}");
    assert_eq!(names(&climb), ["terminate", "terminate_again", "poll"]);
    assert!(began.elapsed() < Duration::from_secs(5), "{climb:?}");
    assert!(!slot::status(&lab.sql, SLOT).await?.context("slot")?.active);
    Ok(())
}

/// A session that waits for a lock doesn't notice that its client is gone.
#[tokio::test]
async fn r_eng_4_no_session_of_ours_is_left() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run("create table t (id int)").await?;
    let locker = connect_sql(&lab.url, "locker", None, PATIENCE).await?;
    locker.batch_execute("begin; lock table public.t").await?;
    let stuck = connect_sql(&lab.url, APP, Some(&lab.sockets), PATIENCE).await?;
    let waiting = tokio::spawn(async move { stuck.batch_execute("table public.t").await });
    let count = |event: &'static str| {
        let sql = "select count(*) from pg_stat_activity where application_name = $1 and wait_event_type = $2";
        let lab = &lab;
        async move { lab.sql.query_one(sql, &[&APP, &event]).await.map_or(-1, |row| row.get::<_, i64>(0)) }
    };
    eventually(PATIENCE, || async { count("Lock").await == 1 }).await?;
    lab.sockets.reset_all();
    assert!(waiting.await?.is_err());
    assert_eq!(count("Lock").await, 1, "still there, without a client");
    let climb = free(&lab, OURS, 0).await?;
    assert!(climb.rungs.is_empty(), "not of that epoch: {climb:?}");
    let climb = free(&lab, OURS, 1).await?;
    assert!(matches!(climb.freed, Freed::Free) && names(&climb) == ["sessions"], "{climb:?}");
    eventually(PATIENCE, || async { count("Lock").await == 0 }).await?;
    Ok(())
}

/// A login that may not signal ours says so at once: the operator gets pid and SQL.
#[tokio::test]
async fn r_eng_4_a_login_that_may_not_end_it_says_who_holds_the_slot() -> Result<()> {
    let lab = Lab::start().await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    let _tail = lab.tail(created, &[]).await?;
    lab.run("create role reader login password 'r' in role pg_monitor").await?;
    let weak = lab.url.with_login("reader", "r");
    let climb = free_slot(&weak, Target { slot: SLOT, source: OURS.parse()?, up_to: Epoch(1) }, LIMIT).await;
    let Freed::Held(holder) = &climb.freed else { panic!("{climb:?}") };
    assert_eq!(holder.application_name, APP);
    assert!(slot::status(&lab.sql, SLOT).await?.context("slot")?.active);
    Ok(())
}
