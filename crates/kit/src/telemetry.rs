//! Logs to standard error and metrics for Prometheus.

use std::{io::IsTerminal, sync::OnceLock};

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::{EnvFilter, fmt};

/// Bounds of every histogram whose name ends in `_seconds`: from loopback latency (0.15 ms) to the longest drain.
const SECONDS: &[f64] =
    &[0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];

/// Libraries whose finer lines have row values, statements or heads of requests in them: nobody gets those, whatever the filter says.
const QUIET: &[&str] =
    &["tokio_postgres=info", "sqlx=warn", "h2=info", "hyper=info", "tungstenite=info", "async_nats=info"];

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object per line.
    Json,
}

/// Logging.
#[derive(Debug, Clone, clap::Args)]
pub struct TelemetryArgs {
    /// Filter in tracing's syntax, such as `info,aura_worker=debug`. Without it `RUST_LOG` counts, then `info`.
    #[arg(long, env = "AURA_LOG", value_name = "FILTER", global = true)]
    pub log: Option<String>,
    /// Shape of log lines.
    #[arg(long, env = "AURA_LOG_FORMAT", value_enum, default_value = "text", global = true)]
    pub log_format: LogFormat,
}

impl TelemetryArgs {
    /// The filter, or what is wrong with it.
    pub(crate) fn filter(&self) -> Result<EnvFilter, String> {
        let from_env = || std::env::var("RUST_LOG").ok();
        let text = self.log.clone().or_else(from_env).filter(|text| !text.is_empty());
        let text = text.unwrap_or_else(|| "info".to_owned());
        let mut filter = EnvFilter::try_new(&text).map_err(|error| format!("AURA_LOG: {error}"))?;
        for directive in QUIET {
            let directive = directive.parse().map_err(|error| format!("{directive}: {error}"))?;
            filter = filter.add_directive(directive);
        }
        Ok(filter)
    }

    /// Starts logging. A second start in one process (tests) changes nothing.
    pub(crate) fn start(&self, filter: EnvFilter) {
        let colours = std::io::stderr().is_terminal();
        let builder = fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr);
        let started = match self.log_format {
            LogFormat::Text => builder.try_init(),
            LogFormat::Json => builder.json().flatten_event(true).try_init(),
        };
        // Only fails if somebody else did it first.
        drop(started);
    }
}

/// The process's metrics.
#[derive(Debug, Clone)]
pub struct Metrics(PrometheusHandle);

impl Metrics {
    /// Installs the recorder, once per process; later calls return the same.
    ///
    /// # Errors
    /// Another recorder was installed by other means.
    pub fn install() -> Result<Self, BuildError> {
        static INSTALLED: OnceLock<Metrics> = OnceLock::new();
        if let Some(metrics) = INSTALLED.get() {
            return Ok(metrics.clone());
        }
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), SECONDS)?
            .build_recorder();
        // Two callers at once: the second recorder is dropped unused.
        let handle = Self(recorder.handle());
        let mut error = None;
        let metrics = INSTALLED.get_or_init(|| {
            error = metrics::set_global_recorder(recorder).err();
            handle
        });
        match error {
            Some(error) => Err(error.into()),
            None => Ok(metrics.clone()),
        }
    }

    /// Text format 0.0.4. Also does the recorder's upkeep, which else nobody would do.
    pub fn render(&self) -> String {
        self.0.run_upkeep();
        self.0.render()
    }
}
