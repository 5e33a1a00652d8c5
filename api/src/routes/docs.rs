use axum::{Router, http::header, response::IntoResponse, routing::get};
use utoipa::openapi::OpenApi;
use utoipa_swagger_ui::{Config, SwaggerUi};

use crate::{error::Result, routes, state::AppState};

const STUDIO_LATER: &str = "<!doctype html><meta charset=\"utf-8\"><title>aura-realtime Studio</title>\
    <p>Studio comes with a later version. The API reference is at <a href=\"/docs\">/docs</a>.</p>";

/// This document.
///
/// As this version of the program serves it.
#[utoipa::path(
    get,
    path = "/openapi.json",
    operation_id = "openapi",
    tag = "service",
    responses((status = 200, description = "OpenAPI 3.1", body = Object))
)]
pub(crate) async fn openapi_json() -> Result<impl IntoResponse> {
    let document = routes::document().to_json().map_err(|error| aura_kit::Problem::internal(&error))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], document))
}

/// Pages for people.
pub(super) fn pages() -> Router<AppState> {
    let later = || async { axum::response::Html(STUDIO_LATER) };
    Router::new().route("/studio", get(later)).route("/studio/{*rest}", get(later))
}

/// The API reference; everything it loads is in the binary.
pub(super) fn reference(_: OpenApi) -> Router {
    let config = Config::from("/openapi.json").try_it_out_enabled(true).use_base_layout();
    SwaggerUi::new("/docs").config(config).into()
}
