//! What production refuses (R-SEC-4, R-SEC-6), and how a configuration that can't work ends.

use anyhow::Result;
use aura_testkit::ProcessOptions;
use system_tests::PATIENCE;

/// Exit code of a bad configuration: a restart is no use.
const BAD_CONFIGURATION: i32 = 2;

/// The three production binaries, and the variable with each one's address.
const BINARIES: [(&str, &str); 3] = [
    ("aura-api", "AURA_API_LISTEN"),
    ("aura-realtime-ws-front", "AURA_FRONT_LISTEN"),
    ("aura-realtime-cdc-worker", "AURA_WORKER_LISTEN"),
];

/// Every part in order, but nothing that runs: whatever is let through fails to connect (exit code 1).
fn fine(binary: &str) -> Result<ProcessOptions> {
    Ok(ProcessOptions::binary(binary)?
        .env("DATABASE_URL", "postgres://nobody@127.0.0.1:1/none")
        .env("NATS_URL", "nats://user:password@127.0.0.1:1")
        .env("AURA_MASTER_KEY", "a master key that is long enough")
        .env("AURA_PLATFORM_JWT_SECRET", "a platform secret, long enough too"))
}

/// Ends with exit code 2 and a line that names `variable`, and repeats nothing secret.
async fn refuses(command: ProcessOptions, variable: &str) -> Result<()> {
    let process = command.start()?;
    let code = process.wait(PATIENCE).await?.code();
    assert_eq!(code, Some(BAD_CONFIGURATION), "{variable}: {:?}", process.lines());
    process.line(PATIENCE, |line| line.starts_with("error: ") && line.contains(variable)).await?;
    assert!(!process.lines().iter().any(|line| line.contains("hunter2")), "{:?}", process.lines());
    Ok(())
}

#[tokio::test]
async fn n_29_production_refuses_each_short_cut_and_says_which() -> Result<()> {
    for (binary, listen) in BINARIES {
        let cases = [
            ("AURA_MASTER_KEY", "aura-development-master-key-do-not-use"),
            ("AURA_MASTER_KEY", "short"),
            ("AURA_PLATFORM_JWT_SECRET", "aura-development-platform-secret-do-not-use"),
            (listen, "0.0.0.0:0"),
            (listen, "[::]:0"),
            ("NATS_URL", "nats://127.0.0.1:4222"),
            ("NATS_URL", "nats://user:hunter2@nats.example:4222"),
            ("NATS_URL", "tls://nats.example:4222"),
        ];
        for (variable, value) in cases {
            // The front takes no platform keys.
            if (binary, variable) != ("aura-realtime-ws-front", "AURA_PLATFORM_JWT_SECRET") {
                refuses(fine(binary)?.env(variable, value), variable).await?;
            }
        }
    }
    let front = fine("aura-realtime-ws-front")?.env("AURA_CORS_CREDENTIALS", "true");
    refuses(front.clone(), "AURA_CORS_CREDENTIALS").await?;
    // What is let through ends as what isn't there.
    let listed = front.env("AURA_ALLOWED_ORIGINS", "https://app.example").start()?;
    assert_eq!(listed.wait(PATIENCE).await?.code(), Some(1), "{:?}", listed.lines());
    Ok(())
}

#[tokio::test]
async fn a_url_that_is_none_is_a_bad_configuration_everywhere() -> Result<()> {
    for (binary, _) in BINARIES {
        refuses(fine(binary)?.env("DATABASE_URL", "mysql://u:hunter2@db"), "DATABASE_URL").await?;
        refuses(fine(binary)?.env("NATS_URL", "http://u:hunter2@nats"), "NATS_URL").await?;
        refuses(fine(binary)?.env("NATS_URL", "memory:"), "NATS_URL").await?;
    }
    let worker = "aura-realtime-cdc-worker";
    refuses(fine(worker)?.env("POSTGRES_REPLICATION_URL", "hunter2"), "POSTGRES_REPLICATION_URL").await?;
    refuses(fine(worker)?.env("POSTGRES_ADMIN_URL", "http://hunter2"), "POSTGRES_ADMIN_URL").await?;
    let serve = fine("aura-realtime")?.arg("serve");
    refuses(serve.clone().env("NATS_URL", "nats://127.0.0.1:4222"), "NATS_URL").await?;
    refuses(serve.env("DATABASE_URL", "nonsense"), "DATABASE_URL").await
}

#[tokio::test]
async fn dev_heeds_the_workers_variables() -> Result<()> {
    let dev = ProcessOptions::binary("aura-realtime")?.arg("dev");
    refuses(dev.clone().env("CDC_SKIP_AFTER", "5m"), "CDC_SKIP_AFTER").await?;
    let process = dev.env("CDC_MEMORY_QUOTA", "lots").start()?;
    assert_eq!(process.wait(PATIENCE).await?.code(), Some(BAD_CONFIGURATION));
    process.line(PATIENCE, |line| line.contains("--memory-quota")).await?;
    Ok(())
}
