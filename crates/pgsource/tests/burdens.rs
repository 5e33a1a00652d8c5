//! What tenant code lays on us besides rows: messages without end, backends that don't let go (R-RLS-6, R-RLS-9).

use std::time::Duration;

use anyhow::{Context, Result};
use aura_testkit::eventually;

use crate::{
    attacks::{attackable, attacker, named, store},
    tenant::{ALICE, BOB, Tenants, all_seen, user},
    visibility::note,
};

/// Peak of this process's memory, in bytes.
fn peak() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
}

#[tokio::test]
async fn r_rls_9_huge_notices_and_errors_stay_out_of_our_memory() -> Result<()> {
    const HUGE: &[&str] = &[
        "do $x$ begin raise notice '%', repeat('x', 60000000); end $x$; select true",
        "do $x$ begin for n in 1..40 loop raise warning '%', repeat('é', 500000); end loop; end $x$; select true",
        "do $x$ begin raise exception '%', repeat('é', 30000000); end $x$; select true",
        "do $x$ begin raise sqlstate 'AA001' using detail = repeat('x', 60000000), hint = 'h'; end $x$; select true",
    ];
    let tenants = Tenants::start().await?;
    // The test kit keeps the server's log.
    tenants.superuser.batch_execute("alter role all set log_min_messages = 'panic'").await?;
    attackable(&tenants).await?;
    store(&tenants, &named(HUGE)).await?;
    let images = [note("1", Some(ALICE)), note("2", Some(BOB))];
    tenants.check("notes", &images, &[user(BOB)]).await?;
    let before = peak()?;
    for how in HUGE {
        let outcome = tenants.check("notes", &images, &[user(BOB), attacker(how), user(BOB)]).await?;
        // It may take longer than it has time.
        let seen = all_seen(&outcome);
        assert!(seen[0] == "01" && seen[2] == "01", "{how}: {seen:?}");
        let more = peak()? - before;
        assert!(more < 24 << 20, "{how}: {} MiB", more >> 20);
    }
    Ok(())
}

/// A policy may catch the cancellation that its time limit is, and go on for ever; the server doesn't look whether anybody
/// is still there. So what is given up must be ended, or a few such checks use up the server's connections.
#[tokio::test]
async fn r_rls_6_a_policy_that_catches_its_time_limit_keeps_no_backend() -> Result<()> {
    const STUBBORN: &str =
        "do $x$ begin loop begin perform pg_sleep(60); exception when query_canceled then null; end; end loop; end $x$";
    let mut tenants = Tenants::start().await?;
    tenants.one_connection();
    attackable(&tenants).await?;
    store(&tenants, &named(&[STUBBORN])).await?;
    let images = [note("1", Some(ALICE)), note("2", Some(BOB))];
    let seen = all_seen(&tenants.check("notes", &images, &[user(BOB), attacker(STUBBORN), user(BOB)]).await?);
    assert!(seen[0] == "01" && seen[2] == "01" && seen[1] != "10", "{seen:?}");
    eventually(Duration::from_secs(5), || async { tenants.sessions().await.is_ok_and(|left| left.len() <= 1) }).await?;
    // The same for a check whose caller goes away.
    for n in 0..2 {
        let who = [attacker(STUBBORN)];
        tenants.one_connection();
        let check = tenants.check("notes", &images, &who);
        assert!(tokio::time::timeout(Duration::from_millis(300), check).await.is_err(), "{n}: it sleeps");
    }
    eventually(Duration::from_secs(5), || async { tenants.sessions().await.is_ok_and(|left| left.len() <= 1) }).await
}
