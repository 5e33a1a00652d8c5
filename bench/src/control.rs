//! The control plane at the size of a hosting company: what a toggle costs beside what PostgreSQL needs for its SQL, what a list
//! costs, and what the worker makes of a hundred thousand registrations.

mod client;
mod fill;
mod statements;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use system_tests::{Project, Split, SplitOptions};
use tokio::task::JoinSet;

use self::client::Client;
use crate::summary;

/// Of requests, and of pgbench.
const CLIENTS: usize = 16;
/// What a project may toggle in a minute.
const TABLES_EACH: usize = 50;

/// Size of the figure.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub(crate) struct Options {
    /// Projects that are registered before anything is measured.
    #[arg(long, default_value_t = 10_000)]
    projects: usize,
    /// Enabled tables of each.
    #[arg(long, default_value_t = 10)]
    tables: usize,
    /// Toggles that are measured, each of a table of its own.
    #[arg(long, default_value_t = 500)]
    toggles: usize,
}

/// See the module.
pub(crate) async fn run(options: &Options) -> Result<Value> {
    let split = Split::start_with(SplitOptions::default()).await?;
    let before = memory(&split)?;
    let began = Instant::now();
    fill::fill(&split, options.projects, options.tables).await?;
    let filled = began.elapsed();
    let mut projects = Vec::new();
    for n in 0..options.toggles.div_ceil(TABLES_EACH) {
        projects.push(tenant(&split, n).await?);
    }
    let worker = Arc::new(Watched::default());
    let puts = toggles(&split, &projects, options.toggles, &worker).await?;
    let lists = lists(&split, &projects[0], options.toggles).await?;
    let postgres = statements::run(&split, &projects[0], CLIENTS).await?;
    let per_second = puts["per_second"].as_f64().context("a rate")?;
    Ok(json!({
        "figure": "control_plane",
        "projects": options.projects, "tables": options.projects * options.tables, "filled_in_seconds": filled.as_secs(),
        "put": puts, "list": lists, "same_sql_per_second": postgres, "put_to_same_sql": per_second / postgres,
        "worker": {
            "filter_rebuild_ms": worker.milliseconds(&worker.rebuild), "registry_load_ms": worker.milliseconds(&worker.load),
            "memory_mb": memory(&split)? >> 20, "memory_before_mb": before >> 20,
        },
    }))
}

/// The longest that a worker's metrics have said, in microseconds.
#[derive(Debug, Default)]
struct Watched {
    rebuild: AtomicUsize,
    load: AtomicUsize,
}

impl Watched {
    async fn look(&self, split: &Split) -> Result<()> {
        for (name, most) in [("cdc_filter_rebuild_seconds", &self.rebuild), ("cdc_registry_load_seconds", &self.load)] {
            let seconds = split.worker.metric(name).await?.unwrap_or_default();
            most.fetch_max(usize::try_from(Duration::from_secs_f64(seconds).as_micros())?, Ordering::Relaxed);
        }
        Ok(())
    }

    fn milliseconds(&self, most: &AtomicUsize) -> f64 {
        most.load(Ordering::Relaxed) as f64 / 1000.0
    }
}

fn memory(split: &Split) -> Result<u64> {
    system_tests::peak(split.worker.process.pid())
}

/// A project whose tables are there and off.
async fn tenant(split: &Split, n: usize) -> Result<Project> {
    let project = split.project(&format!("measured {n}")).await?;
    let tables: Vec<_> =
        (0..TABLES_EACH).map(|t| format!("create table t{t} (id bigint primary key, body text)")).collect();
    project.sql().await?.batch_execute(&tables.join(";")).await?;
    Ok(project)
}

/// Every table once, by some clients at a time, each answer waited for.
async fn toggles(split: &Split, projects: &[Project], count: usize, worker: &Watched) -> Result<Value> {
    let paths = (0..count).map(|n| {
        let project = &projects[n % projects.len()];
        let url = project.toggle_url(&format!("t{}", n / projects.len()));
        (url.trim_start_matches(&split.api_url).to_owned(), project.service_key.clone())
    });
    let work: Arc<Vec<_>> = Arc::new(paths.collect());
    let (next, port, mut clients) = (Arc::new(AtomicUsize::new(0)), split.api_port, JoinSet::new());
    let began = Instant::now();
    for _ in 0..CLIENTS {
        let (work, next) = (Arc::clone(&work), Arc::clone(&next));
        clients.spawn(async move {
            let (mut client, mut took) = (Client::connect(port).await?, Vec::new());
            while let Some((path, key)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                let began = Instant::now();
                let (status, body) = client.request("PUT", path, key, Some("{\"enabled\":true}")).await?;
                ensure!(status == 200, "{status} {body}");
                took.push(began.elapsed().as_secs_f64() * 1000.0);
            }
            anyhow::Ok(took)
        });
    }
    let mut took = Vec::new();
    while !clients.is_empty() {
        tokio::select! {
            done = clients.join_next() => took.extend(done.context("a client")???),
            () = tokio::time::sleep(Duration::from_millis(100)) => worker.look(split).await?,
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    Ok(json!({"clients": CLIENTS, "per_second": (count as f64 / seconds * 10.0).round() / 10.0, "took": summary(took)}))
}

/// A project's tables, and a page of all projects, one after the other.
async fn lists(split: &Split, project: &Project, count: usize) -> Result<Value> {
    let mut client = Client::connect(split.api_port).await?;
    let platform = split.platform_key().await?;
    let tables = format!("/v1/db/{}/schema/tables", project.id);
    let mut figures = Vec::new();
    for (path, key) in [(tables.as_str(), project.service_key.as_str()), ("/v1/projects?limit=100", platform)] {
        let mut took = Vec::new();
        for _ in 0..count {
            let began = Instant::now();
            let (status, body) = client.request("GET", path, key, None).await?;
            ensure!(status == 200, "{status} {body}");
            took.push(began.elapsed().as_secs_f64() * 1000.0);
        }
        figures.push(summary(took));
    }
    Ok(json!({"tables_of_a_project": figures[0], "projects": figures[1]}))
}
