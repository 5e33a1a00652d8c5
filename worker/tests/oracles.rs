//! What a join must not tell whoever may not read a table.

use aura_store::Plugin;
use aura_testkit::eventually;
use serde_json::json;

use crate::stage::{PATIENCE, Stage};

/// What the client is told, with the names of table and column taken out.
async fn told(stage: &mut Stage, table: &str, filter: Option<&str>) -> Option<(String, bool)> {
    let (_, reply) = stage.join(table, "authenticated", json!({"sub": "a", "role": "authenticated"}), filter).await;
    let column = filter.and_then(|filter| filter.split_once('=')).map_or("column", |(column, _)| column);
    reply.exceptions.first().map(|exception| {
        let message = exception.message.replace(&format!("table: {table}"), "table: T").replace(column, "C");
        (message, exception.fatal)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn n_17_a_table_that_may_not_be_read_looks_like_one_that_is_not_there() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    let tables = "create table forbidden (id int primary key, secret int);
        create table unregistered (id int primary key, secret int);
        create table open (id int primary key, secret int)";
    stage.sql.batch_execute(tables).await?;
    let grants = "revoke all on forbidden from public, aura_anon, aura_authenticated";
    stage.sql.batch_execute(grants).await?;
    let (role, anon) = (format!("p_{}_authenticated", stage.project), format!("p_{}_anon", stage.project));
    let own = format!(
        r#"revoke all on forbidden from "{role}", "{anon}"; revoke all on open from "{role}", "{anon}";
        grant select (id) on open to "{role}""#
    );
    stage.sql.batch_execute(&own).await?;
    let worker = stage.run_worker().await;
    stage.enable("forbidden").await?;
    stage.enable("open").await?;
    for filter in [None, Some("id=eq.1"), Some("secret=gt.5"), Some("nothing=eq.1")] {
        let absent = told(&mut stage, "absent", filter).await;
        assert!(absent.as_ref().is_some_and(|(_, fatal)| !fatal), "{filter:?}: {absent:?}");
        assert_eq!(told(&mut stage, "forbidden", filter).await, absent, "{filter:?}");
        assert_eq!(told(&mut stage, "unregistered", filter).await, absent, "{filter:?}");
    }
    // The same of a column: one that may not be read, and one that isn't there.
    assert_eq!(told(&mut stage, "open", Some("id=eq.1")).await, None);
    let hidden = told(&mut stage, "open", Some("secret=gt.5")).await;
    assert!(hidden.as_ref().is_some_and(|(_, fatal)| *fatal), "{hidden:?}");
    assert_eq!(told(&mut stage, "open", Some("nothing=gt.5")).await, hidden);
    // Who is granted it later is heard when its front asks again.
    stage.sql.batch_execute(&format!(r#"grant select on forbidden to "{role}""#)).await?;
    let shared = tokio::sync::Mutex::new(&mut stage);
    let asked_again = || async { told(*shared.lock().await, "forbidden", None).await.is_none() };
    eventually(PATIENCE, asked_again).await?;
    worker.stop().await;
    Ok(())
}

/// A filter on a value that the policy hides finds nothing, whatever it asks.
#[tokio::test(flavor = "multi_thread")]
async fn n_17_no_filter_finds_a_row_that_the_policy_hides() -> anyhow::Result<()> {
    let mut stage = Stage::new(Plugin::Auto).await?;
    let table = "create table t (id int primary key, secret int);
        alter table t enable row level security;
        create policy p on t for select to aura_authenticated using (id > 100)";
    stage.sql.batch_execute(table).await?;
    let worker = stage.run_worker().await;
    stage.enable("t").await?;
    let mut watch = stage.changes().await;
    let claims = json!({"sub": "a", "role": "authenticated"});
    for filter in ["secret=gt.32", "secret=lte.32", "secret=eq.42", "secret=is.null", "id=lt.100"] {
        let (_, reply) = stage.join("t", "authenticated", claims.clone(), Some(filter)).await;
        assert!(reply.exceptions.is_empty(), "{filter}: {reply:?}");
    }
    let (visible, reply) = stage.join("t", "authenticated", claims, Some("secret=in.(42)")).await;
    assert!(reply.exceptions.is_empty(), "{reply:?}");
    stage.sql.batch_execute("insert into t values (1, 42)").await?;
    stage.sql.batch_execute("update t set secret = 41; delete from t; insert into t values (101, 42)").await?;
    for event in ["insert", "update", "delete"] {
        assert_eq!(watch.next().await.ids, [0; 0], "{event} of a hidden row");
    }
    assert!(watch.next().await.ids.contains(&visible));
    worker.stop().await;
    Ok(())
}
