//! Filters of bindings, from the join to the bus.

use std::{collections::BTreeSet, time::Duration};

use aura_bus::{Message, Subject};
use aura_store::Plugin;
use aura_wire::control::{Announcement, Request};
use serde_json::json;

use crate::{hung::another_project, stage::Stage};

/// A type whose values take long to check.
const SLOW_TEXT: &str = "create function is_slow(text) returns bool language sql as 'select pg_sleep(0.7) is not null';
     create domain slow_text as text check (is_slow(value))";

#[tokio::test(flavor = "multi_thread")]
async fn r_rls_7_each_binding_gets_what_its_filter_lets_through_whoever_decides() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage
        .sql
        .batch_execute(
            "create table t (id int primary key, body text, tags text[], score numeric);
             alter table t enable row level security;
             create policy own on t for select to aura_authenticated using (id <> 4)",
        )
        .await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let mut watch = stage.changes().await;
    let claims = json!({"sub": "a", "role": "authenticated"});
    let mut subs = Vec::new();
    for filter in [
        "body=like.a%",
        "score=gt.10",
        "body=match.^[ab]+$",
        "id=not.in.(1,2)",
        r#"tags=eq."{x,y}",id=lt.100"#,
        "body=ilike.A%,score=is.null",
        "score=isdistinct.10",
    ] {
        let (sub, reply) = stage.join("t", "authenticated", claims.clone(), Some(filter)).await;
        assert!(reply.exceptions.is_empty(), "{filter}: {reply:?}");
        subs.push(sub);
    }
    stage
        .sql
        .batch_execute(
            "insert into t values (1, 'ab', '{x}', 10.0), (2, 'Ax', '{x,y}', null), (3, null, null, 10.01), (4, 'a', null, 99);
             update t set body = 'zz' where id = 1",
        )
        .await?;
    let expected = [vec![0, 2], vec![4, 5, 6], vec![1, 3, 6], vec![], vec![]];
    for (n, which) in expected.iter().enumerate() {
        let seen: BTreeSet<u64> = watch.next().await.ids.into_iter().collect();
        assert_eq!(seen, which.iter().map(|at| subs[*at]).collect(), "row {n}");
    }
    worker.stop().await;
    Ok(())
}

/// R-RLS-6: whose condition raises has a gap, all others their event.
#[tokio::test(flavor = "multi_thread")]
async fn r_rls_6_a_failing_filter_has_a_gap_and_all_others_their_event() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage
        .sql
        .batch_execute(
            "create type odd as (n int);
             create function odd_lt(a odd, b odd) returns bool language plpgsql as $$begin
                 if a.n <> b.n and b.n = 13 then raise exception 'unlucky'; end if;
                 return a.n < b.n; end$$;
             create operator < (leftarg = odd, rightarg = odd, function = odd_lt);
             create table t (id int primary key, o odd);
             alter table t enable row level security; create policy few_rows on t using (id < 100)",
        )
        .await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let mut watch = stage.changes().await;
    let claims = json!({"sub": "a", "role": "authenticated"});
    let mut subs = Vec::new();
    for filter in ["o=lt.(5)", "o=lt.(13)", "o=lt.(13),id=eq.2"] {
        let (sub, reply) = stage.join("t", "authenticated", claims.clone(), Some(filter)).await;
        assert!(reply.exceptions.is_empty(), "{filter}: {reply:?}");
        subs.push(sub);
    }
    stage.sql.batch_execute("insert into t values (100, row(1))").await?;
    assert!(
        watch.next().await.ids.is_empty() && watch.gaps.is_empty(),
        "a gap would tell of a row that nobody may see"
    );
    stage.sql.batch_execute("insert into t values (1, row(1))").await?;
    let gap = watch.next_gap().await;
    assert_eq!((&gap["reason"], &gap["sub_ids"]), (&json!("policy_error"), &json!([subs[1]])), "{gap}");
    assert_eq!(watch.next().await.ids, [subs[0]], "the third's other condition excludes the row");
    worker.stop().await;
    Ok(())
}

/// Conditions follow DDL: compiled again for the new type, or ended with a gap, never matched by the old one.
#[tokio::test(flavor = "multi_thread")]
async fn r_rls_10_filters_follow_a_column_s_type() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage
        .sql
        .batch_execute(
            "create table t (id int primary key, v text collate \"C\");
             alter table t enable row level security; create policy all_rows on t using (true)",
        )
        .await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let mut watch = stage.changes().await;
    let claims = json!({"role": "anon"});
    let (nine, _) = stage.join("t", "anon", claims.clone(), Some("v=gt.9")).await;
    let (word, _) = stage.join("t", "anon", claims.clone(), Some("v=eq.word")).await;
    stage.sql.batch_execute("insert into t values (1, '10'), (2, 'word')").await?;
    assert!(watch.next().await.ids.is_empty(), "texts: 10 is below 9");
    let seen: BTreeSet<u64> = watch.next().await.ids.into_iter().collect();
    assert_eq!(seen, BTreeSet::from([nine, word]));
    let alter = "alter table t alter v type int using case when v <> 'word' then v::int end";
    stage.sql.batch_execute(alter).await?;
    stage.sql.batch_execute("insert into t values (3, '10')").await?;
    assert_eq!(watch.next().await.ids, [nine], "numbers: 10 is above 9");
    let gap = watch.gaps.pop().expect("a gap before the row");
    assert_eq!((&gap["reason"], &gap["sub_ids"]), (&json!("table_changed"), &json!([word])), "{gap}");
    let (_, reply) = stage.join("t", "anon", claims, Some("v=eq.word")).await;
    assert!(reply.exceptions[0].fatal && reply.exceptions[0].message.contains("type integer: \"word\""), "{reply:?}");
    worker.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wildcard_s_filter_holds_for_every_table_and_for_those_that_are_registered_later() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage
        .sql
        .batch_execute(
            "create table a (id int primary key, room int); create table b (id int primary key, room text);
             create table c (id int primary key);
             alter table a enable row level security; create policy all_rows on a using (true);
             alter table b enable row level security; create policy all_rows on b using (true)",
        )
        .await?;
    let worker = stage.run_worker().await;
    stage.enable("a").await?;
    let mut watch = stage.changes().await;
    let claims = json!({"role": "anon"});
    let (sub, reply) = stage.join("*", "anon", claims.clone(), Some("room=eq.7")).await;
    assert!(reply.exceptions.is_empty(), "{reply:?}");
    let (_, reply) = stage.join("*", "anon", claims.clone(), Some("nope=eq.7")).await;
    assert!(reply.exceptions[0].fatal && reply.exceptions[0].message.contains("invalid column for filter nope"));
    stage.sql.batch_execute("insert into a values (1, 7), (2, 8)").await?;
    assert_eq!(watch.next().await.ids, [sub]);
    assert!(watch.next().await.ids.is_empty());
    stage.enable("b").await?;
    stage.sql.batch_execute("insert into b values (1, '7'), (2, '07')").await?;
    assert_eq!(watch.next().await.ids, [sub]);
    assert!(watch.next().await.ids.is_empty());
    stage.enable("c").await?;
    stage.sql.batch_execute("insert into c values (1)").await?;
    let gap = watch.next_gap().await;
    assert_eq!((&gap["reason"], &gap["sub_ids"]), (&json!("table_changed"), &json!([sub])), "{gap}");
    assert!(watch.next().await.ids.is_empty(), "a table without the column ends the subscription");
    worker.stop().await;
    Ok(())
}

/// What a front asks is about all projects of a source: whose filters take long to check keeps nobody else from joining.
#[tokio::test(flavor = "multi_thread")]
async fn r_rls_6_slow_filters_of_a_project_don_t_hold_up_the_joins_of_others() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    let worker = stage.run_worker().await;
    let claims = json!({"sub": "a", "role": "authenticated"});
    another_project(&mut stage, 1, "slow").await?;
    stage.sql.batch_execute(&format!("{SLOW_TEXT}; alter table slow add column word slow_text")).await?;
    let filter = |n: u32| format!("word=eq.{n}");
    let mut all: Vec<_> =
        (0..40).map(|n| stage.subscription("slow", "authenticated", &claims, Some(&filter(n)))).collect();
    another_project(&mut stage, 2, "t").await?;
    let good = stage.subscription("t", "authenticated", &claims, Some("id=gt.5"));
    let good_id = good.sub_id;
    all.push(good);
    let reply = stage.join_at_once(all).await;
    assert!(reply.exceptions.iter().all(|exception| exception.sub_id != good_id && !exception.fatal), "{reply:?}");
    assert!(!reply.exceptions.is_empty(), "not all of the slow ones can have been checked");
    worker.stop().await;
    Ok(())
}

/// R-MEM-2: questions to PostgreSQL are rows × distinct filters. A transaction that has more of them than are asked at a
/// time is placed in parts, and nothing of it is given up.
#[tokio::test(flavor = "multi_thread")]
async fn r_mem_2_many_filters_that_postgres_decides_and_many_rows_are_asked_in_parts() -> anyhow::Result<()> {
    const FILTERS: usize = 400;
    const ROWS: usize = 2500;
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage.sql.batch_execute("create table t (id int primary key, body text)").await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let mut watch = stage.changes().await;
    let claims = json!({"sub": "a", "role": "authenticated"});
    let of_body = |n: usize| format!("body=ilike.N{n}");
    let filters: Vec<String> = (0..FILTERS).map(of_body).collect();
    for some in filters.chunks(100) {
        let some = some.iter().map(|filter| stage.subscription("t", "authenticated", &claims, Some(filter))).collect();
        let reply = stage.join_at_once(some).await;
        assert!(reply.exceptions.is_empty(), "{reply:?}");
    }
    stage.sql.batch_execute(&format!("insert into t select n, 'n' || n from generate_series(1, {ROWS}) n")).await?;
    for n in 1..=ROWS {
        assert_eq!(watch.next().await.ids.len(), usize::from(n < FILTERS), "row {n}");
    }
    assert_eq!(watch.gaps, Vec::<serde_json::Value>::new());
    worker.stop().await;
    Ok(())
}

/// Whoever's check takes longer than it may is told so: asked about again it would hold up others again, for ever.
#[tokio::test(flavor = "multi_thread")]
async fn r_rls_6_a_filter_that_takes_too_long_to_check_is_refused_instead_of_asked_about_for_ever() -> anyhow::Result<()>
{
    let mut stage = Stage::new(Plugin::Auto).await?;
    let worker = stage.run_worker().await;
    stage.sql.batch_execute(SLOW_TEXT).await?;
    for n in 0..6 {
        stage.sql.batch_execute(&format!("create table t{n} (id int primary key, word slow_text)")).await?;
        stage.enable(&format!("t{n}")).await?;
    }
    let claims = json!({"sub": "a", "role": "authenticated"});
    // Each of its conditions would do, and so would each of the tables.
    for (table, filter) in [("t0", "word=neq.a,word=neq.b,word=neq.c,word=neq.d"), ("*", "word=eq.a")] {
        let (_, reply) = stage.join(table, "authenticated", claims.clone(), Some(filter)).await;
        let [exception] = &reply.exceptions[..] else { panic!("{table}: {reply:?}") };
        assert!(exception.fatal && exception.message.contains("takes too long"), "{table}: {exception:?}");
    }
    let (_, reply) = stage.join("t0", "authenticated", claims, Some("word=eq.a")).await;
    assert!(reply.exceptions.is_empty(), "{reply:?}");
    worker.stop().await;
    Ok(())
}

/// Requests that wait for their turn keep the leader neither from saying that it is there nor from hearing fronts.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_with_more_requests_than_it_can_work_on_is_heard() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    let worker = stage.run_worker().await;
    stage.sql.batch_execute(&format!("{SLOW_TEXT}; create table t (id int primary key, word slow_text)")).await?;
    stage.enable("t").await?;
    let claims = json!({"sub": "a", "role": "authenticated"});
    let front = aura_domain::FrontId("busy".to_owned());
    let subject = Subject::source_requests(stage.source.id);
    for rev in 1..=250 {
        let subscriptions = vec![stage.subscription("t", "authenticated", &claims, Some(&format!("word=eq.{rev}")))];
        let request = Request::Join { front: front.clone(), rev, subscriptions };
        let (bus, message) =
            (std::sync::Arc::clone(&stage.bus), Message::new(subject.clone(), serde_json::to_vec(&request)?));
        tokio::spawn(async move { bus.request(message, Duration::from_secs(5)).await });
    }
    let mut announcements = stage.bus.subscribe(&Subject::source_announcements(stage.source.id)).await?;
    let heard = async {
        loop {
            let message = announcements.next().await.expect("the bus is there");
            if matches!(serde_json::from_slice(&message.payload), Ok(Announcement::LeaderHeartbeat { .. })) {
                return;
            }
        }
    };
    // Its period is 5 s, and working on all requests takes more than 12 s.
    tokio::time::timeout(Duration::from_secs(8), heard).await?;
    worker.stop().await;
    Ok(())
}
