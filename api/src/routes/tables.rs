use std::collections::{BTreeMap, HashMap, HashSet};

use aura_domain::{Lag, Relation, SqlName};
use aura_kit::Json;
use aura_pgsource::admin::TableInfo;
use aura_store::{Project, Registration, RegistrationFilter};
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    access::{ProjectService, physical_schema},
    engine::lag_now,
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
/// Also those that were enabled and are gone (`missing`). Warnings that take a look at a table's policies and grants are in
/// its own state only.
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
    let lag = state.store().engine(project.source).await?.as_ref().and_then(lag_now);
    let walk = Walk { state: &state, project, admin: &admin, schemas: &schemas, query: &query, window: &window, lag };
    let page = walk.page().await?;
    admin.done();
    Ok(Json(page))
}

/// Tables that are looked at once when only few of them may be wanted.
const CHUNK: u32 = 1000;

/// A walk over the catalogue and the registrations, side by side, that keeps what the client asked for.
struct Walk<'a> {
    state: &'a AppState,
    project: &'a Project,
    admin: &'a AdminLease,
    schemas: &'a [SqlName],
    query: &'a ListQuery,
    window: &'a Window<Key>,
    lag: Option<Lag>,
}

/// Schema and table.
type Key = (String, String);

impl Walk<'_> {
    /// The first `limit` tables behind `after` that match; those that are registered and gone are among them.
    async fn page(&self) -> Result<TablePage> {
        let (limit, mut after) = (self.window.limit, self.window.after.clone());
        let mut known = self.registered(after.as_ref()).await?;
        let chunk = if self.query.enabled == Some(true) { CHUNK.max(limit) } else { limit };
        let mut items = Vec::new();
        loop {
            let cursor = after.as_ref().map(|(schema, table)| (schema.as_str(), table.as_str()));
            let tables = self.admin.tables(self.schemas, self.query.q.as_deref(), cursor, i64::from(chunk)).await?;
            let last = (tables.len() < chunk as usize).then_some(());
            let up_to = tables.last().map(|info| key(&info.relation)).filter(|_| last.is_none());
            let found = known.take(&tables, up_to.as_ref());
            for (key, item) in self.merged(&tables, found) {
                after = Some(key);
                if self.query.enabled.is_none_or(|enabled| item.is_enabled() == enabled) {
                    items.push(item);
                }
                if items.len() == limit as usize {
                    return Ok(TablePage { items, next_cursor: after.map(|key| self.window.cursor(&key)) });
                }
            }
            if last.is_some() {
                return Ok(TablePage { items, next_cursor: None });
            }
            after = up_to;
        }
    }

    /// The project's registrations, and which of their tables are gone. A project has thousands at most.
    async fn registered(&self, after: Option<&Key>) -> Result<Registered> {
        let filter = RegistrationFilter { enabled: None, q: self.query.q.as_deref(), after: None, limit: u32::MAX };
        let all = self.state.store().registrations_of_project(self.project.id, filter).await?;
        let oids: Vec<_> = all.iter().map(|known| known.oid).collect();
        let there = self.admin.names_of(&oids).await?;
        let schemas: HashSet<_> = self.schemas.iter().collect();
        let gone = all.iter().filter(|known| known.enabled && !there.contains_key(&known.oid));
        let gone = gone.filter(|known| schemas.contains(&known.schema)).map(|known| (key(&known.relation()), known));
        let gone = gone.filter(|(key, _)| after.is_none_or(|after| key > after));
        let gone = gone.map(|(key, known)| (key, known.clone())).collect();
        Ok(Registered { gone, by_oid: all.into_iter().map(|known| (known.oid, known)).collect() })
    }

    /// By schema and name.
    fn merged(&self, tables: &[TableInfo], found: Found) -> BTreeMap<Key, RegistrationView> {
        let Found { by_oid, mut gone } = found;
        let mut items = BTreeMap::new();
        for info in tables {
            let key = key(&info.relation);
            // A new table under the name of one that is gone shows what became of that.
            let replaced = gone.remove(&key);
            let known = by_oid.get(&info.oid).or(replaced.as_ref());
            let bare = Unregistered { schema: &info.relation.schema, table: &info.relation.table };
            items.insert(key, view(self.project, known.ok_or(bare), Some(info)).with_lag(self.lag));
        }
        items.extend(
            gone.into_iter().map(|(key, known)| (key, view(self.project, Ok(&known), None).with_lag(self.lag))),
        );
        items
    }
}

/// Registrations on their way into pages.
struct Registered {
    by_oid: HashMap<u32, Registration>,
    /// Those whose table is gone.
    gone: BTreeMap<Key, Registration>,
}

/// What belongs among some tables.
struct Found {
    by_oid: HashMap<u32, Registration>,
    gone: BTreeMap<Key, Registration>,
}

impl Registered {
    /// What belongs among these tables, and up to the last of them unless they are the end.
    fn take(&mut self, tables: &[TableInfo], up_to: Option<&Key>) -> Found {
        let by_oid = tables.iter().filter_map(|info| self.by_oid.remove_entry(&info.oid)).collect();
        let mut gone = std::mem::take(&mut self.gone);
        if let Some(up_to) = up_to {
            self.gone = gone.split_off(up_to);
            gone.extend(self.gone.remove_entry(up_to));
        }
        Found { by_oid, gone }
    }
}

fn key(relation: &Relation) -> Key {
    (relation.schema.to_string(), relation.table.to_string())
}
