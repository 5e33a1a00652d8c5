use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use aura_auth::{AuthError, KeyRole, LiveKey, ProjectRules, Verifier, is_inspector, peek};
use aura_domain::{Claims, ProjectId};
use aura_store::{ProjectAuth, Store, StoreError};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};

use crate::{
    clock,
    identity::{Authenticator, Identity, TokenError},
};

/// Keys that were revoked are refused at most so much later (R-FRT-3).
const FRESH: Duration = Duration::from_secs(2);
/// Projects that are remembered for that long.
const PROJECTS: u64 = 10_000;

/// Authenticates against the platform database.
pub(crate) struct StoreAuthenticator {
    store: Store,
    projects: moka::future::Cache<ProjectId, Option<Arc<ProjectAuth>>>,
}

impl StoreAuthenticator {
    pub(crate) fn new(store: Store) -> Self {
        let projects = moka::future::Cache::builder().max_capacity(PROJECTS).time_to_live(FRESH).build();
        Self { store, projects }
    }

    async fn project(&self, id: ProjectId) -> Result<Arc<ProjectAuth>, TokenError> {
        let load = async { Ok::<_, StoreError>(self.store.project_auth(id).await?.map(Arc::new)) };
        let found = self.projects.try_get_with(id, load).await.map_err(|error| {
            tracing::warn!(%error, "can't read a project");
            TokenError::Unavailable
        })?;
        found.ok_or(TokenError::UnknownProject)
    }
}

#[async_trait]
impl Authenticator for StoreAuthenticator {
    async fn connect(&self, token: &str) -> Result<Identity, TokenError> {
        let named = peek(token).map_err(|error| refused(error, token))?;
        let project = named.project_ref.ok_or(TokenError::UnknownProject)?;
        verify(&*self.project(project).await?, token)
    }

    async fn channel(&self, project: ProjectId, token: &str) -> Result<Identity, TokenError> {
        verify(&*self.project(project).await?, token)
    }
}

fn verify(auth: &ProjectAuth, token: &str) -> Result<Identity, TokenError> {
    let live_keys: Vec<_> = auth
        .keys
        .iter()
        .map(|key| LiveKey {
            id: key.id,
            role: match key.role {
                aura_store::KeyRole::Anon => KeyRole::Anon,
                aura_store::KeyRole::ServiceRole => KeyRole::ServiceRole,
            },
        })
        .collect();
    let rules = ProjectRules {
        project: auth.project.id,
        secret: &auth.jwt_secret,
        live_keys: &live_keys,
        audience: auth.project.settings.aud.as_deref(),
    };
    let verified = Verifier::verify_project(&rules, token).map_err(|error| refused(error, token))?;
    Ok(Identity {
        project: auth.project.id,
        source: auth.project.source,
        role: verified.role.as_str().to_owned(),
        claims: Claims::from_payload(&verified.payload).map_err(|_| TokenError::Malformed)?,
        expires: verified.exp,
        read_only: is_inspector(&verified.payload),
    })
}

/// The original's words for it.
fn refused(error: AuthError, token: &str) -> TokenError {
    match error {
        AuthError::Missing => TokenError::Missing,
        AuthError::Expired => TokenError::Expired { seconds: expired_since(token) },
        AuthError::MissingClaim("exp" | "role") => TokenError::MissingClaims,
        AuthError::Malformed | AuthError::MissingClaim(_) | AuthError::BadClaim(_) | AuthError::NotYetValid => {
            TokenError::Malformed
        }
        AuthError::Forged
        | AuthError::WrongAudience
        | AuthError::Revoked
        | AuthError::WrongProject
        | AuthError::RoleNeedsKey => TokenError::Signature,
    }
}

/// For the message only; the signature of an expired token has been verified.
fn expired_since(token: &str) -> i64 {
    let payload = token.split('.').nth(1).and_then(|part| URL_SAFE_NO_PAD.decode(part).ok());
    let claims: Option<serde_json::Value> = payload.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let exp = claims.and_then(|claims| claims["exp"].as_f64()).map_or(0, |exp| exp as i64);
    clock::now().saturating_sub(exp).max(0)
}
