//! Row-level security while tables change (R-RLS-10).

use std::time::Duration;

use anyhow::{Context, Result};

use crate::{
    tenant::{ALICE, BOB, Tenants, all_seen, identity, relation, user},
    visibility::{NOTES, note},
};

#[tokio::test]
async fn r_rls_10_another_table_under_the_name_is_nobody_s() -> Result<()> {
    let tenants = Tenants::start().await?;
    for security in ["disable", "enable"] {
        tenants.run(&format!("{NOTES}; alter table shop.notes {security} row level security")).await?;
        let oid = tenants.oid(&relation("shop", "notes")?).await?;
        let (images, who) = ([note("1", Some(ALICE))], [user(ALICE), identity("service_role", "x")]);
        let outcome = tenants.check_oid("notes", oid, &[], &images, &who).await?;
        assert_eq!(all_seen(&outcome), ["1", "1"]);
        tenants.run(&format!("drop table shop.notes; {NOTES}; alter policy own on shop.notes using (true)")).await?;
        let outcome = tenants.check_oid("notes", oid, &[], &images, &who).await?;
        assert_eq!((all_seen(&outcome), outcome.oid_matches), (vec!["TableReplaced".to_owned(); 2], false));
        tenants.run("drop table shop.notes").await?;
        let outcome = tenants.check_oid("notes", oid, &[], &images, &who).await?;
        assert!(outcome.table.is_none() && !outcome.oid_matches);
    }
    Ok(())
}

#[tokio::test]
async fn r_rls_10_ddl_that_committed_before_applies() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(&format!("{NOTES}; alter table shop.notes disable row level security")).await?;
    let (images, who) = ([note("1", Some(BOB))], [user(ALICE)]);
    let mut expect = Vec::new();
    for (ddl, sees) in [
        ("select", "1"),
        ("alter table shop.notes enable row level security", "0"),
        ("alter policy own on shop.notes using (true)", "1"),
        ("alter policy own on shop.notes to {anon}", "0"),
        ("alter table shop.notes disable row level security", "1"),
        ("revoke select on shop.notes from {authenticated}", "0"),
    ] {
        tenants.run(ddl).await?;
        let outcome = tenants.check("notes", &images, &who).await?;
        expect.push((ddl, sees.to_owned(), all_seen(&outcome).concat()));
    }
    assert!(expect.iter().all(|(_, wanted, got)| wanted == got), "{expect:#?}");
    Ok(())
}

#[tokio::test]
async fn r_rls_10_a_transaction_that_is_not_visible_yet_is_waited_for() -> Result<()> {
    let tenants = Tenants::start().await?;
    for security in ["disable", "enable"] {
        tenants
            .run(&format!(
                "drop table if exists shop.notes; {NOTES}; alter table shop.notes {security} row level security"
            ))
            .await?;
        let oid = tenants.oid(&relation("shop", "notes")?).await?;
        let (images, who) = ([note("1", Some(ALICE))], [user(ALICE)]);
        tenants.check_oid("notes", oid, &[], &images, &who).await?;
        // The log says it is committed, but a standby has not confirmed it yet.
        tenants
            .superuser
            .batch_execute("begin; drop policy own on shop.notes; alter table shop.notes enable row level security")
            .await?;
        let xid: String = tenants.superuser.query_one("select pg_current_xact_id()::text", &[]).await?.get(0);
        let xids = [xid.parse::<u64>()? as u32];
        let mut check = Box::pin(tenants.check_oid("notes", oid, &xids, &images, &who));
        assert!(tokio::time::timeout(Duration::from_millis(300), &mut check).await.is_err(), "must wait");
        tenants.superuser.batch_execute("commit").await?;
        let outcome = tokio::time::timeout(Duration::from_secs(5), check).await.context("waits for ever")??;
        assert_eq!(all_seen(&outcome), ["0"], "the policy is gone as of that transaction");
    }
    Ok(())
}
