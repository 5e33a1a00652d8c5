//! Verdicts next to those of PostgreSQL itself (R-RLS-1, -2, -3, -6): random tables, policies, grants, claims and row
//! histories; the images come from the log. For each image and identity the server says what a table of this definition
//! that holds exactly the image shows to the identity's role with its claims.
//!
//! A world is made from its seed. What differs is printed with the seed and the SQL; `AURA_DIFFERENTIAL_SEED` runs one
//! seed again, `AURA_DIFFERENTIAL_WORLDS` more of them.

mod claims;
mod dice;
mod oracle;
mod policy;
mod round;
mod table;
mod world;

use anyhow::{Context, Result, ensure};
use world::{Stage, World};

/// Worlds of a usual run.
const WORLDS: u64 = 50;
/// Sets of policies and grants that each world's table gets, one after the other.
const ROUNDS: usize = 3;

/// What was compared.
#[derive(Debug, Default)]
struct Tally {
    visible: usize,
    hidden: usize,
    errors: usize,
    partial: usize,
    policies: usize,
    refused_policies: usize,
}

#[tokio::test]
async fn r_rls_1_to_3_and_6_verdicts_are_those_of_the_server_in_random_worlds() -> Result<()> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seed = number("AURA_DIFFERENTIAL_SEED");
    let worlds = number("AURA_DIFFERENTIAL_WORLDS").unwrap_or(WORLDS);
    let seeds = seed.map_or(1..=worlds, |seed| seed..=seed);
    let mut stage = Stage::start().await?;
    let (mut tally, mut wrong) = (Tally::default(), Vec::new());
    for seed in seeds {
        let world = async {
            let world = World::make(&mut stage, seed).await?;
            for round in 0..ROUNDS {
                wrong.extend(world.round(&stage, round, &mut tally).await?);
            }
            world.drop(&stage).await
        };
        world.await.with_context(|| format!("world {seed}"))?;
    }
    ensure!(wrong.is_empty(), "{} worlds differ, {tally:?}:\n{}", wrong.len(), wrong.join("\n"));
    if seed.is_none() {
        // Cases of each kind, or the test proves less than it seems to.
        ensure!(tally.visible > 4000 && tally.hidden > 4000 && tally.errors > 150 && tally.partial > 1000, "{tally:?}");
        ensure!(tally.policies > 20 * tally.refused_policies, "{tally:?}");
    }
    Ok(())
}
