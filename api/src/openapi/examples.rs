//! Examples, made from the schemas: of a field's own example, of its format or of its kind.

use serde_json::{Map, Value, json};
use utoipa::openapi::{
    Content, OpenApi, RefOr,
    path::{Operation, ParameterBuilder},
};

use super::operations;

/// What is in a place for which nobody has said anything better; a test finds it.
const UNSAID: &str = "…";
const ID: &str = "7c9e6679-7425-40de-944b-e07fc1f90ae7";
const TIME: &str = "2026-01-31T12:00:00Z";
const JSON: &str = "application/json";

/// Gives an example to each body and each path parameter that has none.
pub(super) fn add(document: &mut OpenApi) {
    let schemas = serde_json::to_value(document.components.get_or_insert_default()).unwrap_or_default();
    let schemas = Schemas(schemas["schemas"].as_object().cloned().unwrap_or_default());
    for (_, operation) in operations(document) {
        parameters(operation);
        if let Some(RefOr::T(body)) = &mut operation.request_body {
            body.content.iter_mut().filter(|(kind, _)| *kind == JSON).for_each(|(_, content)| schemas.fill(content));
        }
        for response in operation.responses.responses.values_mut() {
            let RefOr::T(response) = response else { continue };
            response
                .content
                .iter_mut()
                .filter(|(kind, _)| *kind == JSON)
                .for_each(|(_, content)| schemas.fill(content));
        }
    }
}

fn parameters(operation: &mut Operation) {
    for parameter in operation.parameters.iter_mut().flatten() {
        let RefOr::T(known) = parameter else { continue };
        let example = match known.name.as_str() {
            "project" => ID,
            "source" => "shared",
            "table" => "messages",
            "prefer" => "wait=5",
            "if-match" => "\"v3\"",
            "idempotency-key" => "9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d",
            _ => continue,
        };
        *parameter = ParameterBuilder::from(known.clone()).example(Some(example.into())).build().into();
    }
}

/// The document's schemas, by name.
struct Schemas(Map<String, Value>);

impl Schemas {
    fn fill(&self, content: &mut RefOr<Content>) {
        let RefOr::T(content) = content else { return };
        if content.example.is_some() || !content.examples.is_empty() {
            return;
        }
        let schema = content.schema.as_ref().and_then(|schema| serde_json::to_value(schema).ok());
        content.example = schema.map(|schema| self.example(&schema));
    }

    fn example(&self, schema: &Value) -> Value {
        if let Some(name) = schema["$ref"].as_str() {
            let name = name.trim_start_matches("#/components/schemas/");
            return self.0.get(name).map_or_else(|| UNSAID.into(), |schema| self.example(schema));
        }
        let said =
            [&schema["example"], &schema["examples"][0], &schema["const"], &schema["enum"][0], &schema["default"]];
        if let Some(said) = said.into_iter().find(|said| !said.is_null()) {
            return said.clone();
        }
        let choices = ["oneOf", "anyOf"].into_iter().filter_map(|of| schema[of].as_array()).flatten();
        if let Some(choice) = choices.into_iter().find(|choice| choice["type"] != "null") {
            return self.example(choice);
        }
        if let Some(parts) = schema["allOf"].as_array() {
            let members = parts.iter().filter_map(|part| self.example(part).as_object().cloned());
            return members
                .fold(Map::new(), |mut all, part| {
                    all.extend(part);
                    all
                })
                .into();
        }
        self.of_kind(schema)
    }

    fn of_kind(&self, schema: &Value) -> Value {
        let kind = match &schema["type"] {
            // Nothing better is said than that it may be null.
            Value::Array(kinds) if kinds.iter().any(|kind| kind == "null") && schema.get("properties").is_none() => {
                "null"
            }
            Value::Array(kinds) => kinds.first().and_then(Value::as_str).unwrap_or_default(),
            kind => kind.as_str().unwrap_or("object"),
        };
        let minimum = || schema.get("minimum").cloned().unwrap_or_else(|| json!(0));
        match (kind, schema["format"].as_str()) {
            ("object", _) => {
                let members = schema["properties"].as_object().into_iter().flatten();
                members.map(|(name, member)| (name.clone(), self.example(member))).collect::<Map<_, _>>().into()
            }
            ("array", _) => json!([self.example(&schema["items"])]),
            ("string", Some("uuid")) => ID.into(),
            ("string", Some("date-time")) => TIME.into(),
            ("string", _) => UNSAID.into(),
            ("boolean", _) => false.into(),
            ("integer" | "number", _) => minimum(),
            _ => Value::Null,
        }
    }
}
