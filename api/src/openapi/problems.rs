//! Which problems an operation answers with: those that its shape implies, and those that it says.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use aura_kit::{Code, Problem};
use serde_json::Value;
use utoipa::openapi::{
    Content, HeaderBuilder, OpenApi, Ref, RefOr, Response,
    example::ExampleBuilder,
    path::{Operation, Parameter, ParameterIn},
    schema::{KnownFormat, ObjectBuilder, SchemaFormat, Type},
};

use super::operations;

/// Where an operation says its own: `extensions(("x-codes" = json!([Code::TableNotFound, ASKS_SOURCE])))`. It becomes
/// responses and isn't in the document.
const SAID: &str = "x-codes";
/// What whoever asks a source may get.
pub(crate) const ASKS_SOURCE: &[Code] =
    &[Code::SourceError, Code::SourceUnreachable, Code::SourceSlow, Code::SourcePrivilegeMissing];
/// Answered while the process ends, and by what is in reach.
const PROBES: &[&str] = &["/health", "/ready", "/metrics"];
/// What many operations answer alike, by name.
const COMMON: &[(&str, &[Code])] = &[
    ("Unauthorized", UNAUTHORIZED),
    ("Forbidden", &[Code::InsufficientRole, Code::CsrfFailed]),
    ("TooManyRequests", &[Code::RateLimited]),
    ("Internal", &[Code::Internal]),
    ("Unavailable", &[Code::PlatformUnavailable, Code::ShuttingDown]),
];
const UNAUTHORIZED: &[Code] = &[Code::MissingCredentials, Code::InvalidToken, Code::TokenExpired, Code::KeyRevoked];
const MEDIA_TYPE: &str = "application/problem+json";

/// Adds a response for each status that an operation may refuse with, and an example of each code.
pub(super) fn add(document: &mut OpenApi) {
    let mut used: BTreeSet<&str> = BTreeSet::new();
    for (path, operation) in operations(document) {
        let codes = codes(path, operation);
        used.extend(codes.iter().map(|code| code.as_str()));
        // Said in so many words that no key is asked for.
        operation.security.get_or_insert_default();
        let mut by_status: BTreeMap<u16, Vec<Code>> = BTreeMap::new();
        for code in Code::ALL.iter().filter(|code| codes.contains(code)) {
            by_status.entry(code.status()).or_default().push(*code);
        }
        for (status, codes) in by_status {
            let response = operation.responses.responses.entry(status.to_string());
            let common = COMMON.iter().find(|(_, of)| *of == codes);
            match (response, common) {
                (Entry::Vacant(place), Some((name, _))) => {
                    place.insert(RefOr::Ref(Ref::from_response_name(*name)));
                }
                (place, _) => {
                    if let RefOr::T(response) = place.or_insert_with(|| blank(&codes).into()) {
                        fill(response, status, &codes);
                    }
                }
            }
        }
    }
    let components = document.components.get_or_insert_default();
    for (name, codes) in COMMON {
        let mut response = blank(codes);
        fill(&mut response, codes[0].status(), codes);
        components.responses.insert((*name).to_owned(), response.into());
    }
    for code in Code::ALL.iter().filter(|code| used.contains(code.as_str())) {
        let problem = Problem::new(*code, format!("{}.", code.title()));
        let example = ExampleBuilder::new().summary(code.title()).value(serde_json::to_value(problem).ok()).build();
        components.examples.insert(code.to_string(), example.into());
    }
}

/// A response that says what its codes mean.
fn blank(codes: &[Code]) -> Response {
    let lines: Vec<_> = codes.iter().map(|code| format!("* `{code}`: {}.", code.title())).collect();
    Response::new(lines.join("\n"))
}

fn fill(response: &mut Response, status: u16, codes: &[Code]) {
    let reference = |code: &Code| (code.to_string(), RefOr::Ref(Ref::new(format!("#/components/examples/{code}"))));
    let mut content = Content::new(Some(Ref::from_schema_name("Problem")));
    content.examples = codes.iter().map(reference).collect();
    response.content.insert(MEDIA_TYPE.to_owned(), content.into());
    if status == 401 {
        response.headers.insert("WWW-Authenticate".to_owned(), header(Type::String, "`Bearer`"));
    }
    if status == 429 {
        for (name, description) in [
            ("RateLimit-Limit", "Requests of a whole allowance"),
            ("RateLimit-Remaining", "Requests that are left of it"),
            ("RateLimit-Reset", "Seconds until it is whole again"),
        ] {
            response.headers.insert(name.to_owned(), header(Type::Integer, description));
        }
    }
    if codes.iter().any(|code| code.retryable()) {
        response.headers.insert("Retry-After".to_owned(), header(Type::Integer, "Seconds, where a time can be named"));
    }
}

fn header(of: Type, description: &str) -> RefOr<utoipa::openapi::Header> {
    let format = matches!(of, Type::Integer).then_some(SchemaFormat::KnownFormat(KnownFormat::Int64));
    let schema = ObjectBuilder::new().schema_type(of).format(format).build();
    HeaderBuilder::new().schema(Some(schema)).description(Some(description)).build().into()
}

fn codes(path: &str, operation: &mut Operation) -> Vec<Code> {
    let mut codes = said(operation);
    if !PROBES.contains(&path) {
        codes.extend([Code::Internal, Code::ShuttingDown, Code::RateLimited]);
    }
    if operation.security.as_ref().is_some_and(|security| !security.is_empty()) {
        codes.extend(UNAUTHORIZED);
        codes.extend([Code::InsufficientRole, Code::CsrfFailed, Code::PlatformUnavailable]);
    }
    if operation.request_body.is_some() {
        codes.extend([Code::MalformedRequest, Code::RequestTimeout, Code::PayloadTooLarge]);
        codes.extend([Code::UnsupportedMediaType, Code::InvalidBody]);
    }
    let parameters = operation.parameters.iter().flatten();
    let parameters =
        parameters.filter_map(|parameter| if let RefOr::T(known) = parameter { Some(known) } else { None });
    codes.extend(parameters.flat_map(of_parameter).copied());
    codes
}

/// Takes what the operation says out of it; lists may be nested.
fn said(operation: &mut Operation) -> Vec<Code> {
    fn collect(value: &Value, into: &mut Vec<Code>) {
        match value {
            Value::Array(items) => items.iter().for_each(|item| collect(item, into)),
            word => into.extend(Code::ALL.iter().filter(|code| word == code.as_str())),
        }
    }
    let mut codes = Vec::new();
    if let Some(said) = operation.extensions.as_mut().and_then(|extensions| extensions.remove(SAID)) {
        collect(&said, &mut codes);
    }
    operation.extensions = operation.extensions.take().filter(|extensions| !extensions.is_empty());
    codes
}

fn of_parameter(parameter: &Parameter) -> &'static [Code] {
    match (&parameter.parameter_in, parameter.name.to_ascii_lowercase().as_str()) {
        (ParameterIn::Path, "project") => &[Code::ProjectNotFound],
        (ParameterIn::Path, "source") => &[Code::MalformedRequest, Code::SourceNotFound],
        (ParameterIn::Path, "table") => &[Code::MalformedRequest, Code::InvalidName],
        (ParameterIn::Query, "schema") => {
            &[Code::MalformedRequest, Code::SchemaNotFound, Code::InvalidName, Code::SystemSchemaNotSupported]
        }
        (ParameterIn::Query, "limit" | "cursor") => &[Code::MalformedRequest, Code::InvalidParameter],
        (ParameterIn::Header, "idempotency-key") => {
            &[Code::InvalidParameter, Code::IdempotencyInProgress, Code::IdempotencyKeyReused]
        }
        (ParameterIn::Header, "if-match") => &[Code::PreconditionFailed],
        (ParameterIn::Query | ParameterIn::Path, _) => &[Code::MalformedRequest],
        _ => &[],
    }
}
