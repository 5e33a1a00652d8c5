//! Two people over one pooled connection, their checks cut off at any moment: each verdict is the right one, and no
//! connection is left behind (R-RLS-5, R-RLS-9).

use std::time::Duration;

use anyhow::Result;
use aura_domain::Image;
use aura_testkit::eventually;

use crate::{
    tenant::{ALICE, BOB, Tenants, all_seen, user},
    visibility::{NOTES, note},
};

const EVENTS: usize = 10_000;
const BATCH: usize = 50;
/// Each batch with an open transaction of this long would be cut somewhere in the middle of it.
const LONGEST: u64 = 6_000;

/// A fixed sequence of numbers that look random (Knuth's constants).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Rows of one or the other, and what each of them sees.
fn batch(numbers: &mut Numbers, from: usize) -> (Vec<Image>, [String; 2]) {
    let (mut images, mut seen) = (Vec::new(), [String::new(), String::new()]);
    for id in from..from + BATCH {
        let whose = numbers.below(3);
        let owner = [Some(ALICE), Some(BOB), None][usize::try_from(whose).expect("small")];
        images.push(note(&id.to_string(), owner));
        seen[0].push(if whose == 0 { '1' } else { '0' });
        seen[1].push(if whose == 1 { '1' } else { '0' });
    }
    (images, seen)
}

async fn cross_talk(policy: &str) -> Result<()> {
    let mut tenants = Tenants::start().await?;
    tenants.one_connection();
    tenants.run(NOTES).await?;
    // What one leaves behind would be taken for the other's claims.
    tenants
        .run(
            "create function shop.mine(owner uuid) returns bool language plpgsql as $$ begin
                perform set_config('shop.me', coalesce(nullif(current_setting('shop.me', true), ''), auth.uid()::text), false);
                return owner = current_setting('shop.me')::uuid; end $$",
        )
        .await?;
    tenants.run(&format!("alter policy own on shop.notes using ({policy})")).await?;
    let (alice, bob) = ([user(ALICE)], [user(BOB)]);
    let both = [user(BOB), user(ALICE)];
    let mut numbers = Numbers(42);
    let (mut judged, mut cut, mut from) = (0, 0, 0);
    while judged < EVENTS {
        let (images, [hers, his]) = batch(&mut numbers, from);
        from += BATCH;
        let mut times = [0, 0, 0].map(|_| Duration::from_micros(numbers.below(LONGEST)));
        if numbers.below(3) > 0 {
            times[usize::try_from(numbers.below(3))?] = Duration::from_secs(60);
        }
        let first = tokio::time::timeout(times[0], tenants.check("notes", &images, &alice));
        let second = tokio::time::timeout(times[1], tenants.check("notes", &images, &bob));
        let third = tokio::time::timeout(times[2], tenants.check("notes", &images, &both));
        let (first, second, third) = tokio::join!(first, second, third);
        for (outcome, wanted) in
            [(first, vec![hers.clone()]), (second, vec![his.clone()]), (third, vec![his.clone(), hers.clone()])]
        {
            match outcome {
                Ok(outcome) => {
                    assert_eq!(all_seen(&outcome?), wanted, "{policy}, after {judged} events");
                    judged += BATCH;
                }
                Err(_) => cut += 1,
            }
        }
    }
    assert!(cut > 50, "only {cut} checks were cut off");
    eventually(Duration::from_secs(5), || async {
        let busy = "select count(*) from pg_stat_activity where usename like 'p\\_%\\_visibility' and state <> 'idle'";
        let busy = tenants.superuser.query_one(busy, &[]).await.map(|row| row.get::<_, i64>(0));
        busy.is_ok_and(|busy| busy == 0) && tenants.sessions().await.is_ok_and(|left| left.len() <= 1)
    })
    .await
}

#[tokio::test]
async fn r_rls_5_no_cross_talk_where_a_policy_reads_only_its_row_and_the_claims() -> Result<()> {
    cross_talk("owner = auth.uid()").await
}

#[tokio::test]
async fn r_rls_5_no_cross_talk_where_the_claims_are_read_once_per_statement() -> Result<()> {
    cross_talk("owner = (select auth.uid())").await
}

#[tokio::test]
async fn r_rls_5_no_cross_talk_where_a_policy_leaves_state_behind() -> Result<()> {
    cross_talk("shop.mine(owner)").await
}
