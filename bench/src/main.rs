//! `make bench`: how far the product is from what PostgreSQL itself can do, measured in one run on one machine.
//!
//! Prints one JSON object per figure; `docs/benchmarks.md` holds recorded runs.

mod control;
mod latency;
mod lifecycle;
mod peer;
mod throughput;
mod visibility;

use anyhow::Result;
use clap::Parser;
use serde_json::json;

/// Figures of the product, next to `pg_recvlogical` where that can do the same.
#[derive(Debug, Parser)]
struct Options {
    /// Only these; by default all but those of visibility and the control plane.
    #[arg(value_enum)]
    figures: Vec<Figure>,
    /// Single-row transactions of the throughput figure.
    #[arg(long, default_value_t = 200_000)]
    rows: u32,
    /// Rounds of the throughput and of the lifecycle figures; in each, everybody runs once.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Changes of the latency figure.
    #[arg(long, default_value_t = 2_000)]
    changes: u32,
    /// Changes per second of the latency figure.
    #[arg(long, default_value_t = 100)]
    rate: u32,
    #[command(flatten)]
    visibility: visibility::Options,
    #[command(flatten)]
    control: control::Options,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Figure {
    /// Commit to socket.
    Latency,
    /// Rows per second.
    Throughput,
    /// Stops, drains and take-overs.
    Lifecycle,
    /// What a check costs, called directly.
    VisibilityCheck,
    /// What the whole worker makes of it.
    VisibilityEngine,
    /// What others notice of identities that fail.
    Isolation,
    /// Toggles and lists with many projects.
    Control,
}

#[tokio::main]
async fn main() -> Result<()> {
    let options = Options::parse();
    let wanted = |figure| options.figures.is_empty() || options.figures.contains(&figure);
    show(&json!({"machine": machine()}));
    if wanted(Figure::Latency) {
        show(&latency::run(options.changes, options.rate).await?);
    }
    if wanted(Figure::Throughput) {
        show(&throughput::run(options.rows, options.rounds).await?);
    }
    if wanted(Figure::Lifecycle) {
        lifecycle::run(options.rounds).await?.iter().for_each(show);
    }
    let asked = |figure| options.figures.contains(&figure);
    if asked(Figure::VisibilityCheck) {
        visibility::check::run(&options.visibility).await?;
    }
    if asked(Figure::VisibilityEngine) {
        visibility::engine::run(&options.visibility).await?;
    }
    if asked(Figure::Control) {
        show(&control::run(&options.control).await?);
    }
    if asked(Figure::Isolation) {
        show(&visibility::isolation::run(&options.visibility).await?);
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the figures are the output")]
fn show(figure: &serde_json::Value) {
    println!("{figure}");
}

fn machine() -> serde_json::Value {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let model = read("/proc/cpuinfo").lines().find_map(|line| line.strip_prefix("model name").map(str::to_owned));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let load = read("/proc/loadavg").split(' ').next().unwrap_or_default().to_owned();
    json!({"cpu": model.unwrap_or_default().trim_start_matches([':', ' ', '\t']), "cores": cores, "load": load})
}

/// Median, 99th percentile and largest of milliseconds.
fn summary(mut values: Vec<f64>) -> serde_json::Value {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let last = values.len().saturating_sub(1);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index below the length")]
        let index = (share * last as f64).round() as usize;
        values.get(index).copied().unwrap_or(f64::NAN)
    };
    let round = |value: f64| (value * 1000.0).round() / 1000.0;
    json!({"p50_ms": round(at(0.5)), "p99_ms": round(at(0.99)), "max_ms": round(at(1.0)), "samples": values.len()})
}
