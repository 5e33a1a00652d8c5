use aura_auth::{KeyRole, Minter};
use aura_domain::{ProjectId, SourceId, SqlName};
use aura_kit::{Code, Json};
use aura_store::{CreatedProject, NewProject, Project, ProjectSettings, Source};
use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use secrecy::ExposeSecret;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    access::{Platform, ProjectPath, name},
    error::{ApiError, Result},
    openapi::ASKS_SOURCE,
    paging,
    routes::{Params, sources::find_source},
    state::AppState,
};

/// The source that a project gets unless the client names one.
const DEFAULT_SOURCE: &str = "shared";
/// Longest project name in characters.
const MAX_NAME: usize = 100;

/// A tenant.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Project)]
pub(crate) struct ProjectView {
    /// Also the `ref` of its keys.
    #[schema(value_type = uuid::Uuid)]
    id: ProjectId,
    /// Unique.
    #[schema(example = "shop")]
    name: String,
    /// Physical main schema, the client's `public`.
    #[schema(value_type = String, example = "project_7c9e6679-7425-40de-944b-e07fc1f90ae7")]
    schema: SqlName,
    /// Id of its source.
    #[schema(value_type = uuid::Uuid)]
    source: SourceId,
    /// RFC 3339.
    #[schema(format = DateTime)]
    created_at: String,
}

impl From<Project> for ProjectView {
    fn from(project: Project) -> Self {
        let Project { id, name, schema, source, created_at, .. } = project;
        Self { id, name, schema, source, created_at }
    }
}

/// A tenant with what is shown only once.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = CreatedProject)]
pub(crate) struct CreatedView {
    #[serde(flatten)]
    project: ProjectView,
    /// For browsers: row security applies.
    #[schema(example = "eyJhbGciOiJIUzI1NiJ9.anon.signature")]
    anon_key: String,
    /// For servers: administers the project. Keep it secret.
    #[schema(example = "eyJhbGciOiJIUzI1NiJ9.service_role.signature")]
    service_role_key: String,
    /// Signs end users' tokens (HS256). Keep it secret.
    #[schema(example = "43-characters-of-base64url")]
    jwt_secret: String,
}

/// What a project is made from.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "shop"}))]
pub(crate) struct CreateProject {
    /// Unique, 1 to 100 characters.
    name: String,
    /// Existing or new physical schema; `project_<id>` without.
    schema: Option<String>,
    /// Id or name of its source; `shared` without.
    source: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListQuery {
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// Items, 1 to 1000.
    #[param(default = 100)]
    limit: Option<u32>,
}

/// A page of projects.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ProjectPage {
    /// By id.
    items: Vec<ProjectView>,
    /// Behind the last item; null at the end.
    next_cursor: Option<String>,
}

/// List projects.
///
/// By id. The page ends where `next_cursor` is null.
#[utoipa::path(
    get,
    path = "/v1/projects",
    operation_id = "list_projects",
    tag = "projects",
    params(ListQuery),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "A page", body = ProjectPage)
    )
)]
pub(crate) async fn list_projects(
    _: Platform,
    State(state): State<AppState>,
    Params(query): Params<ListQuery>,
) -> Result<Json<ProjectPage>> {
    let limit = paging::limit(query.limit)?;
    let after = paging::key::<ProjectId>(query.cursor.as_deref())?;
    let mut projects = state.store().list_projects(after, limit + 1).await?;
    let more = projects.len() > limit as usize;
    projects.truncate(limit as usize);
    let last = projects.last().filter(|_| more).map(|project| paging::cursor(&project.id));
    Ok(Json(ProjectPage { items: projects.into_iter().map(ProjectView::from).collect(), next_cursor: last }))
}

/// Show a project.
///
/// Never its keys: those are shown once, when they are made.
#[utoipa::path(
    get,
    path = "/v1/projects/{project}",
    operation_id = "get_project",
    tag = "projects",
    params(("project" = uuid::Uuid, Path, description = "Project id")),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "The project", body = ProjectView)
    )
)]
pub(crate) async fn get_project(project: ProjectPath) -> Json<ProjectView> {
    Json(project.into_project().into())
}

/// Create a project.
///
/// Makes its schema and roles in the source. The keys and the secret are in this answer only.
#[utoipa::path(
    post,
    path = "/v1/projects",
    operation_id = "create_project",
    tag = "projects",
    extensions(("x-codes" = json!([ASKS_SOURCE, Code::SourceNotFound, Code::ProjectExists, Code::SchemaTaken, Code::InvalidName, Code::SystemSchemaNotSupported]))),
    request_body = CreateProject,
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 201, description = "The project and its keys", body = CreatedView, headers(("Location" = String, description = "The project")))
    )
)]
pub(crate) async fn create_project(
    platform: Platform,
    State(state): State<AppState>,
    Json(body): Json<CreateProject>,
) -> Result<Response> {
    let source = find_source(&state, body.source.as_deref().unwrap_or(DEFAULT_SOURCE)).await?;
    let new = body.check(&source)?;
    // First what may fail without leaving a trace: is the source there, and may we make roles?
    let admin = state.sources().admin(state.store(), source.id).await?;
    admin.bootstrap().await?;
    let created = state.store().create_project(new, platform.actor().as_str()).await?;
    let CreatedProject { project, secrets, .. } = &created;
    let roles = &project.settings.roles;
    let provisioned = admin.provision_project(project.id, &project.schema, roles, &secrets.visibility_password).await;
    if let Err(error) = provisioned {
        // Nobody knows its keys: a project that can't be reached would only hold the name.
        state.store().discard_project(project.id, platform.actor().as_str()).await?;
        return Err(error.into());
    }
    admin.done();
    let location = format!("/v1/projects/{}", created.project.id);
    Ok((StatusCode::CREATED, [(header::LOCATION, location)], Json(keys(created)?)).into_response())
}

impl CreateProject {
    fn check(self, source: &Source) -> Result<NewProject> {
        let length = self.name.chars().count();
        if !(1..=MAX_NAME).contains(&length) || self.name.chars().any(char::is_control) {
            let detail = format!("name has 1 to {MAX_NAME} characters and no control characters.");
            return Err(ApiError::new(Code::InvalidBody, detail));
        }
        let schema = self.schema.map(|schema| name(schema, "schema")).transpose()?;
        if schema.as_ref().is_some_and(|schema| crate::access::is_system(schema)) {
            return Err(ApiError::new(Code::SystemSchemaNotSupported, "That schema belongs to the server or to us."));
        }
        let settings = ProjectSettings::default();
        Ok(NewProject { id: None, name: self.name, source: source.id, schema, settings })
    }
}

fn keys(created: CreatedProject) -> Result<CreatedView> {
    let CreatedProject { project, secrets, anon_key, service_role_key } = created;
    let minter = Minter::new(&secrets.jwt_secret);
    Ok(CreatedView {
        anon_key: minter.project_key(project.id, anon_key, KeyRole::Anon)?,
        service_role_key: minter.project_key(project.id, service_role_key, KeyRole::ServiceRole)?,
        jwt_secret: secrets.jwt_secret.expose_secret().to_owned(),
        project: project.into(),
    })
}
