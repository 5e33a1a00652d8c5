//! Who may import whom (design §3).

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use anyhow::{Context, Result};
use serde_json::Value;

/// What a crate may import from the workspace, beside the test kit in its tests.
const ALLOWED: &[(&str, &[&str])] = &[
    ("aura-domain", &[]),
    ("aura-kit", &["domain"]),
    ("aura-flow", &["domain"]),
    ("aura-wire", &["domain"]),
    ("aura-pgsource", &["domain"]),
    ("aura-lease", &["domain"]),
    ("aura-auth", &["domain"]),
    ("aura-store", &["domain", "lease"]),
    ("aura-bus", &["domain", "wire"]),
    ("aura-api", &["domain", "pgsource", "lease", "store", "bus", "auth", "kit"]),
    ("aura-worker", &["domain", "flow", "wire", "pgsource", "lease", "store", "bus", "auth", "kit"]),
    ("aura-front", &["domain", "wire", "pgsource", "store", "bus", "auth", "kit"]),
    ("aura-testkit", &[]),
    // The undivided binary alone composes the others.
    ("aura-cli", &["domain", "pgsource", "store", "bus", "auth", "kit", "lease", "api", "worker", "front"]),
];

/// The one crate that knows each foreign system.
const OWNERS: &[(&str, &[&str])] = &[
    ("sqlx", &["aura-store"]),
    ("async-nats", &["aura-bus"]),
    ("jsonwebtoken", &["aura-auth"]),
    ("kube", &["aura-lease"]),
    // The binaries pick the version of its types.
    ("k8s-openapi", &["aura-lease", "aura-worker", "aura-cli"]),
    // The command line sets up the private cluster of `dev`.
    ("tokio-postgres", &["aura-pgsource", "aura-cli"]),
    ("tokio-tungstenite", &["aura-cli"]),
];

/// Crates that are no part of the product.
const TESTS: &[&str] = &["aura-testkit", "system-tests", "aura-bench"];

#[test]
fn the_dependency_direction_holds() -> Result<()> {
    let allowed: BTreeMap<&str, BTreeSet<String>> = ALLOWED
        .iter()
        .map(|(name, list)| (*name, list.iter().map(|short| format!("aura-{short}")).collect()))
        .collect();
    let mut seen = 0;
    for (package, dependencies) in packages()? {
        let Some(allowed) = allowed.get(package.as_str()) else {
            assert!(TESTS.contains(&package.as_str()), "{package} has no place in the table");
            continue;
        };
        seen += 1;
        for dependency in dependencies.iter().filter(|name| name.starts_with("aura-")) {
            assert!(allowed.contains(dependency), "{package} must not import {dependency}");
        }
    }
    assert_eq!(seen, ALLOWED.len(), "the table names a crate that doesn't exist");
    Ok(())
}

#[test]
fn each_foreign_system_has_one_crate_that_knows_it() -> Result<()> {
    for (package, dependencies) in packages()? {
        for (foreign, owners) in OWNERS {
            let fine = owners.contains(&package.as_str()) || TESTS.contains(&package.as_str());
            assert!(fine || !dependencies.contains(*foreign), "{package} must not import {foreign}");
        }
    }
    Ok(())
}

/// Direct dependencies of each workspace member, those of its tests left out.
fn packages() -> Result<Vec<(String, BTreeSet<String>)>> {
    let manifest = aura_testkit::repository_root().join("Cargo.toml");
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline", "--manifest-path"])
        .arg(manifest)
        .output()?;
    let metadata: Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let name = |value: &Value| value["name"].as_str().unwrap_or_default().to_owned();
    let dependencies = |package: &Value| {
        let all = package["dependencies"].as_array().cloned().unwrap_or_default();
        all.iter().filter(|dependency| dependency["kind"].is_null()).map(name).collect()
    };
    Ok(packages.iter().map(|package| (name(package), dependencies(package))).collect())
}
