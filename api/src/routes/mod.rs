//! Routes. One exists only through its documented handler.

mod audit;
mod disconnect;
mod docs;
mod engine_verbs;
mod engines;
mod explain;
mod keys;
mod projects;
mod service;
mod sources;
mod studio;
mod tables;
mod toggle;
mod workers;

use aura_kit::Code;
use axum::{
    Router,
    extract::{FromRequestParts, Query},
    http::request::Parts,
};
use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};
use utoipa::{IntoParams, ToSchema, openapi::OpenApi};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    error::{ApiError, Result},
    openapi,
    state::AppState,
};

/// Query parameters; what can't be read is 400 (unknown ones included).
pub(crate) struct Params<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequestParts<AppState> for Params<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self> {
        let unreadable = || ApiError::new(Code::MalformedRequest, "The query has unknown or unreadable parameters.");
        // No database holds a NUL.
        if parts.uri.query().is_some_and(|query| query.contains("%00")) {
            return Err(unreadable());
        }
        Ok(Self(Query::<T>::try_from_uri(&parts.uri).map_err(|_| unreadable())?.0))
    }
}

/// Tells null from absent: absent leaves a member as it is, null brings its default back.
pub(crate) fn present<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    value: D,
) -> std::result::Result<Option<Option<T>>, D::Error> {
    Option::deserialize(value).map(Some)
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct DryRun {
    /// Only look whether it would do, and say what would be done; nothing is changed.
    #[serde(default)]
    pub(crate) dry_run: bool,
}

/// What would be done (`dry_run`).
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Plan {
    /// In order.
    #[schema(example = json!(["make the project shop in the source shared", "make its keys"]))]
    pub(crate) plan: Vec<String>,
}

/// What was done, or with `dry_run` what would be.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum DoneOr<D, P> {
    Done(D),
    Planned(P),
}

/// Everything, and the document that describes it.
fn documented() -> OpenApiRouter<AppState> {
    OpenApiRouter::with_openapi(openapi::base())
        .routes(routes!(toggle::get_table_realtime, toggle::put_table_realtime, toggle::delete_table_realtime))
        .routes(routes!(tables::list_tables))
        .routes(routes!(projects::list_projects, projects::create_project))
        .routes(routes!(projects::get_project, projects::update_project, projects::delete_project))
        .routes(routes!(audit::list_project_audit))
        .routes(routes!(audit::list_audit))
        .routes(routes!(keys::list_keys))
        .routes(routes!(keys::rotate_keys))
        .routes(routes!(disconnect::disconnect))
        .routes(routes!(explain::explain_change))
        .routes(routes!(sources::list_sources, sources::create_source))
        .routes(routes!(sources::get_source, sources::update_source, sources::delete_source))
        .routes(routes!(sources::validate_source))
        .routes(routes!(engines::list_engines))
        .routes(routes!(engines::get_engine))
        .routes(routes!(engines::list_gaps))
        .routes(routes!(engine_verbs::start_engine))
        .routes(routes!(engine_verbs::stop_engine))
        .routes(routes!(engine_verbs::force_close_engine))
        .routes(routes!(engine_verbs::recreate_slot))
        .routes(routes!(workers::list_workers))
        .routes(routes!(studio::create_studio_session, studio::get_studio_session, studio::delete_studio_session))
        .routes(routes!(studio::create_inspector_token))
        .routes(routes!(service::health))
        .routes(routes!(service::ready))
        .routes(routes!(service::metrics))
        .routes(routes!(docs::openapi_json))
}

/// The router, with the pages for people that no client calls.
pub(crate) fn router(state: AppState) -> Router {
    let (router, document) = documented().split_for_parts();
    router.merge(docs::pages()).with_state(state).merge(docs::reference(document))
}

/// The OpenAPI document.
pub(crate) fn document() -> OpenApi {
    openapi::complete(documented().split_for_parts().1)
}
