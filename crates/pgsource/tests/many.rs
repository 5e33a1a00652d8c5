//! Many identities at once: in which form they are asked, for which images, and who doesn't wait for whom.

use std::time::Duration;

use anyhow::{Context, Result};
use aura_domain::Image;
use aura_pgsource::{Identity, Verdict};
use aura_testkit::eventually;

use crate::{
    tenant::{ALICE, BOB, Tenants, all_seen, seen, user},
    visibility::{NOTES, note},
};

/// What is asked for many at once is asked so: a form that failed would be hidden by the next, which costs more.
#[tokio::test]
async fn r_rls_5_many_identities_are_judged_by_one_statement() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    let claim = "(current_setting('request.jwt.claims')::json ->> 'sub')::uuid";
    let images = [note("1", Some(ALICE)), note("2", Some(BOB)), note("3", Some(ALICE))];
    for policy in [
        format!("owner = {claim}"),
        format!("owner = (select {claim})"),
        format!("id = 7 or owner = {claim}"),
        "owner = auth.uid()".to_owned(),
        "owner = (select auth.uid())".to_owned(),
        "owner = auth.uid() and (notes.*) is not null".to_owned(),
    ] {
        tenants.run(&format!("alter policy own on shop.notes using ({policy})")).await?;
        let outcome = tenants.check("notes", &images, &[user(ALICE), user(BOB), user(ALICE)]).await?;
        assert_eq!(
            (all_seen(&outcome).join(" "), outcome.failed_statements),
            ("101 010 101".to_owned(), 0),
            "{policy}"
        );
    }
    // One who raises costs something once; from then on he is asked apart.
    let who = [user(ALICE), user("not a uuid"), user(BOB)];
    let outcome = tenants.check("notes", &images, &who).await?;
    assert_eq!(outcome.failed_statements, 1);
    let outcome = tenants.check("notes", &images, &who).await?;
    assert_eq!(
        (all_seen(&outcome).join(" "), outcome.failed_statements),
        ("101 Policy(SqlState(E22P02)) 010".to_owned(), 0)
    );
    // A cast that CASE guards raises only where it is hoisted: such a policy is asked in the other form from then on.
    let guarded = "case when current_setting('request.jwt.claims')::json ->> 'sub' ~ '^[0-9a-f-]{36}$'
        then owner = (current_setting('request.jwt.claims')::json ->> 'sub')::uuid else false end";
    tenants.run(&format!("alter policy own on shop.notes using ({guarded})")).await?;
    let who = [user(ALICE), user("no uuid either"), user(BOB)];
    for failed in [1, 0] {
        let outcome = tenants.check("notes", &images, &who).await?;
        assert_eq!((all_seen(&outcome).join(" "), outcome.failed_statements), ("101 000 010".to_owned(), failed));
    }
    Ok(())
}

#[tokio::test]
async fn r_rls_7_an_identity_is_judged_for_the_images_that_matter_to_it() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    tenants
        .run("create function shop.me() returns uuid language plpgsql stable as 'begin return auth.uid(); end'")
        .await?;
    let users: Vec<String> = (0..40).map(|n| format!("00000000-0000-4000-8000-{n:012}")).collect();
    let who: Vec<Identity> = users.iter().map(|sub| user(sub)).chain([user("not a uuid")]).collect();
    // Two rows of each user, and one of nobody, which everybody wants to know about.
    let mut images: Vec<Image> =
        (0..80).map(|n| note(&n.to_string(), Some(&users[n % 40]))).chain([note("80", None)]).collect();
    images.push(images[3].clone());
    let mut wanted: Vec<Vec<usize>> = (0..40).map(|n| vec![n, (n + 1) % 40, n + 40, 80]).collect();
    wanted[3].push(81);
    wanted.push(vec![5]);
    for policy in ["owner = auth.uid()", "owner = shop.me()", "owner = shop.me() and (notes.*) is not null or false"] {
        tenants.run(&format!("alter policy own on shop.notes using ({policy})")).await?;
        // The first time somebody raises in a statement for many, then he is asked apart.
        for _ in 0..2 {
            let outcome = tenants.check_wanted("notes", &images, &who, &wanted).await?;
            for (n, (verdict, wanted)) in outcome.verdicts.iter().zip(&wanted).enumerate().take(40) {
                let Verdict::Decided { visible, .. } = verdict else { anyhow::bail!("{policy} {n}: {verdict:?}") };
                let seen: Vec<usize> = wanted.iter().copied().filter(|image| visible[*image]).collect();
                let own = if n == 3 { vec![3, 43, 81] } else { vec![n, n + 40] };
                assert_eq!(seen, own, "{policy}");
            }
            assert_eq!(seen(&outcome.verdicts[40]), "Policy(SqlState(E22P02))", "{policy}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn r_rls_6_who_is_slow_holds_others_up_once() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.run(NOTES).await?;
    tenants
        .run(
            "create table shop.naps (who text); insert into shop.naps values ('slow'), ('tired');
             create function shop.slow(me text) returns bool language plpgsql as $$ begin
                if exists (select from shop.naps where who = me) then perform pg_sleep(60); end if;
                return true; end $$;
             alter policy own on shop.notes using (shop.slow(auth.jwt() ->> 'sub'))",
        )
        .await?;
    let (images, who) = ([note("1", Some(ALICE))], [user("slow"), user("fast"), user("tired")]);
    let seen = async || Ok::<_, anyhow::Error>(all_seen(&tenants.check("notes", &images, &who).await?));
    assert_eq!(seen().await?, ["TimedOut", "1", "TimedOut"]);
    tenants.run("delete from shop.naps where who = 'tired'").await?;
    let began = std::time::Instant::now();
    assert_eq!(seen().await?, ["CircuitOpen", "1", "CircuitOpen"]);
    assert!(began.elapsed() < Duration::from_millis(1000), "nobody waits for a probe");
    // Whose probe goes well is asked again.
    let back = || async { seen().await.is_ok_and(|seen| seen == ["CircuitOpen", "1", "1"]) };
    eventually(Duration::from_secs(20), back).await.context("nobody found out that the policy is fast now")
}
