use std::collections::HashMap;

use aura_domain::Position;
use aura_kit::Json;
use aura_store::{Gap, Source};
use axum::{
    extract::{FromRequestParts, State},
    http::request::Parts,
};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    access::{Platform, path_param},
    engine::{EngineView, view},
    error::{ApiError, Result},
    paging::PageQuery,
    routes::{Params, sources::find_source},
    state::AppState,
};

/// A page of engines.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EnginePage {
    /// By their source's name.
    items: Vec<EngineView>,
    /// Behind the last item; null at the end.
    next_cursor: Option<String>,
}

/// The right to one source, and the source.
pub(crate) struct SourcePath(Source);

impl SourcePath {
    pub(crate) fn into_source(self) -> Source {
        self.0
    }
}

impl FromRequestParts<AppState> for SourcePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self> {
        Platform::from_request_parts(parts, state).await?;
        let word = path_param(parts, state, "source").await?;
        Ok(Self(find_source(state, &word).await?))
    }
}

/// List engines.
///
/// From the platform database alone: no engine and no source is asked.
#[utoipa::path(
    get,
    path = "/v1/engines",
    operation_id = "list_engines",
    tag = "engines",
    params(PageQuery),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "A page", body = EnginePage)
    )
)]
pub(crate) async fn list_engines(
    _: Platform,
    State(state): State<AppState>,
    Params(query): Params<PageQuery>,
) -> Result<Json<EnginePage>> {
    let (store, window) = (state.store(), query.window::<String>("engines")?);
    let mut sources = store.list_sources(window.after.as_deref(), window.fetch()).await?;
    let next_cursor = window.cut(&mut sources, |source| source.name.clone());
    let (engines, workers) = (store.engines().await?, store.workers().await?);
    let engines: HashMap<_, _> = engines.into_iter().map(|engine| (engine.source, engine)).collect();
    let mut items = Vec::new();
    for source in sources {
        let Some(engine) = engines.get(&source.id) else { continue };
        items.push(view(&source, engine.clone(), store.position(source.id).await?, &workers));
    }
    Ok(Json(EnginePage { items, next_cursor }))
}

/// Show an engine.
///
/// From the platform database alone: neither the engine nor its source is asked.
#[utoipa::path(
    get,
    path = "/v1/engines/{source}",
    operation_id = "get_engine",
    tag = "engines",
    params(("source" = String, Path, description = "Id or name of the source", example = "shared")),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "The engine", body = EngineView)
    )
)]
pub(crate) async fn get_engine(source: SourcePath, State(state): State<AppState>) -> Result<Json<EngineView>> {
    Ok(Json(show(&state, &source.into_source()).await?))
}

/// What is known of a source's engine.
pub(crate) async fn show(state: &AppState, source: &Source) -> Result<EngineView> {
    let store = state.store();
    let engine = store.engine(source.id).await?.ok_or_else(ApiError::source_not_found)?;
    let (position, workers) = (store.position(source.id).await?, store.workers().await?);
    Ok(view(source, engine, position, &workers))
}

/// A range of changes that subscribers may have missed. It was announced to them.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Gap)]
pub(crate) struct GapView {
    /// Rises with time.
    id: i64,
    /// Whose; null = every project's of the source.
    #[schema(value_type = Option<uuid::Uuid>)]
    project_id: Option<aura_domain::ProjectId>,
    /// First position that may be missing; null = unknown.
    from: Option<Position>,
    /// Last position that may be missing; null = up to the announcement.
    to: Option<Position>,
    /// Word of the announcement.
    #[schema(example = "slot_recreated")]
    reason: String,
    /// RFC 3339.
    #[schema(format = DateTime)]
    created_at: String,
}

impl From<Gap> for GapView {
    fn from(gap: Gap) -> Self {
        let Gap { id, project: project_id, from, to, reason, created_at } = gap;
        Self { id, project_id, from, to, reason, created_at }
    }
}

/// A page of gaps.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GapPage {
    /// Newest first.
    items: Vec<GapView>,
    /// Behind the last item; null at the end.
    next_cursor: Option<String>,
}

/// List announced losses.
///
/// Newest first. Each was sent to the subscribers it concerns.
#[utoipa::path(
    get,
    path = "/v1/engines/{source}/gaps",
    operation_id = "list_gaps",
    tag = "engines",
    params(("source" = String, Path, description = "Id or name of the source", example = "shared"), PageQuery),
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "A page", body = GapPage)
    )
)]
pub(crate) async fn list_gaps(
    source: SourcePath,
    State(state): State<AppState>,
    Params(query): Params<PageQuery>,
) -> Result<Json<GapPage>> {
    let window = query.window::<i64>("gaps")?;
    let mut gaps = state.store().gaps(source.into_source().id, window.after, window.fetch()).await?;
    let next_cursor = window.cut(&mut gaps, |gap| gap.id);
    Ok(Json(GapPage { items: gaps.into_iter().map(GapView::from).collect(), next_cursor }))
}
