use std::time::Duration;

use aura_auth::{KeyRole, Minter};
use aura_domain::ProjectId;
use aura_kit::{Code, Json};
use aura_store::{KeyRecord, KeyRotation, RotatedKeys};
use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use secrecy::ExposeSecret;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{
    access::{Platform, ProjectPath},
    error::{ApiError, Result},
    once::OnceJson,
    paging::PageQuery,
    routes::{Params, engine_verbs::Request},
    state::AppState,
};

/// How long replaced keys stay good unless the client says otherwise: a deployment's worth.
const DEFAULT_OVERLAP: u32 = 24 * 3600;
/// At most: whoever needs longer has two keys, not one that is being replaced.
const MAX_OVERLAP: u32 = 30 * 24 * 3600;

/// An API key, without its token: that was shown once, when it was made.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Key, example = json!({
    "id": "0f5c1d0e-8a0b-4d6e-9a39-5b3d1b6f2c11", "role": "anon", "created_at": "2026-01-05T10:20:30.123456Z",
    "valid": true, "valid_until": null
}))]
pub(crate) struct KeyView {
    /// `kid` of its token.
    id: Uuid,
    /// What it may do.
    role: KeyRole,
    /// RFC 3339.
    created_at: String,
    /// Whether it is accepted now.
    valid: bool,
    /// From when it is, or will be, refused, RFC 3339; null = it isn't being replaced.
    valid_until: Option<String>,
}

impl From<KeyRecord> for KeyView {
    fn from(key: KeyRecord) -> Self {
        let KeyRecord { id, role, created_at, valid_until, valid } = key;
        Self { id, role, created_at, valid, valid_until }
    }
}

/// A page of keys.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct KeyPage {
    /// By id.
    items: Vec<KeyView>,
    /// Behind the last item; null at the end.
    next_cursor: Option<String>,
}

/// What is replaced, and how long the old ones stay good.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = RotateKeys, example = json!({"roles": ["service_role"], "overlap_seconds": 3600}))]
pub(crate) struct RotateKeys {
    /// Keys of these roles; of both without.
    roles: Option<Vec<KeyRole>>,
    /// The secret that signs keys and end users' tokens, too, and with it the keys of both roles.
    #[serde(default)]
    jwt_secret: bool,
    /// How long what is replaced stays good beside the new, in seconds, at most 30 days; a day without. 0 = it is refused at
    /// once, and so is what earlier rotations left.
    #[schema(default = 86400, maximum = 2_592_000)]
    overlap_seconds: Option<u32>,
}

/// The new keys; their tokens are in this answer only.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RotatedKeys)]
pub(crate) struct RotatedView {
    /// For browsers; null if it was not replaced.
    anon_key: Option<String>,
    /// For servers; null if it was not replaced. Keep it secret.
    service_role_key: Option<String>,
    /// Signs end users' tokens (HS256); null if it was not replaced. Keep it secret.
    jwt_secret: Option<String>,
    /// The new keys.
    keys: Vec<KeyView>,
    /// The keys that they replace, with the end of each.
    replaced: Vec<KeyView>,
}

/// List a project's API keys.
///
/// Never their tokens. Keys that are refused by now are listed as well.
#[utoipa::path(
    get,
    path = "/v1/projects/{project}/keys",
    operation_id = "list_keys",
    tag = "projects",
    params(("project" = uuid::Uuid, Path, description = "Project id"), PageQuery),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "A page", body = KeyPage)
    )
)]
pub(crate) async fn list_keys(
    project: ProjectPath,
    State(state): State<AppState>,
    Params(query): Params<PageQuery>,
) -> Result<Json<KeyPage>> {
    let window = query.window::<Uuid>("keys")?;
    let mut keys = state.store().keys_of_project(project.into_project().id, window.after, window.fetch()).await?;
    let next_cursor = window.cut(&mut keys, |key| key.id);
    Ok(Json(KeyPage { items: keys.into_iter().map(KeyView::from).collect(), next_cursor }))
}

/// Replace a project's API keys, and its secret when asked.
///
/// The old ones stay good until the end of the overlap; then they are refused everywhere, and sockets and streams that were
/// opened with them are closed within 2 s. Replacing the secret ends what it signed: the keys of both roles and end users'
/// tokens.
#[utoipa::path(
    post,
    path = "/v1/projects/{project}/keys/rotate",
    operation_id = "rotate_keys",
    tag = "projects",
    params(
        ("project" = uuid::Uuid, Path, description = "Project id"),
        ("idempotency-key" = Option<String>, Header, description = "Any text of 1 to 255 bytes: a repeated request is answered as the first one was, for 24 h")
    ),
    request_body = RotateKeys,
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "The new keys", body = RotatedView)
    )
)]
pub(crate) async fn rotate_keys(
    platform: Platform,
    project: ProjectPath,
    State(state): State<AppState>,
    OnceJson { body, once }: OnceJson<RotateKeys>,
) -> Result<Response> {
    let (project, request, secret) = (project.into_project().id, Request::of(&platform), body.jwt_secret);
    let rotation = body.check()?;
    once.run(&state, platform.actor(), async |_| {
        let rotated = state.store().rotate_keys(project, rotation, request.caller()).await?;
        Ok(Json(view(project, rotated, secret)?).into_response())
    })
    .await
}

impl RotateKeys {
    fn check(self) -> Result<KeyRotation> {
        let invalid = |detail: &str| ApiError::new(Code::InvalidBody, detail);
        let mut roles = self.roles.unwrap_or_else(|| KeyRole::ALL.to_vec());
        roles.sort();
        roles.dedup();
        if roles.is_empty() {
            return Err(invalid("roles names at least one role."));
        }
        if self.jwt_secret && roles.len() < KeyRole::ALL.len() {
            return Err(invalid("A new jwt_secret takes the keys of both roles along: leave roles out."));
        }
        let overlap = self.overlap_seconds.unwrap_or(DEFAULT_OVERLAP);
        if overlap > MAX_OVERLAP {
            return Err(invalid("overlap_seconds is at most 2592000 (30 days)."));
        }
        Ok(KeyRotation { roles, secret: self.jwt_secret, overlap: Duration::from_secs(overlap.into()) })
    }
}

fn view(project: ProjectId, rotated: RotatedKeys, secret: bool) -> Result<RotatedView> {
    let RotatedKeys { jwt_secret, keys, replaced } = rotated;
    let minter = Minter::new(&jwt_secret);
    let token = |role: KeyRole| {
        let key = keys.iter().find(|key| key.role == role);
        key.map(|key| minter.project_key(project, key.id, role)).transpose()
    };
    Ok(RotatedView {
        anon_key: token(KeyRole::Anon)?,
        service_role_key: token(KeyRole::ServiceRole)?,
        jwt_secret: secret.then(|| jwt_secret.expose_secret().to_owned()),
        keys: keys.into_iter().map(KeyView::from).collect(),
        replaced: replaced.into_iter().map(KeyView::from).collect(),
    })
}
