//! Rights that are taken away and a secret row at once behind it (R-RLS-10): the row is never delivered, though the worker
//! reads it as soon as it is written, with others' rows in between.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use anyhow::Context as _;
use serde_json::json;

use crate::{
    hall::{Hall, OWNED},
    stage::PATIENCE,
};

/// (what takes the right away, what gives it back). `{role}` is the subscriber's database role, `{login}` the login that
/// policies run under, `{schema}` the project's.
const TAKEN: &[(&str, &str)] = &[
    ("alter table m enable row level security", "alter table m disable row level security"),
    ("revoke select on m from public, aura_authenticated, {role}", "grant select on m to {role}"),
    ("revoke select on m from {role}; grant select (owner) on m to {role}", "grant select on m to {role}"),
    ("alter policy open on m using (false)", "alter policy open on m using (true)"),
    ("alter policy open on m to aura_anon", "alter policy open on m to public"),
    ("drop policy open on m", "create policy open on m for select using (true)"),
    ("create policy shut on m as restrictive using (body <> 'secret')", "drop policy shut on m"),
    (
        "revoke usage on schema {schema} from public, aura_authenticated, {role}",
        "grant usage on schema {schema} to {role}",
    ),
    ("revoke aura_authenticated from {role}", "grant aura_authenticated to {role}"),
    ("revoke {role} from {login}", "grant {role} to {login}"),
    ("update members set may = false", "update members set may = true"),
    (
        "create or replace function may() returns bool language sql stable as 'select false'",
        "create or replace function may() returns bool language sql stable as 'select true'",
    ),
];

/// The policies that stand for the open state; what a round takes away may be any part of them.
const OPEN: &str = "drop policy own on m;
    create policy open on m for select using (true);
    create table members (may bool); insert into members values (true);
    create function may() returns bool language sql stable as 'select true';
    grant select on members to public";

/// What the subscriber's role is let in by in a round.
fn policy(taken: &str) -> &'static str {
    if taken.contains("enable row") {
        "alter policy open on m to public using (false)"
    } else if taken.contains("members") {
        "alter policy open on m using (exists (select from members where may))"
    } else if taken.contains("function") {
        "alter policy open on m using (may())"
    } else if taken.contains("revoke aura_authenticated") {
        "alter policy open on m to aura_authenticated using (true)"
    } else {
        "alter policy open on m to public using (true)"
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r_rls_10_a_secret_row_right_behind_the_loss_of_a_right_is_never_delivered() -> anyhow::Result<()> {
    const ROUNDS: i64 = 6;
    let mut hall = Hall::new(OWNED).await?;
    hall.user("alice").await;
    hall.run(OPEN).await?;
    let (stop, load) = load(&hall).await?;
    let mut id = 0;
    for round in 0..ROUNDS {
        for (taken, given) in TAKEN {
            hall.run("alter table m enable row level security").await?;
            hall.run(policy(taken)).await?;
            let (taken, given) = (fill(&hall, taken), fill(&hall, given));
            if taken.contains("enable row") {
                hall.run(&given).await?;
            }
            id += 10;
            // In the next transaction, or in the same.
            let between = ["; insert", "; commit; begin; insert"][usize::try_from(round % 2)?];
            let visible = format!("insert into m values ({id}, 'alice', 'open')");
            hall.run(&format!("{visible}; update m set body = 'open still' where id = {id}")).await?;
            reaches(&mut hall, id, "alice").await.with_context(|| format!("{taken}: it is visible before"))?;
            let secret = id + 1;
            hall.run(&format!(
                "begin; {taken}{between} into m values ({secret}, 'alice', 'secret');
                 update m set body = 'secret' where id in ({id}, {secret}); delete from m where id = {secret}; commit"
            ))
            .await?;
            reaches(&mut hall, secret, "service").await.with_context(|| taken.clone())?;
            hall.run(&given).await?;
        }
    }
    stop.store(true, Ordering::SeqCst);
    let written = load.await??;
    assert!(written > 100, "there was load: {written}");
    hall.end().await;
    Ok(())
}

fn fill(hall: &Hall, sql: &str) -> String {
    let project = hall.stage.project;
    sql.replace("{role}", &format!("\"p_{project}_authenticated\""))
        .replace("{login}", &format!("\"p_{project}_visibility\""))
        .replace("{schema}", &hall.stage.schema.quoted())
}

/// Waits for the last event about the row, a delete but for `alice`'s; nobody but the service may get a secret on the way.
async fn reaches(hall: &mut Hall, id: i64, name: &str) -> anyhow::Result<()> {
    // There is always another row of the load.
    tokio::time::timeout(PATIENCE, reached(hall, id, name)).await.context("it doesn't come")?
}

async fn reached(hall: &mut Hall, id: i64, name: &str) -> anyhow::Result<()> {
    loop {
        let seen = hall.watch.next().await;
        let to: Vec<_> = seen.ids.iter().flat_map(|id| &hall.names[id]).collect();
        let (record, old) = (&seen.data["record"], &seen.data["old_record"]);
        let secret = [record, old].iter().any(|image| image["body"] == "secret");
        anyhow::ensure!(!secret || to == ["service"], "told to {to:?}: {}", seen.data);
        let last = if name == "alice" { record["body"] == "open still" } else { seen.data["type"] == "DELETE" };
        if last && (record["id"] == id || old["id"] == id) && to.iter().any(|to| *to == name) {
            return Ok(());
        }
    }
}

/// Somebody who writes to the same table all the time, until told to stop; answers how many rows.
async fn load(hall: &Hall) -> anyhow::Result<(Arc<AtomicBool>, tokio::task::JoinHandle<anyhow::Result<i64>>)> {
    let stop = Arc::new(AtomicBool::new(false));
    let (writer, told) = (hall.stage.postgres.client("app").await?, Arc::clone(&stop));
    writer.batch_execute(&format!("set search_path = {}; set lock_timeout = 5000", hall.stage.schema.quoted())).await?;
    let task = tokio::spawn(async move {
        let mut written = 0;
        while !told.load(Ordering::SeqCst) {
            written += 1;
            writer
                .execute("insert into m values ($1, 'load', 'open')", &[&i32::try_from(1_000_000 + written)?])
                .await?;
        }
        Ok(written)
    });
    Ok((stop, task))
}

/// Two people over one pooled connection, with rows of both in each batch.
#[tokio::test(flavor = "multi_thread")]
async fn r_rls_5_two_thousand_rows_go_to_their_owners_over_one_connection() -> anyhow::Result<()> {
    let mut hall = Hall::with_connections(1, OWNED).await?;
    for name in ["alice", "bob", "carol"] {
        hall.user(name).await;
    }
    for policy in ["owner = auth.jwt() ->> 'sub'", "owner in (select auth.jwt() ->> 'sub')"] {
        hall.run(&format!("alter policy own on m using ({policy})")).await?;
        hall.run(
            "insert into m select n, (array['alice', 'bob', 'carol', 'nobody'])[1 + n * 7 % 4], 'x' from generate_series(1, 998) n; update m set body = owner",
        )
        .await?;
        let events = hall.events("").await?;
        assert_eq!(events.len(), 998 * 2);
        for (kind, to, record, old) in &events {
            let row = if record.is_null() { old } else { record };
            let owner = row["owner"].as_str().unwrap_or_default();
            let mut wanted = vec![owner, "service"];
            wanted.retain(|name| *name != "nobody");
            assert_eq!(*to, wanted, "{kind} {row}");
        }
        hall.run("truncate m").await?;
    }
    assert_eq!(hall.watch.gaps, [json!(null); 0]);
    hall.end().await;
    Ok(())
}
