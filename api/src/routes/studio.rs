use std::time::Duration;

use aura_auth::{AuthError, INSPECTOR_LIFETIME, Minter, token_from_headers};
use aura_domain::ProjectId;
use aura_kit::{Code, Json};
use axum::{
    extract::State,
    http::{HeaderMap, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use secrecy::ExposeSecret;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    access::KeyHolder,
    error::{ApiError, Result},
    session,
    state::AppState,
};

/// A working day and a bit.
const LIFETIME: Duration = Duration::from_secs(12 * 3600);

/// Who is signed in.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({"role": "service_role", "project": "6a0c2a2e-4f0a-4b62-9b5f-2f0f7e0d9c11",
    "expires_at": "2026-01-05T22:20:30.000000Z", "csrf_token": "kZ0mR3cC1vYyq7yqH0sQk7m1c1m1a2b3c4d5e6f7g8h"}))]
pub(crate) struct SessionView {
    /// `service_role` or `platform_admin`.
    role: &'static str,
    /// Of a service_role.
    project: Option<ProjectId>,
    /// Of the session; null when a key was sent instead.
    expires_at: Option<String>,
    /// To send as `x-csrf-token` with each change; null when a key was sent instead.
    csrf_token: Option<String>,
}

impl SessionView {
    fn new(holder: &KeyHolder, session: Option<&aura_store::StudioSession>) -> Self {
        let (role, project) = match holder {
            KeyHolder::Platform => ("platform_admin", None),
            KeyHolder::Project(service) => ("service_role", Some(service.project().id)),
        };
        Self {
            role,
            project,
            expires_at: session.map(|session| session.expires_at.clone()),
            csrf_token: session.map(|session| session.csrf.expose_secret().to_owned()),
        }
    }
}

/// Sign in to Studio.
///
/// Keeps the key that was sent on the server, sealed, and answers with a cookie that no page can read. The session lasts 12 h, and
/// ends with the key.
#[utoipa::path(
    post,
    path = "/studio/session",
    operation_id = "create_studio_session",
    tag = "studio",
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 201, description = "Signed in", body = SessionView, headers(("Set-Cookie" = String, description = "The session: HttpOnly, SameSite=Strict")))
    )
)]
pub(crate) async fn create_studio_session(
    holder: KeyHolder,
    State(state): State<AppState>,
    parts: Parts,
) -> Result<Response> {
    let token = session::token(&parts, &state).await?;
    let session = state.store().open_studio_session(&token, LIFETIME).await?;
    let cookie = session::set_cookie(&state, session.id.expose_secret(), LIFETIME.as_secs());
    Ok((StatusCode::CREATED, fresh(cookie), Json(SessionView::new(&holder, Some(&session)))).into_response())
}

/// Show who is signed in.
///
/// By the session's cookie, or by a key that is sent. A page that was loaded again has its `csrf_token` from here.
#[utoipa::path(
    get,
    path = "/studio/session",
    operation_id = "get_studio_session",
    tag = "studio",
    security(("apikey" = []), ("bearer" = []), ("session" = [])),
    responses(
        (status = 200, description = "Who", body = SessionView)
    )
)]
pub(crate) async fn get_studio_session(
    holder: KeyHolder,
    State(state): State<AppState>,
    headers: HeaderMap,
) -> Result<Response> {
    // With a key that is sent a cookie counts for nothing, as everywhere.
    let session = match token_from_headers(&headers) {
        Err(AuthError::Missing) => session::current(&headers, &state).await?,
        _ => None,
    };
    let view = SessionView::new(&holder, session.as_ref());
    Ok(([(header::CACHE_CONTROL, "no-store")], Json(view)).into_response())
}

/// Sign out.
///
/// Ends the session of the cookie. A key that is sent has none, and stays.
#[utoipa::path(
    delete,
    path = "/studio/session",
    operation_id = "delete_studio_session",
    tag = "studio",
    security(("apikey" = []), ("bearer" = []), ("session" = [])),
    responses(
        (status = 204, description = "Signed out", headers(("Set-Cookie" = String, description = "Takes the cookie away")))
    )
)]
pub(crate) async fn delete_studio_session(
    _: KeyHolder,
    State(state): State<AppState>,
    headers: HeaderMap,
) -> Result<Response> {
    if let Some(id) = session::id(&headers, &state) {
        state.store().end_studio_session(id).await?;
    }
    Ok((StatusCode::NO_CONTENT, fresh(session::set_cookie(&state, "", 0))).into_response())
}

fn fresh(cookie: String) -> [(header::HeaderName, String); 2] {
    [(header::SET_COOKIE, cookie), (header::CACHE_CONTROL, "no-store".to_owned())]
}

/// Whom to watch as.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"role": "authenticated", "sub": "a11ce000-0000-4000-8000-000000000001"}))]
pub(crate) struct InspectorRequest {
    /// With a platform key: which project. A service_role key has its own.
    #[schema(value_type = Option<uuid::Uuid>)]
    project: Option<String>,
    /// `anon`, `authenticated` (the default) or one of the project's own roles.
    role: Option<String>,
    /// The end user.
    sub: Option<String>,
    /// More claims, as policies read them. Those that say whose a token is and how long are ours.
    #[serde(default)]
    #[schema(value_type = Object)]
    claims: Map<String, Value>,
}

/// A token for Studio's inspector.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({"token": "eyJhbGciOiJIUzI1NiJ9.e30.c2lnbmF0dXJl", "project": "6a0c2a2e-4f0a-4b62-9b5f-2f0f7e0d9c11", "role": "authenticated", "expires_in": 300}))]
pub(crate) struct InspectorToken {
    /// For a socket or an event stream. It can receive, and nothing else.
    token: String,
    /// Whose.
    project: ProjectId,
    /// Its role.
    role: String,
    /// Seconds.
    expires_in: u64,
}

/// Make a token that sees what an end user sees.
///
/// It lasts 5 minutes and is read-only: what is sent with it to a channel is refused.
#[utoipa::path(
    post,
    path = "/studio/inspector-token",
    operation_id = "create_inspector_token",
    tag = "studio",
    extensions(("x-codes" = json!([Code::ProjectNotFound]))),
    request_body = InspectorRequest,
    security(("apikey" = []), ("bearer" = []), ("session" = [])),
    responses(
        (status = 201, description = "The token", body = InspectorToken)
    )
)]
pub(crate) async fn create_inspector_token(
    holder: KeyHolder,
    State(state): State<AppState>,
    Json(body): Json<InspectorRequest>,
) -> Result<Response> {
    let id = body.project(&holder)?;
    let auth = state.store().project_auth(id).await?.ok_or_else(ApiError::project_not_found)?;
    let role = body.role.unwrap_or_else(|| "authenticated".to_owned());
    let allowed = ["anon", "authenticated"].into_iter().chain(auth.project.settings.roles.iter().map(String::as_str));
    if !allowed.into_iter().any(|word| word == role) {
        let detail = "role is anon, authenticated or one of the project's own: nobody can watch as the service.";
        return Err(ApiError::new(Code::InvalidBody, detail));
    }
    let mut claims = body.claims;
    let audience = auth.project.settings.aud.clone().filter(|_| !claims.contains_key("aud"));
    claims.extend(audience.map(|aud| ("aud".to_owned(), aud.into())));
    claims.extend(body.sub.map(|sub| ("sub".to_owned(), sub.into())));
    let token = Minter::new(&auth.jwt_secret).inspector_token(id, &role, claims)?;
    let view = InspectorToken { token, project: id, role, expires_in: INSPECTOR_LIFETIME.as_secs() };
    Ok((StatusCode::CREATED, [(header::CACHE_CONTROL, "no-store")], Json(view)).into_response())
}

impl InspectorRequest {
    /// The key's own project, or the one that a platform key names.
    fn project(&self, holder: &KeyHolder) -> Result<ProjectId> {
        let named = self.project.as_deref().map(|text| text.parse().map_err(|_| ApiError::project_not_found()));
        match (holder, named.transpose()?) {
            (KeyHolder::Platform, Some(named)) => Ok(named),
            (KeyHolder::Platform, None) => Err(ApiError::new(Code::InvalidBody, "A platform key names the project.")),
            (KeyHolder::Project(service), named) => {
                let own = service.project().id;
                if named.is_none_or(|named| named == own) { Ok(own) } else { Err(ApiError::project_not_found()) }
            }
        }
    }
}
