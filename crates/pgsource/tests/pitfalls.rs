//! What goes wrong with the text of policies unless one knows it (the pitfalls that docs/testing.md lists).

use anyhow::Result;
use aura_domain::Claims;
use aura_pgsource::Identity;

use crate::{
    tenant::{ALICE, BOB, Tenants, all_seen, identity, image, user},
    visibility::{NOTES, note},
};

/// The planner evaluates stable parts with whatever claims are set by then, and after a transaction a custom setting is ''
/// and no longer absent: `''::json` raises.
#[tokio::test]
async fn pitfall_3_planning_runs_the_policy_with_valid_claims_also_in_a_session_that_was_used() -> Result<()> {
    let mut tenants = Tenants::start().await?;
    tenants.one_connection();
    tenants.run(NOTES).await?;
    tenants
        .run(
            "create function shop.strict_sub() returns uuid language plpgsql stable as $$ begin
                return (current_setting('request.jwt.claims')::json ->> 'sub')::uuid; end $$;
             create index on shop.notes (owner);
             insert into shop.notes select n, gen_random_uuid(), 'x' from generate_series(1, 1000) n;
             analyze shop.notes",
        )
        .await?;
    let images = [note("1", Some(ALICE)), note("2", Some(BOB))];
    for policy in [
        "owner = (current_setting('request.jwt.claims')::json ->> 'sub')::uuid",
        "owner = shop.strict_sub()",
        "owner = (select shop.strict_sub())",
        "exists (select from shop.notes n where n.owner <> shop.strict_sub()) and owner = shop.strict_sub()",
    ] {
        tenants.run("alter policy own on shop.notes using (true); drop table if exists shop.n2").await?;
        tenants.run("create table shop.n2 (id int primary key, owner uuid, body text); alter table shop.n2 enable row level security").await?;
        tenants.run(&format!("create policy own on shop.n2 for select using ({policy})")).await?;
        for _ in 0..3 {
            let outcome = tenants.check("n2", &images, &[user(ALICE), user(BOB)]).await?;
            assert_eq!(all_seen(&outcome), ["10", "01"], "{policy}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn pitfall_4_what_only_a_rest_server_sets_has_a_harmless_value() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    let images = [note("1", Some(ALICE))];
    for policy in [
        "current_setting('request.headers')::json ->> 'x-forwarded-for' is null",
        "current_setting('request.cookies')::json ->> 'session' is null",
        "current_setting('request.method') = 'GET'",
        "current_setting('request.path') = ''",
        "current_setting('request.jwt.claim.role') = 'authenticated'",
        "current_setting('request.jwt.claim.sub')::uuid = owner",
        "current_setting('request.jwt.claims')::jsonb ->> 'role' = 'authenticated'",
    ] {
        tenants.run(&format!("alter policy own on shop.notes using ({policy})")).await?;
        assert_eq!(all_seen(&tenants.check("notes", &images, &[user(ALICE)]).await?), ["1"], "{policy}");
    }
    Ok(())
}

/// A policy is printed for the search_path that reads it, and its columns inside sub-selects by the table's bare name.
#[tokio::test]
async fn pitfall_5_names_mean_what_they_meant_when_the_policy_was_made() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants
        .run(
            "create table shop.t (id int, t int, \"Odd col\" int); alter table shop.t enable row level security;
             create table shop.now (id int); insert into shop.now values (1);
             create function shop.lower(text) returns text language sql as $$ select 'shop' $$;
             create function shop.same(a int, b int) returns bool language sql as 'select a = b';
             create operator shop.= (leftarg = int, rightarg = int, function = shop.same)",
        )
        .await?;
    let images = [
        image(&[("id", Some("1")), ("t", Some("1")), ("Odd col", Some("7"))]),
        image(&[("id", Some("2")), ("t", Some("2")), ("Odd col", Some("8"))]),
    ];
    for (path, policy) in [
        ("shop", "id in (select id from now)"),
        ("shop", "t = 1 and (t.t) = 1"),
        ("shop, pg_catalog", "lower('X') = 'shop' and id = 1"),
        ("pg_catalog, shop", "lower('X') = 'x' and id = 1"),
        ("shop, pg_catalog", "id = 1"),
        ("shop", "exists (select from now t where t.id = \"Odd col\" - 6)"),
        ("shop", "exists (select from now where now.id = t.\"Odd col\" - 6)"),
        ("shop", "(select count(*) from now x, now y where x.id = t.id and y.id = t.t) = 1"),
        ("shop", "((t.*)::text) like '(1,%'"),
    ] {
        let sql = format!(
            "set search_path = {path}; drop policy if exists p on shop.t; create policy p on shop.t using ({policy})"
        );
        tenants.run(&format!("{sql}; reset search_path")).await?;
        assert_eq!(all_seen(&tenants.check("t", &images, &[user(ALICE)]).await?), ["10"], "{path}: {policy}");
    }
    Ok(())
}

/// A value that was legal when it was written and isn't any more, one that no statement can divide by.
#[tokio::test]
async fn pitfall_9_a_row_that_raises_is_hidden_and_said_and_the_next_batch_is_judged() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants
        .run(
            "create domain shop.few as int; create table shop.t (id int, d shop.few);
             alter table shop.t enable row level security;
             alter domain shop.few add constraint few check (value < 10) not valid;
             create policy p on shop.t using (d > 0 and 10 / (d - 5) <> 100)",
        )
        .await?;
    let row = |d: &str| image(&[("id", Some("1")), ("d", Some(d))]);
    for bad in ["11", "5"] {
        let outcome = tenants.check("t", &[row("1"), row(bad)], &[user(ALICE), identity("service_role", "x")]).await?;
        let seen = all_seen(&outcome);
        // The good row of the same batch may be given up with it, but nobody stays without a word.
        assert!(seen[0] == "10" || seen[0].starts_with("Policy("), "{seen:?}");
        assert_ne!(seen[0], "11");
        assert_eq!(seen[1], "11", "whom no policy binds isn't concerned");
        assert_eq!(all_seen(&tenants.check("t", &[row("1")], &[user(ALICE)]).await?), ["1"]);
    }
    Ok(())
}

#[tokio::test]
async fn pitfall_10_values_reach_the_policy_as_they_are_in_the_row() -> Result<()> {
    let tenants = Tenants::start().await?;
    let cases = [
        ("jsonb", "null", "v = 'null'::jsonb and v is not null"),
        ("json", "null", "v::text = 'null' and v is not null"),
        ("jsonb[]", "{NULL,\"null\"}", "v[1] is null and v[2] = 'null'::jsonb"),
        ("float8", "NaN", "v = 'NaN'"),
        ("numeric", "-Infinity", "v < -1e30"),
        ("char(5)", "ab   ", "v = 'ab' and octet_length(v) = 5"),
        ("\"char\"", "x", "v = 'x'"),
        ("bytea", "\\x00ff5c", "v = '\\x00ff5c'"),
        ("int[]", "{{1,2},{3,NULL}}", "v[2][1] = 3 and array_ndims(v) = 2"),
        ("int[]", "[0:1]={7,8}", "v[0] = 7"),
        ("text", "a\\,\"b\"(c)\n{d}", "v = E'a\\\\,\"b\"(c)\\n{d}'"),
        ("text", "", "v = '' and v is not null"),
        ("bit(3)", "101", "v = b'101'"),
        ("timestamptz", "2024-02-29 01:02:03.456789+00", "v = '2024-02-29 03:02:03.456789+02'"),
        ("interval", "1 year 2 mons -3 days", "v = '1 year 2 months -3 days'"),
        ("text collate \"C\"", "B", "v < 'a'"),
        ("inet", "10.0.0.1/8", "v << '10.0.0.0/7'"),
    ];
    for (ty, value, policy) in cases {
        tenants
            .run(&format!(
                "drop table if exists shop.t; create table shop.t (gone int, id int, v {ty}); alter table shop.t drop column gone;
                 alter table shop.t enable row level security; create policy p on shop.t using ({policy})"
            ))
            .await?;
        let images = [image(&[("id", Some("1")), ("v", Some(value))]), image(&[("id", Some("2")), ("v", None)])];
        assert_eq!(all_seen(&tenants.check("t", &images, &[user(ALICE)]).await?), ["10"], "{ty}: {policy}");
    }
    Ok(())
}

#[tokio::test]
async fn pitfall_12_a_function_without_execute_raises_and_a_volatile_one_is_asked() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    tenants
        .run(
            "create function shop.mine() returns bool language sql volatile as 'select random() >= 0';
             revoke execute on function shop.mine() from public; grant execute on function shop.mine() to {anon};
             alter policy own on shop.notes using (shop.mine())",
        )
        .await?;
    let outcome = tenants.check("notes", &[note("1", Some(ALICE))], &[user(ALICE), identity("anon", "x")]).await?;
    assert_eq!(all_seen(&outcome), ["Policy(SqlState(E42501))", "1"]);
    Ok(())
}

#[tokio::test]
async fn pitfall_13_a_policy_sees_its_own_role_and_rows_of_others_as_that_role() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    tenants
        .run(
            "create table shop.members (owner uuid); alter table shop.members enable row level security;
             create policy own on shop.members using (owner = auth.uid());
             create table shop.hidden (owner uuid); revoke select on shop.hidden from {authenticated}",
        )
        .await?;
    tenants.run(&format!("insert into shop.members values ('{ALICE}'), ('{BOB}')")).await?;
    let images = [note("1", Some(ALICE)), note("2", Some(BOB))];
    for (policy, expected) in [
        ("current_user like 'p\\_%\\_authenticated' and session_user like 'p\\_%\\_visibility'", ["11", "11"]),
        ("owner in (select m.owner from shop.members m)", ["10", "01"]),
        ("(select count(*) from shop.members) = 1", ["11", "11"]),
        ("owner in (select h.owner from shop.hidden h)", ["Policy(SqlState(E42501))"; 2]),
        ("pg_has_role('aura_authenticated', 'USAGE') and not pg_has_role('aura_anon', 'USAGE')", ["11", "11"]),
    ] {
        tenants.run(&format!("alter policy own on shop.notes using ({policy})")).await?;
        let seen = all_seen(&tenants.check("notes", &images, &[user(ALICE), user(BOB)]).await?);
        assert_eq!(seen, expected, "{policy}");
    }
    Ok(())
}

/// Only what auth.uid() and its like are known to do is seen through, and that depends on each character of a literal and
/// on the type that is returned.
#[tokio::test]
async fn r_rls_5_auth_functions_that_look_like_known_ones_say_what_they_say() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    tenants
        .superuser
        .batch_execute(
            "create or replace function auth.uid() returns uuid language sql stable as $$
                 select coalesce(nullif(current_setting('request.jwt.claim.sub', true), ' '),
                    nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'sub')::uuid $$;
             drop function auth.role();
             create function auth.role() returns \"char\" language sql stable as $$
                 select coalesce(nullif(current_setting('request.jwt.claim.role', true), ''),
                    nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'role') $$",
        )
        .await?;
    let claims = Claims::from_payload(&serde_json::json!({"role": "authenticated"}))?;
    let nobody = Identity { role: "authenticated".to_owned(), claims };
    let images = [note("1", Some(ALICE))];
    let seen = all_seen(&tenants.check("notes", &images, &[user(ALICE), nobody]).await?);
    assert_eq!(seen, ["1", "Policy(SqlState(E22P02))"], "an empty text is no uuid");
    tenants.run("alter policy own on shop.notes using (auth.role()::text = 'a')").await?;
    assert_eq!(all_seen(&tenants.check("notes", &images, &[user(ALICE)]).await?), ["1"], "a \"char\" has one letter");
    Ok(())
}
