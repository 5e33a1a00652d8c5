use std::time::Duration;

use anyhow::{Context, Result};
use aura_domain::{ChangeKind, Lsn, Value};
use aura_pgsource::{LogEvent, Plugin, SkipReason, Status, StreamMessage, slot};

use crate::lab::{Lab, PATIENCE, SLOT, table};

fn text(value: &str) -> Option<Value> {
    Some(Value::Text(value.into()))
}

#[tokio::test]
async fn r_fb_7_confirmed_rows_are_not_sent_again_and_flush_is_shown() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run("create table t (id int primary key)").await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    lab.run("insert into t values (1)").await?;

    let mut tail = lab.tail(created, &[table("public", "t")?]).await?;
    let (changes, end) = tail.transaction().await?;
    assert_eq!(changes[0].new.as_ref().context("new")?.get("id"), text("1").as_ref());
    tail.confirm(end).await?;
    let confirmed = slot::wait_confirmed(&lab.sql, SLOT, end, PATIENCE).await?;
    assert_eq!(confirmed, Some(end));
    let flush = "select flush_lsn is not null from pg_stat_replication where application_name like 'aura-cdc:%'";
    assert!(lab.sql.query_one(flush, &[]).await?.get::<_, bool>(0));

    tail.stream.close().await;
    assert!(slot::wait_inactive(&lab.sql, SLOT, PATIENCE).await?);
    lab.run("insert into t values (2)").await?;
    let mut tail = lab.tail(Lsn::ZERO, &[table("public", "t")?]).await?;
    let (changes, _) = tail.transaction().await?;
    assert_eq!(changes[0].new.as_ref().context("new")?.get("id"), text("2").as_ref());
    Ok(())
}

#[tokio::test]
async fn r_hole_2_a_start_above_the_confirmed_position_skips_nothing_behind_it() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run("create table t (id int primary key); create table late (id int primary key)").await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    lab.run("insert into t values (1)").await?;
    let mut tail = lab.tail(created, &[table("public", "t")?]).await?;
    let (_, end) = tail.transaction().await?;
    tail.stream.close().await;
    assert!(slot::wait_inactive(&lab.sql, SLOT, PATIENCE).await?);
    lab.run("insert into late values (7)").await?;

    let entries = [table("public", "t")?, table("public", "late")?];
    let mut tail = lab.tail(end, &entries).await?;
    let confirmed = slot::status(&lab.sql, SLOT).await?.context("slot")?.confirmed_flush;
    assert_eq!(confirmed, Some(created), "START at E leaves the confirmed position alone");
    let (changes, _) = tail.transaction().await?;
    assert_eq!((&*changes[0].relation.table, changes.len()), ("late", 1));
    Ok(())
}

#[tokio::test]
async fn a_keepalive_at_or_above_the_start_comes_soon_after_it() -> Result<()> {
    let lab = Lab::start().await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    let mut tail = lab.tail(created, &[]).await?;
    let status = Status { written: created, flushed: created, applied: created, reply_requested: true };
    tail.stream.send_status(status).await?;
    let first = tokio::time::timeout(Duration::from_secs(3), async {
        loop {
            match tail.message().await? {
                StreamMessage::Keepalive { end, .. } if end >= created => return anyhow::Ok(end),
                _ => {}
            }
        }
    });
    assert!(first.await?? >= created);
    Ok(())
}

#[tokio::test]
async fn r_dec_3_unchanged_toast_is_filled_in_under_full() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run(
        "create table t (id int primary key, big text, flag bool, raw bytea, n numeric);
         alter table t alter big set storage external; alter table t replica identity full;
         insert into t values (1, repeat('x', 5000), true, '\\xdeadbeef', 1.10)",
    )
    .await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    lab.run("update t set flag = false, n = null").await?;
    let mut tail = lab.tail(created, &[table("public", "t")?]).await?;
    let (changes, _) = tail.transaction().await?;
    let (new, old) = (changes[0].new.as_ref().context("new")?, changes[0].old.as_ref().context("old")?);
    let names: Vec<&str> = new.0.iter().map(|cell| &*cell.name).collect();
    assert_eq!(names, ["id", "big", "flag", "raw", "n"]);
    assert_eq!(new.get("big"), Some(&Value::Text("x".repeat(5000).into())));
    assert_eq!((new.get("flag"), old.get("flag")), (text("f").as_ref(), text("t").as_ref()));
    assert_eq!(new.get("raw"), text("\\xdeadbeef").as_ref());
    assert_eq!((new.get("n"), old.get("n")), (Some(&Value::Null), text("1.10").as_ref()));
    Ok(())
}

#[tokio::test]
async fn r_lsn_6_rows_of_one_record_are_counted() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run("create table t (id int primary key)").await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    // COPY and CREATE TABLE AS write many rows into one record.
    lab.run("begin; insert into t values (0); copy t from program 'seq 1 3'; commit").await?;
    let mut tail = lab.tail(created, &[table("public", "t")?]).await?;
    let (changes, end) = tail.transaction().await?;
    let positions: Vec<_> = changes.iter().map(|change| change.position).collect();
    assert_eq!(positions.iter().map(|position| position.n).collect::<Vec<_>>(), [0, 0, 1, 2]);
    assert!(positions.is_sorted() && positions[0].change < positions[1].change);
    assert!(positions.iter().all(|position| position.commit < end && position.change < position.commit));
    let xid: String = lab.sql.query_one("select xmin::text from t where id = 3", &[]).await?.get(0);
    assert_eq!(changes[3].xid.to_string(), xid);
    let seconds = "select abs(extract(epoch from now()) - $1::float8) < 60";
    let commit_time = changes[0].commit_time_us as f64 / 1e6;
    assert!(lab.sql.query_one(seconds, &[&commit_time]).await?.get::<_, bool>(0));
    Ok(())
}

/// Whoever may connect may write a message of any size and bytes into the log, a policy in its read-only transaction, too.
/// None of it is read: it would be everybody's loss, or the end of the stream.
#[tokio::test]
async fn r_dec_4_messages_that_anybody_writes_into_the_log_disturb_nothing() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run("create table t (id int primary key); create role somebody; set role somebody").await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    for message in [
        "false, 'x', 'plain'",
        "true, 'x', 'in a transaction'",
        "false, E'p\"q\\\\', 'x'",
        "false, 'x', '\\xff00fe'::bytea",
        "false, 'x', repeat('x', 70000000)",
        // Escaped it is more than the gigabyte that the server can hold.
        "false, 'x', repeat(chr(1), 200000000)",
    ] {
        lab.run(&format!("begin read only; select pg_logical_emit_message({message}); commit")).await?;
    }
    lab.run("reset role; insert into t values (1)").await?;
    let mut tail = lab.tail(created, &[table("public", "t")?]).await?;
    let (changes, _) = tail.transaction().await?;
    assert_eq!(changes[0].new.as_ref().and_then(|row| row.get("id")), text("1").as_ref());
    Ok(())
}

#[tokio::test]
async fn r_dec_4_a_message_over_the_limit_is_passed_over() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run("create table t (id int primary key, big text)").await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    lab.run("insert into t values (1, repeat('x', 300000)), (2, 'small')").await?;
    let mut tail = lab.tail(created, &[table("public", "t")?]).await?;
    tail.stream.set_max_message(100_000);
    let mut skipped = 0;
    loop {
        match tail.event().await? {
            LogEvent::Skipped { reason, relation } => {
                assert_eq!(reason, SkipReason::TooLong);
                assert_eq!(&*relation.context("relation")?.table, "t");
                skipped += 1;
            }
            LogEvent::Change(change) => {
                assert_eq!(change.new.context("new")?.get("id"), text("2").as_ref());
                break;
            }
            _ => {}
        }
    }
    assert_eq!(skipped, 1);
    Ok(())
}

#[tokio::test]
async fn reading_survives_being_cancelled_at_any_moment() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run("create table t (id int primary key, big text)").await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    lab.run("insert into t select g, repeat('x', 20000) from generate_series(1, 500) g").await?;
    let stream = lab.tail(created, &[table("public", "t")?]).await?;
    let mut tail = stream;
    let (mut ids, mut cancelled) = (Vec::new(), 0);
    while ids.len() < 500 {
        // Polls once and drops the future.
        let polled = std::pin::pin!(tail.event());
        match futures_util::FutureExt::now_or_never(polled) {
            Some(event) => {
                if let LogEvent::Change(change) = event? {
                    assert_eq!(change.kind, ChangeKind::Insert);
                    ids.push(change);
                }
            }
            None => {
                cancelled += 1;
                tokio::task::yield_now().await;
            }
        }
    }
    assert!(cancelled > 0);
    let ids: Vec<_> = ids.iter().filter_map(|change| change.new.as_ref()?.get("id").cloned()).collect();
    assert_eq!(ids, (1..=500).filter_map(|id: i32| text(&id.to_string())).collect::<Vec<_>>());
    Ok(())
}

#[tokio::test]
async fn copy_done_ends_an_idle_stream() -> Result<()> {
    let lab = Lab::start().await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    let mut tail = lab.tail(created, &[]).await?;
    tail.stream.copy_done().await?;
    while tail.message().await? != StreamMessage::End {}
    tail.stream.close().await;
    assert!(slot::wait_inactive(&lab.sql, SLOT, PATIENCE).await?);
    Ok(())
}
