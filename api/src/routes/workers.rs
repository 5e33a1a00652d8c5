use aura_domain::{SourceId, WorkerId};
use aura_kit::Json;
use aura_store::{Engine, WorkerRow};
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::{access::Platform, error::Result, paging::PageQuery, routes::Params, state::AppState};

/// A process of the pool that runs engines.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Worker)]
pub(crate) struct WorkerView {
    /// Unique per start.
    id: WorkerId,
    /// Host or pod.
    #[schema(example = "worker-0")]
    host: String,
    /// Of the program.
    #[schema(example = "0.1.0")]
    version: String,
    /// It was heard in the last 15 s. A dead one's engines are taken by the others.
    alive: bool,
    /// It leaves: its engines go to the others.
    draining: bool,
    /// Ids of the sources whose engines it runs.
    engines: Vec<SourceId>,
    /// Engines that it may run.
    max_engines: usize,
    /// RFC 3339.
    #[schema(format = DateTime)]
    started_at: String,
    /// Milliseconds since it was heard.
    silent_ms: i64,
}

/// A page of the pool.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct WorkerPage {
    /// By start.
    items: Vec<WorkerView>,
    /// Behind the last item; null at the end.
    next_cursor: Option<String>,
}

/// List the workers.
///
/// Those that ended without saying so are listed, not alive, for a day.
#[utoipa::path(
    get,
    path = "/v1/workers",
    operation_id = "list_workers",
    tag = "engines",
    params(PageQuery),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "A page", body = WorkerPage)
    )
)]
pub(crate) async fn list_workers(
    _: Platform,
    State(state): State<AppState>,
    Params(query): Params<PageQuery>,
) -> Result<Json<WorkerPage>> {
    let window = query.window::<(String, String)>("workers")?;
    let (mut workers, engines) = (state.store().workers().await?, state.store().engines().await?);
    // A pool is small: it is read whole.
    workers.retain(|worker| window.after.as_ref().is_none_or(|after| key(worker) > *after));
    let next_cursor = window.cut(&mut workers, key);
    let items = workers.into_iter().map(|worker| shown(worker, &engines)).collect();
    Ok(Json(WorkerPage { items, next_cursor }))
}

/// In the order of the list.
fn key(worker: &WorkerRow) -> (String, String) {
    (worker.started_at.clone(), worker.id.0.clone())
}

fn shown(worker: WorkerRow, engines: &[Engine]) -> WorkerView {
    let alive = worker.is_alive();
    let own = engines.iter().filter(|engine| engine.holder.as_ref() == Some(&worker.id));
    let engines = own.map(|engine| engine.source).collect();
    let WorkerRow { id, host, version, draining, max_engines, started_at, silent_ms, .. } = worker;
    WorkerView { id, host, version, alive, draining, engines, max_engines, started_at, silent_ms }
}
