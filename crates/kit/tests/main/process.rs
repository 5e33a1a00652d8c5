//! The shutdown of real processes.

use std::time::{Duration, Instant};

use anyhow::Result;
use aura_testkit::{Process, ProcessOptions, Signal, eventually, free_port, http_status};

const SOON: Duration = Duration::from_secs(10);

struct Stubborn {
    process: Process,
    port: u16,
}

impl Stubborn {
    /// Starts it and waits until `line` was logged.
    async fn start(habit: &str, drain_seconds: u32, line: &str, more: &[&str]) -> Result<Self> {
        let port = free_port()?;
        let options = ProcessOptions::binary("examples/stubborn")?
            .args([habit, "--listen", &format!("127.0.0.1:{port}"), "--log", "info"])
            .args(["--drain-timeout", &drain_seconds.to_string()])
            .args(more.iter().copied());
        let process = options.start()?;
        process.line(SOON, |said| said.contains(line)).await?;
        Ok(Self { process, port })
    }

    /// Its exit code, and how long after `since` it was gone.
    async fn gone(&self, since: Instant) -> Result<(Option<i32>, Duration)> {
        let status = self.process.wait(SOON).await?;
        Ok((status.code(), since.elapsed()))
    }
}

#[tokio::test]
async fn r_sd_3_an_idle_process_is_gone_in_a_second() -> Result<()> {
    for signal in [Signal::TERM, Signal::INT] {
        let idle = Stubborn::start("idle", 25, "listening", &[]).await?;
        let sent = Instant::now();
        idle.process.signal(signal)?;
        let (code, took) = idle.gone(sent).await?;
        assert!(code == Some(0) && took < Duration::from_secs(1), "{code:?} after {took:?}");
        let lines = idle.process.lines();
        assert_eq!(lines.iter().filter(|line| line.contains("draining until ")).count(), 1, "{lines:#?}");
        assert!(lines.last().is_some_and(|line| line.contains("completed") && line.contains("exit_code=0")));
    }
    Ok(())
}

#[tokio::test]
async fn r_sd_4_a_second_signal_ends_the_drain_and_a_third_the_process() -> Result<()> {
    let hung = Stubborn::start("hangs", 60, "listening", &[]).await?;
    hung.process.signal(Signal::TERM)?;
    hung.process.line(SOON, |line| line.contains("at most 60 s")).await?;
    let sent = Instant::now();
    hung.process.signal(Signal::TERM)?;
    let (code, took) = hung.gone(sent).await?;
    assert!(code == Some(0) && took < Duration::from_millis(1500), "{code:?} after {took:?}");

    for (third, expected) in [(Signal::TERM, 128 + 15), (Signal::INT, 128 + 2)] {
        let blocked = Stubborn::start("blocks", 60, "blocked", &[]).await?;
        blocked.process.signal(Signal::TERM)?;
        blocked.process.line(SOON, |line| line.contains("draining until")).await?;
        blocked.process.signal(Signal::INT)?;
        blocked.process.line(SOON, |line| line.contains("second signal, ")).await?;
        let sent = Instant::now();
        blocked.process.signal(third)?;
        let (code, took) = blocked.gone(sent).await?;
        assert!(code == Some(expected) && took < Duration::from_millis(500), "{code:?} after {took:?}");
    }
    Ok(())
}

#[tokio::test]
async fn invariant_14_a_blocked_runtime_is_ended_by_the_watchdog() -> Result<()> {
    let message = std::env::temp_dir().join(format!("aura-termination-{}", std::process::id()));
    let path = message.to_string_lossy();
    let blocked = Stubborn::start("blocks", 1, "blocked", &["--termination-log", &path]).await?;
    let sent = Instant::now();
    blocked.process.signal(Signal::TERM)?;
    let (code, took) = blocked.gone(sent).await?;
    assert_eq!(code, Some(6), "{:?}", blocked.process.lines());
    // The deadline and 2 s; 0.2 s for the last words, and a busy machine.
    assert!(took >= Duration::from_secs(3) && took < Duration::from_millis(3700), "{took:?}");
    let words = std::fs::read_to_string(&message)?;
    std::fs::remove_file(&message)?;
    assert!(words.starts_with("shutdown: ") && words.contains("watchdog"), "{words}");
    Ok(())
}

#[tokio::test]
async fn readiness_is_off_from_the_trigger_on_and_health_stays() -> Result<()> {
    let hung = Stubborn::start("hangs", 60, "listening", &[]).await?;
    for path in ["/ready", "/health", "/work"] {
        assert_eq!(http_status(hung.port, path).await?, 200, "{path}");
    }
    hung.process.signal(Signal::TERM)?;
    let off = || async { http_status(hung.port, "/ready").await.is_ok_and(|status| status == 503) };
    eventually(Duration::from_millis(100), off).await?;
    assert_eq!(http_status(hung.port, "/health").await?, 200);
    assert_eq!(http_status(hung.port, "/metrics").await?, 200);
    assert_eq!(http_status(hung.port, "/work").await?, 503, "new work is refused");
    Ok(())
}

#[tokio::test]
async fn a_failure_drains_and_names_component_and_reason() -> Result<()> {
    let message = std::env::temp_dir().join(format!("aura-failure-{}", std::process::id()));
    let path = message.to_string_lossy();
    let more = ["--termination-log", &path, "--termination-grace-period", "10", "--pre-stop", "5s"];
    let failing = Stubborn::start("fails", 25, "it is full", &more).await?;
    assert_eq!(failing.process.wait(SOON).await?.code(), Some(1));
    assert_eq!(std::fs::read_to_string(&message)?, "sink: it is full");
    std::fs::remove_file(&message)?;
    let lines = failing.process.lines();
    let last = lines.last().map(String::as_str).unwrap_or_default();
    assert!(last.contains("it is full") && last.contains("component=sink"), "{last}");
    // R-SD-1
    assert!(lines.iter().any(|line| line.contains("TERMINATION_GRACE_PERIOD_SECONDS 10 s")), "{lines:#?}");
    Ok(())
}
