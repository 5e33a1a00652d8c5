//! What tenant code leaves behind in a session, or makes of a connection (R-RLS-9): nothing of it reaches the next identity
//! of the batch, the next check, another project, or our memory.

use anyhow::Result;
use aura_domain::Claims;
use aura_pgsource::{Identity, IdentityErrorKind, SqlState};
use serde_json::json;

use crate::{
    attacks::{attackable, attacker, named, store},
    tenant::{ALICE, BOB, Tenants, all_seen, user},
    visibility::note,
};

/// Each leaves something, and answers true.
const LEFT: &[&str] = &[
    "select set_config('request.jwt.claims', '{\"sub\":\"a11ce000-0000-4000-8000-000000000001\"}', false) is not null",
    "select set_config('request.jwt.claim.sub', 'a11ce000-0000-4000-8000-000000000001', false) is not null",
    "select set_config('request.jwt.claim', '{\"sub\":\"a11ce000-0000-4000-8000-000000000001\"}', false) is not null",
    "select set_config('request.jwt.claims', '{\"sub\":\"a11ce000-0000-4000-8000-000000000001\"}', true) is not null",
    "select set_config('request.jwt.claim', '{\"sub\":\"a11ce000-0000-4000-8000-000000000001\"}', true) is not null",
    "select set_config('role', 'none', false) is not null",
    "select set_config('statement_timeout', '0', false) is not null",
    "select set_config('row_security', 'off', false) is not null",
    "select set_config('search_path', 'shop', false) is not null",
    "select set_config('datestyle', 'SQL, DMY', false) is not null",
    "select set_config('timezone', 'Asia/Tokyo', false) is not null",
    "select set_config('intervalstyle', 'iso_8601', false) is not null",
    "select set_config('bytea_output', 'escape', false) is not null",
    "select set_config('extra_float_digits', '-15', false) is not null",
    "select set_config('standard_conforming_strings', 'off', false) is not null",
    "select set_config('array_nulls', 'off', false) is not null",
    "select set_config('default_transaction_isolation', 'serializable', false) is not null",
    "select set_config('default_transaction_read_only', 'off', false) is not null",
    "select set_config('application_name', 'aura-cdc:mine', false) is not null",
    "select set_config('plan_cache_mode', 'force_generic_plan', false) is not null",
    "select set_config('client_min_messages', 'debug5', false) is not null",
    "select set_config('enable_seqscan', 'off', false) is not null",
    "select set_config('idle_in_transaction_session_timeout', '1', false) is not null",
    "select set_config('shop.mark', 'left', false) is not null",
    "set session role none; select true",
    "prepare s0 as select true; select true",
    "prepare s1 as select true; select true",
    "declare left_open cursor with hold for select 1; select true",
    "listen aura_left; select true",
    "unlisten *; select true",
    "select pg_advisory_lock(42)::text is not null",
    "select pg_advisory_lock_shared(43)::text is not null",
    "select pg_advisory_xact_lock(44)::text is not null",
    "select count(pg_notify('aura_left', repeat('x', 7000))) > 0 from generate_series(1, 2000)",
    "select setseed(0.5)::text is not null",
    "select pg_export_snapshot() is not null",
    "select lo_from_bytea(0, 'x') > 0",
    "deallocate all; select true",
    "reset all; select true",
    "set constraints all deferred; select true",
];

/// Whether the session in which a policy is judged is as fresh: nothing but our own settings, and in the next check no
/// statement, cursor, channel, lock or temporary schema either. Within a batch those last to its end: they are the tenant's
/// own, and hold nothing of ours. It raises nothing: an error would be forgiven by a second, cleaner try.
const FRESH: &str = "create function shop.fresh(next_check bool) returns bool language plpgsql as $$
    declare found text; begin
        select string_agg(name || '=' || setting, ', ') into found from pg_catalog.pg_settings
            where source = 'session' and name not in ('role', 'search_path', 'row_security', 'statement_timeout', 'jit',
                'transaction_isolation', 'transaction_read_only', 'transaction_deferrable');
        if found is not null then return false; end if;
        if coalesce(current_setting('shop.mark', true), '') <> '' then return false; end if;
        if coalesce(current_setting('request.jwt.claim', true), '') <> '' then return false; end if;
        if current_setting('statement_timeout') not in ('500ms', '2s') then return false; end if;
        if current_setting('row_security') <> 'on' then return false; end if;
        if current_setting('search_path') <> '' then return false; end if;
        if current_setting('transaction_read_only') <> 'on' then return false; end if;
        if session_user !~ '_visibility$' or current_user !~ '_authenticated$' then return false; end if;
        if not next_check then return true; end if;
        if exists (select from pg_catalog.pg_prepared_statements where name ~ '^s[01]$') then return false; end if;
        if exists (select from pg_catalog.pg_cursors where name = 'left_open') then return false; end if;
        if exists (select from pg_catalog.pg_listening_channels()) then return false; end if;
        if exists (select from pg_catalog.pg_locks where locktype = 'advisory') then return false; end if;
        if pg_catalog.pg_my_temp_schema() <> 0 then return false; end if;
        return true; end $$;
    alter policy own on shop.notes using (owner = auth.uid()
        and case when auth.jwt() ->> 'how' is null then shop.fresh(auth.jwt() ? 'next') else shop.attack(auth.jwt() ->> 'how') end)";

/// Bob in a check of his own.
fn next() -> Identity {
    let claims = json!({"sub": BOB, "role": "authenticated", "next": true});
    Identity { role: "authenticated".to_owned(), claims: Claims::from_payload(&claims).expect("an object") }
}

#[tokio::test]
async fn r_rls_9_nothing_is_left_in_the_session_for_the_next_identity_or_check() -> Result<()> {
    let mut tenants = Tenants::start().await?;
    tenants.one_connection();
    attackable(&tenants).await?;
    tenants.run(FRESH).await?;
    store(&tenants, &named(LEFT)).await?;
    let images = [note("1", Some(ALICE)), note("2", Some(BOB))];
    let mut left = Vec::new();
    for how in LEFT {
        // The same batch before and behind, then the same session; the first fails, so that each is asked by himself.
        let batch = [user(BOB), attacker(how), user(BOB), user("not a uuid"), attacker(how), user(BOB)];
        let alone = [next()];
        let before = tenants.sessions().await?;
        for who in [&batch[..3], &alone, &batch, &alone] {
            let seen = all_seen(&tenants.check("notes", &images, who).await?);
            let bob = |who: &Identity| *who == user(BOB) || *who == next();
            let ok = who.iter().zip(&seen).all(|(who, seen)| !bob(who) || seen == "01");
            if !ok {
                left.push((how, seen));
            }
        }
        let locks = "select count(*) from pg_locks where locktype = 'advisory'";
        assert_eq!(tenants.superuser.query_one(locks, &[]).await?.get::<_, i64>(0), 0, "{how}");
        // That one may end its connection between two round trips.
        let same = how.contains("idle_in_transaction") || before.is_empty() || tenants.sessions().await? == before;
        assert!(same, "{how}: another connection was opened");
    }
    assert!(left.is_empty(), "{left:#?}");
    let objects = "select count(*) from pg_largeobject_metadata";
    assert_eq!(tenants.superuser.query_one(objects, &[]).await?.get::<_, i64>(0), 0);
    let queue: f64 = tenants.superuser.query_one("select pg_notification_queue_usage()", &[]).await?.get(0);
    assert!(queue == 0.0, "notifications were rolled back: {queue}");
    Ok(())
}

/// Answers that look like the end of the connection, of the server or of the transaction, and other bad manners.
#[tokio::test]
async fn r_rls_6_forged_errors_and_endless_code_concern_their_identity_alone() -> Result<()> {
    let tenants = Tenants::start().await?;
    attackable(&tenants).await?;
    tenants
        .run("create function shop.deep(n int) returns bool language plpgsql as 'begin return shop.deep(n + 1); end'")
        .await?;
    let codes = [
        "08000", "08006", "08P01", "57P01", "57P02", "57P03", "40001", "40P01", "25P02", "25P01", "XX000", "XX002",
        "53300", "53200", "58000", "0A000", "28000", "3D000", "55P03", "26000", "34000", "P0001",
    ];
    let mut attacks: Vec<_> = codes
        .iter()
        .map(|code| ((*code).to_owned(), format!("do $x$ begin raise sqlstate '{code}'; end $x$; select true")))
        .collect();
    for sql in
        ["select shop.deep(1)", "select 1 / 0 = 1", "select set_config('client_encoding', 'LATIN1', false) = 'é'"]
    {
        attacks.push((sql.to_owned(), sql.to_owned()));
    }
    store(&tenants, &attacks).await?;
    let images = [note("1", Some(ALICE)), note("2", Some(BOB))];
    for (how, _) in &attacks {
        let outcome = tenants.check("notes", &images, &[user(BOB), attacker(how), user(BOB)]).await?;
        let seen = all_seen(&outcome);
        assert!(seen[0] == "01" && seen[2] == "01" && !seen[1].starts_with('1'), "{how}: {seen:?}");
        if codes.contains(&how.as_str()) {
            let kind = IdentityErrorKind::Policy(SqlState::from_code(how));
            assert_eq!(seen[1], format!("{kind:?}"), "an error, never an outage");
        }
    }
    Ok(())
}

/// On a database where others may make schemas, one of them may have made ours before us: whatever stands under the judge's
/// name is code of somebody else, and would say who sees what, as every tenant.
#[tokio::test]
async fn r_rls_9_a_judge_that_somebody_else_made_is_not_asked() -> Result<()> {
    let tenants = Tenants::start().await?;
    attackable(&tenants).await?;
    tenants
        .superuser
        .batch_execute(
            "drop schema aura_source cascade; create role mallory; grant create on database postgres to mallory; set role mallory;
             create schema aura_source; grant usage on schema aura_source to public;
             create function aura_source.judge(query text, images anyarray, claims text[], subjects text[], role_name text,
                word text, time_limit text) returns table (who int8, seen int8[]) language sql as
                'select n, array[1, 2]::int8[] from generate_series(1, cardinality(claims)) n';
             reset role",
        )
        .await?;
    tenants.admin.bootstrap().await?;
    let images = [note("1", Some(ALICE)), note("2", Some(BOB))];
    let who = [user(ALICE), user(BOB), attacker("none")];
    assert_eq!(all_seen(&tenants.check("notes", &images, &who).await?), ["10", "01", "10"]);
    Ok(())
}
