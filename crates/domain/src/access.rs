//! What a project accepts as keys and tokens: read by the platform database's crate, judged by the one that verifies.

use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::ProjectId;

crate::words! {
    /// What an API key may do.
    KeyRole {
        /// Public: row security decides.
        Anon = "anon",
        /// The project's owner.
        ServiceRole = "service_role",
    }
}

/// An API key that isn't revoked: a JWT whose `kid` is this id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveKey {
    /// `kid`.
    pub id: Uuid,
    /// What it was made for.
    pub role: KeyRole,
    /// From when it is refused, seconds since 1970; `None` = not planned.
    pub until: Option<i64>,
}

/// An HS256 secret that signs a project's keys and end users' tokens.
#[derive(Debug, Clone)]
pub struct LiveSecret {
    /// 43 characters when it is one of ours.
    pub secret: SecretString,
    /// From when nothing that it signed is accepted, seconds since 1970; `None` = not planned.
    pub until: Option<i64>,
}

/// What a project accepts.
#[derive(Debug, Clone)]
pub struct AccessRules {
    /// The project.
    pub project: ProjectId,
    /// The present secret first, then those whose overlap isn't over.
    pub secrets: Vec<LiveSecret>,
    /// Its keys that aren't revoked.
    pub keys: Vec<LiveKey>,
    /// `aud` that end users' tokens must carry, if the project asks for one.
    pub audience: Option<String>,
    /// Where the public keys of end users' tokens are, besides the secrets.
    pub jwks_url: Option<String>,
    /// Role words of end users' tokens besides `anon` and `authenticated` (R-RLS-8).
    pub roles: Vec<String>,
}

/// Whose sockets are to be closed. On the wire `{"subject": "…"}` or `{"key_id": "…"}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// `sub` of end users' tokens.
    Subject(String),
    /// An API key.
    KeyId(Uuid),
}
