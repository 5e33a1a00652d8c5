use aura_auth::{KeyRole, Minter};
use aura_domain::{ProjectId, SourceId, SqlName};
use aura_kit::{Code, Json, Problem};
use aura_store::{CreatedProject, NewProject, Project, ProjectSettings, Source, StoreError};
use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use secrecy::ExposeSecret;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    access::{Platform, ProjectOrRemains, ProjectPath},
    error::{ApiError, Result},
    headers::{IfMatch, Wait, version_etag},
    once::OnceJson,
    openapi::ASKS_SOURCE,
    paging::PageQuery,
    project::{
        DeletedView, Deletion, PatchProject, SettingsView, change, check_name, check_schema, delete, finish,
        plan_deletion, preview,
    },
    routes::{DoneOr, DryRun, Params, Plan, engine_verbs::Request, sources::find_source},
    state::AppState,
};

/// The source that a project gets unless the client names one.
const DEFAULT_SOURCE: &str = "shared";

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
    #[serde(flatten)]
    settings: SettingsView,
}

impl From<Project> for ProjectView {
    fn from(project: Project) -> Self {
        let Project { id, name, schema, source, created_at, settings, .. } = project;
        Self { id, name, schema, source, created_at, settings: settings.into() }
    }
}

/// A project and its version.
fn shown(project: Project) -> Response {
    ([(header::ETAG, version_etag(project.version))], Json(ProjectView::from(project))).into_response()
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
    params(PageQuery),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "A page", body = ProjectPage)
    )
)]
pub(crate) async fn list_projects(
    _: Platform,
    State(state): State<AppState>,
    Params(query): Params<PageQuery>,
) -> Result<Json<ProjectPage>> {
    let window = query.window::<ProjectId>("projects")?;
    let mut projects = state.store().list_projects(window.after, window.fetch()).await?;
    let next_cursor = window.cut(&mut projects, |project| project.id);
    Ok(Json(ProjectPage { items: projects.into_iter().map(ProjectView::from).collect(), next_cursor }))
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
        (status = 200, description = "The project", body = ProjectView, headers(("ETag" = String, description = "Version of its name and settings")))
    )
)]
pub(crate) async fn get_project(project: ProjectPath) -> Response {
    shown(project.into_project())
}

/// Change a project.
///
/// What is absent stays, null brings the default back, a value replaces what was there. Roles are made in the source, and
/// the project's roles get USAGE on its schemas. With `?dry_run=true` the answer is the project as it would be.
#[utoipa::path(
    patch,
    path = "/v1/projects/{project}",
    operation_id = "update_project",
    tag = "projects",
    extensions(("x-codes" = json!([ASKS_SOURCE, Code::ProjectExists, Code::SchemaTaken, Code::SchemaInUse, Code::InvalidName, Code::SystemSchemaNotSupported]))),
    params(
        ("project" = uuid::Uuid, Path, description = "Project id"),
        ("if-match" = Option<String>, Header, description = "ETag of the version that the change is based on"),
        DryRun
    ),
    request_body = PatchProject,
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "The project as it is now", body = ProjectView, headers(("ETag" = String, description = "Version of its name and settings")))
    )
)]
pub(crate) async fn update_project(
    platform: Platform,
    project: ProjectPath,
    State(state): State<AppState>,
    if_match: IfMatch,
    Params(query): Params<DryRun>,
    Json(body): Json<PatchProject>,
) -> Result<Response> {
    let project = project.into_project();
    let wanted = body.check(&project, &state.settings().verifier)?;
    if query.dry_run {
        return Ok(Json(ProjectView::from(preview(&state, &project, wanted, &if_match).await?)).into_response());
    }
    Ok(shown(change(&state, &project, wanted, &if_match, Request::of(&platform).caller()).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeleteQuery {
    /// Also drop the project's main schema and everything in it. Needs `confirm`.
    #[serde(default)]
    drop_schema: bool,
    /// The project's name, to confirm `drop_schema`.
    confirm: Option<String>,
    /// Only say what would be done; nothing is changed.
    #[serde(default)]
    dry_run: bool,
}

/// Delete a project.
///
/// From then on its keys are refused, its sockets are closed and its tables are off. In the source their replica identities
/// are restored, and the project's roles and its login dropped. Nothing of the customer's data is dropped, unless
/// `?drop_schema=true&confirm=<name>` asks for it. 202 when what is in the source takes longer than `Prefer: wait=<s>`
/// (default 5, at most 60) or isn't possible now: it is tried until it is done, and a second DELETE tries it at once.
#[utoipa::path(
    delete,
    path = "/v1/projects/{project}",
    operation_id = "delete_project",
    tag = "projects",
    extensions(("x-codes" = json!([ASKS_SOURCE, Code::InvalidParameter]))),
    params(
        ("project" = uuid::Uuid, Path, description = "Project id"),
        ("prefer" = Option<String>, Header, description = "`wait=<seconds>`", example = "wait=5"),
        ("if-match" = Option<String>, Header, description = "ETag of the version that is to be deleted"),
        DeleteQuery
    ),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "It is deleted, and nothing of ours is left; with `dry_run` a `Plan`", body = DoneOr<DeletedView, Plan>),
        (status = 202, description = "It is deleted; `pending` says what is in the way of the rest", body = DeletedView, headers(("Retry-After" = u64, description = "Seconds")))
    )
)]
pub(crate) async fn delete_project(
    platform: Platform,
    project: ProjectOrRemains,
    State(state): State<AppState>,
    if_match: IfMatch,
    Wait(wait): Wait,
    Params(query): Params<DeleteQuery>,
) -> Result<Response> {
    let deleted = match project {
        ProjectOrRemains::Deleted(project) => finish(&state, &project, wait).await?,
        ProjectOrRemains::Living(project) => {
            if query.drop_schema && query.confirm.as_deref() != Some(project.name.as_str()) {
                return Err(ApiError::invalid_parameter("drop_schema takes confirm=<the project's name>."));
            }
            let deletion = Deletion { drop_schema: query.drop_schema, if_match, wait };
            if query.dry_run {
                let plan = plan_deletion(&state, &project, &deletion).await?;
                return Ok(Json(DoneOr::<DeletedView, _>::Planned(Plan { plan })).into_response());
            }
            delete(&state, &project, &deletion, Request::of(&platform).caller()).await?
        }
    };
    if deleted.is_done() {
        return Ok(Json(deleted).into_response());
    }
    Ok((StatusCode::ACCEPTED, [(header::RETRY_AFTER, "1")], Json(deleted)).into_response())
}

/// Create a project.
///
/// Makes its schema and roles in the source. The keys and the secret are in this answer only; who repeats the request with
/// its `Idempotency-Key` within 24 h gets the same answer. With `?dry_run=true` nothing is made.
#[utoipa::path(
    post,
    path = "/v1/projects",
    operation_id = "create_project",
    tag = "projects",
    extensions(("x-codes" = json!([ASKS_SOURCE, Code::SourceNotFound, Code::ProjectExists, Code::SchemaTaken, Code::InvalidName, Code::SystemSchemaNotSupported]))),
    params(
        ("idempotency-key" = Option<String>, Header, description = "Any text of 1 to 255 bytes: a repeated request is answered as the first one was, for 24 h"),
        DryRun
    ),
    request_body = CreateProject,
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "Nothing was made: what would be (`dry_run`)", body = Plan),
        (status = 201, description = "The project and its keys", body = CreatedView, headers(("Location" = String, description = "The project"), ("ETag" = String, description = "Version of its name and settings")))
    )
)]
pub(crate) async fn create_project(
    platform: Platform,
    State(state): State<AppState>,
    Params(query): Params<DryRun>,
    OnceJson { body, once }: OnceJson<CreateProject>,
) -> Result<Response> {
    let source = find_source(&state, body.source.as_deref().unwrap_or(DEFAULT_SOURCE)).await?;
    let new = body.check(&source)?;
    if query.dry_run {
        return Ok(Json(plan_creation(&state, new, &source).await?).into_response());
    }
    once.run(&state, platform.actor(), async |id| {
        let created = create(&state, NewProject { id: Some(ProjectId(id)), ..new }, &platform).await?;
        let (project, location) = (&created.project, format!("/v1/projects/{}", created.project.id));
        let headers = [(header::LOCATION, location), (header::ETAG, version_etag(project.version))];
        Ok((StatusCode::CREATED, headers, Json(keys(created)?)).into_response())
    })
    .await
}

async fn create(state: &AppState, new: NewProject, platform: &Platform) -> Result<CreatedProject> {
    // First what may fail without leaving a trace: is the source there, and may we make roles?
    let admin = state.sources().admin(state.store(), new.source).await?;
    admin.bootstrap().await?;
    let (id, request) = (new.id, Request::of(platform));
    let created = match state.store().create_project(new, request.caller()).await {
        // An earlier try of the request was cut off behind this.
        Err(StoreError::Taken("project id")) => resumed(state, id).await?,
        created => created?,
    };
    let CreatedProject { project, secrets, .. } = &created;
    let roles = &project.settings.roles;
    let provisioned = admin.provision_project(project.id, &project.schema, roles, &secrets.visibility_password).await;
    if let Err(error) = provisioned {
        // Nobody knows its keys: a project that can't be reached would only hold the name.
        state.store().discard_project(project.id, request.caller()).await?;
        return Err(error.into());
    }
    admin.done();
    Ok(created)
}

async fn resumed(state: &AppState, id: Option<ProjectId>) -> Result<CreatedProject> {
    let missing = || Problem::internal(&StoreError::NotFound("project"));
    match id {
        Some(id) => Ok(state.store().created_project(id).await?.ok_or_else(missing)?),
        None => Err(missing().into()),
    }
}

async fn plan_creation(state: &AppState, new: NewProject, source: &Source) -> Result<Plan> {
    state.store().check_new_project(new.clone()).await?;
    let admin = state.sources().admin(state.store(), source.id).await?;
    let schema = match &new.schema {
        Some(schema) if admin.missing_schemas(std::slice::from_ref(schema)).await?.is_empty() => {
            format!("use the schema {schema} as it is")
        }
        Some(schema) => format!("make the schema {schema}"),
        None => "make the schema project_<id>".to_owned(),
    };
    admin.done();
    let plan = vec![
        format!("make the project {} in the source {}", new.name, source.name),
        schema,
        "make its roles, and the login that its policies are judged with".to_owned(),
        "make its keys".to_owned(),
    ];
    Ok(Plan { plan })
}

impl CreateProject {
    fn check(self, source: &Source) -> Result<NewProject> {
        check_name(&self.name)?;
        let schema = self.schema.map(check_schema).transpose()?;
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
