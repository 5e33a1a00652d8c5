use std::path::PathBuf;

use aura_store::Plugin;
use secrecy::SecretString;

/// Everything in one process for development: an embedded PostgreSQL, an in-process bus and a demo project.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct DevOptions {
    /// Where the database and the keys are kept between runs. Safe to delete, but for --database-url: it has the
    /// key to the secrets there.
    #[arg(long, value_name = "DIR", default_value = "./.aura")]
    pub(crate) data_dir: PathBuf,
    /// The one port that serves everything, on loopback.
    #[arg(long, default_value_t = 54321, value_parser = clap::value_parser!(u16).range(1..=65534))]
    pub(crate) port: u16,
    /// Folder of PostgreSQL's server programs.
    #[arg(long, value_name = "DIR", conflicts_with = "database_url")]
    pub(crate) pg_bin: Option<PathBuf>,
    /// Use this database instead of an embedded one; its user must be a superuser, and wal_level logical.
    #[arg(long, value_name = "URL")]
    pub(crate) database_url: Option<SecretString>,
    /// Use NATS instead of the in-process bus.
    #[arg(long, value_name = "URL")]
    pub(crate) nats_url: Option<SecretString>,
    /// Output plugin: auto is wal2json if the server has it, else pgoutput.
    #[arg(long, env = "CDC_PLUGIN", value_enum, default_value = "auto")]
    pub(crate) plugin: PluginChoice,
    /// Without the demo project.
    #[arg(long)]
    pub(crate) no_demo: bool,
    /// Start, insert a row, receive it through the socket, stop: exit code 0 if that took at most 15 s.
    #[arg(long, conflicts_with = "no_demo")]
    pub(crate) once: bool,
    /// Print one JSON object per line.
    #[arg(long)]
    pub(crate) json: bool,
}

/// See [`Plugin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "lower")]
pub(crate) enum PluginChoice {
    Auto,
    Wal2json,
    PgOutput,
}

impl From<PluginChoice> for Plugin {
    fn from(choice: PluginChoice) -> Self {
        match choice {
            PluginChoice::Auto => Self::Auto,
            PluginChoice::Wal2json => Self::Wal2json,
            PluginChoice::PgOutput => Self::PgOutput,
        }
    }
}
