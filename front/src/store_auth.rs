use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use aura_auth::{AuthError, Verifier, is_inspector, peek};
use aura_domain::{Claims, ProjectId};
use aura_store::{ProjectAuth, Signal, Store, StoreError};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use futures_util::{StreamExt, stream::FuturesUnordered};

use crate::{
    clock,
    identity::{Authenticator, Identity, TokenError},
};

/// Keys that were revoked are refused at most so much later, also when nobody tells us (R-FRT-3).
const FRESH: Duration = Duration::from_secs(1);
/// A project that was read while it changed may be remembered as it was; by then it isn't any more.
const AGAIN: Duration = Duration::from_millis(1200);
/// Between two tries to listen to the platform database.
const RETRY: Duration = Duration::from_millis(500);
/// Projects that are remembered for that long.
const PROJECTS: u64 = 10_000;

/// Authenticates against the platform database.
pub(crate) struct StoreAuthenticator {
    store: Store,
    verifier: Verifier,
    projects: moka::future::Cache<ProjectId, Option<Arc<ProjectAuth>>>,
}

impl StoreAuthenticator {
    pub(crate) fn new(store: Store, verifier: Verifier) -> Self {
        let projects = moka::future::Cache::builder().max_capacity(PROJECTS).time_to_live(FRESH).build();
        Self { store, verifier, projects }
    }

    async fn project(&self, id: ProjectId) -> Result<Arc<ProjectAuth>, TokenError> {
        let load = async { Ok::<_, StoreError>(self.store.project_auth(id).await?.map(Arc::new)) };
        let found = self.projects.try_get_with(id, load).await.map_err(|error| {
            tracing::warn!(%error, "can't read a project");
            TokenError::Unavailable
        })?;
        found.ok_or(TokenError::UnknownProject)
    }

    /// Tells of changes until the connection for them is lost for good.
    async fn follow(&self, changed: &(dyn Fn(Option<ProjectId>) + Send + Sync)) -> Result<(), StoreError> {
        let mut listener = self.store.listen().await?;
        // What happened before we listened.
        self.projects.invalidate_all();
        changed(None);
        let mut again = FuturesUnordered::new();
        loop {
            tokio::select! {
                signal = listener.next() => {
                    let project = match signal? {
                        Signal::Project(project) => Some(project),
                        Signal::Lost => None,
                        Signal::Registry(_) | Signal::Engines => continue,
                    };
                    self.forget(project).await;
                    changed(project);
                    again.push(async move {
                        tokio::time::sleep(AGAIN).await;
                        project
                    });
                }
                Some(project) = again.next() => changed(project),
            }
        }
    }

    async fn forget(&self, project: Option<ProjectId>) {
        match project {
            Some(project) => self.projects.invalidate(&project).await,
            None => self.projects.invalidate_all(),
        }
    }

    async fn verify(&self, project: ProjectId, token: &str) -> Result<Identity, TokenError> {
        let auth = self.project(project).await?;
        let verified = self.verifier.verify_project(&auth.rules, token).await.map_err(|error| refused(error, token))?;
        Ok(Identity {
            project,
            source: auth.project.source,
            role: verified.role.as_str().to_owned(),
            claims: Claims::from_payload(&verified.payload).map_err(|_| TokenError::Malformed)?,
            expires: verified.exp,
            ends: verified.ends,
            key: verified.key_id,
            read_only: is_inspector(&verified.payload),
        })
    }
}

#[async_trait]
impl Authenticator for StoreAuthenticator {
    async fn connect(&self, token: &str) -> Result<Identity, TokenError> {
        let named = peek(token).map_err(|error| refused(error, token))?;
        let project = named.project_ref.ok_or(TokenError::UnknownProject)?;
        self.verify(project, token).await
    }

    async fn channel(&self, project: ProjectId, token: &str) -> Result<Identity, TokenError> {
        self.verify(project, token).await
    }

    async fn watch(&self, changed: &(dyn Fn(Option<ProjectId>) + Send + Sync)) {
        loop {
            if let Err(error) = self.follow(changed).await {
                tracing::debug!(%error, "can't hear of changed projects now");
            }
            tokio::time::sleep(RETRY).await;
        }
    }
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
        AuthError::UnknownRole => TokenError::Role,
        AuthError::KeySetUnavailable => TokenError::KeySet,
    }
}

/// For the message only; the signature of an expired token has been verified.
fn expired_since(token: &str) -> i64 {
    let payload = token.split('.').nth(1).and_then(|part| URL_SAFE_NO_PAD.decode(part).ok());
    let claims: Option<serde_json::Value> = payload.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let exp = claims.and_then(|claims| claims["exp"].as_f64()).map_or(0, |exp| exp as i64);
    clock::now().saturating_sub(exp).max(0)
}
