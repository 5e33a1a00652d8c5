//! Permission as a parameter (R-SEC-1): a handler gets a project or a table only by extracting the right to it.

use aura_auth::{AuthError, Role, Verified, Verifier, peek};
use aura_domain::{ProjectId, SqlName};
use aura_kit::Code;
use aura_store::{NewAudit, Project, TableRef};
use axum::{
    extract::{FromRequestParts, MatchedPath, RawPathParams},
    http::request::Parts,
};

use crate::{
    error::{ApiError, Result},
    session,
    state::AppState,
};

/// Whoever has the platform's secret.
const PLATFORM: &str = "platform";

/// Who did it, for the audit: key id and role, or `platform`.
#[derive(Debug, Clone)]
pub(crate) struct Actor(String);

impl Actor {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// The right to administer one project, from its service_role key.
#[derive(Debug, Clone)]
pub(crate) struct ProjectService {
    project: Project,
    actor: Actor,
}

impl ProjectService {
    pub(crate) fn project(&self) -> &Project {
        &self.project
    }

    pub(crate) fn actor(&self) -> &Actor {
        &self.actor
    }

    /// `None` if the token isn't a service_role key.
    fn new(project: Project, verified: &Verified) -> Option<Self> {
        let key = verified.key_id.filter(|_| verified.role == Role::ServiceRole)?;
        Some(Self { project, actor: Actor(format!("{key} {}", verified.role)) })
    }
}

impl FromRequestParts<AppState> for ProjectService {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self> {
        // An id that isn't one is as unknown as any other.
        let wanted = path_param(parts, state, "project").await?.parse::<ProjectId>().ok();
        let (project, verified) = match authenticate(parts, state, wanted).await? {
            Caller::Project(project, verified) => (project, verified),
            Caller::Platform => return Err(forbidden("a service_role key of the project")),
        };
        if wanted != Some(project.id) {
            note_intrusion(parts, state, wanted, &project, &verified).await?;
            return Err(ApiError::project_not_found());
        }
        Self::new(*project, &verified).ok_or_else(|| forbidden("a service_role key of the project"))
    }
}

/// Whoever holds a key that administers something: the platform or a project.
pub(crate) enum KeyHolder {
    Platform,
    Project(Box<ProjectService>),
}

impl FromRequestParts<AppState> for KeyHolder {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self> {
        let service = match authenticate(parts, state, None).await? {
            Caller::Platform => return Ok(Self::Platform),
            Caller::Project(project, verified) => ProjectService::new(*project, &verified),
        };
        service.map(Box::new).map(Self::Project).ok_or_else(|| forbidden("a service_role or platform key"))
    }
}

/// Who tries to change something with another project's key is noted, whether or not there is such a project: the answer and
/// what it takes are the same.
async fn note_intrusion(
    parts: &Parts,
    state: &AppState,
    wanted: Option<ProjectId>,
    own: &Project,
    verified: &Verified,
) -> Result<()> {
    if parts.method.is_safe() || state.intrusions().count(own.id).is_err() {
        return Ok(());
    }
    let key = verified.key_id.map(|key| format!("{key} ")).unwrap_or_default();
    let route = parts.extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str);
    let request = aura_kit::request_id::current();
    let entry = NewAudit {
        project: wanted,
        actor: &format!("{key}{}", verified.role),
        action: "access.refused",
        target: format!("{} {route}", parts.method),
        before: None,
        after: Some(serde_json::json!({"key_of": own.id})),
        request_id: request.as_deref(),
    };
    Ok(state.store().audit(entry).await?)
}

/// The right to what a project's owner and the platform may both do, from a service_role or a platform key.
#[derive(Debug, Clone)]
pub(crate) struct ProjectAdmin {
    project: Project,
    actor: Actor,
}

impl ProjectAdmin {
    pub(crate) fn project(&self) -> &Project {
        &self.project
    }

    pub(crate) fn actor(&self) -> &Actor {
        &self.actor
    }
}

impl FromRequestParts<AppState> for ProjectAdmin {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self> {
        match ProjectService::from_request_parts(parts, state).await {
            Ok(ProjectService { project, actor }) => Ok(Self { project, actor }),
            Err(refused) if refused.code() == Code::InsufficientRole => {
                let project =
                    ProjectPath::from_request_parts(parts, state).await.map_err(|error| match error.code() {
                        Code::InsufficientRole => forbidden("a service_role key of the project, or a platform key"),
                        _ => error,
                    })?;
                Ok(Self { project: project.into_project(), actor: Actor(PLATFORM.to_owned()) })
            }
            Err(refused) => Err(refused),
        }
    }
}

/// The right to administer one table of a project, by its physical names.
#[derive(Debug, Clone)]
pub(crate) struct TableService {
    access: ProjectService,
    schema: SqlName,
    table: SqlName,
}

impl TableService {
    pub(crate) fn access(&self) -> &ProjectService {
        &self.access
    }

    pub(crate) fn project(&self) -> &Project {
        &self.access.project
    }

    pub(crate) fn schema(&self) -> &SqlName {
        &self.schema
    }

    pub(crate) fn table(&self) -> &SqlName {
        &self.table
    }

    pub(crate) fn reference(&self) -> TableRef<'_> {
        TableRef { project: self.access.project.id, schema: &self.schema, table: &self.table }
    }
}

impl FromRequestParts<AppState> for TableService {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self> {
        let access = ProjectService::from_request_parts(parts, state).await?;
        let table = name(path_param(parts, state, "table").await?, "table")?;
        let schema = physical_schema(&access.project, schema_param(parts)?.as_deref())?;
        Ok(Self { access, schema, table })
    }
}

/// The right to administer the platform.
#[derive(Debug, Clone)]
pub(crate) struct Platform {
    actor: Actor,
}

impl Platform {
    pub(crate) fn actor(&self) -> &Actor {
        &self.actor
    }
}

impl FromRequestParts<AppState> for Platform {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self> {
        match authenticate(parts, state, None).await? {
            Caller::Platform => Ok(Self { actor: Actor(PLATFORM.to_owned()) }),
            Caller::Project(..) => Err(forbidden("a platform key")),
        }
    }
}

/// The right to administer the platform, and one project.
pub(crate) struct ProjectPath(Project);

impl ProjectPath {
    pub(crate) fn into_project(self) -> Project {
        self.0
    }
}

impl FromRequestParts<AppState> for ProjectPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self> {
        Platform::from_request_parts(parts, state).await?;
        let id = path_param(parts, state, "project").await?.parse().map_err(|_| ApiError::project_not_found())?;
        state.store().project(id).await?.map(Self).ok_or_else(ApiError::project_not_found)
    }
}

/// The right to administer the platform, and one project that may have been deleted already, as long as something of it is
/// left to be taken back.
pub(crate) enum ProjectOrRemains {
    Living(Project),
    Deleted(Project),
}

impl FromRequestParts<AppState> for ProjectOrRemains {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self> {
        Platform::from_request_parts(parts, state).await?;
        let id = path_param(parts, state, "project").await?.parse().map_err(|_| ApiError::project_not_found())?;
        if let Some(project) = state.store().project(id).await? {
            return Ok(Self::Living(project));
        }
        let deleted = state.store().deleted_project(id).await?;
        deleted.map(|deleted| Self::Deleted(deleted.project)).ok_or_else(ApiError::project_not_found)
    }
}

/// What a token of the project says, whoever holds it; a token of another project's is none.
pub(crate) async fn verify_user(state: &AppState, project: ProjectId, token: &str) -> Result<Verified> {
    let refused = |error: AuthError| ApiError::new(Code::InvalidBody, format!("The token is not accepted: {error}."));
    if peek(token).map_err(refused)?.project_ref.is_some_and(|named| named != project) {
        return Err(ApiError::new(Code::InvalidBody, "The token is not one of this project."));
    }
    let auth = state.store().project_auth(project).await?.ok_or_else(ApiError::project_not_found)?;
    state.settings().verifier.verify_project(&auth.rules, token).await.map_err(|error| match error {
        AuthError::KeySetUnavailable => error.into(),
        error => refused(error),
    })
}

/// Who is asking.
enum Caller {
    Platform,
    Project(Box<Project>, Verified),
}

/// `wanted` is the project that is asked for: an end user's token, which a tenant's own server signs, need not name it.
async fn authenticate(parts: &Parts, state: &AppState, wanted: Option<ProjectId>) -> Result<Caller> {
    let token = &*session::token(parts, state).await?;
    let id = match (peek(token)?.project_ref, wanted) {
        (Some(id), _) => id,
        (None, wanted) => match (Verifier::verify_platform(&state.settings().platform_secret, token), wanted) {
            (Ok(_), _) => return Ok(Caller::Platform),
            // The signature was the platform's: whose project is asked for doesn't matter.
            (Err(AuthError::Expired), _) => return Err(AuthError::Expired.into()),
            (Err(_), Some(wanted)) => wanted,
            (Err(error), None) => return Err(error.into()),
        },
    };
    // A token of a project that isn't there can't be verified, whoever signed it.
    let unverifiable = || ApiError::new(Code::InvalidToken, "The signature is not valid.");
    let auth = state.store().project_auth(id).await?.ok_or_else(unverifiable)?;
    let verified = state.settings().verifier.verify_project(&auth.rules, token).await;
    // Nobody learns from the difference which projects there are: an end user's token is good for nothing here anyway.
    let verified =
        verified.map_err(|error| if error == AuthError::KeySetUnavailable { AuthError::Forged } else { error })?;
    Ok(Caller::Project(Box::new(auth.project), verified))
}

fn forbidden(needed: &str) -> ApiError {
    ApiError::new(Code::InsufficientRole, format!("This takes {needed}."))
}

/// A path parameter, percent-decoded.
pub(crate) async fn path_param(parts: &mut Parts, state: &AppState, wanted: &str) -> Result<String> {
    let params = RawPathParams::from_request_parts(parts, state).await;
    let params = params.map_err(|_| ApiError::new(Code::MalformedRequest, "The path is not UTF-8."))?;
    let found = params.iter().find(|(name, _)| *name == wanted).map(|(_, value)| value.to_owned());
    found.ok_or_else(|| ApiError::new(Code::MalformedRequest, format!("The path has no {wanted}.")))
}

/// Parses a name from outside into its type.
pub(crate) fn name(text: String, what: &str) -> Result<SqlName> {
    SqlName::new(text).map_err(|error| ApiError::new(Code::InvalidName, format!("The {what} can't be: {error}.")))
}

/// `?schema=`, decoded here since the extractor of a handler's own query can't be asked twice.
fn schema_param(parts: &Parts) -> Result<Option<String>> {
    #[derive(serde::Deserialize)]
    struct Query {
        schema: Option<String>,
    }
    let query = axum::extract::Query::<Query>::try_from_uri(&parts.uri);
    Ok(query.map_err(|_| ApiError::new(Code::MalformedRequest, "The query can't be read."))?.0.schema)
}

/// The client's word for a schema as its physical name: `public` (the default) is the project's main schema.
pub(crate) fn physical_schema(project: &Project, word: Option<&str>) -> Result<SqlName> {
    let Some(word) = word.filter(|word| *word != "public") else { return Ok(project.schema.clone()) };
    if is_system(word) {
        return Err(ApiError::new(Code::SystemSchemaNotSupported, "That schema belongs to the server or to us."));
    }
    let own = project.settings.schemas.iter().chain([&project.schema]).find(|schema| schema.as_str() == word);
    own.cloned().ok_or_else(|| ApiError::new(Code::SchemaNotFound, "The project has no such schema."))
}

/// A physical schema as the client says it.
pub(crate) fn schema_word<'a>(project: &Project, schema: &'a str) -> &'a str {
    if schema == project.schema.as_str() { "public" } else { schema }
}

/// `pg_*`, `information_schema`, the platform's own and the source's bootstrap.
pub(crate) fn is_system(schema: &str) -> bool {
    schema.starts_with("pg_") || matches!(schema, "information_schema" | "aura" | "aura_source" | "auth")
}
