use aura_domain::SourceId;
use aura_kit::{Json, problem::ProblemBody};
use aura_store::Source;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    access::Platform,
    error::{ApiError, Result},
    state::AppState,
};

/// A PostgreSQL server. Its URLs hold passwords and are never shown.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Source)]
pub(crate) struct SourceView {
    /// Id.
    #[schema(value_type = uuid::Uuid)]
    id: SourceId,
    /// Unique; stands for the id in paths.
    name: String,
    /// Its logical replication slot.
    slot_name: String,
    /// `auto`, `wal2json` or `pgoutput`.
    plugin: &'static str,
}

impl From<Source> for SourceView {
    fn from(source: Source) -> Self {
        let Source { id, name, slot_name, plugin, .. } = source;
        Self { id, name, slot_name, plugin: plugin.as_str() }
    }
}

/// All sources.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SourcePage {
    /// By name.
    items: Vec<SourceView>,
    /// Always null: there are few.
    next_cursor: Option<String>,
}

/// List sources.
#[utoipa::path(
    get,
    path = "/v1/sources",
    operation_id = "list_sources",
    tag = "sources",
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 200, description = "All of them", body = SourcePage),
        (status = "4XX", description = "Refused", body = ProblemBody, content_type = "application/problem+json"),
        (status = "5XX", description = "Not possible now", body = ProblemBody, content_type = "application/problem+json")
    )
)]
pub(crate) async fn list_sources(_: Platform, State(state): State<AppState>) -> Result<Json<SourcePage>> {
    let sources = state.store().sources().await?;
    Ok(Json(SourcePage { items: sources.into_iter().map(SourceView::from).collect(), next_cursor: None }))
}

/// A source by its id or name.
pub(crate) async fn find_source(state: &AppState, word: &str) -> Result<Source> {
    let found = match word.parse::<SourceId>() {
        Ok(id) => state.store().source(id).await?,
        Err(_) => state.store().source_by_name(word).await?,
    };
    found.ok_or_else(ApiError::source_not_found)
}
