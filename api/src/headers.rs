//! What a client may say besides path, query and body, in one way for all operations.

use std::{convert::Infallible, time::Duration};

use aura_kit::Code;
use axum::{
    extract::FromRequestParts,
    http::{HeaderMap, header, request::Parts},
};

use crate::error::{ApiError, Result};

/// `Prefer: wait` without which is waited so long (design §6).
const DEFAULT_WAIT: Duration = Duration::from_secs(5);
/// Longest wait.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// `If-Match`: the version on which a change is based.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct IfMatch(Option<String>);

impl IfMatch {
    pub(crate) fn new(headers: &HeaderMap) -> Self {
        // One that can't be read is no version that we ever gave.
        let lists: Vec<_> =
            headers.get_all(header::IF_MATCH).iter().map(|value| value.to_str().unwrap_or("")).collect();
        Self((!lists.is_empty()).then(|| lists.join(",")))
    }

    /// Whether the version that the client knows is `etag`. `*` is any that exists.
    pub(crate) fn allows(&self, etag: &str, exists: bool) -> bool {
        match self.0.as_deref().map(str::trim) {
            None => true,
            Some("*") => exists,
            Some(list) => list.split(',').any(|one| one.trim() == etag),
        }
    }

    /// The same of something that exists and is at this version.
    pub(crate) fn allows_version(&self, version: i64) -> bool {
        self.allows(&version_etag(version), true)
    }

    /// 412 unless it is the version that the client knows.
    pub(crate) fn check(&self, etag: &str, exists: bool) -> Result<()> {
        if self.allows(etag, exists) { Ok(()) } else { Err(changed()) }
    }
}

impl<S: Sync> FromRequestParts<S> for IfMatch {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> std::result::Result<Self, Infallible> {
        Ok(Self::new(&parts.headers))
    }
}

/// 412: it is another version than the client knows.
pub(crate) fn changed() -> ApiError {
    ApiError::new(Code::PreconditionFailed, "GET it again; somebody else has changed it.")
}

/// The `ETag` of what has a version number.
pub(crate) fn version_etag(version: i64) -> String {
    format!("\"v{version}\"")
}

/// How long the client waits for what takes time: `Prefer: wait=<seconds>`, at most 60. What can't be read is ignored, as RFC
/// 7240 has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait(pub(crate) Duration);

impl Wait {
    pub(crate) fn new(headers: &HeaderMap) -> Self {
        let preferences = headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
        let mut waits = preferences.flat_map(|text| text.split([',', ';'])).filter_map(|preference| {
            let (name, value) = preference.split_once('=')?;
            name.trim().eq_ignore_ascii_case("wait").then(|| value.trim().trim_matches('"').parse::<u64>().ok())?
        });
        Self(waits.next().map_or(DEFAULT_WAIT, |seconds| Duration::from_secs(seconds).min(MAX_WAIT)))
    }
}

impl<S: Sync> FromRequestParts<S> for Wait {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> std::result::Result<Self, Infallible> {
        Ok(Self::new(&parts.headers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn prefer_wait_is_read_as_rfc_7240_has_it() {
        let wait = |text| Wait::new(&headers(&[("prefer", text)])).0.as_secs();
        assert_eq!(Wait::new(&HeaderMap::new()).0, DEFAULT_WAIT);
        assert_eq!((wait("wait=0"), wait("wait=7"), wait("respond-async, Wait=\"9\"")), (0, 7, 9));
        assert_eq!(wait("wait=100000"), 60);
        assert_eq!((wait("wait=soon"), wait("wait"), wait("waiting=3")), (5, 5, 5));
    }

    #[test]
    fn if_match_compares_versions() {
        let allows = |text, etag, exists| IfMatch::new(&headers(&[("if-match", text)])).allows(etag, exists);
        assert!(IfMatch::default().allows("\"a\"", false));
        assert!(allows("\"b\", \"a\"", "\"a\"", true) && !allows("\"b\"", "\"a\"", true));
        assert!(allows("*", "\"a\"", true) && !allows("*", "\"a\"", false));
        // Weak versions never match (RFC 9110 §13.1.1).
        assert!(!allows("W/\"a\"", "\"a\"", true));
        // One that can't be read is none that can be left out.
        let mut unreadable = HeaderMap::new();
        unreadable.insert(header::IF_MATCH, http_value(b"\"\xe9\""));
        assert!(!IfMatch::new(&unreadable).allows("\"a\"", true));
    }

    fn http_value(bytes: &[u8]) -> axum::http::HeaderValue {
        axum::http::HeaderValue::from_bytes(bytes).unwrap()
    }
}
