use async_trait::async_trait;
use aura_domain::{Claims, ProjectId, SourceId, Target};

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
    /// From when the token is refused whatever its `exp`, seconds since 1970: its key or the secret behind it is being
    /// replaced.
    pub ends: Option<i64>,
    /// The API key that it is.
    pub key: Option<uuid::Uuid>,
}

impl Identity {
    /// Whether it is one of those whose sockets are to be closed.
    pub(crate) fn is(&self, target: &Target) -> bool {
        #[derive(serde::Deserialize)]
        struct Subject {
            sub: Option<String>,
        }
        match target {
            Target::KeyId(key) => self.key == Some(*key),
            Target::Subject(subject) => serde_json::from_str::<Subject>(self.claims.as_json())
                .is_ok_and(|claims| claims.sub.as_ref() == Some(subject)),
        }
    }

    /// Whether what stood behind the token is gone.
    pub(crate) fn has_ended(&self, now: i64) -> bool {
        self.ends.is_some_and(|ends| ends <= now)
    }

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
    /// The role is none of the project's (R-RLS-8).
    #[error("The role of the token is not a role of this project")]
    Role,
    /// The project's JWKS could not be read yet.
    #[error("The project's key set can't be read now")]
    KeySet,
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
            Self::Missing | Self::Expired { .. } | Self::MissingClaims | Self::Role => "InvalidJWTToken",
            Self::Malformed => "MalformedJWT",
            Self::Signature => "JwtSignatureError",
            Self::UnknownProject => "TenantNotFound",
            Self::Unavailable | Self::KeySet => "UnableToConnectToProject",
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

    /// Whether the token is no good, whenever one looks: not a matter of time, nor of somebody who doesn't answer.
    pub(crate) fn is_final(&self) -> bool {
        !matches!(self, Self::Unavailable | Self::KeySet | Self::Expired { .. })
    }

    /// HTTP status at connect.
    pub fn status(&self) -> http::StatusCode {
        match self {
            Self::UnknownProject => http::StatusCode::NOT_FOUND,
            Self::Unavailable | Self::KeySet => http::StatusCode::INTERNAL_SERVER_ERROR,
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

    /// Calls `changed` whenever a project may accept other tokens than before (`None` = any project may), until dropped.
    async fn watch(&self, changed: &(dyn Fn(Option<ProjectId>) + Send + Sync)) {
        let _ = changed;
        std::future::pending::<()>().await;
    }
}
