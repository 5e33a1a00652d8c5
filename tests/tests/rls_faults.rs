//! The table of faults in docs/testing.md is true: each has a row, and each test that a row names is there.

use std::path::Path;

use anyhow::{Context, Result};

const FAULTS: usize = 21;
const PITFALLS: usize = 14;

/// Everything that says `fn `, in all Rust files below.
fn functions(folder: &Path, found: &mut Vec<String>) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && !name.starts_with('.') && name != "target" && name != "node_modules" {
            functions(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path)?;
            let names = text.lines().filter_map(|line| line.trim_start().split_once("fn ")?.1.split_once('('));
            found.extend(names.map(|(name, _)| name.to_owned()));
        }
    }
    Ok(())
}

/// Tests that a line names: words in backquotes with two underscores or more, without what `…` stands for.
fn named(line: &str) -> Vec<&str> {
    let quoted = line.split('`').skip(1).step_by(2);
    quoted.filter(|word| word.matches('_').count() > 1 && !word.contains("::")).collect()
}

#[test]
fn each_fault_of_others_has_a_test_that_is_there() -> Result<()> {
    let root = &aura_testkit::repository_root();
    let text = std::fs::read_to_string(root.join("docs/testing.md"))?;
    let section =
        text.split("\n## ").find(|section| section.starts_with("Row-level security\n")).context("its section")?;
    let mut functions_found = Vec::new();
    functions(root, &mut functions_found)?;
    let is_there = |test: &str| match test.strip_suffix('…') {
        Some(start) => functions_found.iter().any(|name| name.starts_with(start)),
        None => functions_found.iter().any(|name| name == test),
    };
    let missing: Vec<_> = section.lines().flat_map(named).filter(|test| !is_there(test)).collect();
    assert!(missing.is_empty(), "no such tests: {missing:?}");
    let numbered = |line: &&str| line.split('|').nth(1).is_some_and(|cell| cell.trim().parse::<usize>().is_ok());
    let rows: Vec<_> = section.lines().filter(numbered).collect();
    let numbers: Vec<usize> = rows.iter().filter_map(|row| row.split('|').nth(1)?.trim().parse().ok()).collect();
    assert_eq!(numbers, (1..=FAULTS).chain(1..=PITFALLS).collect::<Vec<_>>());
    for row in rows {
        assert!(!named(row).is_empty(), "no test: {row}");
    }
    Ok(())
}
