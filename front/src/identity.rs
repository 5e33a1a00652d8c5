use async_trait::async_trait;
use aura_domain::{Claims, ProjectId, SourceId};

/// Who a verified token stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Tenant.
    pub project: ProjectId,
    /// Source that serves the tenant now.
    pub source: SourceId,
    /// Role word of the token.
    pub role: String,
    /// Claims as policies see them.
    pub claims: Claims,
    /// `exp`, seconds since 1970.
    pub expires: i64,
    /// It receives and sends nothing.
    pub read_only: bool,
}

impl Identity {
    /// Whether policies see the same person: a refreshed token changes only its expiry.
    pub fn sees_as(&self, other: &Self) -> bool {
        self.project == other.project && self.role == other.role && self.claims == other.claims
    }
}

/// Why a token isn't accepted; the texts are the original's for a channel (supabase-wire.md §1.8, §2.3).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// No key at all.
    #[error("API key is missing")]
    Missing,
    /// `exp` has passed.
    #[error("Token has expired {seconds} seconds ago")]
    Expired {
        /// Since when, in seconds.
        seconds: i64,
    },
    /// `role` or `exp` is absent.
    #[error("Fields `role` and `exp` are required in JWT")]
    MissingClaims,
    /// Not a JWT, or claims that PostgreSQL can't take.
    #[error("The token provided is not a valid JWT")]
    Malformed,
    /// Not signed by the project, or not a key that is good for this.
    #[error("Failed to validate JWT signature")]
    Signature,
    /// No such project, or the token doesn't say which.
    #[error("Tenant with the given ID does not exist")]
    UnknownProject,
    /// The platform database doesn't answer.
    #[error("Realtime was unable to connect to the project database")]
    Unavailable,
}

impl TokenError {
    /// Code that a join's error reply puts before the text.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Missing | Self::Expired { .. } | Self::MissingClaims => "InvalidJWTToken",
            Self::Malformed => "MalformedJWT",
            Self::Signature => "JwtSignatureError",
            Self::UnknownProject => "TenantNotFound",
            Self::Unavailable => "UnableToConnectToProject",
        }
    }

    /// What a refused connect says: where there is no channel yet, the original has other words (supabase-wire.md §1.3).
    pub fn at_connect(&self) -> String {
        match self {
            Self::Expired { .. } => "Token has expired".to_owned(),
            Self::UnknownProject => "Tenant not found".to_owned(),
            Self::Unavailable => "Error connecting to Realtime".to_owned(),
            other => other.to_string(),
        }
    }

    /// HTTP status at connect.
    pub fn status(&self) -> http::StatusCode {
        match self {
            Self::UnknownProject => http::StatusCode::NOT_FOUND,
            Self::Unavailable => http::StatusCode::INTERNAL_SERVER_ERROR,
            _ => http::StatusCode::UNAUTHORIZED,
        }
    }
}

/// Turns tokens into identities. A trait at the edge, so that the front can be tested without a platform database.
#[async_trait]
pub trait Authenticator: Send + Sync + 'static {
    /// A key as given at connect: its `ref` names the project.
    async fn connect(&self, token: &str) -> Result<Identity, TokenError>;

    /// A token for a channel of this project; it needs no `ref`, and one of another project is refused.
    async fn channel(&self, project: ProjectId, token: &str) -> Result<Identity, TokenError>;
}
