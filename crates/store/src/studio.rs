use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};

use crate::{KeyError, Store, StoreError, bounded, decode::rfc3339};

/// What the sealed token is.
const SEALED_AS: &str = "studio session";

/// A session of Studio (R-SEC-5).
#[derive(Debug, Clone)]
pub struct StudioSession {
    /// The cookie, 43 characters.
    pub id: SecretString,
    /// What a page of ours sends with each change, and no other page knows; follows from the cookie.
    pub csrf: SecretString,
    /// The key that it was opened with.
    pub token: SecretString,
    /// RFC 3339, UTC.
    pub expires_at: String,
}

impl Store {
    /// Opens a session for whoever holds `token`, and forgets those that are over.
    pub async fn open_studio_session(&self, token: &str, lifetime: Duration) -> Result<StudioSession, StoreError> {
        let id: SecretString = URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>()).into();
        let sealed = self.master_key().seal(token.as_bytes(), SEALED_AS);
        let sql = concat!(
            "with over as (delete from aura.studio_sessions where expires_at < now())
             insert into aura.studio_sessions (id_hash, token, expires_at)
             values ($1, $2, now() + $3 * interval '1 s') returning ",
            rfc3339!("expires_at")
        );
        let query = sqlx::query_scalar(sql).bind(hash(id.expose_secret())).bind(sealed);
        let query = query.bind(i64::try_from(lifetime.as_secs()).unwrap_or(i64::MAX));
        let expires_at = bounded(async { Ok(query.fetch_one(self.pool()).await?) }).await?;
        Ok(StudioSession { csrf: self.csrf(id.expose_secret()), id, token: token.to_owned().into(), expires_at })
    }

    /// The session of this cookie, unless it is over.
    pub async fn studio_session(&self, id: &str) -> Result<Option<StudioSession>, StoreError> {
        let sql = concat!(
            "select token, ",
            rfc3339!("expires_at"),
            " from aura.studio_sessions where id_hash = $1 and expires_at > now()"
        );
        let query = sqlx::query_as::<_, (Vec<u8>, String)>(sql).bind(hash(id));
        let Some((sealed, expires_at)) = bounded(async { Ok(query.fetch_optional(self.pool()).await?) }).await? else {
            return Ok(None);
        };
        let token = self.master_key().open(&sealed, SEALED_AS)?;
        let token = String::from_utf8(token).map_err(|_| KeyError::Sealed)?;
        Ok(Some(StudioSession { id: id.to_owned().into(), csrf: self.csrf(id), token: token.into(), expires_at }))
    }

    /// Ends the session of this cookie, if there is one.
    pub async fn end_studio_session(&self, id: &str) -> Result<(), StoreError> {
        let query = sqlx::query("delete from aura.studio_sessions where id_hash = $1").bind(hash(id));
        bounded(async { Ok(query.execute(self.pool()).await.map(drop)?) }).await
    }

    fn csrf(&self, id: &str) -> SecretString {
        URL_SAFE_NO_PAD.encode(self.master_key().derive(&format!("studio csrf v1 {id}"))).into()
    }
}

/// The cookie has 256 random bits, so a plain hash is enough.
fn hash(id: &str) -> Vec<u8> {
    Sha256::digest(id.as_bytes()).to_vec()
}
