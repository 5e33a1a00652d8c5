//! What code of a tenant tries to gain (R-RLS-9): from policy functions, domain CHECKs, casts and operators.
//!
//! Each attack is one SQL text that answers whether it gained what it was after. It runs where a policy of the shop leads,
//! before an honest identity of the same batch; the row that only success shows must stay hidden.

use std::time::Duration;

use anyhow::Result;
use aura_domain::Claims;
use aura_pgsource::{Identity, SourceUrl, SqlConnection, connect_sql};
use serde_json::json;

use crate::{
    conditions::compile,
    tenant::{ALICE, BOB, Tenants, all_seen, image},
    visibility::note,
};

/// Runs the attack that the claims name. `shop.attacks` is data, so that each attack is planned under the role it has by then.
const ATTACK: &str = "create table shop.attacks (name text primary key, sql text);
    create function shop.attack(how text) returns bool language plpgsql as $$
    declare stolen bool; todo text; begin
        select a.sql into todo from shop.attacks a where a.name = how;
        if todo is null then return true; end if;
        execute todo into stolen;
        return stolen; end $$;";

pub(crate) async fn attackable(tenants: &Tenants) -> Result<()> {
    tenants.run(ATTACK).await?;
    tenants
        .run(
            "create table shop.notes (id int primary key, owner uuid, body text);
             alter table shop.notes enable row level security;
             create policy own on shop.notes for select using
                (owner = auth.uid() and shop.attack(auth.jwt() ->> 'how'))",
        )
        .await
}

/// Somebody whose policy attacks.
pub(crate) fn attacker(how: &str) -> Identity {
    let claims = json!({"sub": ALICE, "role": "authenticated", "how": how});
    Identity { role: "authenticated".to_owned(), claims: Claims::from_payload(&claims).expect("an object") }
}

fn honest() -> Identity {
    crate::tenant::user(BOB)
}

pub(crate) async fn store(tenants: &Tenants, attacks: &[(String, String)]) -> Result<()> {
    let insert = "insert into shop.attacks values ($1, $2)";
    for (name, sql) in attacks {
        tenants.sql.execute(insert, &[name, sql]).await?;
    }
    Ok(())
}

/// The other tenant's treasure, a slot with log to read, and what else there is to steal; a session of his policies.
async fn treasures(tenants: &Tenants) -> Result<SqlConnection> {
    tenants.run("create table bank.accounts (id int, owner text); insert into bank.accounts values (1, 'eve')").await?;
    tenants
        .superuser
        .batch_execute(
            "select pg_create_logical_replication_slot('aura_probe', 'test_decoding'); analyze bank.accounts",
        )
        .await?;
    for extension in ["dblink", "pg_walinspect", "file_fdw", "pageinspect"] {
        let sql =
            format!("create extension if not exists {extension} schema public; grant usage on schema public to public");
        assert!(tenants.superuser.batch_execute(&sql).await.is_ok(), "{extension} comes with PostgreSQL");
    }
    let login = format!("p_{}_visibility", tenants.bank);
    let url = SourceUrl::parse(&tenants.postgres.url_as(&login, "it's%20secret", "postgres"))?;
    Ok(connect_sql(&url, "aura-visibility", None, Duration::from_secs(10)).await?)
}

/// Becoming somebody else.
fn roles(tenants: &Tenants) -> Vec<(String, String)> {
    let mut attacks = Vec::new();
    let read = "select count(*) > 0 from bank.accounts";
    let (shop, bank) = (tenants.shop, tenants.bank);
    for escape in
        ["reset role", "reset session authorization", "set local role none", "set session authorization default"]
    {
        attacks.push((escape.to_owned(), format!("{escape}; {read}")));
    }
    let others = [
        format!("p_{bank}_authenticated"),
        format!("p_{bank}_service_role"),
        format!("p_{bank}_visibility"),
        format!("p_{shop}_service_role"),
        "aura_owner".to_owned(),
        "aura_service_role".to_owned(),
        "postgres".to_owned(),
        "pg_read_all_data".to_owned(),
        "pg_read_server_files".to_owned(),
    ];
    for role in others {
        for how in [
            format!("set role \"{role}\"; select true"),
            format!("reset role; set role \"{role}\"; select true"),
            format!("set session authorization \"{role}\"; select true"),
            format!("select set_config('role', '{role}', false) is not null"),
            format!("select set_config('session_authorization', '{role}', true) is not null"),
            format!("grant \"{role}\" to session_user; set role \"{role}\"; select true"),
        ] {
            attacks.push((how.clone(), how));
        }
    }
    attacks
}

/// Reading what isn't the tenant's: tables, log, files, secrets, sessions of others.
const READS: &[&str] = &[
    "select count(*) > 0 from bank.accounts",
    "table bank.accounts; select true",
    "select count(*) > 0 from pg_catalog.pg_stats where schemaname = 'bank'",
    "select count(*) > 0 from pg_catalog.pg_statistic",
    "select count(*) >= 0 from pg_logical_slot_peek_changes('aura_probe', null, null)",
    "select count(*) >= 0 from pg_logical_slot_get_changes('aura_probe', null, null)",
    "select count(*) >= 0 from pg_logical_slot_peek_binary_changes('aura_probe', null, null)",
    "select count(*) >= 0 from public.pg_get_wal_records_info('0/1000000', 'FFFFFFFF/FFFFFFFF')",
    "select count(*) >= 0 from public.pg_get_wal_stats('0/1000000', 'FFFFFFFF/FFFFFFFF')",
    "select public.get_raw_page('bank.accounts', 0) is not null",
    "select count(*) > 0 from pg_ls_waldir()",
    "select pg_read_file('postgresql.conf') is not null",
    "select pg_read_binary_file('global/pg_control') is not null",
    "select count(*) > 0 from pg_ls_dir('.')",
    "select size > 0 from pg_stat_file('postgresql.conf')",
    "select lo_import('/etc/passwd') > 0",
    "copy bank.accounts to '/nowhere'; select true",
    "copy (select 1) to program 'cat'; select true",
    "create temp table x (a text); copy x from program 'id'; select true",
    "select rolpassword is not null from pg_authid where rolname = 'aura_owner'",
    "select count(*) > 0 from pg_shadow",
    "select count(*) > 0 from pg_hba_file_rules()",
    "select count(*) > 0 from pg_file_settings",
    "select bool_or(query <> '<insufficient privilege>') from pg_stat_activity where usename in ('aura_owner', 'postgres')",
    "select bool_or(client_port is not null) from pg_stat_activity where usename in ('aura_owner', 'postgres')",
    "select count(*) > 0 from public.dblink('dbname=postgres user=aura_owner', 'select 1') as x (a int)",
    "select public.dblink_connect('dbname=postgres user=aura_owner') is not null",
    "select public.dblink_connect('dbname=postgres user=postgres') is not null",
    "select public.dblink_connect_u('dbname=postgres user=postgres') is not null",
];

/// Doing what isn't the tenant's: slots, replication, others' sessions, the server, and writing anything at all.
const DEEDS: &[&str] = &[
    "select pg_create_logical_replication_slot('mine', 'test_decoding') is not null",
    "select pg_create_physical_replication_slot('mine') is not null",
    "select pg_copy_logical_replication_slot('aura_probe', 'mine') is not null",
    "select pg_drop_replication_slot('aura_probe') is null",
    "select pg_replication_slot_advance('aura_probe', pg_current_wal_lsn()) is not null",
    "select pg_replication_origin_create('mine') > 0",
    "create publication mine for all tables; select true",
    "create subscription mine connection 'dbname=postgres' publication p; select true",
    "select bool_or(pg_terminate_backend(pid)) from pg_stat_activity where usename = 'aura_owner'",
    "select bool_or(pg_cancel_backend(pid)) from pg_stat_activity where usename = 'aura_owner'",
    "select bool_or(pg_terminate_backend(pid)) from pg_stat_activity where usename = 'postgres'",
    "select bool_or(pg_terminate_backend(pid)) from pg_stat_activity where usename ~ '_visibility$' and usename <> session_user",
    "select bool_or(pg_cancel_backend(pid)) from pg_stat_activity where usename ~ '_visibility$' and usename <> session_user",
    "select pg_reload_conf()",
    "select pg_switch_wal() is not null",
    "select pg_create_restore_point('mine') is not null",
    "select pg_rotate_logfile()",
    "select set_config('session_replication_role', 'replica', false) = 'replica'",
    "select set_config('log_statement', 'all', false) = 'all'",
    "alter system set log_statement = 'all'; select true",
    "alter role current_user bypassrls; select true",
    "alter role session_user replication; select true",
    "alter role session_user set role = 'postgres'; select true",
    "checkpoint; select true",
    "load 'auto_explain'; select true",
    "insert into shop.notes values (9); select true",
    "delete from shop.attacks; select true",
    "update shop.attacks set sql = 'select true'; select true",
    "alter table shop.notes disable row level security; select true",
    "drop policy own on shop.notes; select true",
    "create table shop.mine (a int); select true",
    "create temp table mine (a int); select true",
    "create function pg_temp.mine() returns int language sql as 'select 1'; select true",
    "select set_config('transaction_read_only', 'off', true) is null; insert into shop.notes values (9); select true",
    "set transaction read write; insert into shop.notes values (9); select true",
    "commit; select true",
    "rollback; select true",
    "begin; select true",
    "prepare transaction 'mine'; select true",
    "lock table shop.notes in access exclusive mode; select true",
    "select true from shop.attacks for update limit 1",
    "vacuum; select true",
    "do $x$ begin commit; end $x$; select true",
];

pub(crate) fn named(texts: &[&str]) -> Vec<(String, String)> {
    texts.iter().map(|sql| ((*sql).to_owned(), (*sql).to_owned())).collect()
}

/// Runs each attack before an honest identity and one that doesn't attack. An attack that fails for another reason than
/// that it isn't allowed would prove nothing.
async fn nothing_gained(tenants: &Tenants, attacks: &[(String, String)]) -> Result<()> {
    let images = [note("1", Some(ALICE)), note("2", Some(BOB))];
    let (mut gained, mut slips) = (Vec::new(), Vec::new());
    for (name, _) in attacks {
        let outcome = tenants.check("notes", &images, &[attacker(name), honest(), attacker("none")]).await?;
        let seen = all_seen(&outcome);
        if seen[0] == "10" || seen[0] == "11" || seen[1..] != ["01", "10"] {
            gained.push((name.clone(), seen));
        } else if seen[0].starts_with("Policy(SqlState(E42") && seen[0] != "Policy(SqlState(E42501))" {
            slips.push((name.clone(), seen));
        }
    }
    assert!(gained.is_empty() && slips.is_empty(), "gained {gained:#?}, slips {slips:#?}");
    Ok(())
}

#[tokio::test]
async fn r_rls_9_a_policy_becomes_nobody_else() -> Result<()> {
    let tenants = Tenants::start().await?;
    attackable(&tenants).await?;
    let _neighbour = treasures(&tenants).await?;
    let attacks = roles(&tenants);
    store(&tenants, &attacks).await?;
    nothing_gained(&tenants, &attacks).await
}

#[tokio::test]
async fn r_rls_9_a_policy_reads_and_does_nothing_that_is_not_its_tenant_s() -> Result<()> {
    let tenants = Tenants::start().await?;
    attackable(&tenants).await?;
    let neighbour = treasures(&tenants).await?;
    let attacks = [named(READS), named(DEEDS)].concat();
    store(&tenants, &attacks).await?;
    nothing_gained(&tenants, &attacks).await?;
    neighbour.batch_execute("select").await?;
    let slots = "select array_agg(slot_name::text) from pg_replication_slots";
    assert_eq!(tenants.superuser.query_one(slots, &[]).await?.get::<_, Vec<String>>(0), ["aura_probe"]);
    Ok(())
}

/// Casts to a domain run its CHECK, those of the tenant's types and operators their functions: the same login, the same walls.
#[tokio::test]
async fn r_rls_9_domains_casts_and_operators_gain_no_more_than_policies() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(ATTACK).await?;
    let _neighbour = treasures(&tenants).await?;
    let attacks = [roles(&tenants), named(READS), named(DEEDS)].concat();
    store(&tenants, &attacks).await?;
    tenants
        .run(
            "create domain shop.spied as text check (shop.attack(value));
             create type shop.token as (how text);
             create function shop.opens(token shop.token) returns bool language sql as 'select shop.attack(token.how)';
             create cast (shop.token as bool) with function shop.opens(shop.token);
             create function shop.opens(a text, b text) returns bool language sql as 'select shop.attack(a || b)';
             create operator shop.=! (leftarg = text, rightarg = text, function = shop.opens);
             create table shop.t (id int primary key, d shop.spied, c shop.token, o text);
             alter table shop.t enable row level security",
        )
        .await?;
    let row = |way: &str, how: &str| {
        let mut cells = [("id", Some("1")), ("d", None), ("c", None), ("o", None)];
        let quoted = format!("(\"{}\")", how.replace('"', "\"\""));
        match way {
            "d is not null" => cells[1].1 = Some(how),
            "c::bool" => cells[2].1 = Some(&quoted),
            _ => cells[3].1 = Some(how),
        }
        image(&cells)
    };
    for way in ["d is not null", "c::bool", "o operator(shop.=!) ''"] {
        tenants.run(&format!("drop policy if exists p on shop.t; create policy p on shop.t using ({way})")).await?;
        let mut gained = Vec::new();
        for (name, _) in &attacks {
            let outcome = tenants.check("t", &[row(way, name)], &[honest()]).await?;
            if all_seen(&outcome) == ["1"] {
                gained.push(name);
            }
        }
        assert!(gained.is_empty(), "{way}: {gained:#?}");
        assert_eq!(
            all_seen(&tenants.check("t", &[row(way, "none")], &[honest()]).await?),
            ["1"],
            "{way}: it is called"
        );
    }
    Ok(())
}

/// A filter's value is cast to the column's type when somebody joins: its CHECK runs then, and may do no more.
#[tokio::test]
async fn r_rls_9_values_of_filters_gain_no_more_than_policies() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(ATTACK).await?;
    let _neighbour = treasures(&tenants).await?;
    let attacks = [roles(&tenants), named(READS), named(DEEDS)].concat();
    let attacks: Vec<_> = attacks.into_iter().zip(0..).map(|((_, sql), n)| (format!("a{n}"), sql)).collect();
    store(&tenants, &attacks).await?;
    tenants
        .run(
            "create domain shop.spied as text check (shop.attack(value));
             create table shop.t (id int primary key, d shop.spied); grant select on shop.t to {authenticated}",
        )
        .await?;
    let mut gained = Vec::new();
    for (name, sql) in &attacks {
        if compile(&tenants, "t", &format!("d=eq.{name}")).await.is_ok() {
            gained.push(sql);
        }
    }
    assert!(gained.is_empty(), "{gained:#?}");
    assert!(compile(&tenants, "t", "d=eq.none").await.is_ok(), "it is called");
    Ok(())
}

/// Claims are users' data: a policy that is judged for one finds nothing of the others that are judged with him.
#[tokio::test]
async fn r_rls_9_a_policy_finds_no_claims_of_others() -> Result<()> {
    let tenants = Tenants::start().await?;
    attackable(&tenants).await?;
    let attacks = [
        "select bool_or(query like '%treasure%') from pg_stat_activity where pid = pg_backend_pid()",
        "select bool_or(query like '%treasure%') from pg_stat_activity",
        "select current_query() like '%treasure%'",
        "select bool_or(statement like '%treasure%') from pg_prepared_statements",
        "select bool_or(statement like '%treasure%') from pg_cursors",
        "select bool_or(setting like '%treasure%') from pg_settings",
        "select current_setting('request.jwt.claims') like '%treasure%'",
        "select bool_or(s.v like '%treasure%') from unnest(array['', 's', 'user', 'email', 'role', 'sub', 'headers']) as n (n),
            lateral (select current_setting('request.jwt.claim.' || n.n, true) as v) s",
    ];
    let attacks: Vec<_> = attacks.iter().zip(0..).map(|(sql, n)| (format!("c{n}"), (*sql).to_owned())).collect();
    store(&tenants, &attacks).await?;
    let images = [note("1", Some(ALICE)), note("2", Some(BOB))];
    let claims = json!({"sub": BOB, "role": "authenticated", "secret": "treasure"});
    let bob = Identity { role: "authenticated".to_owned(), claims: Claims::from_payload(&claims)? };
    for (name, sql) in &attacks {
        let outcome = tenants.check("notes", &images, &[bob.clone(), attacker(name), bob.clone()]).await?;
        let seen = all_seen(&outcome);
        assert!(seen[0] == "01" && seen[1] != "10" && seen[2] == "01", "{sql}: {seen:?}");
    }
    // Where it is, it is found.
    let claims = json!({"sub": ALICE, "role": "authenticated", "secret": "treasure", "how": attacks[6].0});
    let alice = Identity { role: "authenticated".to_owned(), claims: Claims::from_payload(&claims)? };
    assert_eq!(all_seen(&tenants.check("notes", &images, &[alice]).await?), ["10"]);
    Ok(())
}
