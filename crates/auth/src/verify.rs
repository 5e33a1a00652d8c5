use std::{
    fmt,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use aura_domain::{AccessRules, LiveKey, LiveSecret};
use jsonwebtoken::{Algorithm, DecodingKey, TokenData, Validation, errors::ErrorKind};
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use uuid::Uuid;

use crate::{
    AuthError, ISSUER, JwksOptions, LEEWAY_SECONDS, MAX_TOKEN_BYTES, UrlError,
    jwks::{KeySets, SetKey, Unavailable},
    mint::INSPECTOR,
    peek::project_ref,
};

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
    /// Another word of an end user's token, one that the project knows (R-RLS-8).
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
    /// From when it is refused whatever its `exp`, seconds since 1970: its key or the secret that signed it is being
    /// replaced. `None` = not planned.
    pub ends: Option<i64>,
}

/// Verifies tokens: the one door of every surface. Keeps the key sets of projects that have a JWKS URL; cheap to clone.
#[derive(Debug, Clone)]
pub struct Verifier {
    sets: Arc<KeySets>,
}

impl Default for Verifier {
    fn default() -> Self {
        Self::new(JwksOptions::default())
    }
}

/// A verified signature.
struct Signed {
    data: TokenData<Value>,
    /// From when what the secret signed is refused; `None` = not planned.
    until: Option<i64>,
    /// By a key of the JWKS, which can't stand for an API key.
    foreign: bool,
}

impl Verifier {
    /// With other options than those of production.
    pub fn new(options: JwksOptions) -> Self {
        Self { sets: Arc::new(KeySets::new(options)) }
    }

    /// Whether a project may have this as its `jwks_url`, as far as that can be seen without looking its host up.
    ///
    /// # Errors
    /// Why not.
    pub fn check_jwks_url(&self, url: &str) -> Result<(), UrlError> {
        self.sets.check_url(url)
    }

    /// Verifies a key or an end user's token of one project. Waits for the project's JWKS (5 s at most) only for a token
    /// that nothing known verifies.
    ///
    /// # Errors
    /// Whatever is wrong with it, signature first: nothing about claims is told to somebody without the secret.
    pub async fn verify_project(&self, rules: &AccessRules, token: &str) -> Result<Verified, AuthError> {
        let Signed { data, until, foreign } = self.verify_signature(rules, token).await?;
        let payload = data.claims;
        let has_ref = match payload.get("ref") {
            None => false,
            Some(value) if project_ref(value)? == rules.project => true,
            Some(_) => return Err(AuthError::WrongProject),
        };
        let role = role_of(&payload)?;
        let kid = data.header.kid.as_deref().filter(|_| !foreign);
        let key = match api_key(&role, &payload, kid)? {
            Some(kid) => Some(live(&rules.keys, kid, &role)?),
            None => {
                check_audience(rules.audience.as_deref(), &payload)?;
                check_role(&rules.roles, &role)?;
                None
            }
        };
        let ends = [until, key.and_then(|key| key.until)].into_iter().flatten().min();
        Ok(Verified { role, exp: exp(&payload)?, payload, key_id: key.map(|key| key.id), has_ref, ends })
    }

    /// The key comes from what the project has under the token's `kid`, and the algorithm from that key: first its own
    /// API keys, then its JWKS, then its secrets. `jku`, `x5u`, `x5c` and `jwk` are ignored.
    async fn verify_signature(&self, rules: &AccessRules, token: &str) -> Result<Signed, AuthError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(AuthError::Malformed);
        }
        let kid = jsonwebtoken::decode_header(token).map_err(AuthError::from)?.kid;
        let own = kid.as_ref().and_then(|kid| kid.parse().ok());
        let own = own.is_some_and(|kid: Uuid| rules.keys.iter().any(|key| key.id == kid));
        let (Some(url), Some(kid), false) = (&rules.jwks_url, kid, own) else {
            return by_secrets(&rules.secrets, token);
        };
        if let Some(key) = self.sets.known(url, &kid).await {
            return by_set_key(&key, token);
        }
        match by_secrets(&rules.secrets, token) {
            Err(AuthError::Forged) => match self.sets.find(url, &kid).await {
                Ok(Some(key)) => by_set_key(&key, token),
                Ok(None) => Err(AuthError::Forged),
                Err(Unavailable) => Err(AuthError::KeySetUnavailable),
            },
            verified => verified,
        }
    }

    /// Verifies a platform key: `{iss: "aura", role: "platform_admin"}` with the platform's secret.
    ///
    /// # Errors
    /// Whatever is wrong with it.
    pub fn verify_platform(secret: &SecretString, token: &str) -> Result<Verified, AuthError> {
        let payload = by_secret(secret, token)?.claims;
        if payload.get("iss").and_then(Value::as_str) != Some(ISSUER) {
            return Err(AuthError::BadClaim("iss"));
        }
        let role = role_of(&payload)?;
        if role != Role::PlatformAdmin {
            return Err(AuthError::BadClaim("role"));
        }
        Ok(Verified { role, exp: exp(&payload)?, payload, key_id: None, has_ref: false, ends: None })
    }
}

/// Whether it is an inspector's token: it receives, and sends nothing.
pub fn is_inspector(payload: &Value) -> bool {
    payload.get("jti").and_then(Value::as_str).is_some_and(|jti| jti.starts_with(INSPECTOR))
}

/// The first secret that signed it says what it is worth.
fn by_secrets(secrets: &[LiveSecret], token: &str) -> Result<Signed, AuthError> {
    let now = now();
    for live in secrets.iter().filter(|live| live.until.is_none_or(|until| until > now)) {
        match by_secret(&live.secret, token) {
            Err(AuthError::Forged) => {}
            verified => return verified.map(|data| Signed { data, until: live.until, foreign: false }),
        }
    }
    Err(AuthError::Forged)
}

fn by_secret(secret: &SecretString, token: &str) -> Result<TokenData<Value>, AuthError> {
    let key = DecodingKey::from_secret(secret.expose_secret().as_bytes())?;
    decode(token, Algorithm::HS256, &key)
}

fn by_set_key(key: &SetKey, token: &str) -> Result<Signed, AuthError> {
    Ok(Signed { data: decode(token, key.algorithm, &key.key)?, until: None, foreign: true })
}

/// Signature and times, with the algorithm of the key, never that of the header.
fn decode(token: &str, algorithm: Algorithm, key: &DecodingKey) -> Result<TokenData<Value>, AuthError> {
    if token.len() > MAX_TOKEN_BYTES {
        return Err(AuthError::Malformed);
    }
    let mut validation = Validation::new(algorithm);
    validation.leeway = LEEWAY_SECONDS;
    validation.validate_nbf = true;
    // Ours to check: keys carry none, and users' tokens only where the project asks for it.
    validation.validate_aud = false;
    jsonwebtoken::decode(token, key, &validation).map_err(|error| match error.kind() {
        // The header was read before, so it is the signature that is no base64url: no valid one, and nothing else to those
        // who would learn from the difference which projects there are.
        ErrorKind::Base64(_) => AuthError::Forged,
        _ => error.into(),
    })
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

fn live(keys: &[LiveKey], kid: Uuid, role: &Role) -> Result<LiveKey, AuthError> {
    let now = now();
    let key = keys.iter().find(|key| key.id == kid && key.until.is_none_or(|until| until > now));
    let key = key.ok_or(AuthError::Revoked)?;
    if key.role.as_str() == role.as_str() { Ok(*key) } else { Err(AuthError::BadClaim("role")) }
}

/// A word that the project doesn't know stands for nobody: no database role is ever made of it.
fn check_role(known: &[String], role: &Role) -> Result<(), AuthError> {
    match role {
        Role::Other(word) if !known.contains(word) => Err(AuthError::UnknownRole),
        _ => Ok(()),
    }
}

/// Seconds since 1970.
fn now() -> i64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(elapsed.as_secs()).unwrap_or(i64::MAX)
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
