//! The API's document is one that other programs can use: linters accept it, clients made from it work, and the running
//! program answers as it says.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use aura_testkit::{ProcessOptions, repository_root};
use serde_json::Value;
use system_tests::{Dev, Directory, Project};

/// Making or compiling a client, on a busy machine.
const TOOL: Duration = Duration::from_secs(120);

fn document() -> String {
    repository_root().join("openapi/api.v1.json").to_string_lossy().into_owned()
}

fn folder() -> PathBuf {
    repository_root().join("tests/contract")
}

/// A program of `tests/contract/requirements.txt`.
fn python_tool(name: &str) -> ProcessOptions {
    let programs = repository_root().join(".cache/contract/bin");
    let path = format!("{}:{}", programs.to_string_lossy(), std::env::var("PATH").unwrap_or_default());
    ProcessOptions::new(programs.join(name)).env("PATH", path)
}

/// A program of `tests/contract/package.json`.
fn node_tool(name: &str) -> ProcessOptions {
    ProcessOptions::new(folder().join("node_modules/.bin").join(name))
}

#[tokio::test]
async fn the_document_is_accepted_by_redocly_and_the_validator() -> Result<()> {
    let rules = folder().join("redocly.yaml");
    let lint = node_tool("redocly").args(["lint", "--config", &rules.to_string_lossy(), &document()]);
    lint.env("REDOCLY_TELEMETRY", "off").start()?.succeeds(TOOL).await?;
    python_tool("openapi-spec-validator").arg(document()).start()?.succeeds(TOOL).await?;
    Ok(())
}

/// What a sample said: the table's state, and the code of a refusal.
fn assert_toggled(lines: &[String]) -> Result<()> {
    let [state, code] = lines else { anyhow::bail!("{lines:?}") };
    let state: Value = serde_json::from_str(state)?;
    assert_eq!((&state["status"], &state["enabled"]), (&"active".into(), &true.into()), "{state}");
    assert_eq!(code, "table_not_found");
    Ok(())
}

async fn table(project: &Project, name: &str) -> Result<[String; 4]> {
    project.sql().await?.batch_execute(&format!("create table {name} (id int primary key)")).await?;
    Ok([project.api_url.clone(), project.service_key.clone(), project.id.clone(), name.to_owned()])
}

#[tokio::test]
async fn clients_made_from_the_document_toggle_a_table() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    let project = dev.demo()?;
    let made = Directory::create()?;
    let directory = made.0.to_string_lossy().into_owned();
    typescript(&directory).await?;
    let arguments = table(&project, "by_typescript").await?;
    let node = ProcessOptions::new("node").arg("toggle.js").args(&arguments).directory(&made.0);
    assert_toggled(&node.start()?.succeeds(TOOL).await?)?;

    let package = format!("{directory}/aura_realtime");
    let make = ["generate", "--path", &document(), "--output-path", &package, "--meta", "none", "--fail-on-warning"];
    python_tool("openapi-python-client").args(make).directory(&made.0).start()?.succeeds(TOOL).await?;
    let arguments = table(&project, "by_python").await?;
    let sample = folder().join("toggle.py").to_string_lossy().into_owned();
    let python = python_tool("python").arg(sample).args(&arguments).env("PYTHONPATH", &directory);
    assert_toggled(&python.start()?.succeeds(TOOL).await?)
}

/// Makes the types and compiles the sample; a path or a member that isn't the document's would not compile.
async fn typescript(directory: &str) -> Result<()> {
    let (types, sample) = (format!("{directory}/schema.d.ts"), format!("{directory}/toggle.ts"));
    node_tool("openapi-typescript").args([&document(), "--output", &types]).start()?.succeeds(TOOL).await?;
    std::os::unix::fs::symlink(folder().join("node_modules"), format!("{directory}/node_modules"))?;
    fs::copy(folder().join("toggle.ts"), &sample)?;
    fs::write(format!("{directory}/package.json"), r#"{"type": "module"}"#)?;
    let options = ["--strict", "--skipLibCheck", "--target", "es2022", "--module", "esnext"];
    let compile = node_tool("tsc").args(options).args(["--moduleResolution", "bundler", &sample]);
    compile.start()?.succeeds(TOOL).await.context("the sample compiles").map(drop)
}

#[tokio::test]
async fn a_go_client_can_be_made_from_the_document() -> Result<()> {
    let made = Directory::create()?;
    let out = made.0.to_string_lossy().into_owned();
    let make = ["generate", "--generator-name", "go", "--input-spec", &document(), "--output", &out];
    python_tool("openapi-generator-cli").args(make).start()?.succeeds(TOOL).await?;
    let tables = fs::read_to_string(made.0.join("api_tables.go"))?;
    assert!(tables.contains("PutTableRealtime("), "{tables}");
    Ok(())
}

/// The same requests each time; what is found is printed with a curl that shows it again.
#[tokio::test]
async fn schemathesis_finds_nothing_in_the_running_program() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    let project = dev.demo()?;
    let platform_key = dev.file()?["platform_key"].as_str().context("platform_key")?.to_owned();
    let made = Directory::create()?;
    let settings = folder().join("schemathesis.toml").to_string_lossy().into_owned();
    let bounds = ["--phases", "examples,coverage,fuzzing", "--max-examples", "5", "--max-time", "30", "--no-shrink"];
    let run = python_tool("schemathesis")
        .args(["--config-file", &settings, "run", &document(), "--url", &project.api_url])
        .args(["--header", &format!("apikey: {platform_key}"), "--checks", "all", "--continue-on-failure"])
        .args(bounds)
        .args(["--request-timeout", "30"])
        .env("AURA_PROJECT", &project.id)
        .env("AURA_SERVICE_KEY", &project.service_key)
        .directory(&made.0);
    run.start()?.succeeds(TOOL).await.map(drop)
}
