//! What the api asks of a source: bootstrap, projects, tables, replica identity, preflight.

use std::{collections::HashSet, time::Duration};

use anyhow::{Context, Result};
use aura_domain::SqlName;
use aura_pgsource::{
    SourceUrl,
    admin::{Admin, IdentityError},
    connect_sql,
    preflight::{PreflightOptions, Severity, preflight},
    roles::project_role,
};
use aura_testkit::{Postgres, PostgresOptions};
use secrecy::SecretString;

use crate::tenant::{Tenants, relation};

const BUDGET: Duration = Duration::from_secs(3);

#[tokio::test]
async fn r_reg_1_two_hundred_callers_cause_one_alter() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run("create table shop.t (id int primary key, v text)").await?;
    let at = relation("shop", "t")?;
    let oid = tenants.oid(&at).await?;
    let mut admins = Vec::new();
    for _ in 0..20 {
        admins.push(Admin::connect(&tenants.url).await?);
    }
    let calls = (0..200).map(|n| admins[n % admins.len()].set_replica_identity_full(&at, oid, BUDGET));
    let changes: Vec<_> = futures_util::future::try_join_all(calls).await?;
    let altered: Vec<_> = changes.iter().filter(|change| change.altered).collect();
    assert_eq!(altered.len(), 1);
    assert_eq!(altered[0].previous.kind, 'd');
    assert!(tenants.admin.table(&at.schema, &at.table).await?.context("gone")?.is_full());
    Ok(())
}

#[tokio::test]
async fn r_reg_3_a_lock_is_waited_for_in_short_tries_and_the_blocker_named() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run("create table shop.t (id int primary key)").await?;
    let at = relation("shop", "t")?;
    let oid = tenants.oid(&at).await?;
    tenants.superuser.batch_execute("begin; select from shop.t").await?;
    let pid: i32 = tenants.superuser.query_one("select pg_backend_pid()", &[]).await?.get(0);
    let started = std::time::Instant::now();
    let alter = tenants.admin.set_replica_identity_full(&at, oid, Duration::from_secs(1));
    // Readers get through between the tries.
    let reads = async {
        let mut longest = Duration::ZERO;
        for _ in 0..20 {
            let begun = std::time::Instant::now();
            tenants.sql.query("select from shop.t", &[]).await?;
            longest = longest.max(begun.elapsed());
        }
        Ok::<_, anyhow::Error>(longest)
    };
    let (altered, longest) = tokio::join!(alter, reads);
    let Err(IdentityError::LockTimeout { blocker }) = altered else { anyhow::bail!("{altered:?}") };
    assert_eq!(blocker, Some(pid));
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    assert!(longest? < Duration::from_millis(900), "a reader waited too long");
    tenants.superuser.batch_execute("rollback").await?;
    assert!(tenants.admin.set_replica_identity_full(&at, oid, BUDGET).await?.altered);
    Ok(())
}

#[tokio::test]
async fn r_reg_3_whatever_commits_after_the_alter_is_above_its_lsn() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run("create table shop.t (id int primary key); insert into shop.t values (1)").await?;
    let at = relation("shop", "t")?;
    let before = tenants.admin.current_wal_insert_lsn().await?;
    let change = tenants.admin.set_replica_identity_full(&at, tenants.oid(&at).await?, BUDGET).await?;
    tenants.run("insert into shop.t values (2)").await?;
    let after = tenants.admin.current_wal_insert_lsn().await?;
    assert!(before < change.lsn && change.lsn < after, "{before} {} {after}", change.lsn);
    Ok(())
}

#[tokio::test]
async fn r_reg_3_the_identity_of_before_comes_back() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants
        .run("create table shop.\"T x\" (id int not null); create unique index \"I x\" on shop.\"T x\" (id)")
        .await?;
    tenants.run("alter table shop.\"T x\" replica identity using index \"I x\"").await?;
    let at = relation("shop", "T x")?;
    let oid = tenants.oid(&at).await?;
    let change = tenants.admin.set_replica_identity_full(&at, oid, BUDGET).await?;
    assert_eq!((change.previous.kind, change.previous.index.as_deref()), ('i', Some("I x")));
    let index = change.previous.index.as_ref();
    tenants.admin.restore_replica_identity(&at, oid, 'i', index).await?;
    let info = tenants.admin.table(&at.schema, &at.table).await?.context("gone")?;
    assert_eq!((info.replica_identity, info.identity_index.as_deref()), ('i', Some("I x")));
    Ok(())
}

#[tokio::test]
async fn r_reg_2_an_alter_is_for_one_oid() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run("create table shop.t (id int primary key)").await?;
    let at = relation("shop", "t")?;
    let oid = tenants.oid(&at).await?;
    tenants.run("drop table shop.t; create table shop.t (id int primary key)").await?;
    let done = tenants.admin.set_replica_identity_full(&at, oid, BUDGET).await;
    assert!(matches!(done, Err(IdentityError::Missing)), "{done:?}");
    assert!(!tenants.admin.table(&at.schema, &at.table).await?.context("gone")?.is_full());
    Ok(())
}

#[tokio::test]
async fn r_reg_4_every_leaf_of_a_partitioned_table_gets_it() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants
        .run(
            "create table shop.p (id int, k int, primary key (id, k)) partition by list (k);
             create table shop.p1 partition of shop.p for values in (1);
             create table shop.p2 partition of shop.p for values in (2) partition by list (id);
             create table shop.p2a partition of shop.p2 for values in (1)",
        )
        .await?;
    let at = relation("shop", "p")?;
    let oid = tenants.oid(&at).await?;
    let change = tenants.admin.set_replica_identity_full(&at, oid, BUDGET).await?;
    assert!(change.altered);
    let info = tenants.admin.table(&at.schema, &at.table).await?.context("gone")?;
    let leaves: Vec<_> = info.leaves.iter().map(|leaf| (leaf.relation.table.as_str(), leaf.replica_identity)).collect();
    assert_eq!(leaves, [("p1", 'f'), ("p2a", 'f')]);
    assert!(info.is_full());
    tenants.run("create table shop.p3 partition of shop.p for values in (3)").await?;
    assert!(!tenants.admin.table(&at.schema, &at.table).await?.context("gone")?.is_full(), "a new leaf is drift");
    Ok(())
}

#[tokio::test]
async fn r_reg_4_what_is_not_ours_is_told_apart() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.superuser.batch_execute("create table shop.theirs (id int); create view shop.v as select 1 as a").await?;
    tenants.run("create unlogged table shop.u (id int)").await?;
    let at = relation("shop", "theirs")?;
    let info = tenants.admin.table(&at.schema, &at.table).await?.context("gone")?;
    assert!(!info.owned_by_us && info.owner == "postgres");
    let done = tenants.admin.set_replica_identity_full(&at, info.oid, BUDGET).await;
    assert!(matches!(done, Err(IdentityError::NotOwner)), "{done:?}");
    let kind = async |schema: &str, name: &str| -> Result<_> {
        let info = tenants.admin.table(&SqlName::new(schema)?, &SqlName::new(name)?).await?;
        Ok(info.map(|info| (info.kind, info.persistence, info.is_system)))
    };
    assert_eq!(kind("shop", "v").await?, Some(('v', 'p', false)));
    assert_eq!(kind("shop", "u").await?, Some(('r', 'u', false)));
    assert_eq!(kind("pg_catalog", "pg_class").await?, Some(('r', 'p', true)));
    assert_eq!(kind("shop", "none").await?, None);
    Ok(())
}

#[tokio::test]
async fn tables_are_listed_in_pages() -> Result<()> {
    let tenants = Tenants::start().await?;
    for name in ["b", "A", "a_Order", "orders", "ü"] {
        tenants.run(&format!("create table shop.\"{name}\" (id int)")).await?;
    }
    tenants.run("create table bank.orders (id int); create view shop.view as select 1 as a").await?;
    let partitions = "create table shop.p (id int) partition by list (id); create table shop.p1 partition of shop.p for values in (1)";
    tenants.run(partitions).await?;
    let schemas = [SqlName::new("shop")?];
    let names = async |query, after, limit| -> Result<Vec<String>> {
        let tables = tenants.admin.tables(&schemas, query, after, limit).await?;
        Ok(tables.iter().map(|info| info.relation.table.to_string()).collect())
    };
    assert_eq!(names(None, None, 10).await?, ["A", "a_Order", "b", "orders", "p", "p1", "ü"]);
    assert_eq!(names(None, Some(("shop", "a_Order")), 2).await?, ["b", "orders"]);
    assert_eq!(names(Some("order"), None, 10).await?, ["a_Order", "orders"]);
    Ok(())
}

#[tokio::test]
async fn provisioning_again_changes_nothing_but_the_password() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run("create table shop.t (id int)").await?;
    let state = "select (select string_agg(rolname || rolcanlogin || rolinherit || rolsuper || rolreplication || rolbypassrls, ',' order by rolname) from pg_roles),
         (select string_agg(m::text, ',' order by m::text) from (select r.rolname, x.rolname from pg_auth_members a join pg_roles r on r.oid = a.roleid join pg_roles x on x.oid = a.member) m (a, b)),
         (select string_agg(nspname || coalesce(nspacl::text, ''), ',' order by nspname) from pg_namespace),
         (select relacl::text from pg_class where relname = 't'), (select string_agg(defaclacl::text, ',' order by oid) from pg_default_acl)";
    let read = async || -> Result<Vec<Option<String>>> {
        let row = tenants.superuser.query_one(state, &[]).await?;
        Ok((0..5).map(|n| row.get(n)).collect())
    };
    let before = read().await?;
    let password = SecretString::from("another");
    let schema = SqlName::new("shop")?;
    let words = ["editor".to_owned()];
    let provision = || tenants.admin.provision_project(tenants.shop, &schema, &words, &password);
    provision().await?;
    tenants.admin.bootstrap().await?;
    assert_eq!(read().await?, before);
    let login = aura_pgsource::roles::visibility_login(tenants.shop);
    let url = tenants.url.with_login(&login, "another");
    connect_sql(&url, "test", None, Duration::from_secs(5)).await.context("the new password")?;
    Ok(())
}

#[tokio::test]
async fn r_rls_9_the_visibility_login_can_do_nothing_by_itself() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run("create table shop.t (id int)").await?;
    let login = aura_pgsource::roles::visibility_login(tenants.shop);
    let session =
        connect_sql(&tenants.url.with_login(&login, "it's secret"), "test", None, Duration::from_secs(5)).await?;
    let (anon, service) = (format!("p_{}_anon", tenants.shop), format!("p_{}_service_role", tenants.shop));
    assert!(session.query("select from shop.t", &[]).await.is_err(), "no privilege without SET ROLE");
    assert!(
        session.batch_execute(&format!("set role \"{service}\"")).await.is_err(),
        "nobody becomes the service role"
    );
    assert!(session.batch_execute("set role aura_owner").await.is_err());
    session.batch_execute(&format!("set role \"{anon}\"")).await?;
    session.query("select from shop.t", &[]).await?;
    assert!(session.query("select from bank.accounts", &[]).await.is_err());
    let sql = "select rolsuper or rolreplication or rolbypassrls or rolcreaterole or rolcreatedb or rolinherit from pg_roles where rolname = $1";
    assert!(!tenants.superuser.query_one(sql, &[&login]).await?.get::<_, bool>(0));
    let stats = "select count(*) from pg_catalog.pg_stats";
    assert!(session.query(stats, &[]).await.is_err(), "statistics hold values of all tenants");
    Ok(())
}

#[tokio::test]
async fn r_rls_9_a_schema_that_was_there_keeps_its_privileges() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run("create schema old; create table old.t (id int)").await?;
    let project = "01d00000-0000-4000-8000-000000000003".parse()?;
    let password = SecretString::from("pw");
    tenants.admin.provision_project(project, &SqlName::new("old")?, &[], &password).await?;
    tenants.run("create table old.later (id int)").await?;
    let sql = "select relname::text from pg_class where relnamespace = 'old'::regnamespace and relacl is not null";
    assert!(tenants.superuser.query(sql, &[]).await?.is_empty(), "nothing is granted on somebody's tables");
    Ok(())
}

#[tokio::test]
async fn r_rls_8_role_words_come_and_go() -> Result<()> {
    let tenants = Tenants::start().await?;
    let (schema, password) = (SqlName::new("shop")?, SecretString::from("pw"));
    let role = |word: &str| project_role(tenants.shop, word).map(|name| name.to_string()).context("a word");
    let login = aura_pgsource::roles::visibility_login(tenants.shop);
    let can_become = async |word: &str| -> Result<bool> {
        let client = connect_sql(&tenants.url.with_login(&login, "pw"), "test", None, Duration::from_secs(5)).await?;
        Ok(client.batch_execute(&format!("set role \"{}\"", role(word)?)).await.is_ok())
    };
    let words = ["author".to_owned(), "editor".to_owned()];
    tenants.admin.provision_project(tenants.shop, &schema, &words, &password).await?;
    assert!(can_become("author").await? && can_become("editor").await? && can_become("anon").await?);
    let granted = "select count(*) from pg_default_acl, aclexplode(defaclacl) where pg_get_userbyid(grantee) = $1";
    let granted: i64 = tenants.superuser.query_one(granted, &[&role("author")?]).await?.get(0);
    assert_eq!(granted, 1, "what is made in the schema later on is theirs to read, as it is the others'");
    tenants.admin.provision_project(tenants.shop, &schema, &words[..1], &password).await?;
    assert!(can_become("author").await? && can_become("anon").await?);
    assert!(!can_become("editor").await?, "a word that is gone stands for nobody");
    assert!(!can_become("service_role").await?);
    let there = "select count(*) from pg_roles where rolname = $1";
    let there: i64 = tenants.superuser.query_one(there, &[&role("editor")?]).await?.get(0);
    assert_eq!(there, 1, "grants and policies may name it");
    Ok(())
}

#[tokio::test]
async fn many_provision_at_once() -> Result<()> {
    let tenants = Tenants::start().await?;
    let (a, b) = (Admin::connect(&tenants.url).await?, Admin::connect(&tenants.url).await?);
    let (schema, password) = (SqlName::new("new")?, SecretString::from("pw"));
    let project = "01d00000-0000-4000-8000-000000000004".parse()?;
    let both = [&a, &b].map(|admin| admin.provision_project(project, &schema, &[], &password));
    futures_util::future::try_join_all(both).await?;
    Ok(())
}

#[tokio::test]
async fn r_eng_9_preflight_names_what_is_missing() -> Result<()> {
    let options = PreflightOptions { require_wal2json: true, shared: true, ..PreflightOptions::default() };
    let codes = async |postgres: &Postgres, user: &str| -> Result<HashSet<(&'static str, Severity)>> {
        let url = SourceUrl::parse(&postgres.url_as(user, "pw", "postgres"))?;
        Ok(preflight(&url, options).await.into_iter().map(|finding| (finding.code, finding.severity)).collect())
    };
    let setup = "create role good login replication password 'pw'; create role bad login password 'pw'";
    let postgres = Postgres::start().await?;
    let superuser = postgres.client("postgres").await?;
    superuser.batch_execute(setup).await?;
    assert_eq!(codes(&postgres, "good").await?, [("statistics_visible", Severity::Critical)].into());
    Admin::connect(&SourceUrl::parse(&postgres.url("postgres"))?).await?.bootstrap().await?;
    assert_eq!(codes(&postgres, "good").await?, HashSet::new());
    assert_eq!(codes(&postgres, "bad").await?, [("no_replication_attribute", Severity::Critical)].into());
    assert_eq!(codes(&postgres, "nobody").await?, [("unreachable", Severity::Critical)].into());
    let poor = PostgresOptions::default().without_wal2json().setting("max_slot_wal_keep_size", "-1");
    let postgres = Postgres::start_with(poor).await?;
    postgres.client("postgres").await?.batch_execute(setup).await?;
    let found = codes(&postgres, "good").await?;
    assert!(found.contains(&("slot_wal_unbounded", Severity::Warning)), "{found:?}");
    assert!(found.contains(&("wal2json_missing", Severity::Critical)), "{found:?}");
    let poor = PostgresOptions::default().setting("wal_level", "replica");
    let postgres = Postgres::start_with(poor).await?;
    postgres.client("postgres").await?.batch_execute(setup).await?;
    assert!(codes(&postgres, "good").await?.contains(&("wal_level", Severity::Critical)));
    Ok(())
}

#[tokio::test]
async fn r_eng_9_preflight_looks_at_the_admins_login_and_the_slot() -> Result<()> {
    let postgres = Postgres::start_with(PostgresOptions::default().setting("max_replication_slots", "1")).await?;
    let superuser = postgres.client("postgres").await?;
    superuser
        .batch_execute(
            "create role cdc login replication password 'pw'; create role admin login password 'pw';
             create role good login createrole password 'pw'; grant cdc to good;
             create role signals login createrole password 'pw'; grant pg_signal_backend to signals;
             grant create on database postgres to good, signals;
             revoke all on pg_stats, pg_stats_ext, pg_stats_ext_exprs from public",
        )
        .await?;
    superuser.batch_execute("create database other").await?;
    let url = |user: &str, database: &str| SourceUrl::parse(&postgres.url_as(user, "pw", database));
    let cdc = url("cdc", "postgres")?;
    let codes = async |slot: Option<&str>, admin: Option<&SourceUrl>| {
        let options = PreflightOptions { slot, admin, ..PreflightOptions::default() };
        let found = preflight(&cdc, options).await;
        found.into_iter().map(|finding| (finding.code, finding.severity)).collect::<HashSet<_>>()
    };
    let (critical, warning) = (Severity::Critical, Severity::Warning);
    for good in ["good", "signals"] {
        assert_eq!(codes(None, Some(&url(good, "postgres")?)).await, HashSet::new(), "{good}");
    }
    let poor = codes(None, Some(&url("admin", "postgres")?)).await;
    assert_eq!(poor, [("no_create_role", warning), ("no_create_schema", warning), ("cannot_signal", warning)].into());
    let both = codes(None, Some(&cdc)).await;
    assert_eq!(both, [("no_create_role", warning), ("no_create_schema", warning)].into(), "one login for both");
    let nobody = codes(None, Some(&url("nobody", "postgres")?)).await;
    assert_eq!(nobody, [("admin_unreachable", warning)].into());
    superuser.batch_execute("select pg_create_logical_replication_slot('taken', 'wal2json')").await?;
    assert_eq!(codes(Some("mine"), None).await, [("no_free_slot", critical)].into());
    assert_eq!(codes(Some("taken"), None).await, HashSet::new(), "it is there already");
    superuser.batch_execute("select pg_drop_replication_slot('taken')").await?;
    let other = postgres.client("other").await?;
    other.batch_execute("select pg_create_logical_replication_slot('taken', 'wal2json')").await?;
    assert_eq!(codes(Some("taken"), None).await, [("slot_of_other_database", critical)].into());
    let elsewhere = Postgres::start().await?;
    elsewhere.client("postgres").await?.batch_execute("create role admin login createrole password 'pw'").await?;
    let elsewhere = SourceUrl::parse(&elsewhere.url_as("admin", "pw", "postgres"))?;
    assert!(codes(Some("taken"), Some(&elsewhere)).await.contains(&("admin_on_other_server", critical)));
    Ok(())
}
