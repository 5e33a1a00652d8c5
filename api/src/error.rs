//! Errors of the layers below as problems. The one place that decides what a client learns.

use aura_auth::{AuthError, MintError};
use aura_kit::{Code, Problem};
use aura_pgsource::SourceError;
use aura_store::StoreError;
use axum::response::{IntoResponse, Response};

/// Result of handlers and of what they call.
pub(crate) type Result<T> = std::result::Result<T, ApiError>;

/// An error on its way to the client.
#[derive(Debug, Clone)]
pub(crate) struct ApiError(Problem);

impl ApiError {
    pub(crate) fn new(code: Code, detail: impl Into<String>) -> Self {
        Self(Problem::new(code, detail))
    }

    /// The same words whatever the reason, so that nobody learns which projects exist.
    pub(crate) fn project_not_found() -> Self {
        Self::new(Code::ProjectNotFound, "No project that this key reaches has that id.")
    }

    pub(crate) fn source_not_found() -> Self {
        Self::new(Code::SourceNotFound, "No source has that id or name.")
    }

    /// A number that the client sent is out of its range, or the like.
    pub(crate) fn invalid_parameter(detail: impl Into<String>) -> Self {
        Self::new(Code::InvalidParameter, detail)
    }

    pub(crate) fn code(&self) -> Code {
        self.0.code()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.0.into_response()
    }
}

impl From<Problem> for ApiError {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl From<AuthError> for ApiError {
    fn from(error: AuthError) -> Self {
        let code = match error {
            AuthError::Missing => Code::MissingCredentials,
            AuthError::Expired => Code::TokenExpired,
            AuthError::Revoked => Code::KeyRevoked,
            AuthError::KeySetUnavailable => Code::KeySetUnavailable,
            _ => Code::InvalidToken,
        };
        Self::new(code, sentence(&error.to_string()))
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        match &error {
            StoreError::Unreachable(_) | StoreError::Timeout(_) => {
                tracing::warn!(%error, "platform database");
                Self(Problem::new(Code::PlatformUnavailable, "Try again in a moment.").retry_after(1))
            }
            StoreError::NotMigrated => Self::new(Code::PlatformUnavailable, sentence(&error.to_string())),
            StoreError::Taken("schema name") => {
                Self::new(Code::SchemaTaken, "Another project of this source has that schema.")
            }
            StoreError::Taken("project name") => Self::new(Code::ProjectExists, "Choose another name."),
            StoreError::Taken("source name") => Self::new(Code::SourceExists, "Choose another name."),
            StoreError::NotFound("source") => Self::source_not_found(),
            StoreError::NotFound("project") => Self::project_not_found(),
            _ => Self(Problem::internal(&error)),
        }
    }
}

impl From<SourceError> for ApiError {
    fn from(error: SourceError) -> Self {
        match &error {
            SourceError::Timeout { .. } => {
                tracing::warn!(%error, "source");
                Self(Problem::new(Code::SourceSlow, "The source database took too long.").retry_after(1))
            }
            error if error.is_connection_error() => {
                tracing::warn!(%error, "source");
                Self(Problem::new(Code::SourceUnreachable, "No connection to the source database.").retry_after(1))
            }
            error => match error.sqlstate().map(|state| state.code()) {
                Some("42501") => Self(privilege_missing()),
                state => {
                    tracing::warn!(%error, "source");
                    let problem = Problem::new(Code::SourceError, "The log has more under this request id.");
                    Self(match state {
                        Some(state) => problem.with("sqlstate", state),
                        None => problem,
                    })
                }
            },
        }
    }
}

impl From<MintError> for ApiError {
    fn from(error: MintError) -> Self {
        Self(Problem::internal(&error))
    }
}

fn privilege_missing() -> Problem {
    Problem::new(
        Code::SourcePrivilegeMissing,
        "The source's admin role may not do that; run preflight for the details.",
    )
}

/// Library errors are lower-case phrases, details are sentences.
fn sentence(phrase: &str) -> String {
    let mut letters = phrase.chars();
    let first = letters.next().map(|letter| letter.to_ascii_uppercase());
    format!("{}{}.", first.map(String::from).unwrap_or_default(), letters.as_str())
}
