use aura_domain::ProjectId;
use aura_kit::Json;
use aura_store::{AuditEntry, AuditFilter};
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::{
    access::{Platform, ProjectPath},
    error::Result,
    paging::{PageQuery, Window},
    routes::Params,
    state::AppState,
};

/// Who changed what.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AuditEntry)]
pub(crate) struct EntryView {
    /// Rises with time.
    id: i64,
    /// RFC 3339.
    #[schema(format = DateTime)]
    at: String,
    /// Whose; null = the installation's.
    project_id: Option<uuid::Uuid>,
    /// Key id and role, `platform`, or `worker`.
    #[schema(example = "platform")]
    actor: String,
    /// What was done.
    #[schema(example = "project.update")]
    action: String,
    /// `schema.table`, a name or an id.
    #[schema(example = "shop")]
    target: String,
    /// State before; null where there was none.
    #[schema(value_type = Option<Object>)]
    before: Option<Value>,
    /// State after; null where there is none.
    #[schema(value_type = Option<Object>)]
    after: Option<Value>,
    /// `x-request-id` of the request; null where nobody asked.
    request_id: Option<String>,
}

impl From<AuditEntry> for EntryView {
    fn from(entry: AuditEntry) -> Self {
        let AuditEntry { id, at, project_id, actor, action, target, before, after, request_id } = entry;
        Self { id, at, project_id, actor, action, target, before, after, request_id }
    }
}

/// A page of the audit log.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AuditPage {
    /// Newest first.
    items: Vec<EntryView>,
    /// Behind the last item; null at the end.
    next_cursor: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct AuditQuery {
    /// Only this project's, which may have been deleted.
    #[param(value_type = Option<uuid::Uuid>)]
    project: Option<ProjectId>,
    /// Only of this action.
    #[param(example = "project.delete")]
    action: Option<String>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// Items, 1 to 1000.
    #[param(default = 100, minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// List what was changed of a project.
///
/// Every change through the API, what the worker found out about its tables, and what was tried with another project's key
/// (`access.refused`). There is no secret in it.
#[utoipa::path(
    get,
    path = "/v1/projects/{project}/audit",
    operation_id = "list_project_audit",
    tag = "projects",
    params(("project" = uuid::Uuid, Path, description = "Project id"), PageQuery),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "A page", body = AuditPage)
    )
)]
pub(crate) async fn list_project_audit(
    project: ProjectPath,
    State(state): State<AppState>,
    Params(query): Params<PageQuery>,
) -> Result<Json<AuditPage>> {
    let filter = AuditFilter { project: Some(project.into_project().id), ..Default::default() };
    page(&state, filter, &query.window("audit")?).await
}

/// List what was changed in the installation.
///
/// Sources, engines and projects, deleted ones included.
#[utoipa::path(
    get,
    path = "/v1/audit",
    operation_id = "list_audit",
    tag = "service",
    params(AuditQuery),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "A page", body = AuditPage)
    )
)]
pub(crate) async fn list_audit(
    _: Platform,
    State(state): State<AppState>,
    Params(query): Params<AuditQuery>,
) -> Result<Json<AuditPage>> {
    let filter = AuditFilter { project: query.project, action: query.action.as_deref(), ..Default::default() };
    page(&state, filter, &Window::new("audit", query.cursor.as_deref(), query.limit)?).await
}

async fn page(state: &AppState, filter: AuditFilter<'_>, window: &Window<i64>) -> Result<Json<AuditPage>> {
    let filter = AuditFilter { before: window.after, limit: window.fetch(), ..filter };
    let mut entries = state.store().audit_entries(filter).await?;
    let next_cursor = window.cut(&mut entries, |entry| entry.id);
    Ok(Json(AuditPage { items: entries.into_iter().map(EntryView::from).collect(), next_cursor }))
}
