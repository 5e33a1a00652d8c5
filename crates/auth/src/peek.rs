use aura_domain::ProjectId;
use axum::http::{HeaderMap, header};
use serde_json::Value;
use uuid::Uuid;

use crate::{AuthError, MAX_TOKEN_BYTES};

/// What an unverified token says about itself. Only good for choosing the key to verify it with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peeked {
    /// `ref`; `None`: a platform key, or a user's token that is only valid as `access_token`.
    pub project_ref: Option<ProjectId>,
    /// `kid` of the header, if it looks like one of ours.
    pub kid: Option<Uuid>,
}

/// Reads a token without verifying anything.
///
/// # Errors
/// [`AuthError::Malformed`] if it isn't a token; [`AuthError::BadClaim`] if `ref` is there and not a project id.
pub fn peek(token: &str) -> Result<Peeked, AuthError> {
    if token.len() > MAX_TOKEN_BYTES {
        return Err(AuthError::Malformed);
    }
    let data = jsonwebtoken::dangerous::insecure_decode::<Value>(token).map_err(|_| AuthError::Malformed)?;
    let project_ref = match data.claims.get("ref") {
        None => None,
        Some(value) => Some(project_ref(value)?),
    };
    Ok(Peeked { project_ref, kid: data.header.kid.and_then(|kid| kid.parse().ok()) })
}

pub(crate) fn project_ref(value: &Value) -> Result<ProjectId, AuthError> {
    value.as_str().and_then(|text| text.parse().ok()).ok_or(AuthError::BadClaim("ref"))
}

/// The token of a request: `Authorization: Bearer` wins over `apikey` (design §6).
///
/// # Errors
/// [`AuthError::Missing`], or [`AuthError::Malformed`] for another scheme.
pub fn token_from_headers(headers: &HeaderMap) -> Result<&str, AuthError> {
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        let (scheme, token) = value.to_str().ok().and_then(|text| text.split_once(' ')).ok_or(AuthError::Malformed)?;
        return if scheme.eq_ignore_ascii_case("bearer") { Ok(token.trim()) } else { Err(AuthError::Malformed) };
    }
    let key = headers.get("apikey").ok_or(AuthError::Missing)?;
    key.to_str().map(str::trim).map_err(|_| AuthError::Malformed)
}
