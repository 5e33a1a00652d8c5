//! Row-level security while tables change (R-RLS-10).

use std::time::Duration;

use anyhow::{Context, Result};
use aura_testkit::eventually;

use crate::{
    tenant::{ALICE, BOB, Tenants, all_seen, identity, image, relation, user},
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

/// Nothing locks a table that is being judged, and the text of an image is read by the row type as it is at that moment.
#[tokio::test]
async fn r_rls_10_columns_that_change_under_a_check_don_t_shift_values() -> Result<()> {
    let tenants = Tenants::start().await?;
    let setup = format!(
        "create table shop.members (who uuid); grant select on shop.members to {{authenticated}};
         create function shop.waits() returns bool language plpgsql as $$ begin
             if auth.uid() = '{ALICE}' then perform pg_advisory_xact_lock(7); end if;
             return not exists (select from shop.members);
         end $$;
         create table shop.t (junk uuid, editor uuid, owner uuid);
         alter table shop.t enable row level security;
         create policy p on shop.t using (shop.waits() and coalesce(editor, owner) is not null and owner = auth.uid())"
    );
    tenants.run(&setup).await?;
    tenants.superuser.batch_execute("select pg_advisory_lock(7)").await?;
    let images = [image(&[("junk", Some(ALICE)), ("editor", Some(BOB)), ("owner", Some(ALICE))])];
    let who = [user(ALICE), user(BOB)];
    let change = async {
        let asked_alone = "select exists (select from pg_stat_activity where wait_event = 'advisory'
            and query like 'select array(select _aura_s%')";
        eventually(Duration::from_secs(10), || async {
            tenants.superuser.query_one(asked_alone, &[]).await.is_ok_and(|row| row.get(0))
        })
        .await?;
        // As many columns as before.
        tenants.run("alter table shop.t drop column junk, add column later uuid").await?;
        tenants.superuser.batch_execute("select pg_advisory_unlock(7)").await?;
        Ok::<_, anyhow::Error>(())
    };
    let (outcome, changed) = tokio::join!(tenants.check("t", &images, &who), change);
    changed?;
    let seen = all_seen(&outcome?);
    assert_eq!(seen[0], "1");
    assert!(seen[1].starts_with("Policy"), "the editor was taken for the owner: {seen:?}");
    Ok(())
}
