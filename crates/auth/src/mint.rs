use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aura_domain::{KeyRole, ProjectId};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::ISSUER;

/// Life of an API key: ten years, as Supabase's; it ends earlier by being revoked.
pub const KEY_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Life of an inspector's token (R-SEC-5).
pub const INSPECTOR_LIFETIME: Duration = Duration::from_secs(300);
/// Begins the `jti` of an inspector's token, which policies don't see.
pub(crate) const INSPECTOR: &str = "inspector:";

/// A token that could not be made.
#[derive(Debug, thiserror::Error)]
#[error("can't sign the token")]
pub struct MintError(#[from] jsonwebtoken::errors::Error);

/// A new HS256 secret: 256 random bits as base64url text (43 characters).
pub fn generate_secret() -> SecretString {
    BASE64_URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>()).into()
}

/// Signs tokens with one secret.
#[derive(Debug, Clone, Copy)]
pub struct Minter<'a> {
    secret: &'a SecretString,
}

impl<'a> Minter<'a> {
    /// Signs with this secret: a project's, or the platform's.
    pub fn new(secret: &'a SecretString) -> Self {
        Self { secret }
    }

    /// A project's API key. `key_id` is its row in the platform database, by which it is revoked.
    ///
    /// # Errors
    /// Signing failed.
    pub fn project_key(&self, project: ProjectId, key_id: Uuid, role: KeyRole) -> Result<String, MintError> {
        let (iat, exp) = times(KEY_LIFETIME);
        let claims = json!({"iss": ISSUER, "ref": project, "role": role.as_str(), "iat": iat, "exp": exp});
        self.sign(&claims, Some(key_id))
    }

    /// A platform key; only with the platform's secret.
    ///
    /// # Errors
    /// Signing failed.
    pub fn platform_key(&self, lifetime: Duration) -> Result<String, MintError> {
        let (iat, exp) = times(lifetime);
        self.sign(&json!({"iss": ISSUER, "role": "platform_admin", "iat": iat, "exp": exp}), None)
    }

    /// An end user's token: `{ref, role: "authenticated", sub, iat, exp}` plus `claims`, which win.
    ///
    /// # Errors
    /// Signing failed.
    pub fn user_token(
        &self,
        project: ProjectId,
        subject: &str,
        claims: Map<String, Value>,
        lifetime: Duration,
    ) -> Result<String, MintError> {
        let (iat, exp) = times(lifetime);
        let mut payload = Map::new();
        payload.insert("ref".to_owned(), json!(project));
        payload.insert("role".to_owned(), "authenticated".into());
        payload.insert("sub".to_owned(), subject.into());
        payload.insert("iat".to_owned(), iat.into());
        payload.insert("exp".to_owned(), exp.into());
        payload.extend(claims);
        self.sign(&Value::Object(payload), None)
    }

    /// A token of Studio's inspector (R-SEC-5): what an end user with these claims sees, for [`INSPECTOR_LIFETIME`], and nothing
    /// else ([`crate::is_inspector`]). Claims that say whose a token is and for how long don't count.
    ///
    /// # Errors
    /// Signing failed.
    pub fn inspector_token(
        &self,
        project: ProjectId,
        role: &str,
        mut claims: Map<String, Value>,
    ) -> Result<String, MintError> {
        claims.retain(|name, _| !["iss", "iat", "nbf"].contains(&name.as_str()));
        let (iat, exp) = times(INSPECTOR_LIFETIME);
        let jti = format!("{INSPECTOR}{}", Uuid::new_v4());
        let ours = json!({"ref": project, "role": role, "jti": jti, "iat": iat, "exp": exp});
        claims.extend(ours.as_object().cloned().unwrap_or_default());
        self.sign(&Value::Object(claims), None)
    }

    fn sign(&self, claims: &Value, key_id: Option<Uuid>) -> Result<String, MintError> {
        let mut header = Header::new(Algorithm::HS256);
        header.kid = key_id.map(|id| id.to_string());
        let key = EncodingKey::from_secret(self.secret.expose_secret().as_bytes())?;
        Ok(jsonwebtoken::encode(&header, claims, &key)?)
    }
}

/// `iat` and `exp` in seconds since 1970.
fn times(lifetime: Duration) -> (u64, u64) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    (now, now.saturating_add(lifetime.as_secs()))
}
