use anyhow::{Context, Result};
use secrecy::{ExposeSecret, SecretString};

/// Brings the platform database's schema up to date, under an advisory lock.
#[derive(Debug, clap::Args)]
pub(crate) struct MigrateOptions {
    /// The platform database, `postgres://…`.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    database_url: SecretString,
}

pub(crate) async fn run(options: MigrateOptions) -> Result<()> {
    let applied = aura_store::migrate(options.database_url.expose_secret()).await.context("the migration failed")?;
    for name in &applied {
        tracing::info!(migration = name, "applied");
    }
    println(&format!("{} applied, the platform database is up to date", applied.len()));
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the command's answer")]
fn println(text: &str) {
    println!("{text}");
}
