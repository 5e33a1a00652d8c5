//! What a join asks for. Lenient as the original: what doesn't validate takes its default (supabase-wire.md §2.1).

use aura_domain::EventFilter;
use serde_json::{Map, Value, value::RawValue};

/// Longest texts of a binding, in bytes. PostgreSQL's names have 63; longer ones are answered as unknown by the worker.
const NAME_BYTES: usize = 255;
const FILTER_BYTES: usize = 16 << 10;
const SELECT_BYTES: usize = 16 << 10;

/// The payload of a `phx_join`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct JoinRequest {
    pub(crate) token: Option<String>,
    pub(crate) private: bool,
    pub(crate) broadcast_self: bool,
    pub(crate) broadcast_ack: bool,
    pub(crate) presence: bool,
    /// The requested objects, verbatim.
    pub(crate) postgres_changes: Vec<String>,
}

/// One entry of `postgres_changes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Binding {
    /// The client's number for it, unique in the channel.
    pub(crate) id: u32,
    pub(crate) schema: String,
    /// `None` = all.
    pub(crate) table: Option<String>,
    pub(crate) event: EventFilter,
    pub(crate) filter: Option<String>,
    pub(crate) select: Option<Vec<String>>,
}

/// Why a binding can't be registered, in the original's words where it has some.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BindingError {
    #[error("No subscription params provided. Please provide at least a `schema` or `table` to subscribe to: {0}")]
    NoParams(String),
    #[error("Column selection is not supported for wildcard subscriptions. Provide an explicit schema and table name.")]
    SelectOnWildcard,
    #[error("Column selection must be a list of column names")]
    Select,
    #[error("A subscription param is too long")]
    TooLong,
}

#[derive(serde::Deserialize)]
struct RawConfig<'a> {
    #[serde(borrow, default)]
    postgres_changes: Option<Vec<&'a RawValue>>,
}

#[derive(serde::Deserialize)]
struct RawPayload<'a> {
    #[serde(borrow, default)]
    config: Option<RawConfig<'a>>,
}

impl JoinRequest {
    /// Reads a payload; never fails.
    pub(crate) fn parse(payload: &str) -> Self {
        let value: Value = serde_json::from_str(payload).unwrap_or_default();
        let config = &value["config"];
        // The legacy name wins, as in the original.
        let token = ["user_token", "access_token"].into_iter().find_map(|name| value[name].as_str());
        Self {
            token: token.filter(|token| !token.starts_with("sb_")).map(str::to_owned),
            private: boolean(&config["private"]),
            broadcast_self: boolean(&config["broadcast"]["self"]),
            broadcast_ack: boolean(&config["broadcast"]["ack"]),
            presence: boolean(&config["presence"]["enabled"]),
            postgres_changes: requested(payload),
        }
    }

    /// What the join's reply says of the bindings: each requested object verbatim, in order, and its id. The id is the
    /// last member, so that it wins over one that the client sent.
    pub(crate) fn echo(&self) -> String {
        let entries: Vec<_> = (1..)
            .zip(&self.postgres_changes)
            .map(|(id, object)| {
                let open = object.trim_end().strip_suffix('}').unwrap_or(object).trim_end();
                let comma = if open.ends_with('{') { "" } else { "," };
                format!(r#"{open}{comma}"id":{id}}}"#)
            })
            .collect();
        format!(r#"{{"postgres_changes":[{}]}}"#, entries.join(","))
    }

    /// The bindings; one bad one fails the whole set.
    pub(crate) fn bindings(&self) -> Result<Vec<Binding>, BindingError> {
        (1..).zip(&self.postgres_changes).map(|(id, object)| Binding::parse(id, object)).collect()
    }
}

/// Bools also come as strings.
fn boolean(value: &Value) -> bool {
    value.as_bool().unwrap_or(matches!(value.as_str(), Some("true" | "True")))
}

/// Objects only: null elements are dropped as the original does, and others have no echo that a client could match.
fn requested(payload: &str) -> Vec<String> {
    let raw: Option<RawPayload<'_>> = serde_json::from_str(payload).ok();
    let list = raw.and_then(|payload| payload.config).and_then(|config| config.postgres_changes).unwrap_or_default();
    list.into_iter().map(RawValue::get).filter(|json| json.starts_with('{')).map(str::to_owned).collect()
}

impl Binding {
    fn parse(id: u32, object: &str) -> Result<Self, BindingError> {
        let params: Map<String, Value> = serde_json::from_str(object).unwrap_or_default();
        let text = |name: &str| params.get(name).and_then(Value::as_str);
        Self::new(id, text("schema"), text("table"), text("event"), text("filter"), select(params.get("select"))?)
            .map_err(|error| match error {
                BindingError::NoParams(_) => BindingError::NoParams(object.to_owned()),
                other => other,
            })
    }

    /// `{schema}` only = all its tables, `{table}` only = of `public`; neither, or a filter without a table, is nothing.
    pub(crate) fn new(
        id: u32,
        schema: Option<&str>,
        table: Option<&str>,
        event: Option<&str>,
        filter: Option<&str>,
        select: Option<Vec<String>>,
    ) -> Result<Self, BindingError> {
        let wildcard = table.is_none_or(|table| table == "*");
        if (schema.is_none() && table.is_none()) || (table.is_none() && filter.is_some()) {
            return Err(BindingError::NoParams(String::new()));
        }
        if select.is_some() && (wildcard || schema == Some("*")) {
            return Err(BindingError::SelectOnWildcard);
        }
        let long = |text: Option<&str>, limit| text.is_some_and(|text| text.len() > limit);
        if long(schema, NAME_BYTES) || long(table, NAME_BYTES) || long(filter, FILTER_BYTES) {
            return Err(BindingError::TooLong);
        }
        Ok(Self {
            id,
            schema: schema.unwrap_or("public").to_owned(),
            table: table.filter(|_| !wildcard).map(str::to_owned),
            event: event.map_or(EventFilter::All, EventFilter::from_client),
            filter: filter.map(str::to_owned),
            select,
        })
    }
}

fn select(value: Option<&Value>) -> Result<Option<Vec<String>>, BindingError> {
    let list = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(BindingError::Select),
    };
    let names: Option<Vec<_>> = list.iter().map(|name| name.as_str().map(str::to_owned)).collect();
    let names = names.ok_or(BindingError::Select)?;
    if names.iter().map(String::len).sum::<usize>() > SELECT_BYTES {
        Err(BindingError::TooLong)
    } else {
        Ok(Some(names))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join(changes: &str) -> JoinRequest {
        JoinRequest::parse(&format!(r#"{{"config":{{"postgres_changes":{changes}}}}}"#))
    }

    #[test]
    fn r_frt_1_the_echo_is_verbatim_and_in_order() {
        let request = join(
            r#"[ {"event":"insert", "schema":"public","n":1.10}, null, {"table":"t","filter":"id=eq. 1","id":9}, {} ]"#,
        );
        assert_eq!(
            request.echo(),
            r#"{"postgres_changes":[{"event":"insert", "schema":"public","n":1.10,"id":1},{"table":"t","filter":"id=eq. 1","id":9,"id":2},{"id":3}]}"#
        );
        assert_eq!(JoinRequest::parse("{}").echo(), r#"{"postgres_changes":[]}"#);
        assert_eq!(join("null").echo(), r#"{"postgres_changes":[]}"#);
    }

    #[test]
    fn nothing_in_a_payload_is_an_error() {
        for payload in ["", "null", "[]", "7", r#"{"config":7}"#, r#"{"config":{"private":"x","broadcast":[]}}"#] {
            assert_eq!(JoinRequest::parse(payload), JoinRequest::default(), "{payload}");
        }
        let payload = r#"{"access_token":"a","user_token":"u","config":{"private":"True","broadcast":{"self":true}}}"#;
        let request = JoinRequest::parse(payload);
        assert_eq!(request.token.as_deref(), Some("u"));
        assert!(request.private && request.broadcast_self && !request.broadcast_ack);
        assert_eq!(JoinRequest::parse(r#"{"access_token":"sb_publishable"}"#).token, None);
    }

    #[test]
    fn bindings_name_tables_as_the_original_does() {
        let one = |object: &str| join(&format!("[{object}]")).bindings().map(|mut list| list.remove(0));
        let binding = one(r#"{"table":"t","event":"update"}"#).expect("a table");
        assert_eq!((binding.schema.as_str(), binding.table.as_deref()), ("public", Some("t")));
        assert_eq!(binding.event, EventFilter::Update);
        assert_eq!(one(r#"{"schema":"s"}"#).expect("a schema").table, None);
        assert_eq!(one(r#"{"schema":"*","table":"*"}"#).expect("all").table, None);
        assert!(matches!(one("{}"), Err(BindingError::NoParams(_))));
        assert!(matches!(one(r#"{"schema":"s","filter":"a=eq.1"}"#), Err(BindingError::NoParams(_))));
        assert_eq!(one(r#"{"schema":"s","select":["a"]}"#), Err(BindingError::SelectOnWildcard));
        assert_eq!(one(r#"{"table":"t","select":"a"}"#), Err(BindingError::Select));
        let long = "x".repeat(FILTER_BYTES + 1);
        assert_eq!(one(&format!(r#"{{"table":"t","filter":"{long}"}}"#)), Err(BindingError::TooLong));
    }
}
