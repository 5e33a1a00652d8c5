//! What others' row-level security was seen to do wrong, and what ours does instead. The numbers are those of the table in
//! docs/testing.md.

use std::collections::BTreeMap;

use aura_store::Plugin;
use serde_json::{Value, json};

use crate::hall::{Hall, OWNED, open, row};

#[tokio::test(flavor = "multi_thread")]
async fn walrus_1_a_row_that_is_gone_by_now_comes_with_its_owners_insert_and_nobody_elses() -> anyhow::Result<()> {
    let mut hall = Hall::new(OWNED).await?;
    hall.user("alice").await;
    hall.user("bob").await;
    hall.late("insert into m values (0)", &["insert into m values (1, 'alice', 'a')", "delete from m where id = 1"])
        .await?;
    let (events, a) = (hall.events("").await?, row(1, "alice", "a"));
    assert_eq!(Hall::of(&events, "alice"), [("INSERT", &a, &Value::Null), ("DELETE", &Value::Null, &a)]);
    assert_eq!(Hall::of(&events, "bob"), [], "not even a key");
    hall.end().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn walrus_2_the_old_owners_contents_never_go_to_the_new_owner() -> anyhow::Result<()> {
    let mut hall = Hall::new(OWNED).await?;
    hall.user("alice").await;
    hall.user("bob").await;
    let later = ["insert into m values (1, 'alice', 'a')", "update m set owner = 'bob', body = 'b' where id = 1"];
    hall.late("insert into m values (0)", &later).await?;
    let (events, key) = (hall.events("").await?, json!({"id": 1}));
    assert_eq!(Hall::of(&events, "alice"), [("INSERT", &row(1, "alice", "a"), &Value::Null)]);
    assert_eq!(Hall::of(&events, "bob"), [("UPDATE", &row(1, "bob", "b"), &key)]);
    hall.end().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn walrus_3_a_row_that_changes_hands_shows_its_new_owner_nothing_of_the_old() -> anyhow::Result<()> {
    let mut hall = Hall::new(OWNED).await?;
    hall.user("alice").await;
    hall.user("bob").await;
    hall.run("insert into m values (1, 'alice', 'a'); update m set owner = 'bob', id = 2").await?;
    hall.run("update m set owner = 'alice', body = 'c'").await?;
    let events = hall.events("").await?;
    assert_eq!(Hall::of(&events, "bob"), [("UPDATE", &row(2, "bob", "a"), &json!({}))], "the key changed, too");
    let alice = Hall::of(&events, "alice");
    assert_eq!(alice[1..], [("UPDATE", &row(2, "alice", "c"), &json!({"id": 2}))], "as any row that comes into view");
    assert_eq!(Hall::of(&events, "service")[1].2, &row(1, "alice", "a"), "who may see it all does");
    hall.end().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn walrus_4_a_delete_goes_whole_to_those_who_saw_the_row_and_to_nobody_else() -> anyhow::Result<()> {
    let mut hall = Hall::new(OWNED).await?;
    hall.user("alice").await;
    hall.user("bob").await;
    hall.join("bypass", "anon", json!({"role": "anon"}), None).await;
    let anon = format!("\"p_{}_anon\"", hall.stage.project);
    hall.run("insert into m values (1, 'alice', 'a')").await?;
    hall.run(&format!("alter role {anon} bypassrls")).await?;
    hall.run("delete from m").await?;
    let (events, whole) = (hall.events("").await?, row(1, "alice", "a"));
    for name in ["alice", "service", "bypass"] {
        assert_eq!(Hall::of(&events, name).last(), Some(&("DELETE", &Value::Null, &whole)), "{name}");
    }
    assert_eq!(Hall::of(&events, "bob"), []);
    hall.end().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn walrus_5_a_delete_is_filtered_by_any_column() -> anyhow::Result<()> {
    let mut hall = Hall::new(OWNED).await?;
    hall.filtered("x", "body=eq.x").await;
    hall.filtered("y", "body=eq.y").await;
    hall.run("insert into m values (1, 'alice', 'x'); delete from m").await?;
    let (events, whole) = (hall.events("").await?, row(1, "alice", "x"));
    assert_eq!(Hall::of(&events, "x").last(), Some(&("DELETE", &Value::Null, &whole)));
    assert_eq!(Hall::of(&events, "y"), []);
    hall.end().await;
    Ok(())
}

/// The wire's contract is that filters are about the new row; clients count on it.
#[tokio::test(flavor = "multi_thread")]
async fn walrus_6_an_update_out_of_a_filter_is_no_event_and_one_into_it_is() -> anyhow::Result<()> {
    let mut hall = Hall::new(OWNED).await?;
    hall.filtered("x", "body=eq.x").await;
    hall.run("insert into m values (1, 'alice', 'x'); update m set body = 'y'; update m set body = 'x'").await?;
    let events = hall.events("").await?;
    let (x, y) = (row(1, "alice", "x"), row(1, "alice", "y"));
    assert_eq!(Hall::of(&events, "x"), [("INSERT", &x, &Value::Null), ("UPDATE", &x, &y)]);
    hall.end().await;
    Ok(())
}

/// One whose `sub` is no uuid where the policy wants one; a policy that divides by zero for one row of one owner.
#[tokio::test(flavor = "multi_thread")]
async fn walrus_7_a_policy_that_raises_costs_its_own_subscriber_a_gap_and_nobody_else_anything() -> anyhow::Result<()> {
    let raising = "owner = auth.jwt() ->> 'sub' and case auth.jwt() ->> 'sub' when 'alice' then auth.uid() is null
        when 'carol' then 1 / length(body) > 0 else true end";
    let mut hall = Hall::new(&OWNED.replace("owner = auth.jwt() ->> 'sub'", raising)).await?;
    for name in ["alice", "bob", "carol"] {
        hall.user(name).await;
    }
    let stream = hall.stage.walsender().await?;
    hall.run("insert into m values (1, 'bob', 'b'), (2, 'alice', 'a'), (3, 'carol', ''), (4, 'bob', 'b')").await?;
    let events = hall.events("").await?;
    hall.run("delete from m where id = 999; insert into m values (5, 'carol', 'c')").await?;
    let later = hall.events("").await?;
    let got: Vec<_> = Hall::of(&events, "bob").iter().map(|event| event.1["id"].clone()).collect();
    assert_eq!(got, [1, 4], "the batch is judged for the others");
    assert_eq!(Hall::of(&later, "carol"), [("INSERT", &row(5, "carol", "c"), &Value::Null)], "its next row arrives");
    assert!(Hall::of(&events, "alice").is_empty() && Hall::of(&later, "alice").is_empty());
    let mut told = BTreeMap::new();
    for gap in &hall.watch.gaps {
        assert_eq!(gap["reason"], "policy_error", "{gap}");
        for id in gap["sub_ids"].as_array().into_iter().flatten() {
            let id = id.as_u64().or_else(|| id.as_str()?.parse().ok()).unwrap_or_default();
            *told.entry(hall.names[&id][0].as_str()).or_insert(0) += 1;
        }
    }
    assert_eq!(told.keys().copied().collect::<Vec<_>>(), ["alice", "carol"], "who misses something, and nobody else");
    assert_eq!(hall.stage.walsender().await?, stream, "the stream runs on");
    hall.end().await;
    Ok(())
}

/// Nothing at all is said to a role without a right: no event, no message with the table's name.
#[tokio::test(flavor = "multi_thread")]
async fn walrus_10_a_role_without_a_right_hears_nothing() -> anyhow::Result<()> {
    let mut hall = Hall::new(&open("m", "id int primary key, owner text, body text")).await?;
    hall.join("anon", "anon", json!({"role": "anon"}), None).await;
    hall.user("alice").await;
    let role = format!("\"p_{}_anon\"", hall.stage.project);
    hall.run(&format!("revoke select on m from public, aura_anon, {role}")).await?;
    hall.run("insert into m values (1, '', ''); update m set body = 'x'; delete from m").await?;
    let events = hall.events("").await?;
    assert_eq!(events.len(), 3);
    assert_eq!(Hall::of(&events, "alice").len(), 3);
    assert_eq!(Hall::of(&events, "anon"), []);
    assert!(hall.watch.gaps.is_empty());
    hall.end().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn walrus_11_padded_and_bit_keys_are_whole_and_judged() -> anyhow::Result<()> {
    let sql = "create table m (id char(5), bits bit(3), owner text, primary key (id, bits));
        alter table m enable row level security;
        create policy own on m for select using (id = 'hello' and bits = b'101' and owner = auth.jwt() ->> 'sub')";
    let mut hall = Hall::new(sql).await?;
    hall.user("alice").await;
    hall.run(
        "insert into m values ('hello', '101', 'alice'); delete from m; insert into m values ('hello', '111', 'alice')",
    )
    .await?;
    let (first, second) = (hall.watch.next().await, hall.watch.next().await);
    let whole = json!({"id": "hello", "bits": "101", "owner": "alice"});
    assert_eq!((&first.data["record"], &second.data["old_record"]), (&whole, &whole));
    assert!(first.ids.len() == 2 && second.ids.len() == 2, "alice and the service");
    assert_eq!(hall.watch.next().await.ids.len(), 1, "the other key is not hers");
    hall.end().await;
    Ok(())
}

/// What wal2json itself replaces by null can't be told; pgoutput tells it.
#[tokio::test(flavor = "multi_thread")]
async fn walrus_12_numbers_keep_their_digits_and_bytes_their_form() -> anyhow::Result<()> {
    for (plugin, nan) in [(Plugin::Wal2json, Value::Null), (Plugin::PgOutput, json!("NaN"))] {
        let columns = "id int primary key, f float8, n numeric, b bytea, big int8";
        let mut hall = Hall::with(plugin, &open("m", columns)).await?;
        hall.run("insert into m values (1, 'NaN', 'NaN', '\\xdeadbeef', 9007199254740993)").await?;
        let seen = hall.watch.next().await;
        let record = &seen.data["record"];
        assert_eq!((&record["f"], &record["n"], &record["b"]), (&nan, &nan, &json!("deadbeef")), "{plugin:?}");
        assert!(seen.data.to_string().contains("\"big\":9007199254740993"), "every digit: {record}");
        hall.end().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn walrus_13_an_unchanged_toasted_value_is_there_filters_and_is_judged() -> anyhow::Result<()> {
    let owned = OWNED.replace("(owner =", "(length(body) > 100000 and owner =")
        + "; alter table m alter body set storage external";
    let mut hall = Hall::new(&owned).await?;
    let body = "x".repeat(200_000);
    hall.filtered("body", &format!("body=eq.{body}")).await;
    hall.filtered("other", "body=eq.x").await;
    hall.user("alice").await;
    hall.run(&format!("insert into m values (1, 'alice', '{body}'); update m set id = 2")).await?;
    let (events, whole) = (hall.events("").await?, row(2, "alice", &body));
    for name in ["alice", "body"] {
        let got = Hall::of(&events, name);
        assert!(got.len() == 2 && got[1] == ("UPDATE", &whole, &row(1, "alice", &body)), "{name}: {}", got.len());
    }
    assert_eq!(Hall::of(&events, "other"), []);
    hall.end().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn walrus_14_a_change_beyond_the_limit_of_the_bus_keeps_its_key_and_goes_to_its_owner_alone() -> anyhow::Result<()>
{
    let mut hall = Hall::new(OWNED).await?;
    hall.user("alice").await;
    hall.user("bob").await;
    for (id, size) in [(1, 900_000), (2, 3_000_000)] {
        hall.run(&format!("insert into m values ({id}, 'alice', repeat('x', {size}))")).await?;
    }
    let events = hall.events("").await?;
    let got = Hall::of(&events, "alice");
    assert_eq!(got[0].1["body"].as_str().map(str::len), Some(900_000), "whole");
    assert_eq!(got[1].1, &json!({"id": 2, "owner": "alice"}));
    assert_eq!(Hall::of(&events, "bob"), []);
    hall.end().await;
    Ok(())
}

/// A leaf is a table of its own, as it is for who selects from it: its own policies and rights decide, never nobody's.
#[tokio::test(flavor = "multi_thread")]
async fn walrus_15_a_leaf_is_judged_by_its_own_policies() -> anyhow::Result<()> {
    let sql = "create table root (id int primary key, owner text, body text) partition by range (id);
        alter table root enable row level security;
        create policy all_of_it on root for select using (true);
        create table m partition of root for values from (0) to (1000);
        alter table m enable row level security;
        create policy own on m for select to aura_authenticated using (owner = auth.jwt() ->> 'sub')";
    let mut hall = Hall::new(sql).await?;
    hall.user("alice").await;
    hall.user("bob").await;
    hall.run("insert into root values (1, 'alice', 'a'); insert into m values (2, 'bob', 'b')").await?;
    let events = hall.events("").await?;
    assert_eq!(Hall::of(&events, "alice"), [("INSERT", &row(1, "alice", "a"), &Value::Null)]);
    assert_eq!(Hall::of(&events, "bob"), [("INSERT", &row(2, "bob", "b"), &Value::Null)]);
    hall.end().await;
    Ok(())
}

/// In a query a parent shows its children's rows by its own policies; in the log they are the child's, and never come under
/// the parent's name. Whoever wants them enables the child.
#[tokio::test(flavor = "multi_thread")]
async fn r_rls_2_a_childs_rows_are_the_childs_own() -> anyhow::Result<()> {
    let sql = open("m", "id int primary key, owner text, body text")
        + "; create table child (secret text) inherits (m); alter table child enable row level security";
    let mut hall = Hall::new(&sql).await?;
    hall.user("alice").await;
    hall.run(
        "insert into child values (1, 'alice', 'a', 's'); update m set body = 'b'; insert into m values (2, '', '')",
    )
    .await?;
    hall.stage.enable("child").await?;
    hall.run("insert into child values (3, 'alice', 'a', 's'); delete from m where id = 3").await?;
    let events = hall.events("").await?;
    let of_alice: Vec<_> = Hall::of(&events, "alice").iter().map(|event| event.1["id"].clone()).collect();
    assert_eq!(of_alice, [2]);
    let secret = events.iter().filter(|event| event.2["secret"] == "s" || event.3["secret"] == "s");
    assert_eq!(secret.map(|event| event.1.len()).collect::<Vec<_>>(), [0, 0], "published, for nobody");
    hall.end().await;
    Ok(())
}

/// Registration decides which tables are live, policies which rows, grants which columns. A tenant's own publications are
/// for others.
#[tokio::test(flavor = "multi_thread")]
async fn walrus_16_grants_decide_about_columns_and_publications_about_nothing() -> anyhow::Result<()> {
    for plugin in [Plugin::Wal2json, Plugin::PgOutput] {
        let mut hall = Hall::with(plugin, OWNED).await?;
        hall.user("alice").await;
        let role = format!("\"p_{}_authenticated\"", hall.stage.project);
        hall.run("create publication theirs for table m (id) where (id > 100) with (publish = 'insert')").await?;
        hall.run(&format!("revoke select on m from public, aura_authenticated, {role}")).await?;
        hall.run(&format!("grant select (id, owner) on m to {role}")).await?;
        hall.run("insert into m values (1, 'alice', 'a'); update m set body = 'b'; delete from m").await?;
        let (events, part) = (hall.events("").await?, json!({"id": 1, "owner": "alice"}));
        let got = Hall::of(&events, "alice");
        assert_eq!(got, [("INSERT", &part, &Value::Null), ("UPDATE", &part, &part), ("DELETE", &Value::Null, &part)]);
        assert_eq!(Hall::of(&events, "service")[1].1, &row(1, "alice", "b"), "{plugin:?}");
        hall.end().await;
    }
    Ok(())
}

/// With pgoutput a generated column isn't in the log before version 18: a policy that reads it lets nobody see the row,
/// instead of taking it for null.
#[tokio::test(flavor = "multi_thread")]
async fn walrus_17_a_generated_column_is_delivered_and_judged_or_the_row_denied() -> anyhow::Result<()> {
    let sql =
        "create table m (id int primary key, owner text, body text, g text generated always as (owner || '!') stored);
        alter table m enable row level security;
        create policy own on m for select to aura_authenticated using (g is null or g = (auth.jwt() ->> 'sub') || '!')";
    for plugin in [Plugin::Wal2json, Plugin::PgOutput] {
        let mut hall = Hall::with(plugin, sql).await?;
        hall.user("alice").await;
        hall.user("bob").await;
        hall.run("insert into m values (1, 'alice', 'a')").await?;
        let events = hall.events("").await?;
        assert_eq!(Hall::of(&events, "bob"), []);
        let got = Hall::of(&events, "alice");
        match plugin {
            Plugin::PgOutput => assert_eq!(got, [], "what can't be judged is denied"),
            _ => assert_eq!(got[0].1, &json!({"id": 1, "owner": "alice", "body": "a", "g": "alice!"})),
        }
        hall.end().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn walrus_18_a_truncate_disturbs_nothing() -> anyhow::Result<()> {
    let mut hall = Hall::new(OWNED).await?;
    hall.user("alice").await;
    hall.run("insert into m values (1, 'alice', 'a')").await?;
    hall.run("begin; truncate m; insert into m values (2, 'alice', 'b'); commit; truncate m").await?;
    let events = hall.events("").await?;
    let ids: Vec<_> = Hall::of(&events, "alice").iter().map(|event| event.1["id"].clone()).collect();
    assert_eq!((ids, hall.watch.gaps.len()), (vec![json!(1), json!(2)], 0));
    hall.end().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn walrus_20_one_change_is_one_event_for_each_whatever_roles_and_columns_there_are() -> anyhow::Result<()> {
    let mut hall = Hall::new(&open("m", "id int primary key, owner text, body text")).await?;
    hall.join("anon", "anon", json!({"role": "anon"}), None).await;
    for name in ["alice", "bob"] {
        hall.user(name).await;
    }
    hall.filtered("filtered", "id=eq.1").await;
    let role = format!("\"p_{}_anon\"", hall.stage.project);
    hall.run(&format!("revoke select on m from public, aura_anon, {role}; grant select (id) on m to {role}")).await?;
    hall.run("insert into m values (1, 'x', 'y')").await?;
    let events = hall.events("").await?;
    assert_eq!(events.len(), 2, "one for each part of the row that somebody sees");
    for name in ["anon", "alice", "bob", "filtered", "service"] {
        assert_eq!(Hall::of(&events, name).len(), 1, "{name}");
    }
    assert_eq!(Hall::of(&events, "anon")[0].1, &json!({"id": 1}));
    hall.end().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn walrus_21_what_was_rolled_back_to_a_savepoint_never_comes_and_a_changed_key_is_told() -> anyhow::Result<()> {
    let mut hall = Hall::new(OWNED).await?;
    hall.user("alice").await;
    hall.run(
        "begin; insert into m values (1, 'alice', 'a'); savepoint s; insert into m values (2, 'alice', 'no');
         update m set body = 'no'; rollback to s; update m set id = 3; commit",
    )
    .await?;
    let events = hall.events("").await?;
    let (a, b) = (row(1, "alice", "a"), row(3, "alice", "a"));
    assert_eq!(Hall::of(&events, "alice"), [("INSERT", &a, &Value::Null), ("UPDATE", &b, &a)]);
    hall.end().await;
    Ok(())
}
