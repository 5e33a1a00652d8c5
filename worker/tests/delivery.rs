use std::{collections::BTreeSet, time::Duration};

use aura_store::Plugin;
use aura_testkit::eventually;
use serde_json::json;

use crate::stage::Stage;

#[tokio::test(flavor = "multi_thread")]
async fn a_registered_table_is_published_and_no_other_time_or_table() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    stage.sql.batch_execute("create table t (id int primary key, body text); create table other (id int)").await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.sql.batch_execute("insert into t values (1, 'before')").await?;
    stage.enable("t").await?;
    stage.sql.batch_execute("insert into other values (1); insert into t values (2, 'it''s'), (3, null)").await?;
    stage.sql.batch_execute("update t set body = 'x' where id = 2; delete from t where id = 3").await?;

    let (a, b, c, d) = (watch.next().await, watch.next().await, watch.next().await, watch.next().await);
    assert_eq!(a.data["record"], json!({"id": 2, "body": "it's"}));
    assert_eq!((a.data["type"].as_str(), a.data["schema"].as_str()), (Some("INSERT"), Some("public")));
    assert_eq!(a.data["columns"], json!([{"name": "id", "type": "int4"}, {"name": "body", "type": "text"}]));
    assert_eq!(b.data["record"], json!({"id": 3, "body": null}));
    assert_eq!(c.data["old_record"], json!({"id": 2, "body": "it's"}), "the old image is whole under FULL");
    assert_eq!((d.data["type"].as_str(), &d.data["old_record"]), (Some("DELETE"), &json!({"id": 3, "body": null})));
    assert!(d.data.get("record").is_none() && a.data.get("old_record").is_none());
    assert_eq!([a.seq, b.seq, c.seq, d.seq], [1, 2, 3, 4]);
    assert!(a.ids.is_empty(), "nobody subscribed, so nobody may see it");

    stage.disable("t").await?;
    stage.sql.batch_execute("insert into t values (9, 'after')").await?;
    stage.enable("other").await?;
    stage.sql.batch_execute("insert into other values (7)").await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 7}), "nothing of t after the disable was applied");
    worker.stop().await;
    Ok(())
}

/// A worker that lags reads what was written before the table went live, under a filter that has the table by then.
#[tokio::test(flavor = "multi_thread")]
async fn r_reg_8_nothing_from_before_its_registration_is_published_by_a_worker_that_lags() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    stage.sql.batch_execute("create table t (id int primary key); create table other (id int)").await?;
    let worker = stage.run_worker().await;
    stage.enable("other").await?;
    worker.stop().await;
    stage.sql.batch_execute("insert into t values (1)").await?;
    stage.register("t").await?;
    stage.sql.batch_execute("insert into t values (2)").await?;
    let mut watch = stage.changes().await;
    let worker = stage.run_worker().await;
    assert_eq!(watch.next().await.data["record"], json!({"id": 2}));
    worker.stop().await;
    Ok(())
}

/// G1: whatever was committed after the 200 reaches the bus, across a crash of the worker.
#[tokio::test(flavor = "multi_thread")]
async fn g1_a_killed_worker_loses_nothing_and_keeps_the_order() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    stage.sql.batch_execute("create table t (id int primary key)").await?;
    let mut watch = stage.changes().await;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    for id in 0..101 {
        stage.sql.execute("insert into t values ($1)", &[&id]).await?;
    }
    worker.kill();
    for id in 101..300 {
        stage.sql.execute("insert into t values ($1)", &[&id]).await?;
    }
    let worker = stage.run_worker().await;
    let mut ids = Vec::new();
    while ids.last() != Some(&299) {
        ids.push(watch.next().await.data["record"]["id"].as_i64().expect("an id"));
    }
    let distinct: BTreeSet<_> = ids.iter().copied().collect();
    assert_eq!(distinct.len(), 300, "every row at least once");
    let last_start = ids.windows(2).rposition(|pair| pair[1] <= pair[0]).map_or(0, |at| at + 1);
    assert!(ids[last_start..].is_sorted(), "in order since the worker was started again");
    worker.stop().await;
    Ok(())
}

/// R-HOLE-2: a change of the filter under load skips nothing and repeats nothing.
#[tokio::test(flavor = "multi_thread")]
async fn r_hole_2_a_registration_under_load_misses_no_row() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    stage.sql.batch_execute("create table a (id int primary key); create table b (id int primary key)").await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.enable("a").await?;
    let writer = stage.postgres.client("app").await?;
    writer.batch_execute(&format!("set search_path = {}", stage.schema.quoted())).await?;
    let load = async {
        for id in 0..1500 {
            writer.execute("insert into a values ($1)", &[&id]).await?;
        }
        anyhow::Ok(())
    };
    let register = async {
        stage.enable("b").await?;
        for id in 0..200 {
            stage.sql.execute("insert into b values ($1)", &[&id]).await?;
        }
        anyhow::Ok(())
    };
    let (loaded, registered) = tokio::join!(load, register);
    loaded?;
    registered?;
    let (mut a, mut b) = (Vec::new(), Vec::new());
    while a.len() < 1500 || b.len() < 200 {
        let seen = watch.next().await;
        let ids = if seen.data["table"] == "a" { &mut a } else { &mut b };
        ids.push(seen.data["record"]["id"].as_i64().expect("an id"));
    }
    assert!(a.iter().copied().eq(0..1500), "no row missing, none twice");
    assert!(b.iter().copied().eq(0..200), "every row from the first one committed after the answer");
    worker.stop().await;
    Ok(())
}

/// R-RLS-1 over insert, a move from one owner to the other, and delete.
#[tokio::test(flavor = "multi_thread")]
async fn r_rls_1_alice_and_bob_each_get_their_own_rows() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage
        .sql
        .batch_execute(
            "create table m (id int primary key, owner text, body text);
             alter table m enable row level security;
             create policy own on m for select to aura_authenticated using (owner = auth.jwt() ->> 'sub')",
        )
        .await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    let (early, _) = stage.join("m", "authenticated", json!({"sub": "early", "role": "authenticated"}), None).await;
    stage.enable("m").await?;
    let (alice, reply) = stage.join("m", "authenticated", json!({"sub": "alice", "role": "authenticated"}), None).await;
    assert!(reply.exceptions.is_empty() && reply.streaming, "{reply:?}");
    let (bob, _) = stage.join("m", "authenticated", json!({"sub": "bob", "role": "authenticated"}), None).await;
    let (admin, _) = stage.join("m", "service_role", json!({"role": "service_role"}), Some("id=eq.1")).await;
    let (nobody, _) = stage.join("m", "anon", json!({"role": "anon"}), None).await;
    stage.sql.batch_execute("insert into m values (1, 'alice', 'a'), (2, 'early', 'e')").await?;
    stage.sql.batch_execute("update m set owner = 'bob', body = 'b' where id = 1").await?;
    stage.sql.batch_execute("delete from m where id = 1").await?;

    let (insert, second) = (watch.next().await, watch.next().await);
    assert_eq!(insert.ids.iter().copied().collect::<BTreeSet<_>>(), BTreeSet::from([alice, admin]));
    assert_eq!(second.ids, [early], "a subscription from before the PUT delivers, the filter of another does not");
    let (first, second) = (watch.next().await, watch.next().await);
    let (for_bob, for_admin) = if first.ids == [bob] { (first, second) } else { (second, first) };
    assert_eq!((&for_bob.ids, &for_admin.ids), (&vec![bob], &vec![admin]));
    assert_eq!(for_bob.data["record"], json!({"id": 1, "owner": "bob", "body": "b"}));
    assert_eq!(for_bob.data["old_record"], json!({"id": 1}), "the old owner's contents never go to the new owner");
    assert_eq!(for_admin.data["old_record"], json!({"id": 1, "owner": "alice", "body": "a"}));
    let delete = watch.next().await;
    assert_eq!(delete.ids.iter().copied().collect::<BTreeSet<_>>(), BTreeSet::from([bob, admin]));
    assert_eq!(delete.data["old_record"], json!({"id": 1, "owner": "bob", "body": "b"}));
    assert!(!delete.ids.contains(&nobody));
    worker.stop().await;
    Ok(())
}

/// pgoutput gives the same objects.
#[tokio::test(flavor = "multi_thread")]
async fn r_dec_1_pgoutput_delivers_the_same() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::PgOutput).await?;
    stage.sql.batch_execute("create table t (id int primary key, body text)").await?;
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    stage.enable("t").await?;
    stage.sql.batch_execute("insert into t values (1, 'x'); update t set body = 'y'; delete from t").await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 1, "body": "x"}));
    assert_eq!(watch.next().await.data["old_record"], json!({"id": 1, "body": "x"}));
    assert_eq!(watch.next().await.data["old_record"], json!({"id": 1, "body": "y"}));
    worker.stop().await;
    Ok(())
}

/// R-DEC-5 and R-FB-7: an idle source's position moves, and `flush_lsn` is never NULL.
#[tokio::test(flavor = "multi_thread")]
async fn r_dec_5_writes_of_others_do_not_pin_the_log() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    let worker = stage.run_worker().await;
    stage.sql.batch_execute("create table foreign_writes as select g from generate_series(1, 1000) g").await?;
    let target: String = stage.sql.query_one("select pg_current_wal_lsn()::text", &[]).await?.get(0);
    eventually(Duration::from_secs(12), || async {
        let sql = "select s.confirmed_flush_lsn >= $1::text::pg_lsn and r.flush_lsn is not null
                   from pg_replication_slots s join pg_stat_replication r on r.pid = s.active_pid";
        stage.sql.query_one(sql, &[&target]).await.is_ok_and(|row| row.get(0))
    })
    .await?;
    worker.stop().await;
    let active: bool = stage.sql.query_one("select active from pg_replication_slots", &[]).await?.get(0);
    assert!(!active, "R-SD-9: the slot is inactive before the lease is released");
    let holder: Option<String> = lease_holder(&stage).await?;
    assert_eq!(holder, None);
    Ok(())
}

async fn lease_holder(stage: &Stage) -> anyhow::Result<Option<String>> {
    let platform = stage.postgres.client("platform").await?;
    Ok(platform.query_one("select holder from aura.leases", &[]).await?.get(0))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_filter_is_refused_with_its_reason_and_delivers_nothing() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    stage.sql.batch_execute("create table t (id int primary key, doc json)").await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    for (filter, words) in [
        ("id=ne.1", "Error parsing `filter` params: [\"ne\", \"1\"]"),
        ("id=like.1", "operator like requires a text-compatible column type, got integer"),
        ("nope=eq.1", "invalid column for filter nope"),
        (
            "id=eq.hey",
            "Unable to subscribe to changes with given parameters. An exception happened so please check your connect \
             parameters: [event: *, schema: public, table: t, filters: [{\"id\", \"eq\", \"hey\", false}], select: nil]. \
             Exception: ERROR 22P02 (invalid_text_representation) invalid input syntax for type integer: \"hey\"",
        ),
        ("doc=eq.{}", "operator does not exist: json = json"),
        ("foo", "Error parsing `filter` params"),
    ] {
        let (_, reply) = stage.join("t", "anon", json!({"role": "anon"}), Some(filter)).await;
        let exception = reply.exceptions.first().expect("an exception");
        assert!(exception.fatal && exception.message.contains(words), "{filter}: {exception:?}");
    }
    let (_, reply) = stage.join("nope", "anon", json!({"role": "anon"}), None).await;
    assert!(!reply.exceptions[0].fatal && reply.exceptions[0].message.contains("table: nope"), "{reply:?}");
    let (_, reply) = stage.join("t", "postgres", json!({"role": "postgres"}), None).await;
    assert!(reply.exceptions[0].fatal, "R-RLS-8: only roles of the allow-list");
    worker.stop().await;
    Ok(())
}

/// Slot names are cluster-wide: a slot of another database is never read, and the reason says so.
#[tokio::test(flavor = "multi_thread")]
async fn r_eng_8_a_slot_of_another_database_is_not_ours() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Auto).await?;
    let other = stage.postgres.client("platform").await?;
    other.execute("select pg_create_logical_replication_slot('aura_cdc_slot', 'wal2json')", &[]).await?;
    let worker = stage.worker().await;
    eventually(Duration::from_secs(10), || async {
        worker.status.engines().values().any(|engine| engine.code == Some("slot_of_other_database"))
    })
    .await?;
    assert!(!worker.status.cdc_active());
    worker.stop().await;
    Ok(())
}

/// R-HOLE-5: with more than 300 names the server sends whole schemas. What leaves the worker is as exact as before, and a
/// toggle inside such a schema meets a stream that runs on.
#[tokio::test(flavor = "multi_thread")]
async fn r_hole_5_a_toggle_among_more_than_300_names_restarts_no_stream() -> anyhow::Result<()> {
    let stage = Stage::new(Plugin::Wal2json).await?;
    let tables: Vec<String> = (0..302).map(|n| format!("create table t{n} (id int primary key);")).collect();
    stage.sql.batch_execute(&tables.concat()).await?;
    stage.run_worker().await.stop().await;
    for n in 0..301 {
        stage.register(&format!("t{n}")).await?;
    }
    let worker = stage.run_worker().await;
    let mut watch = stage.changes().await;
    let stream = stage.walsender().await?;
    stage.sql.batch_execute("insert into t301 values (1); insert into t0 values (2)").await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 2}), "t301 is in a listed schema, but not registered");

    stage.enable("t301").await?;
    stage.sql.batch_execute("insert into t301 values (3)").await?;
    let row = watch.next().await;
    assert_eq!((row.data["table"].as_str(), &row.data["record"]), (Some("t301"), &json!({"id": 3})));
    stage.disable("t0").await?;
    stage.sql.batch_execute("insert into t0 values (4); insert into t1 values (5)").await?;
    assert_eq!(watch.next().await.data["record"], json!({"id": 5}), "nothing of t0 after the disable was applied");
    assert_eq!(stage.walsender().await?, stream, "the stream runs on");
    assert!(watch.gaps.is_empty());
    worker.stop().await;
    Ok(())
}
