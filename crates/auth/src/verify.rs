use std::{fmt, str::FromStr};

use aura_domain::ProjectId;
use jsonwebtoken::{Algorithm, DecodingKey, TokenData, Validation};
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use uuid::Uuid;

use crate::{AuthError, ISSUER, LEEWAY_SECONDS, MAX_TOKEN_BYTES, mint::INSPECTOR, peek::project_ref};

/// Role of a project's API key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyRole {
    /// For browsers: row security applies.
    Anon,
    /// For servers: administers the project.
    ServiceRole,
}

impl KeyRole {
    /// The word in the token.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Anon => "anon",
            Self::ServiceRole => "service_role",
        }
    }
}

impl FromStr for KeyRole {
    type Err = AuthError;
    fn from_str(text: &str) -> Result<Self, AuthError> {
        match text {
            "anon" => Ok(Self::Anon),
            "service_role" => Ok(Self::ServiceRole),
            _ => Err(AuthError::BadClaim("role")),
        }
    }
}

/// A key that isn't revoked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveKey {
    /// `kid` of its token.
    pub id: Uuid,
    /// What it was made for.
    pub role: KeyRole,
}

/// Role of a verified token.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Role {
    /// `anon`.
    Anon,
    /// `authenticated`: an end user.
    Authenticated,
    /// `service_role`, always from a live key.
    ServiceRole,
    /// `platform_admin`, always from a platform key.
    PlatformAdmin,
    /// Another word of an end user's token; means something only if the project allows that role (R-RLS-8).
    Other(String),
}

impl Role {
    /// The word in the token.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Anon => "anon",
            Self::Authenticated => "authenticated",
            Self::ServiceRole => "service_role",
            Self::PlatformAdmin => "platform_admin",
            Self::Other(word) => word,
        }
    }

    fn parse(word: &str) -> Self {
        match word {
            "anon" => Self::Anon,
            "authenticated" => Self::Authenticated,
            "service_role" => Self::ServiceRole,
            "platform_admin" => Self::PlatformAdmin,
            other => Self::Other(other.to_owned()),
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A token that was accepted.
#[derive(Debug, Clone, PartialEq)]
pub struct Verified {
    /// Role.
    pub role: Role,
    /// All claims, a JSON object.
    pub payload: Value,
    /// Expiry in seconds since 1970, without leeway.
    pub exp: i64,
    /// The API key; `None` for an end user's token and a platform key.
    pub key_id: Option<Uuid>,
    /// Whether it carries `ref`: without, it is valid only as `access_token` (R-SEC-2).
    pub has_ref: bool,
}

/// What a project accepts.
#[derive(Debug, Clone, Copy)]
pub struct ProjectRules<'a> {
    /// The project.
    pub project: ProjectId,
    /// Its HS256 secret.
    pub secret: &'a SecretString,
    /// Its keys that aren't revoked.
    pub live_keys: &'a [LiveKey],
    /// `aud` that end users' tokens must carry, if the project asks for one.
    pub audience: Option<&'a str>,
}

/// Verifies tokens.
#[derive(Debug, Clone, Copy)]
pub struct Verifier;

impl Verifier {
    /// Verifies a key or an end user's token of one project.
    ///
    /// # Errors
    /// Whatever is wrong with it, signature first: nothing about claims is told to somebody without the secret.
    pub fn verify_project(rules: &ProjectRules<'_>, token: &str) -> Result<Verified, AuthError> {
        let data = verify_hs256(token, rules.secret)?;
        let payload = data.claims;
        let has_ref = match payload.get("ref") {
            None => false,
            Some(value) if project_ref(value)? == rules.project => true,
            Some(_) => return Err(AuthError::WrongProject),
        };
        let role = role_of(&payload)?;
        let key_id = match api_key(&role, &payload, data.header.kid.as_deref())? {
            Some(kid) => Some(live(rules.live_keys, kid, &role)?),
            None => {
                check_audience(rules.audience, &payload)?;
                None
            }
        };
        Ok(Verified { role, exp: exp(&payload)?, payload, key_id, has_ref })
    }

    /// Verifies a platform key: `{iss: "aura", role: "platform_admin"}` with the platform's secret.
    ///
    /// # Errors
    /// Whatever is wrong with it.
    pub fn verify_platform(secret: &SecretString, token: &str) -> Result<Verified, AuthError> {
        let payload = verify_hs256(token, secret)?.claims;
        if payload.get("iss").and_then(Value::as_str) != Some(ISSUER) {
            return Err(AuthError::BadClaim("iss"));
        }
        let role = role_of(&payload)?;
        if role != Role::PlatformAdmin {
            return Err(AuthError::BadClaim("role"));
        }
        Ok(Verified { role, exp: exp(&payload)?, payload, key_id: None, has_ref: false })
    }
}

/// Whether it is an inspector's token: it receives, and sends nothing.
pub fn is_inspector(payload: &Value) -> bool {
    payload.get("jti").and_then(Value::as_str).is_some_and(|jti| jti.starts_with(INSPECTOR))
}

/// Signature and times. The algorithm comes from the key, never from the header; `jku`, `x5u` and `jwk` are ignored.
fn verify_hs256(token: &str, secret: &SecretString) -> Result<TokenData<Value>, AuthError> {
    if token.len() > MAX_TOKEN_BYTES {
        return Err(AuthError::Malformed);
    }
    let mut validation = Validation::new(Algorithm::HS256);
    validation.leeway = LEEWAY_SECONDS;
    validation.validate_nbf = true;
    // Ours to check: keys carry none, and users' tokens only where the project asks for it.
    validation.validate_aud = false;
    let key = DecodingKey::from_secret(secret.expose_secret().as_bytes())?;
    Ok(jsonwebtoken::decode(token, &key, &validation)?)
}

fn role_of(payload: &Value) -> Result<Role, AuthError> {
    match payload.get("role") {
        None => Err(AuthError::MissingClaim("role")),
        Some(Value::String(word)) if !word.is_empty() => Ok(Role::parse(word)),
        Some(_) => Err(AuthError::BadClaim("role")),
    }
}

/// The key id if the token is an API key: `iss` is ours and there is a `kid`. An end user's token may carry a `kid` of
/// whoever issued it; it may not carry a role that only keys have.
fn api_key(role: &Role, payload: &Value, kid: Option<&str>) -> Result<Option<Uuid>, AuthError> {
    let ours = payload.get("iss").and_then(Value::as_str) == Some(ISSUER);
    match (kid, role) {
        (_, Role::PlatformAdmin) => Err(AuthError::RoleNeedsKey),
        (Some(kid), _) if ours => kid.parse().map(Some).map_err(|_| AuthError::Revoked),
        (_, Role::ServiceRole) => Err(AuthError::RoleNeedsKey),
        _ => Ok(None),
    }
}

fn live(keys: &[LiveKey], kid: Uuid, role: &Role) -> Result<Uuid, AuthError> {
    let key = keys.iter().find(|key| key.id == kid).ok_or(AuthError::Revoked)?;
    if key.role.as_str() == role.as_str() { Ok(kid) } else { Err(AuthError::BadClaim("role")) }
}

fn check_audience(wanted: Option<&str>, payload: &Value) -> Result<(), AuthError> {
    let Some(wanted) = wanted else { return Ok(()) };
    let found = match payload.get("aud") {
        Some(Value::String(aud)) => aud == wanted,
        Some(Value::Array(list)) => list.iter().any(|aud| aud.as_str() == Some(wanted)),
        _ => false,
    };
    if found { Ok(()) } else { Err(AuthError::WrongAudience) }
}

/// `exp` may be written with a fraction (RFC 7519 NumericDate); it was checked with the signature.
fn exp(payload: &Value) -> Result<i64, AuthError> {
    let value = payload.get("exp").ok_or(AuthError::MissingClaim("exp"))?;
    #[expect(clippy::cast_possible_truncation, reason = "saturates, and nobody lives that long")]
    let whole = || value.as_f64().map(|seconds| seconds as i64);
    value.as_i64().or_else(whole).ok_or(AuthError::BadClaim("exp"))
}
