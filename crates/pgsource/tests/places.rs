//! Who waits for a visibility connection, and for whom (R-RLS-9).

use std::{cell::Cell, time::Duration};

use anyhow::Result;
use aura_pgsource::Identity;
use aura_testkit::eventually;

use crate::{
    attacks::{attackable, attacker, store},
    tenant::{ALICE, BOB, Tenants, image, relation, user},
    visibility::note,
};

/// Visibility connections whose statement has been running for longer.
async fn running(tenants: &Tenants, longer: &str) -> i64 {
    let sql = format!(
        "select count(*) from pg_stat_activity where usename like 'p\\_%\\_visibility' and state = 'active'
             and clock_timestamp() - query_start > '{longer}'"
    );
    tenants.superuser.query_one(&sql, &[]).await.map_or(0, |row| row.get(0))
}

async fn slow(tenants: &Tenants, count: usize, sql: &str) -> Result<Vec<Identity>> {
    attackable(tenants).await?;
    let all: Vec<_> = (0..count).map(|n| (n.to_string(), sql.to_owned())).collect();
    store(tenants, &all).await?;
    Ok(all.iter().map(|(name, _)| attacker(name)).collect())
}

#[tokio::test]
async fn r_rls_9_who_waits_long_for_a_connection_has_no_verdict_and_no_outage() -> Result<()> {
    let mut tenants = Tenants::start().await?;
    tenants.one_connection();
    let raises = "do $x$ begin perform pg_sleep(1.5); raise exception 'late'; end $x$; select true";
    let slow = slow(&tenants, 9, raises).await?;
    tenants
        .run(
            "create table shop.open (id int primary key, owner uuid, body text);
             alter table shop.open enable row level security; create policy own on shop.open using (owner = auth.uid());
             alter policy own on shop.notes using (body <> '' and shop.attack(auth.jwt() ->> 'how'))",
        )
        .await?;
    // So big that everybody is asked in a round trip of his own, all of them over one connection.
    let body = "x".repeat(4 << 20);
    let big = [image(&[("id", Some("1")), ("owner", Some(ALICE)), ("body", Some(&body))])];
    let oid = tenants.oid(&relation("shop", "open")?).await?;
    let (images, who) = ([note("1", Some(BOB))], [user(BOB)]);
    let waits = async {
        eventually(Duration::from_secs(10), || async { running(&tenants, "800 ms").await == 1 }).await?;
        let waited = tenants.check_oid("open", oid, &[], &images, &who).await;
        let error = waited.err().map(|error| (error.is_connection_error(), error.is_unreachable(), error.to_string()));
        assert_eq!(error, Some((false, false, "no visibility connection was free for 10s".to_owned())));
        anyhow::Ok(())
    };
    let (slow, waits) = tokio::join!(tenants.check("notes", &big, &slow), waits);
    waits?;
    slow?;
    let outcome = tenants.check_oid("open", oid, &[], &images, &who).await?;
    assert_eq!(crate::tenant::all_seen(&outcome), ["1"], "the next try has its verdict");
    Ok(())
}

#[tokio::test]
async fn r_rls_6_probes_of_a_project_run_one_at_a_time_and_each_has_its_turn() -> Result<()> {
    let tenants = Tenants::start().await?;
    let slow = slow(&tenants, 3, "select pg_sleep(60) is null").await?;
    let images = [note("1", Some(ALICE))];
    let seen = crate::tenant::all_seen(&tenants.check("notes", &images, &slow).await?);
    assert_eq!(seen, ["TimedOut"; 3]);
    // Who was probed once more in vain has to wait, so each of these is another's.
    for round in 0..3 {
        tenants.check("notes", &images, &slow).await?;
        let most = Cell::new(0);
        eventually(Duration::from_secs(10), || async {
            let now = running(&tenants, "200 ms").await;
            most.set(most.get().max(now));
            most.get() > 0 && now == 0
        })
        .await?;
        assert_eq!(most.get(), 1, "round {round}");
        eventually(Duration::from_secs(5), || async { running(&tenants, "0").await == 0 }).await?;
    }
    Ok(())
}
