use std::{fmt, io, time::Duration};

use postgres_protocol::message::backend::ErrorResponseBody;
use tokio_postgres::error::{Severity, SqlState};

/// The step of [`SourceError::Timeout`] in which no statement is under way yet.
pub(crate) const CONNECTING: &str = "connecting";

/// What went wrong with a source database. The texts never hold a DSN, a key or a row's values.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The connection URL can't be used; the text names the part, never its value.
    #[error("source URL: {0}")]
    Url(&'static str),
    /// A step of the connection took longer than it may.
    #[error("{what} took longer than {limit:?}")]
    Timeout {
        /// The step.
        what: &'static str,
        /// Its limit.
        limit: Duration,
    },
    /// All connections that a project may have were in use for too long. Nobody's fault: to be tried again.
    #[error("no visibility connection was free for {limit:?}")]
    Busy {
        /// How long.
        limit: Duration,
    },
    /// The socket failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The server closed the connection without a word.
    #[error("the server closed the connection")]
    Closed,
    /// [`Sockets::shutdown_all`](crate::Sockets::shutdown_all) was called: nothing is opened any more.
    #[error("the engine's sockets were shut")]
    Shut,
    /// TLS was asked for and can't be had.
    #[error("TLS: {0}")]
    Tls(String),
    /// The server wants an authentication method that this client doesn't have, or did it wrong.
    #[error("authentication: {0}")]
    Auth(&'static str),
    /// The server said something that the protocol doesn't allow here.
    #[error("protocol: {0}")]
    Protocol(&'static str),
    /// An error response on a replication connection.
    #[error("{0}")]
    Server(ServerError),
    /// An error of an SQL connection. Its message may quote a row's values, so only the code is shown.
    #[error("{}", describe(.0))]
    Sql(tokio_postgres::Error),
}

/// An error response of a replication connection: there, messages name slots, options and tables, not row values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerError {
    /// FATAL or PANIC: the session is gone.
    pub fatal: bool,
    /// The SQLSTATE.
    pub code: SqlState,
    /// The primary message, in the server's language.
    pub message: String,
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = if self.fatal { "FATAL" } else { "ERROR" };
        write!(f, "{severity} {}: {}", self.code.code(), self.message)
    }
}

impl SourceError {
    /// The SQLSTATE, when the server sent one.
    pub fn sqlstate(&self) -> Option<&SqlState> {
        match self {
            Self::Server(error) => Some(&error.code),
            Self::Sql(error) => error.code(),
            _ => None,
        }
    }

    /// Whether the connection is gone: a broken socket or severity FATAL. An ERROR never is one, whatever its
    /// SQLSTATE says, since a policy may RAISE any (R-RLS-6).
    pub fn is_connection_error(&self) -> bool {
        match self {
            Self::Timeout { .. } | Self::Io { .. } | Self::Closed | Self::Shut => true,
            Self::Server(error) => error.fatal,
            Self::Sql(error) => sql_connection_is_gone(error),
            Self::Busy { .. } | Self::Url(_) | Self::Tls(_) | Self::Auth(_) | Self::Protocol(_) => false,
        }
    }

    /// Whether the server can't be reached: a connection broke or could not be made. A statement that takes too long,
    /// since somebody holds a lock, says nothing about that.
    pub fn is_unreachable(&self) -> bool {
        match self {
            Self::Timeout { what, .. } => *what == CONNECTING,
            Self::Shut => false,
            _ => self.is_connection_error(),
        }
    }

    /// Of creating a slot or starting its stream: the server doesn't have the plugin's library (58P01), or has it and
    /// doesn't allow it (42501). PostgreSQL 15.20 was seen to refuse, to superusers too, every library that is not in
    /// its setting `output_plugin_libraries` (default `pgoutput, test_decoding`). A role that may not replicate at all
    /// fails before, when it connects.
    pub fn is_plugin_unavailable(&self) -> bool {
        let Self::Server(error) = self else { return false };
        !error.fatal && [SqlState::UNDEFINED_FILE, SqlState::INSUFFICIENT_PRIVILEGE].contains(&error.code)
    }

    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }

    pub(crate) fn response(body: &ErrorResponseBody) -> Self {
        match ServerError::parse(body) {
            Ok(error) => Self::Server(error),
            Err(_) => Self::Protocol("an error response that can't be read"),
        }
    }
}

impl From<tokio_postgres::Error> for SourceError {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Sql(error)
    }
}

impl ServerError {
    fn parse(body: &ErrorResponseBody) -> io::Result<Self> {
        use fallible_iterator::FallibleIterator;
        let mut error = Self { fatal: false, code: SqlState::INTERNAL_ERROR, message: String::new() };
        let mut fields = body.fields();
        while let Some(field) = fields.next()? {
            let text = String::from_utf8_lossy(field.value_bytes());
            match field.type_() {
                // The severity that is not translated (since 9.6).
                b'V' => error.fatal = matches!(&*text, "FATAL" | "PANIC"),
                b'C' => error.code = SqlState::from_code(&text),
                b'M' => error.message = text.into_owned(),
                _ => {}
            }
        }
        Ok(error)
    }
}

fn sql_connection_is_gone(error: &tokio_postgres::Error) -> bool {
    use std::error::Error;
    if let Some(db) = error.as_db_error() {
        return matches!(db.parsed_severity(), Some(Severity::Fatal | Severity::Panic));
    }
    error.is_closed() || error.source().is_some_and(|source| source.is::<io::Error>())
}

fn describe(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(db) => format!("{} {}", db.severity(), db.code().code()),
        None => error.to_string(),
    }
}
