//! What is refused at a join, and who suffers from a condition that can't be decided.

use std::sync::Arc;

use anyhow::{Context, Result};
use aura_domain::{Cell, Image, Value};
use aura_pgsource::{
    conditions::{Answers, Compiled, Truth, parse},
    visibility::{CompileError, Subscriber},
};

use crate::tenant::{Tenants, image, relation};

pub(crate) async fn compile(tenants: &Tenants, table: &str, filter: &str) -> Result<Vec<Arc<Compiled>>, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let conditions = parse(filter).map_err(|error| text(&error))?;
    let relation = relation("shop", table).expect("a name");
    let described = tenants.pool.describe(tenants.shop, &relation, "authenticated", &[]);
    let (catalog, access) = described.await.map_err(|error| text(&error))?.expect("a table");
    let subscriber = Subscriber { tenant: tenants.shop_tenant(), role: "authenticated", access: &access };
    tenants.pool.compile(subscriber, &catalog, &conditions, &mut std::time::Duration::from_secs(1)).await.map_err(
        |error| match error {
            CompileError::Refused(why) => why,
            CompileError::Source(error) => format!("source: {error}"),
        },
    )
}

#[tokio::test]
async fn what_can_t_be_decided_is_refused_at_the_join_in_the_original_s_words() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants
        .run(
            "create domain shop.even as int check (value % 2 = 0); create type shop.mood as enum ('sad', 'ok');
             create table shop.t (id int primary key, body text, doc json, ok bool, m shop.mood, e shop.even, secret text);
             revoke all on shop.t from {authenticated};
             grant select (id, body, doc, ok, m, e) on shop.t to {authenticated}",
        )
        .await?;
    for (filter, words) in [
        ("nope=eq.1", "ERROR P0001 (raise_exception) invalid column for filter nope"),
        ("secret=eq.1", "ERROR P0001 (raise_exception) invalid column for filter secret"),
        ("id=eq.hey", "ERROR 22P02 (invalid_text_representation) invalid input syntax for type integer: \"hey\""),
        (
            "id=eq.3000000000",
            "ERROR 22003 (numeric_value_out_of_range) value \"3000000000\" is out of range for type integer",
        ),
        (
            "id=like.1%",
            "ERROR P0001 (raise_exception) operator like requires a text-compatible column type, got integer",
        ),
        ("id=imatch.1", "operator imatch requires a text-compatible column type, got integer"),
        ("m=ilike.s%", "operator ilike requires a text-compatible column type, got shop.mood"),
        ("id=is.true", "is true filter requires a boolean column, got integer"),
        ("doc=eq.{}", "ERROR 42883 (undefined_function) operator does not exist: json = json"),
        ("m=eq.happy", "invalid input value for enum mood: \"happy\""),
        ("e=eq.3", "ERROR 23514 (check_violation) value for domain shop.even violates check constraint \"even_check\""),
        (
            "body=match.(",
            "invalid regular expression for match filter: invalid regular expression: parentheses () not balanced",
        ),
        ("body=imatch.(a)\\1", "back-references are not supported"),
        ("body=match.\"(((a{1,100}){1,100}){1,100}){1,100}\"", "ERROR"),
        ("body=like.a\\", "LIKE pattern must not end with escape character"),
        ("body=ilike.a\\", "LIKE pattern must not end with escape character"),
    ] {
        let refused = compile(&tenants, "t", filter).await.err().context(filter)?;
        assert!(refused.contains(words), "{filter}: {refused}");
    }
    let long = format!("body=match.{}", "a".repeat(1025));
    assert!(compile(&tenants, "t", &long).await.is_err_and(|why| why.contains("longer than 1024 bytes")));
    for filter in ["ok=is.true", "id=is.null", "body=match.^a+(b|c)*$", "doc=is.null", "m=in.(sad,ok)", "e=eq.4", ""] {
        assert!(compile(&tenants, "t", filter).await.is_ok(), "{filter}");
    }
    Ok(())
}

#[tokio::test]
async fn absent_and_unchanged_columns_fulfil_nothing_and_another_type_fails() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants
        .run("create table shop.t (id int primary key, body text); grant select on shop.t to {authenticated}")
        .await?;
    let mut answers = Answers::default();
    let cell = |value, type_oid| Image(vec![Cell { name: "body".into(), type_oid, value }]);
    for filter in ["body=is.null", "body=not.eq.x", "body=isdistinct.x", "body=not.is.null", "body=neq.x"] {
        let compiled = compile(&tenants, "t", filter).await.map_err(anyhow::Error::msg)?;
        for image in [image(&[("id", Some("1"))]), cell(Value::Unchanged, 25)] {
            assert_eq!(compiled[0].truth(&image, &mut answers), Truth::False, "{filter}");
        }
    }
    let compiled = compile(&tenants, "t", "body=not.eq.x").await.map_err(anyhow::Error::msg)?;
    assert_eq!(
        compiled[0].truth(&cell(Value::Text("5".into()), 23), &mut answers),
        Truth::Failed,
        "it was an int then"
    );
    Ok(())
}

/// R-RLS-6: whoever raises or is late fails alone, and after two time-outs isn't asked.
#[tokio::test]
async fn r_rls_6_a_condition_that_can_t_be_decided_concerns_nobody_else() -> Result<()> {
    let tenants = Tenants::start().await?;
    // An operator of the tenant's own, as bad as can be; not when a value is compared with itself, as at a join.
    tenants
        .run(
            "create type shop.odd as (n int);
             create function shop.odd_lt(a shop.odd, b shop.odd) returns bool language plpgsql as $$begin
                 if a.n = b.n then return false; end if;
                 if b.n = 13 then raise exception sqlstate '57P01' using message = 'unlucky'; end if;
                 if b.n = 99 then perform pg_sleep(60); end if;
                 if b.n = 7 then
                     perform set_config('role', 'none', false);
                     perform set_config('search_path', 'nowhere', false);
                 end if;
                 return a.n < b.n; end$$;
             create operator shop.< (leftarg = shop.odd, rightarg = shop.odd, function = shop.odd_lt);
             create table shop.t (id int primary key, o shop.odd, body text);
             grant select on shop.t to {authenticated}",
        )
        .await?;
    let filters = ["o=lt.(5)", "o=lt.(7)", "o=lt.(13)", "o=lt.(99)", "body=ilike.A%"];
    let mut all = Vec::new();
    for filter in filters {
        all.extend(compile(&tenants, "t", filter).await.map_err(anyhow::Error::msg)?);
    }
    let row = image(&[("id", Some("1")), ("o", Some("(1)")), ("body", Some("abc"))]);
    let judge = async || {
        let mut answers = Answers::default();
        for condition in &all {
            assert_eq!(condition.truth(&row, &mut answers), Truth::Open);
        }
        let started = std::time::Instant::now();
        tenants.pool.decide(tenants.shop_tenant(), &mut answers).await?;
        let truths: Vec<_> = all.iter().map(|condition| condition.truth(&row, &mut answers)).collect();
        anyhow::Ok((truths, started.elapsed()))
    };
    let expected = [Truth::True, Truth::True, Truth::Failed, Truth::Failed, Truth::True];
    assert_eq!(judge().await?.0, expected);
    // Once it is quick, a probe finds out.
    tenants.run("alter function shop.odd_lt rename to odd_lt_bad").await?;
    let calm = "create function shop.odd_lt(a shop.odd, b shop.odd) returns bool language sql as 'select a.n < b.n';
        drop operator shop.< (shop.odd, shop.odd);
        create operator shop.< (leftarg = shop.odd, rightarg = shop.odd, function = shop.odd_lt)";
    tenants.run(calm).await?;
    aura_testkit::eventually(std::time::Duration::from_secs(10), || async {
        judge().await.is_ok_and(|(truths, _)| truths == [Truth::True; 5])
    })
    .await?;
    tenants
        .run(
            "drop operator shop.< (shop.odd, shop.odd);
             create operator shop.< (leftarg = shop.odd, rightarg = shop.odd, function = shop.odd_lt_bad)",
        )
        .await?;
    assert_eq!(judge().await?.0, expected);
    let (truths, took) = judge().await?;
    assert_eq!(truths, expected);
    assert!(took < std::time::Duration::from_millis(900), "nobody waits a second time for the late one: {took:?}");
    let left = "select count(*) from pg_stat_activity where usename like '%visibility' and state <> 'idle'";
    aura_testkit::eventually(std::time::Duration::from_secs(10), || async {
        tenants.superuser.query_one(left, &[]).await.is_ok_and(|row| row.get::<_, i64>(0) == 0)
    })
    .await?;
    Ok(())
}

/// R-RLS-9: an operator of the tenant's runs as the project's visibility login at most, can't write, and leaves nothing.
#[tokio::test]
async fn r_rls_9_an_operator_gains_nothing_and_leaves_nothing_behind() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants
        .run(
            "create type shop.spy as (n int); create table bank.vault (secret text); create table shop.log (t text);
             grant all on shop.log to {authenticated};
             create function shop.spy_lt(a shop.spy, b shop.spy) returns bool language plpgsql as $$
             declare before text := current_setting('shop.left', true); begin
                 reset role;
                 perform set_config('shop.left', 'behind', false), set_config('search_path', 'shop', false);
                 create temp table if not exists left_over (i int);
                 return false;
             exception when read_only_sql_transaction or insufficient_privilege then
                 if b.n = 1 then return session_user ~ '^p_.*_visibility$'; end if;
                 if b.n = 2 then return coalesce(before, '') = ''; end if;
                 if b.n = 3 then
                     begin reset role; perform count(*) from bank.vault; return false;
                     exception when insufficient_privilege then return true; end;
                 end if;
                 begin reset role; insert into shop.log values ('x'); return false;
                 exception when read_only_sql_transaction or insufficient_privilege then return true; end;
             end$$;
             create operator shop.< (leftarg = shop.spy, rightarg = shop.spy, function = shop.spy_lt);
             create table shop.t (id int primary key, s shop.spy); grant select on shop.t to {authenticated}",
        )
        .await?;
    let mut all = Vec::new();
    for filter in ["s=lt.(1)", "s=lt.(2)", "s=lt.(3)", "s=lt.(4)"] {
        all.extend(compile(&tenants, "t", filter).await.map_err(anyhow::Error::msg)?);
    }
    for n in 0..3 {
        let row = image(&[("s", Some(&format!("({n})")))]);
        let mut answers = Answers::default();
        let mut truths = || all.iter().map(|condition| condition.truth(&row, &mut answers)).collect::<Vec<_>>();
        assert_eq!(truths(), [Truth::Open; 4]);
        tenants.pool.decide(tenants.shop_tenant(), &mut answers).await?;
        let truths: Vec<_> = all.iter().map(|condition| condition.truth(&row, &mut answers)).collect();
        assert_eq!(truths, [Truth::True; 4], "not us, nothing left of the last time, no other tenant, no write");
    }
    Ok(())
}

/// What conditions of a batch may take is bounded, however many types and operators there are.
#[tokio::test]
async fn r_rls_6_slow_conditions_of_many_types_take_no_more_than_their_batch_has() -> Result<()> {
    const TYPES: usize = 16;
    let tenants = Tenants::start().await?;
    tenants
        .run("create table shop.t (id int primary key, fine text); grant select on shop.t to {authenticated}")
        .await?;
    let mut cells = vec![("id".to_owned(), "1"), ("fine".to_owned(), "abc")];
    let mut all = Vec::new();
    for n in 0..TYPES {
        let sql = "create type shop.odd# as (n int);
             create function shop.lt#(a shop.odd#, b shop.odd#) returns bool language sql
                 as 'select (a.n = b.n or pg_sleep(0.9) is not null) and a.n < b.n';
             create operator shop.< (leftarg = shop.odd#, rightarg = shop.odd#, function = shop.lt#);
             alter table shop.t add o# shop.odd#; grant select on shop.t to {authenticated}";
        tenants.run(&sql.replace('#', &n.to_string())).await?;
        cells.push((format!("o{n}"), "(1)"));
    }
    for n in 0..TYPES {
        all.extend(compile(&tenants, "t", &format!("o{n}=lt.(5)")).await.map_err(anyhow::Error::msg)?);
    }
    let cells: Vec<_> = cells.iter().map(|(name, value)| (name.as_str(), Some(*value))).collect();
    let row = image(&cells);
    let mut answers = Answers::default();
    all.iter().for_each(|condition| assert_eq!(condition.truth(&row, &mut answers), Truth::Open));
    let started = std::time::Instant::now();
    tenants.pool.decide(tenants.shop_tenant(), &mut answers).await?;
    let took = started.elapsed();
    assert!(took < std::time::Duration::from_secs(9), "6 s, and a last statement: {took:?}");
    let truths: Vec<_> = all.iter().map(|condition| condition.truth(&row, &mut answers)).collect();
    let count = |truth| truths.iter().filter(|it| **it == truth).count();
    assert_eq!(count(Truth::True) + count(Truth::Failed), TYPES, "all are settled: {truths:?}");
    assert!(count(Truth::True) > 2 && count(Truth::Failed) > 2, "{truths:?}");
    Ok(())
}

/// The names of what is asked follow the catalogue.
#[tokio::test]
async fn r_rls_10_a_renamed_type_is_asked_about_by_its_new_name() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants
        .run(
            "create type shop.mood as enum ('sad', 'ok'); create table shop.t (id int primary key, m shop.mood);
             grant select on shop.t to {authenticated}",
        )
        .await?;
    let before = compile(&tenants, "t", "m=gt.sad").await.map_err(anyhow::Error::msg)?;
    tenants.run("alter type shop.mood rename to temper").await?;
    let after = compile(&tenants, "t", "m=lt.ok").await.map_err(anyhow::Error::msg)?;
    let row = image(&[("m", Some("ok"))]);
    let mut answers = Answers::default();
    assert_eq!((before[0].truth(&row, &mut answers), after[0].truth(&row, &mut answers)), (Truth::Open, Truth::Open));
    tenants.pool.decide(tenants.shop_tenant(), &mut answers).await?;
    assert_eq!((before[0].truth(&row, &mut answers), after[0].truth(&row, &mut answers)), (Truth::True, Truth::False));
    // A label that is gone can't be compared with.
    tenants.run("alter type shop.temper rename value 'sad' to 'blue'").await?;
    let mut answers = Answers::default();
    assert_eq!(before[0].truth(&row, &mut answers), Truth::Open);
    tenants.pool.decide(tenants.shop_tenant(), &mut answers).await?;
    assert_eq!(before[0].truth(&row, &mut answers), Truth::Failed);
    Ok(())
}
