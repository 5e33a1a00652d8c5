use std::collections::HashMap;

use aura_domain::SqlName;
use aura_kit::Json;
use aura_pgsource::admin::TableInfo;
use aura_store::{Project, Registration, RegistrationFilter};
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    access::{ProjectService, physical_schema},
    error::Result,
    openapi::ASKS_SOURCE,
    paging::Window,
    routes::Params,
    source::AdminLease,
    state::AppState,
    toggle::{RegistrationView, Unregistered, view},
};

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListQuery {
    /// Only this schema; all of the project's without.
    schema: Option<String>,
    /// Only tables that are on, or off.
    enabled: Option<bool>,
    /// Only tables whose name contains this, ignoring case.
    q: Option<String>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// Items, 1 to 1000.
    #[param(default = 100, minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// A page of tables.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TablePage {
    /// By schema and name.
    items: Vec<RegistrationView>,
    /// Behind the last item; null at the end.
    next_cursor: Option<String>,
}

/// List a project's tables with their realtime state.
///
/// Those that were never enabled, too, by schema and name.
#[utoipa::path(
    get,
    path = "/v1/db/{project}/schema/tables",
    operation_id = "list_tables",
    tag = "tables",
    extensions(("x-codes" = json!([ASKS_SOURCE]))),
    params(("project" = uuid::Uuid, Path, description = "Project id"), ListQuery),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "A page", body = TablePage)
    )
)]
pub(crate) async fn list_tables(
    service: ProjectService,
    State(state): State<AppState>,
    Params(query): Params<ListQuery>,
) -> Result<Json<TablePage>> {
    let project = service.project();
    let window = Window::new("tables", query.cursor.as_deref(), query.limit)?;
    let schemas = match &query.schema {
        Some(word) => vec![physical_schema(project, Some(word))?],
        None => project.settings.schemas.iter().chain([&project.schema]).cloned().collect(),
    };
    let admin = state.sources().admin(state.store(), project.source).await?;
    let walk = Walk { state: &state, project, admin: &admin, schemas: &schemas, query: &query, window: &window };
    let page = walk.page().await?;
    admin.done();
    Ok(Json(page))
}

/// A walk over the catalogue that keeps what the client asked for.
struct Walk<'a> {
    state: &'a AppState,
    project: &'a Project,
    admin: &'a AdminLease,
    schemas: &'a [SqlName],
    query: &'a ListQuery,
    window: &'a Window<(String, String)>,
}

impl Walk<'_> {
    /// The first `limit` tables behind `after` that match.
    async fn page(&self) -> Result<TablePage> {
        let (wanted, mut after) = (self.window.limit as usize, self.window.after.clone());
        let mut items = Vec::new();
        loop {
            let cursor = after.as_ref().map(|(schema, table)| (schema.as_str(), table.as_str()));
            let tables =
                self.admin.tables(self.schemas, self.query.q.as_deref(), cursor, i64::from(self.window.limit)).await?;
            let registrations = self.registrations(cursor).await?;
            let more = tables.len() >= wanted;
            for info in &tables {
                let item = self.item(info, &registrations);
                after = Some((info.relation.schema.to_string(), info.relation.table.to_string()));
                if self.query.enabled.is_none_or(|enabled| item.is_enabled() == enabled) {
                    items.push(item);
                }
                if items.len() == wanted {
                    return Ok(TablePage { items, next_cursor: after.map(|key| self.window.cursor(&key)) });
                }
            }
            if !more {
                return Ok(TablePage { items, next_cursor: None });
            }
        }
    }

    /// Registrations behind the cursor. There may be more than a page of them between two tables of one (dropped
    /// tables), so all are read: a project has thousands at most.
    async fn registrations(&self, after: Option<(&str, &str)>) -> Result<HashMap<u32, Registration>> {
        let filter = RegistrationFilter { enabled: None, q: self.query.q.as_deref(), after, limit: u32::MAX };
        let all = self.state.store().registrations_of_project(self.project.id, filter).await?;
        Ok(all.into_iter().map(|known| (known.oid, known)).collect())
    }

    fn item(&self, info: &TableInfo, registrations: &HashMap<u32, Registration>) -> RegistrationView {
        let relation = &info.relation;
        let known = registrations.get(&info.oid);
        let known = known.ok_or(Unregistered { schema: &relation.schema, table: &relation.table });
        view(self.project, known, Some(info))
    }
}
