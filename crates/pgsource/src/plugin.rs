use std::{fmt, str::FromStr};

/// Output plugin of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Plugin {
    /// wal2json, format 2.
    Wal2json,
    /// pgoutput, protocol 1; comes with the server.
    PgOutput,
}

/// A text that names no known plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an output plugin: wal2json or pgoutput")]
pub struct ParsePluginError;

impl Plugin {
    /// Name of its library, as `pg_replication_slots.plugin` says it.
    pub fn library(self) -> &'static str {
        match self {
            Self::Wal2json => "wal2json",
            Self::PgOutput => "pgoutput",
        }
    }
}

impl fmt::Display for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.library())
    }
}

impl FromStr for Plugin {
    type Err = ParsePluginError;

    fn from_str(text: &str) -> Result<Self, ParsePluginError> {
        [Self::Wal2json, Self::PgOutput].into_iter().find(|plugin| plugin.library() == text).ok_or(ParsePluginError)
    }
}
