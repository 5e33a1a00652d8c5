use std::{path::PathBuf, time::Duration};

use super::ShutdownOptions;

/// What the process needs after the drain's deadline: the runtime's end and the watchdog.
const AFTER_THE_DRAIN: Duration = Duration::from_secs(2);
/// Before the orchestrator kills.
const MARGIN: Duration = Duration::from_secs(1);

/// How a binary shuts down.
#[derive(Debug, Clone, clap::Args)]
pub struct ShutdownArgs {
    /// From the first signal to the end of the drain, in seconds, with or without s; keep it below the pod's grace period.
    #[arg(long, env = "CDC_DRAIN_TIMEOUT", default_value = "25s", value_parser = seconds, value_name = "SECONDS")]
    pub drain_timeout: Duration,
    /// Tells endings apart by exit codes 3, 4 and 5 that else are 0 or 1.
    #[arg(long, env = "AURA_STRICT_EXIT_CODES", action = clap::ArgAction::Set, default_value_t = false, num_args = 0..=1,
        default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new(), value_name = "BOOL")]
    pub strict_exit_codes: bool,
    /// Takes the reason of a failed end, for the orchestrator; without it /dev/termination-log if that exists.
    #[arg(long, env = "AURA_TERMINATION_LOG", value_name = "FILE")]
    pub termination_log: Option<PathBuf>,
    /// When the orchestrator kills, in seconds from the first signal: only to warn of a drain that is longer.
    #[arg(long, env = "TERMINATION_GRACE_PERIOD_SECONDS", value_parser = seconds, value_name = "SECONDS")]
    pub termination_grace_period: Option<Duration>,
    /// What a preStop hook takes of the grace period, in seconds.
    #[arg(long, env = "PRE_STOP_SECONDS", default_value = "0", value_parser = seconds, value_name = "SECONDS")]
    pub pre_stop: Duration,
}

impl Default for ShutdownArgs {
    /// The options' defaults, whatever the environment says.
    fn default() -> Self {
        Self {
            drain_timeout: Duration::from_secs(25),
            strict_exit_codes: false,
            termination_log: None,
            termination_grace_period: None,
            pre_stop: Duration::ZERO,
        }
    }
}

impl ShutdownArgs {
    /// What the process would not survive (R-SD-1), in words for the operator.
    pub fn warning(&self) -> Option<String> {
        let grace = self.termination_grace_period?;
        let needed = self.pre_stop + self.drain_timeout + AFTER_THE_DRAIN + MARGIN;
        (needed > grace).then(|| {
            format!(
                "a drain may be killed before its end: CDC_DRAIN_TIMEOUT {} s + 3 s + PRE_STOP_SECONDS {} s is more \
                 than TERMINATION_GRACE_PERIOD_SECONDS {} s",
                self.drain_timeout.as_secs(),
                self.pre_stop.as_secs(),
                grace.as_secs()
            )
        })
    }

    /// For a process of its own: with signals and watchdog.
    pub(crate) fn options(&self) -> ShutdownOptions {
        ShutdownOptions {
            drain_timeout: self.drain_timeout,
            handle_signals: true,
            watchdog: true,
            termination_log: self.termination_log.clone(),
            strict_exit_codes: self.strict_exit_codes,
        }
    }
}

/// `25s`, `25`.
fn seconds(text: &str) -> Result<Duration, String> {
    let digits = text.strip_suffix('s').unwrap_or(text);
    digits.parse().map(Duration::from_secs).map_err(|_| "a number of seconds".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_sd_1_a_drain_longer_than_the_grace_period_is_warned_of() {
        let args = |grace, pre_stop| ShutdownArgs {
            termination_grace_period: Some(Duration::from_secs(grace)),
            pre_stop: Duration::from_secs(pre_stop),
            ..ShutdownArgs::default()
        };
        assert_eq!(args(30, 2).warning(), None);
        let warning = args(30, 3).warning().expect("too long");
        assert!(warning.contains("TERMINATION_GRACE_PERIOD_SECONDS 30 s"), "{warning}");
        assert_eq!(ShutdownArgs::default().warning(), None, "nobody said when it kills");
    }

    #[test]
    fn times_have_units_or_none() {
        assert_eq!(seconds("25s"), Ok(Duration::from_secs(25)));
        assert_eq!(seconds("0"), Ok(Duration::ZERO));
        assert!(seconds("25m").is_err());
    }
}
