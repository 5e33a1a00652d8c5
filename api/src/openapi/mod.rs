//! The OpenAPI document: what isn't at a handler.

mod examples;
mod problems;

pub(crate) use problems::ASKS_SOURCE;
use utoipa::{
    Modify, OpenApi,
    openapi::{
        self, RefOr,
        security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme},
    },
};

use crate::routes;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "aura-realtime",
        version = "1",
        description = "Turns PostgreSQL tables into live, row-level-secure event streams.\n\nKeys are JSON web tokens, \
                       sent as `apikey` or as `Authorization: Bearer` (which wins). Errors are \
                       `application/problem+json` with a stable `code`.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    tags(
        (name = "tables", description = "Make a table live"),
        (name = "projects", description = "Tenants"),
        (name = "sources", description = "PostgreSQL servers"),
        (name = "engines", description = "What reads a source's changes"),
        (name = "studio", description = "Sessions of the web interface"),
        (name = "service", description = "This process")
    ),
    servers((url = "/", description = "This installation")),
    components(schemas(aura_kit::problem::ProblemBody)),
    modifiers(&Security)
)]
struct Base;

struct Security;

impl Modify for Security {
    fn modify(&self, document: &mut openapi::OpenApi) {
        let components = document.components.get_or_insert_default();
        let key = SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("apikey")));
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format("JWT").build();
        components.add_security_scheme("apikey", key);
        let session = SecurityScheme::ApiKey(ApiKey::Cookie(ApiKeyValue::new("aura_session")));
        components.add_security_scheme("session", session);
        components.add_security_scheme("bearer", SecurityScheme::Http(bearer));
    }
}

/// Everything but the operations.
pub(crate) fn base() -> openapi::OpenApi {
    Base::openapi()
}

/// Adds what follows from the operations: their problems, and examples.
pub(crate) fn complete(mut document: openapi::OpenApi) -> openapi::OpenApi {
    operations(&mut document).for_each(|(_, operation)| without_null(operation));
    problems::add(&mut document);
    examples::add(&mut document);
    document
}

/// A body that may be left out is still never `null`, as an `Option` of it would be.
fn without_null(operation: &mut openapi::path::Operation) {
    let Some(RefOr::T(body)) = &mut operation.request_body else { return };
    for content in body.content.values_mut() {
        let RefOr::T(content) = content else { continue };
        let Some(RefOr::T(openapi::Schema::OneOf(choice))) = &content.schema else { continue };
        let named = choice.items.iter().find(|item| matches!(item, RefOr::Ref(_))).cloned();
        content.schema = named.or_else(|| content.schema.take());
    }
}

/// Every operation with its path.
fn operations(document: &mut openapi::OpenApi) -> impl Iterator<Item = (&str, &mut openapi::path::Operation)> {
    document.paths.paths.iter_mut().flat_map(|(path, item)| {
        let openapi::PathItem { get, put, post, delete, patch, .. } = item;
        let operations = [get, put, post, delete, patch].into_iter().flatten();
        operations.map(move |operation| (path.as_str(), operation))
    })
}

/// The document as `openapi/api.v1.json` has it: pretty-printed JSON, a newline at the end.
///
/// # Errors
/// Serialising failed.
pub fn document() -> Result<String, serde_json::Error> {
    Ok(routes::document().to_pretty_json()? + "\n")
}
