//! A request's key: sent with it, or that of the Studio session whose cookie came (R-SEC-5).

use std::borrow::Cow;

use aura_auth::{AuthError, token_from_headers};
use aura_kit::Code;
use aura_store::StudioSession;
use axum::http::{HeaderMap, header, request::Parts};
use secrecy::ExposeSecret;
use subtle::ConstantTimeEq;

use crate::{
    error::{ApiError, Result},
    state::AppState,
};

/// Where it isn't encrypted, so only where `Secure` can't be.
const PLAIN: &str = "aura_session";
/// Browsers take a cookie of this name only from the host itself, encrypted and for all paths.
const SECURE: &str = "__Host-aura_session";
const CSRF: &str = "x-csrf-token";

/// The key, or why there is none. A key that is sent wins: no cookie makes it another one.
pub(crate) async fn token<'a>(parts: &'a Parts, state: &AppState) -> Result<Cow<'a, str>> {
    match token_from_headers(&parts.headers) {
        Err(AuthError::Missing) => {
            let Some(session) = current(&parts.headers, state).await? else { return Err(AuthError::Missing.into()) };
            check(parts, &session)?;
            Ok(Cow::Owned(session.token.expose_secret().to_owned()))
        }
        sent => Ok(Cow::Borrowed(sent?)),
    }
}

/// The session of the request's cookie; a cookie whose session is over is an error.
pub(crate) async fn current(headers: &HeaderMap, state: &AppState) -> Result<Option<StudioSession>> {
    let Some(id) = id(headers, state) else { return Ok(None) };
    let session = state.store().studio_session(id).await?;
    let over = || ApiError::new(Code::InvalidToken, "The session is over: sign in again.");
    session.map(Some).ok_or_else(over)
}

/// The request's cookie.
pub(crate) fn id<'a>(headers: &'a HeaderMap, state: &AppState) -> Option<&'a str> {
    let name = name(state);
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|line| line.to_str().ok());
    let mut pairs = cookies.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(given, _)| *given == name).map(|(_, id)| id)
}

/// The header that gives a browser this cookie for so many seconds; 0 takes it away.
pub(crate) fn set_cookie(state: &AppState, id: &str, seconds: u64) -> String {
    let secure = if state.settings().secure_cookies { "; Secure" } else { "" };
    format!("{}={id}; Path=/; HttpOnly; SameSite=Strict; Max-Age={seconds}{secure}", name(state))
}

fn name(state: &AppState) -> &'static str {
    if state.settings().secure_cookies { SECURE } else { PLAIN }
}

/// Only pages of ours use a session: browsers say where a request comes from, and a change needs what only they were told.
fn check(parts: &Parts, session: &StudioSession) -> Result<()> {
    let site = parts.headers.get("sec-fetch-site").map(|value| value.as_bytes());
    let is_ours = site.is_none_or(|site| matches!(site, b"same-origin" | b"none"));
    let sent = parts.headers.get(CSRF).map(|value| value.as_bytes()).unwrap_or_default();
    let is_told = parts.method.is_safe() || bool::from(sent.ct_eq(session.csrf.expose_secret().as_bytes()));
    if is_ours && is_told {
        return Ok(());
    }
    Err(ApiError::new(Code::CsrfFailed, "A session's changes carry its csrf_token in x-csrf-token, from its own page."))
}
