//! Row-level security on images (section V).

use std::time::Duration;

use anyhow::{Context, Result};
use aura_pgsource::JsonForm;
use aura_testkit::eventually;

use crate::tenant::{ALICE, BOB, Tenants, all_seen, identity, image, relation, seen, user};

pub(crate) const NOTES: &str = "create table shop.notes (id int primary key, owner uuid, body text);
    alter table shop.notes enable row level security;
    create policy own on shop.notes for select using (owner = auth.uid())";

pub(crate) fn note(id: &str, owner: Option<&str>) -> aura_domain::Image {
    image(&[("id", Some(id)), ("owner", owner), ("body", Some("text"))])
}

#[tokio::test]
async fn r_rls_1_each_image_is_judged_by_itself_whatever_the_table_holds_now() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    // The live row says the opposite of the image: it must not matter.
    tenants.run(&format!("insert into shop.notes values (1, '{BOB}', 'live')")).await?;
    let images = [note("1", Some(ALICE)), note("1", Some(BOB)), note("2", None)];
    let outcome = tenants.check("notes", &images, &[user(ALICE), user(BOB), identity("anon", ALICE)]).await?;
    assert_eq!(all_seen(&outcome), ["100", "010", "100"]);
    assert!(outcome.row_security && outcome.oid_matches);
    Ok(())
}

#[tokio::test]
async fn r_rls_2_verdicts_are_those_of_the_server() -> Result<()> {
    let tenants = Tenants::start().await?;
    let cases = [
        "",
        "create policy a on shop.t using (a > 1)",
        "create policy a on shop.t using (a > 1); create policy b on shop.t for select using (b = 'x')",
        "create policy a on shop.t using (true); create policy r on shop.t as restrictive using (a < 3)",
        "create policy r on shop.t as restrictive for select using (a < 3)",
        "create policy a on shop.t for insert with check (true)",
        "create policy a on shop.t for update using (true)",
        "create policy a on shop.t for all to aura_authenticated using (a is null or a = 2)",
        "create policy a on shop.t to {anon} using (true); create policy b on shop.t to {authenticated} using (b is null)",
        "create policy a on shop.t using (a = (select max(o.a) from shop.other o where o.b = t.b))",
        "create policy a on shop.t using (exists (select from shop.other o where o.a = t.a))",
        "create policy a on shop.t using (a in (select o.a from shop.other o) and null)",
        "create policy a on shop.t using ((t).a = 2 and shop.whole(t))",
        "create policy a on shop.t using (b = current_setting('request.headers')::json ->> 'x' or b ~ '.*x')",
        "create policy a on shop.t using (auth.role() = 'authenticated' and auth.jwt() ->> 'sub' = 'sub')",
    ];
    for case in cases {
        tenants.run("drop table if exists shop.t, shop.other cascade").await?;
        tenants
            .run(
                "create table shop.t (a int, gone text, b text); alter table shop.t drop column gone;
                 create table shop.other (a int, b text);
                 insert into shop.t values (1, 'x'), (2, null), (3, 'y'), (null, 'x'), (null, null);
                 insert into shop.other values (2, null), (3, 'y'), (2, 'y');
                 create or replace function shop.whole(r shop.t) returns bool language sql as 'select r.a is not null';
                 alter table shop.t enable row level security",
            )
            .await?;
        tenants.run(case).await?;
        let row = |a, b| image(&[("b", b), ("a", a)]);
        let (x, y) = (Some("x"), Some("y"));
        let images = [row(Some("1"), x), row(Some("2"), None), row(Some("3"), y), row(None, x), row(None, None)];
        for role in ["anon", "authenticated", "editor"] {
            let outcome = tenants.check("t", &images, &[identity(role, "sub")]).await?;
            assert_eq!(all_seen(&outcome), [live(&tenants, role).await?], "{role}: {case}");
        }
    }
    Ok(())
}

/// What the role sees of `shop.t` by the server's own row security.
async fn live(tenants: &Tenants, role: &str) -> Result<String> {
    let claims = format!(r#"{{"role":"{role}","sub":"sub"}}"#);
    let sql = format!(
        "begin; set local role \"p_{}_{role}\"; set local request.jwt.claims = '{claims}'; set local request.headers = '{{}}'",
        tenants.shop
    );
    tenants.superuser.batch_execute(&sql).await?;
    let rows = tenants.superuser.query("select a, b from shop.t", &[]).await?;
    tenants.superuser.batch_execute("rollback").await?;
    let found: Vec<(Option<i32>, Option<String>)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    let all = [(Some(1), Some("x")), (Some(2), None), (Some(3), Some("y")), (None, Some("x")), (None, None)];
    let has = |(a, b): &(Option<i32>, Option<&str>)| found.iter().any(|row| row.0 == *a && row.1.as_deref() == *b);
    Ok(all.iter().map(|row| if has(row) { '1' } else { '0' }).collect())
}

#[tokio::test]
async fn r_rls_2_bypass_and_ownership_are_the_server_s_to_decide() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    let images = [note("1", Some(BOB))];
    let who = [user(ALICE)];
    assert_eq!(all_seen(&tenants.check("notes", &images, &who).await?), ["0"]);
    let role = format!("\"p_{}_authenticated\"", tenants.shop);
    tenants.superuser.batch_execute(&format!("alter role {role} bypassrls")).await?;
    assert_eq!(all_seen(&tenants.check("notes", &images, &who).await?), ["1"]);
    let owner = format!("alter role {role} nobypassrls; alter table shop.notes owner to {role}");
    tenants.superuser.batch_execute(&owner).await?;
    assert_eq!(all_seen(&tenants.check("notes", &images, &who).await?), ["1"], "an owner");
    tenants.superuser.batch_execute("alter table shop.notes force row level security").await?;
    assert_eq!(all_seen(&tenants.check("notes", &images, &who).await?), ["0"], "FORCE");
    Ok(())
}

#[tokio::test]
async fn r_rls_3_privileges_of_schema_table_and_columns_count() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run("create table shop.t (id int primary key, open text, secret text)").await?;
    let images = [image(&[("id", Some("1")), ("open", Some("o")), ("secret", Some("s"))])];
    let who = [identity("anon", "x"), identity("service_role", "x")];
    for security in ["disable", "enable"] {
        tenants.run(&format!("alter table shop.t {security} row level security")).await?;
        tenants.run("drop policy if exists p on shop.t; create policy p on shop.t using (true)").await?;
        tenants.run("grant select on shop.t to {anon}; grant usage on schema shop to {anon}").await?;
        let outcome = tenants.check("t", &images, &who).await?;
        assert_eq!(all_seen(&outcome), ["1", "1"], "{security}");
        tenants.run("revoke select on shop.t from {anon}; grant select (id, open) on shop.t to {anon}").await?;
        let outcome = tenants.check("t", &images, &who).await?;
        let aura_pgsource::Verdict::Decided { access, visible } = &outcome.verdicts[0] else {
            anyhow::bail!("{outcome:?}")
        };
        assert_eq!(
            (access.readable.as_slice(), visible.as_slice()),
            ([true, true, false].as_slice(), [true].as_slice())
        );
        tenants.run("revoke usage on schema shop from {anon}").await?;
        assert_eq!(all_seen(&tenants.check("t", &images, &who).await?), ["0", "1"], "{security}, no usage");
        tenants.run("grant usage on schema shop to {anon}; revoke select (id, open) on shop.t from {anon}").await?;
        assert_eq!(all_seen(&tenants.check("t", &images, &who).await?), ["0", "1"], "{security}, no column");
        tenants.run("revoke select on shop.t from {service_role}").await?;
        assert_eq!(all_seen(&tenants.check("t", &images, &who).await?), ["0", "0"], "{security}, service role");
        tenants.run("grant select on shop.t to {service_role}").await?;
    }
    Ok(())
}

#[tokio::test]
async fn r_rls_4_what_can_t_be_judged_on_the_image_is_denied() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    let key_only = image(&[("id", Some("1"))]);
    let outcome = tenants.check("notes", &[key_only.clone(), note("1", Some(ALICE))], &[user(ALICE)]).await?;
    assert_eq!((all_seen(&outcome), outcome.unjudgeable), (vec!["01".to_owned()], 1));
    // "owner is null" would be true of a key-only image if its missing columns were taken for NULL.
    tenants.run("alter policy own on shop.notes using (owner is null)").await?;
    assert_eq!(all_seen(&tenants.check("notes", std::slice::from_ref(&key_only), &[user(ALICE)]).await?), ["0"]);
    tenants.run("alter policy own on shop.notes using (id = 1)").await?;
    assert_eq!(all_seen(&tenants.check("notes", std::slice::from_ref(&key_only), &[user(ALICE)]).await?), ["1"]);
    tenants.run("alter policy own on shop.notes using ((notes.*) is not null or true)").await?;
    assert_eq!(all_seen(&tenants.check("notes", &[key_only], &[user(ALICE)]).await?), ["0"], "whole row");
    for unjudgeable in ["ctid is not null", "tableoid > 0", "nextval('shop.counter') > 0"] {
        tenants.run("create sequence if not exists shop.counter; grant all on shop.counter to {authenticated}").await?;
        tenants.run(&format!("alter policy own on shop.notes using ({unjudgeable})")).await?;
        let outcome = tenants.check("notes", &[note("1", Some(ALICE))], &[user(ALICE)]).await?;
        assert_eq!(all_seen(&outcome), ["NotJudgeable"], "{unjudgeable}");
    }
    Ok(())
}

#[tokio::test]
async fn r_rls_5_identities_never_share_an_evaluation() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    // Evaluated once per statement; and what one leaves behind must not reach the next.
    tenants
        .run(
            "create function shop.mess() returns bool language plpgsql as $$ begin
                perform set_config('request.jwt.claims', '{\"sub\":\"a11ce000-0000-4000-8000-000000000001\"}', false);
                perform set_config('request.jwt.claim.sub', 'a11ce000-0000-4000-8000-000000000001', false);
                perform set_config('search_path', 'shop', false);
                perform set_config('row_security', 'off', false);
                perform set_config('datestyle', 'SQL, DMY', false);
                perform set_config('shop.mark', 'left', false);
                perform pg_advisory_lock(42);
                begin execute 'prepare s0 as select true'; exception when others then null; end;
                return true; end $$;
             alter policy own on shop.notes using (owner = (select auth.uid())
                and coalesce(current_setting('shop.mark', true), '') = '' and shop.mess())",
        )
        .await?;
    let images = [note("1", Some(ALICE)), note("2", Some(BOB))];
    for _ in 0..3 {
        let outcome = tenants.check("notes", &images, &[user(ALICE), user(BOB), user(ALICE)]).await?;
        assert_eq!(all_seen(&outcome), ["10", "01", "10"]);
    }
    let locks = "select count(*) from pg_locks where locktype = 'advisory'";
    assert_eq!(tenants.superuser.query_one(locks, &[]).await?.get::<_, i64>(0), 0);
    let used = "select count(*) from pg_stat_activity where application_name = 'aura-visibility'";
    assert_eq!(tenants.superuser.query_one(used, &[]).await?.get::<_, i64>(0), 1, "one connection, used again");
    Ok(())
}

#[tokio::test]
async fn r_rls_6_an_error_is_its_identity_s_alone() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    let images = [note("1", Some(ALICE))];
    let who = [user(ALICE), user("not a uuid"), user(BOB)];
    let outcome = tenants.check("notes", &images, &who).await?;
    assert_eq!(all_seen(&outcome), ["1", "Policy(SqlState(E22P02))", "0"]);
    // A policy may raise what looks like the connection's end, and may end it.
    tenants
        .run(
            "create function shop.trap(how text) returns bool language plpgsql as $$ begin
                if how = 'raise' then raise sqlstate '57P01'; end if;
                if how = 'die' then
                    execute 'reset role'; perform pg_terminate_backend(pg_backend_pid());
                end if;
                if how = 'sleep' then perform pg_sleep(60); end if;
                return true; end $$;
             alter policy own on shop.notes using (shop.trap(auth.jwt() ->> 'sub'))",
        )
        .await?;
    let who = [user("raise"), user("fine"), user("die"), user("good")];
    let outcome = tenants.check("notes", &images, &who).await?;
    assert_eq!(all_seen(&outcome), ["Policy(SqlState(E57P01))", "1", "ConnectionLost", "1"]);
    let mut who: Vec<_> = (0..100).map(|n| user(&format!("fine {n}"))).collect();
    who[50] = user("raise");
    let outcome = tenants.check("notes", &images, &who).await?;
    let fine = all_seen(&outcome).iter().filter(|seen| *seen == "1").count();
    assert_eq!(fine, 99);
    Ok(())
}

#[tokio::test]
async fn r_rls_8_only_known_role_words_are_judged() -> Result<()> {
    let tenants = Tenants::start().await?;
    for security in ["disable", "enable"] {
        tenants
            .run(&format!(
                "drop table if exists shop.notes; {NOTES}; alter table shop.notes {security} row level security"
            ))
            .await?;
        let who =
            [identity("postgres", ALICE), identity("aura_owner", ALICE), identity("visibility", ALICE), user(ALICE)];
        let outcome = tenants.check("notes", &[note("1", Some(ALICE))], &who).await?;
        assert_eq!(all_seen(&outcome), ["UnknownRole", "UnknownRole", "UnknownRole", "1"], "{security}");
    }
    Ok(())
}

#[tokio::test]
async fn r_rls_9_tenant_code_never_becomes_us_or_another_tenant() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    let bank_role = format!("p_{}_authenticated", tenants.bank);
    let service = format!("p_{}_service_role", tenants.shop);
    tenants
        .run(&format!(
            "create table bank.accounts (id int, owner text); insert into bank.accounts values (1, 'eve');
             analyze bank.accounts;
             create function shop.steal(how text) returns bool language plpgsql as $$
             declare n int; begin
                if how = 'reset' then execute 'reset role'; end if;
                if how = 'bank' then execute 'set role \"{bank_role}\"'; end if;
                if how = 'service' then execute 'set role \"{service}\"'; return true; end if;
                if how = 'owner' then execute 'set role aura_owner'; end if;
                if how = 'session' then execute 'set session authorization aura_owner'; end if;
                if how = 'later' then execute 'reset role'; execute 'reset session authorization'; end if;
                if how = 'statistics' then
                    execute 'select count(*) from pg_catalog.pg_stats where schemaname = ''bank''' into n;
                    return n > 0;
                end if;
                if how = 'write' then execute 'insert into shop.notes values (9)'; return true; end if;
                if how = 'read write' then perform set_config('transaction_read_only', 'off', true);
                    execute 'insert into shop.notes values (9)'; return true; end if;
                if how = 'temp' then execute 'create temp table x (a int)'; return true; end if;
                execute 'select count(*) from bank.accounts' into n;
                return true; end $$;
             alter policy own on shop.notes using (shop.steal(auth.jwt() ->> 'sub'))"
        ))
        .await?;
    for how in
        ["reset", "bank", "service", "owner", "session", "later", "statistics", "write", "read write", "temp", "plain"]
    {
        let outcome = tenants.check("notes", &[note("1", Some(ALICE))], &[user(how)]).await?;
        assert_ne!(seen(&outcome.verdicts[0]), "1", "{how}");
    }
    // The attack works where it should: with the privilege, the same function says true.
    tenants
        .run("grant usage on schema bank to {authenticated}; grant select on bank.accounts to {authenticated}")
        .await?;
    assert_eq!(all_seen(&tenants.check("notes", &[note("1", Some(ALICE))], &[user("plain")]).await?), ["1"]);
    Ok(())
}

#[tokio::test]
async fn r_rls_9_types_of_the_tenant_are_cast_under_the_tenant_s_login() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants
        .run(
            "create function shop.spy(value text) returns bool language plpgsql as $$ begin
                if session_user !~ '^p_.*_visibility$' then raise 'cast by %', session_user; end if;
                return true; end $$;
             create domain shop.spied as text check (shop.spy(value));
             create table shop.t (id int, d shop.spied); alter table shop.t enable row level security;
             create policy p on shop.t using (d = 'x')",
        )
        .await?;
    let outcome = tenants.check("t", &[image(&[("id", Some("1")), ("d", Some("x"))])], &[user(ALICE)]).await?;
    assert_eq!(all_seen(&outcome), ["1"]);
    Ok(())
}

#[tokio::test]
async fn r_rls_9_connections_stay_within_their_limit() -> Result<()> {
    let mut tenants = Tenants::start().await?;
    tenants.pool =
        aura_pgsource::VisibilityPool::new(tenants.url.clone(), aura_pgsource::Sockets::new(), "test".to_owned(), 2);
    tenants.run(NOTES).await?;
    let (images, who) = ([note("1", Some(ALICE))], [user(ALICE)]);
    let checks = (0..8).map(|_| tenants.check("notes", &images, &who));
    for outcome in futures_util::future::join_all(checks).await {
        assert_eq!(all_seen(&outcome?), ["1"]);
    }
    let count = "select count(*) from pg_stat_activity where application_name = 'aura-visibility'";
    assert!(tenants.superuser.query_one(count, &[]).await?.get::<_, i64>(0) <= 2);
    Ok(())
}

#[tokio::test]
async fn r_reg_5_any_name_and_any_value_can_be_judged() -> Result<()> {
    let tenants = Tenants::start().await?;
    for table in ["we,ird. t'b*l", "quo\"te", "back\\slash", "select", "_aura_o", "🦀", &"x".repeat(63)] {
        let quoted = relation("shop", table)?.quoted();
        tenants
            .run(&format!(
                "create table {quoted} (\"a\"\"b\\,\" text, _aura_n int[], j jsonb, c char(5), g int generated always as (1) stored);
                 alter table {quoted} enable row level security;
                 create policy p on {quoted} using (\"a\"\"b\\,\" = E'\"(),\\\\\\'' and _aura_n = '{{1,NULL}}' and j ->> 'k' = 'v'
                    and c = 'ab' and exists (select from shop.helper h where h.a = _aura_n[1]))"
            )
            .replace("exists (select from shop.helper h where h.a = _aura_n[1])", "g = 1"))
            .await?;
        let good = [
            ("a\"b\\,", Some("\"(),\\'")),
            ("_aura_n", Some("{1,NULL}")),
            ("j", Some(r#"{"k": "v"}"#)),
            ("c", Some("ab   ")),
            ("g", Some("1")),
        ];
        let mut bad = good;
        bad[0].1 = Some("\"(),\\");
        let outcome = tenants.check(table, &[image(&good), image(&bad)], &[user(ALICE)]).await?;
        assert_eq!(all_seen(&outcome), ["10"], "{table}");
    }
    Ok(())
}

#[tokio::test]
async fn a_lost_connection_is_not_a_verdict() -> Result<()> {
    let mut tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    let oid = tenants.oid(&relation("shop", "notes")?).await?;
    let (images, who) = ([note("1", Some(ALICE))], [user(ALICE)]);
    tenants.check_oid("notes", oid, &[], &images, &who).await?;
    let kill = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name in ('aura-visibility', 'aura-catalogue')";
    tenants.superuser.query(kill, &[]).await?;
    let outcome = tenants.check_oid("notes", oid, &[], &images, &who).await?;
    assert_eq!(all_seen(&outcome), ["1"], "idle connections that died are replaced");
    let login = format!("alter role \"p_{}_visibility\" nologin", tenants.shop);
    tenants.superuser.batch_execute(&login).await?;
    tenants.superuser.query(kill, &[]).await?;
    eventually(Duration::from_secs(5), || async {
        let outcome = tenants.check_oid("notes", oid, &[], &images, &who).await;
        outcome.is_ok_and(|outcome| all_seen(&outcome) == ["LoginFailed"])
    })
    .await?;
    tenants.postgres.stop(aura_testkit::Shutdown::Immediate).await?;
    let outcome = tenants.check_oid("notes", oid, &[], &images, &who).await;
    assert!(outcome.is_err_and(|error| error.is_connection_error()), "an outage is the source's");
    Ok(())
}

#[tokio::test]
async fn describe_tells_a_join_what_its_role_may_read() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run("create domain shop.d as int8; create type shop.mood as enum ('ok');").await?;
    tenants.run("create table shop.t (id int primary key, d shop.d[], m shop.mood, s text)").await?;
    tenants.run("revoke select on shop.t from {anon}; grant select (id) on shop.t to {anon}").await?;
    let at = relation("shop", "t")?;
    let (table, access) = tenants.pool.describe(tenants.shop, &at, "anon", &[]).await?.context("a table")?;
    let columns: Vec<_> = table.columns.iter().map(|c| (&*c.name, &*c.ty.name, c.primary_key)).collect();
    assert_eq!(columns, [("id", "int4", true), ("d", "_d", false), ("m", "mood", false), ("s", "text", false)]);
    assert_eq!(access.readable, [true, false, false, false]);
    let (_, access) = tenants.pool.describe(tenants.shop, &at, "postgres", &[]).await?.context("a table")?;
    assert!(!access.any());
    assert!(tenants.pool.describe(tenants.shop, &relation("shop", "none")?, "anon", &[]).await?.is_none());
    Ok(())
}

/// What a type consists of is no part of a table's own catalogue rows.
#[tokio::test]
async fn r_dec_1_types_follow_ddl() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants
        .run("create type shop.pair as (a int, b text); create table shop.t (id int primary key, p shop.pair[])")
        .await?;
    let attributes = async || {
        let at = relation("shop", "t")?;
        let (table, _) = tenants.pool.describe(tenants.shop, &at, "anon", &[]).await?.context("a table")?;
        let JsonForm::Array { element, .. } = &table.columns[1].ty.form else { anyhow::bail!("no array") };
        let JsonForm::Composite { attributes } = &element.form else { anyhow::bail!("not composite") };
        Ok(attributes.iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>().join(","))
    };
    assert_eq!(attributes().await?, "a,b");
    tenants.run("alter type shop.pair rename attribute a to first; alter type shop.pair add attribute c int").await?;
    eventually(Duration::from_secs(10), || async { attributes().await.is_ok_and(|names| names == "first,b,c") }).await
}

/// G4: pg_get_expr waits for a table's lock, on the connection that all projects share.
#[tokio::test]
async fn g4_a_locked_table_holds_up_nobody_else() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    tenants.run("create table shop.open (id int)").await?;
    tenants.superuser.batch_execute("begin; lock table shop.notes in access exclusive mode").await?;
    let (locked, open) = (relation("shop", "notes")?, relation("shop", "open")?);
    let began = std::time::Instant::now();
    let (locked, open) = tokio::join!(
        tenants.pool.describe(tenants.shop, &locked, "anon", &[]),
        tenants.pool.describe(tenants.shop, &open, "anon", &[]),
    );
    assert!(locked.is_err(), "what can't be read is no answer: {locked:?}");
    assert!(open?.is_some() && began.elapsed() < Duration::from_millis(1500), "{:?}", began.elapsed());
    tenants.superuser.batch_execute("rollback").await?;
    assert!(tenants.pool.describe(tenants.shop, &relation("shop", "notes")?, "anon", &[]).await?.is_some());
    Ok(())
}

#[tokio::test]
async fn r_rls_2_a_setting_that_is_asked_for_with_null_is_null() -> Result<()> {
    let tenants = Tenants::start().await?;
    let setup = "create table shop.t (owner text, strict bool);
        alter table shop.t enable row level security;
        create policy p on shop.t using (
            owner = (current_setting('request.jwt.claims', strict)::json ->> 'sub'))";
    tenants.run(setup).await?;
    let row = |strict| image(&[("owner", Some("me")), ("strict", strict)]);
    let outcome = tenants.check("t", &[row(None), row(Some("t")), row(Some("f"))], &[identity("anon", "me")]).await?;
    assert_eq!(all_seen(&outcome), ["011"]);
    Ok(())
}
