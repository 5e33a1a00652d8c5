//! A value's text form as JSON, the way `to_jsonb` shows the typed value (supabase-wire.md §3.2, R-DEC-2). Never fails
//! and never writes anything but one JSON value: a text that isn't what its type promises becomes a string (R-DEC-4).

use std::{fmt::Write as _, sync::Arc};

use serde::de::IgnoredAny;

use crate::types::{JsonForm, TypeInfo};

/// Appends `value`, PostgreSQL's text form under the pinned session settings, to `out` as JSON.
pub fn encode_value(out: &mut String, value: &str, ty: &TypeInfo) {
    match &ty.form {
        JsonForm::Bool => encode_bool(out, value),
        // A float's negative zero: jsonb's numbers have none.
        JsonForm::Number if value == "-0" => out.push('0'),
        JsonForm::Number if is_number(value) => out.push_str(value),
        JsonForm::Timestamp => encode_string(out, &value.replacen(' ', "T", usize::from(is_finite(value)))),
        JsonForm::TimestampTz => encode_timestamptz(out, value),
        JsonForm::Json if is_json(value) => out.push_str(value),
        JsonForm::Bytea => encode_string(out, value.strip_prefix("\\x").unwrap_or(value)),
        JsonForm::Array { element, delimiter } => encode_array(out, value, element, *delimiter),
        JsonForm::Vector { element } => encode_vector(out, value, element),
        JsonForm::Composite { attributes } => encode_composite(out, value, attributes),
        JsonForm::Hstore => encode_hstore(out, value),
        JsonForm::Number | JsonForm::Json | JsonForm::Text => encode_string(out, value),
    }
}

/// `pg_type.typname`, for a change's `columns`.
pub fn type_name(ty: &TypeInfo) -> &str {
    &ty.name
}

/// Appends a JSON string.
pub fn encode_string(out: &mut String, text: &str) {
    out.push('"');
    let mut plain = 0;
    for (at, byte) in text.bytes().enumerate() {
        if byte >= 0x20 && byte != b'"' && byte != b'\\' {
            continue;
        }
        out.push_str(&text[plain..at]);
        escape(out, byte);
        plain = at + 1;
    }
    out.push_str(&text[plain..]);
    out.push('"');
}

fn escape(out: &mut String, byte: u8) {
    match byte {
        b'"' => out.push_str("\\\""),
        b'\\' => out.push_str("\\\\"),
        b'\n' => out.push_str("\\n"),
        b'\r' => out.push_str("\\r"),
        b'\t' => out.push_str("\\t"),
        // Writing to a String can't fail.
        _ => drop(write!(out, "\\u{byte:04x}")),
    }
}

fn encode_bool(out: &mut String, value: &str) {
    match value {
        "t" | "true" => out.push_str("true"),
        "f" | "false" => out.push_str("false"),
        _ => encode_string(out, value),
    }
}

/// `2026-01-02 03:04:05+00` → `2026-01-02T03:04:05+00:00`; the zone is always UTC in our sessions.
fn encode_timestamptz(out: &mut String, value: &str) {
    if !is_finite(value) {
        return encode_string(out, value);
    }
    let (moment, era) = value.strip_suffix(" BC").map_or((value, ""), |moment| (moment, " BC"));
    let zone = if moment.ends_with("+00") { ":00" } else { "" };
    encode_string(out, &format!("{}{zone}{era}", moment.replacen(' ', "T", 1)));
}

/// Neither `infinity` nor `-infinity`.
fn is_finite(timestamp: &str) -> bool {
    timestamp.starts_with(|first: char| first.is_ascii_digit())
}

/// JSON's grammar of numbers: PostgreSQL's finite numbers all fit it.
fn is_number(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    digits.starts_with(|first: char| first.is_ascii_digit()) && is_json(text)
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

fn encode_vector(out: &mut String, value: &str, element: &TypeInfo) {
    out.push('[');
    for (n, item) in value.split_ascii_whitespace().enumerate() {
        if n > 0 {
            out.push(',');
        }
        encode_value(out, item, element);
    }
    out.push(']');
}

/// Arrays, `{1,NULL,"a \"b\""}`, `[0:1]={…}`; anything else falls back to a string.
fn encode_array(out: &mut String, value: &str, element: &TypeInfo, delimiter: char) {
    let start = out.len();
    let body = match value.split_once('=') {
        Some((bounds, body)) if bounds.starts_with('[') => body,
        _ => value,
    };
    let mut text = ArrayText { rest: body, delimiter };
    if text.array(out, element, 0).is_none() || !text.rest.is_empty() {
        out.truncate(start);
        encode_string(out, value);
    }
}

/// PostgreSQL's MAXDIM.
const MAX_DIMENSIONS: usize = 6;

/// A cursor over an array's text form.
struct ArrayText<'a> {
    rest: &'a str,
    delimiter: char,
}

impl ArrayText<'_> {
    fn eat(&mut self, wanted: char) -> bool {
        let Some(rest) = self.rest.strip_prefix(wanted) else { return false };
        self.rest = rest;
        true
    }

    /// One `{…}` with everything in it. `None`: not an array.
    fn array(&mut self, out: &mut String, element: &TypeInfo, depth: usize) -> Option<()> {
        if depth >= MAX_DIMENSIONS || !self.eat('{') {
            return None;
        }
        out.push('[');
        while !self.eat('}') {
            if !out.ends_with('[') && !self.eat(self.delimiter) {
                return None;
            }
            self.separate(out);
            self.item(out, element, depth)?;
        }
        out.push(']');
        Some(())
    }

    fn separate(&self, out: &mut String) {
        if !out.ends_with('[') {
            out.push(',');
        }
    }

    fn item(&mut self, out: &mut String, element: &TypeInfo, depth: usize) -> Option<()> {
        match self.rest.chars().next()? {
            '{' => self.array(out, element, depth + 1),
            '"' => self.quoted(out, element),
            _ => self.bare(out, element),
        }
    }

    fn quoted(&mut self, out: &mut String, element: &TypeInfo) -> Option<()> {
        let (item, rest) = unquote(self.rest)?;
        self.rest = rest;
        encode_value(out, &item, element);
        Some(())
    }

    fn bare(&mut self, out: &mut String, element: &TypeInfo) -> Option<()> {
        let end = self.rest.find([self.delimiter, '}'])?;
        let (item, rest) = self.rest.split_at(end);
        self.rest = rest;
        match item {
            "" => return None,
            "NULL" => out.push_str("null"),
            _ => encode_value(out, item, element),
        }
        Some(())
    }
}

/// The content of a leading `"…"` with backslash escapes, and what follows it.
fn unquote(text: &str) -> Option<(String, &str)> {
    let mut chars = text.strip_prefix('"')?.char_indices();
    let mut content = String::new();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((content, &text[at + 2..])),
            '\\' => content.push(chars.next()?.1),
            _ => content.push(c),
        }
    }
    None
}

/// `(1,"a b",)` → `{"n":1,"t":"a b","nothing":null}`; a string if it has other fields than the type has attributes.
fn encode_composite(out: &mut String, value: &str, attributes: &[(Arc<str>, Arc<TypeInfo>)]) {
    let start = out.len();
    if composite_object(out, value, attributes).is_none() {
        out.truncate(start);
        encode_string(out, value);
    }
}

fn composite_object(out: &mut String, value: &str, attributes: &[(Arc<str>, Arc<TypeInfo>)]) -> Option<()> {
    let mut rest = value.strip_prefix('(')?;
    out.push('{');
    for (n, (name, ty)) in attributes.iter().enumerate() {
        if n > 0 {
            out.push(',');
            rest = rest.strip_prefix(',')?;
        }
        encode_string(out, name);
        out.push(':');
        let (field, after) = record_field(rest)?;
        match field {
            Some(text) => encode_value(out, &text, ty),
            None => out.push_str("null"),
        }
        rest = after;
    }
    out.push('}');
    (rest == ")").then_some(())
}

/// A field of a row's text form and what follows it; `None` inside: null. Quotes may be doubled or escaped.
fn record_field(text: &str) -> Option<(Option<String>, &str)> {
    let (mut content, mut quoted, mut any) = (String::new(), false, false);
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            ',' | ')' if !quoted => return Some((any.then_some(content), &text[at..])),
            '"' if quoted && chars.next_if(|(_, next)| *next == '"').is_some() => content.push('"'),
            '"' => quoted = !quoted,
            '\\' => content.push(chars.next()?.1),
            _ => content.push(c),
        }
        any = true;
    }
    None
}

/// `"a"=>"1", "b"=>NULL` → `{"a":"1","b":null}`.
fn encode_hstore(out: &mut String, value: &str) {
    let start = out.len();
    if hstore_object(out, value).is_none() {
        out.truncate(start);
        encode_string(out, value);
    }
}

fn hstore_object(out: &mut String, value: &str) -> Option<()> {
    out.push('{');
    let mut rest = value;
    while !rest.is_empty() {
        let (key, after) = unquote(rest)?;
        encode_string(out, &key);
        out.push(':');
        rest = hstore_value(out, after.strip_prefix("=>")?)?;
        if let Some(next) = rest.strip_prefix(", ") {
            out.push(',');
            rest = next;
        } else if !rest.is_empty() {
            return None;
        }
    }
    out.push('}');
    Some(())
}

fn hstore_value<'a>(out: &mut String, text: &'a str) -> Option<&'a str> {
    if let Some(rest) = text.strip_prefix("NULL") {
        out.push_str("null");
        return Some(rest);
    }
    let (item, rest) = unquote(text)?;
    encode_string(out, &item);
    Some(rest)
}

#[cfg(test)]
mod tests {
    use tokio_postgres::types::Type;

    use super::*;

    fn encode(ty: &Type, value: &str) -> String {
        let mut out = String::new();
        encode_value(&mut out, value, &TypeInfo::built_in(ty.oid()).expect("a built-in type"));
        out
    }

    #[test]
    fn r_dec_2_numbers_keep_all_their_digits() {
        assert_eq!(encode(&Type::INT8, "9007199254740993"), "9007199254740993");
        assert_eq!(encode(&Type::NUMERIC, "1.10000"), "1.10000");
        assert_eq!(encode(&Type::FLOAT8, "1e-07"), "1e-07");
        for word in ["NaN", "Infinity", "-Infinity"] {
            assert_eq!(encode(&Type::NUMERIC, word), format!("\"{word}\""));
        }
    }

    #[test]
    fn timestamps_follow_iso_8601() {
        assert_eq!(encode(&Type::TIMESTAMP, "2024-02-29 01:02:03.4"), r#""2024-02-29T01:02:03.4""#);
        assert_eq!(encode(&Type::TIMESTAMPTZ, "2024-02-29 01:02:03.4+00"), r#""2024-02-29T01:02:03.4+00:00""#);
        assert_eq!(encode(&Type::TIMESTAMPTZ, "0044-03-15 00:00:00+00 BC"), r#""0044-03-15T00:00:00+00:00 BC""#);
        assert_eq!(encode(&Type::TIMESTAMPTZ, "infinity"), r#""infinity""#);
    }

    #[test]
    fn arrays_are_typed_and_nested() {
        assert_eq!(encode(&Type::INT4_ARRAY, "{1,NULL,-3}"), "[1,null,-3]");
        assert_eq!(encode(&Type::INT4_ARRAY, "[0:1][2:3]={{1,2},{3,4}}"), "[[1,2],[3,4]]");
        assert_eq!(
            encode(&Type::TEXT_ARRAY, r#"{a,"b,c","NULL",NULL,"q\"\\",""}"#),
            r#"["a","b,c","NULL",null,"q\"\\",""]"#
        );
        assert_eq!(encode(&Type::BOX_ARRAY, "{(1,1),(0,0);(2,2),(1,1)}"), r#"["(1,1),(0,0)","(2,2),(1,1)"]"#);
        assert_eq!(encode(&Type::INT2_VECTOR, "1 2 3"), "[1,2,3]");
        assert_eq!(encode(&Type::TEXT_ARRAY, "{}"), "[]");
    }

    #[test]
    fn r_dec_4_a_text_that_belies_its_type_is_still_valid_json() {
        let types = [Type::BOOL, Type::INT4, Type::JSONB, Type::INT4_ARRAY, Type::TIMESTAMPTZ, Type::BYTEA, Type::TEXT];
        for ty in &types {
            for value in ["", "{", "{1", "{1,}", "{1}2", "0x1", "+1", "é\"\\\n\u{1}", "{\"a", "[1:2]={", "{,1}", " 1"]
            {
                let json = encode(ty, value);
                assert!(is_json(&json), "{ty} {value:?} became {json}");
            }
        }
    }

    #[test]
    fn hstore_is_an_object() {
        let ty = TypeInfo { oid: 99_999, name: "hstore".into(), base_oid: 99_999, form: JsonForm::Hstore };
        let mut out = String::new();
        encode_value(&mut out, r#""a"=>"1", "b\"c"=>NULL"#, &ty);
        assert_eq!(out, r#"{"a":"1","b\"c":null}"#);
    }
}
