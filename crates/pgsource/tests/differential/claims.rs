//! Whose eyes a world's rows are seen with.

use aura_domain::Claims;
use aura_pgsource::Identity;
use serde_json::{Value, json};

use super::dice::Dice;
use crate::tenant::{ALICE, BOB};

pub(super) const CAROL: &str = "ca401000-0000-4000-8000-000000000003";

/// Role words, the frequent one more often. `nobody` is not of the project.
const WORDS: [&str; 12] = [
    "authenticated",
    "authenticated",
    "authenticated",
    "authenticated",
    "authenticated",
    "authenticated",
    "anon",
    "anon",
    "editor",
    "editor",
    "service_role",
    "nobody",
];

/// Distinct identities; a tame world has none whose claims fail the usual casts.
pub(super) fn identities(dice: &mut Dice) -> Vec<Identity> {
    let count = if dice.chance(8) { 70 } else { 2 + dice.below(16) };
    let tame = dice.chance(40);
    let mut all: Vec<Identity> = Vec::new();
    for n in 0..count {
        let role = dice.pick(&WORDS);
        let payload = match all.last() {
            // The same claims with another role word.
            Some(before) if dice.chance(10) => serde_json::from_str(before.claims.as_json()).expect("claims are JSON"),
            _ => payload(dice, role, n, tame),
        };
        let claims = Claims::from_payload(&payload).expect("an object without NUL");
        let identity = Identity { role: role.to_owned(), claims };
        if !all.contains(&identity) {
            all.push(identity);
        }
    }
    all
}

fn payload(dice: &mut Dice, role: &str, n: usize, tame: bool) -> Value {
    let mut claims = json!({});
    match dice.below(20) {
        0 => {}
        1 => claims["role"] = json!("somebody else"),
        _ => claims["role"] = json!(role),
    }
    let subs = [json!(ALICE), json!(BOB), json!(CAROL), json!(ALICE.to_uppercase())];
    let odd = [json!("not-a-uuid"), json!(""), json!(42), Value::Null, json!("o'brien \\ \"ä\""), json!({"a": 1})];
    match dice.below(if tame { 12 } else { 18 }) {
        0..=9 => claims["sub"] = subs[dice.below(subs.len())].clone(),
        10 | 11 => claims["sub"] = json!(format!("{n:08x}-0000-4000-8000-000000000000")),
        12 => {}
        _ => claims["sub"] = odd[dice.below(odd.len())].clone(),
    }
    if dice.chance(85) {
        claims["org"] = json!(dice.pick(&["org1", "org2", "ORG1", "ä", "", "o'brien", "1"]));
    }
    if dice.chance(70) {
        claims["level"] = if tame || dice.chance(80) { json!(dice.below(4)) } else { json!("high") };
    }
    if tame || dice.chance(80) {
        let orgs = dice.some(40, &["org1", "org2", "ORG1", "ä", "o'brien", "a,b", "NULL"]);
        claims["orgs"] = if tame || dice.chance(90) { json!(orgs) } else { json!("org1") };
        claims["rooms"] = json!(dice.some(40, &[0, 1, 2, 3]));
    }
    if dice.chance(50) {
        claims["app_metadata"] = json!({"team": dice.pick(&["a", "b"]), "deep": {"n": dice.below(3)}, "ünï": "☃🦀"});
    }
    // Makes claims distinct that no policy can tell apart.
    if dice.chance(30) {
        claims["session_id"] = json!(n);
    }
    claims
}
