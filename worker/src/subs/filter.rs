//! Filters of bindings: `column=eq.value` and `column=in.(a,b)`, joined by commas (supabase-wire.md §3.6). Anything else
//! is refused with its reason, never passed.

use aura_domain::{Image, Value};
use aura_pgsource::TypeInfo;

use super::equality::Equality;

/// One condition as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Condition {
    pub(crate) column: String,
    /// `eq` has one, `in` has up to [`MAX_IN`].
    pub(crate) values: Vec<String>,
}

/// Most values of an `in` list, as the original has it.
const MAX_IN: usize = 100;

/// What the client is told about a filter that can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FilterError {
    #[error("filter must not contain empty segments (check for extra commas)")]
    EmptySegment,
    #[error("Error parsing `filter` params: [{0:?}]")]
    Malformed(String),
    #[error("Error parsing `filter` params: operator {0:?} is not supported, use eq or in")]
    Operator(String),
    #[error("`in` filter value must be wrapped by parentheses")]
    NoParentheses,
    #[error("too many values for `in` filter. Maximum {MAX_IN}")]
    TooManyValues,
    #[error("invalid column for filter {0}")]
    Column(String),
    #[error("filters on a column of type {1} are not supported: {0}")]
    Type(String, String),
    #[error("invalid input syntax for type {1}: {0:?}")]
    Value(String, String),
}

/// Parses a filter text; blank = no condition.
pub(crate) fn parse(text: &str) -> Result<Vec<Condition>, FilterError> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    split_top_level(text).into_iter().map(|segment| parse_condition(segment.trim())).collect()
}

fn parse_condition(segment: &str) -> Result<Condition, FilterError> {
    if segment.is_empty() {
        return Err(FilterError::EmptySegment);
    }
    let malformed = || FilterError::Malformed(segment.to_owned());
    let (column, rest) = segment.split_once('=').ok_or_else(malformed)?;
    let (operator, value) = rest.split_once('.').ok_or_else(malformed)?;
    let values = match operator {
        "eq" => vec![unquote(value)],
        "in" => parse_list(value)?,
        other => return Err(FilterError::Operator(other.to_owned())),
    };
    Ok(Condition { column: column.to_owned(), values })
}

fn parse_list(value: &str) -> Result<Vec<String>, FilterError> {
    let inner = value.strip_prefix('(').and_then(|v| v.strip_suffix(')')).ok_or(FilterError::NoParentheses)?;
    let values: Vec<_> = split_top_level(inner).into_iter().map(unquote).collect();
    if values.len() > MAX_IN { Err(FilterError::TooManyValues) } else { Ok(values) }
}

/// Splits at commas outside parentheses and quotes; a quote opens only directly after `.`, `(`, `,` or at the start.
fn split_top_level(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut depth, mut quoted) = (Vec::new(), 0, 0_usize, false);
    let mut previous = None;
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' if quoted => drop(chars.next()),
            '"' if quoted => quoted = false,
            '"' if matches!(previous, None | Some('.' | '(' | ',')) => quoted = true,
            '(' if !quoted => depth += 1,
            ')' if !quoted => depth = depth.saturating_sub(1),
            ',' if !quoted && depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
        previous = Some(c);
    }
    parts.push(&text[start..]);
    parts
}

/// `"a\"b"` → `a"b`; an unquoted value is itself.
fn unquote(value: &str) -> String {
    let Some(inner) = value.strip_prefix('"').and_then(|v| v.strip_suffix('"')) else { return value.to_owned() };
    let mut out = String::with_capacity(inner.len());
    let mut chars = inner.chars();
    while let Some(c) = chars.next() {
        out.push(if c == '\\' { chars.next().unwrap_or(c) } else { c });
    }
    out
}

/// A condition that was checked against its column: equality with one of some canonical values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CompiledCondition {
    pub(crate) column: String,
    pub(crate) equality: Equality,
    /// Canonical, as [`Equality::canonical`] makes them.
    pub(crate) values: Vec<String>,
}

impl CompiledCondition {
    /// Checks the values against the column's type.
    pub(crate) fn new(condition: &Condition, ty: &TypeInfo) -> Result<Self, FilterError> {
        let equality = Equality::of_type(ty.base_oid)
            .ok_or_else(|| FilterError::Type(condition.column.clone(), ty.name.to_string()))?;
        let canonical = |value: &String| {
            let refused = || FilterError::Value(value.clone(), ty.name.to_string());
            equality.canonical_input(value).ok_or_else(refused)
        };
        let values = condition.values.iter().map(canonical).collect::<Result<_, _>>()?;
        Ok(Self { column: condition.column.clone(), equality, values })
    }

    /// Whether the image fulfils it; NULL, absent and unchanged values don't (supabase-wire.md §3.6).
    pub(crate) fn matches(&self, image: &Image) -> bool {
        let Some(Value::Text(text)) = image.get(&self.column) else { return false };
        self.equality.canonical(text).is_some_and(|value| self.values.contains(&value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn condition(column: &str, values: &[&str]) -> Condition {
        Condition { column: column.to_owned(), values: values.iter().map(|v| (*v).to_owned()).collect() }
    }

    #[test]
    fn eq_and_in_and_their_quotes() {
        assert_eq!(parse("  "), Ok(vec![]));
        assert_eq!(parse("id=eq.1"), Ok(vec![condition("id", &["1"])]));
        assert_eq!(parse("id=eq.1, b=eq.x=y.z"), Ok(vec![condition("id", &["1"]), condition("b", &["x=y.z"])]));
        assert_eq!(parse(r#"a=in.(x,"y,)","q\"\\")"#), Ok(vec![condition("a", &["x", "y,)", "q\"\\"])]));
        assert_eq!(parse(r#"a=eq."x,y",b=eq.it"s"#), Ok(vec![condition("a", &["x,y"]), condition("b", &["it\"s"])]));
        assert_eq!(parse("a=eq."), Ok(vec![condition("a", &[""])]));
    }

    #[test]
    fn anything_else_is_refused_with_its_reason() {
        assert_eq!(parse("a=eq.1,"), Err(FilterError::EmptySegment));
        assert_eq!(parse("foo"), Err(FilterError::Malformed("foo".to_owned())));
        assert_eq!(parse("foo=hey"), Err(FilterError::Malformed("foo=hey".to_owned())));
        assert_eq!(parse("a=neq.1"), Err(FilterError::Operator("neq".to_owned())));
        assert_eq!(parse("a=not.eq.1"), Err(FilterError::Operator("not".to_owned())));
        assert_eq!(parse("a=in.1,2"), Err(FilterError::NoParentheses));
        let many = format!("a=in.({})", vec!["1"; 101].join(","));
        assert_eq!(parse(&many), Err(FilterError::TooManyValues));
    }

    #[test]
    fn values_are_checked_against_the_type() {
        let (int4, int8, json) = (23, 20, 114);
        let compile = |value: &str, oid: u32| {
            CompiledCondition::new(&condition("c", &[value]), &TypeInfo::built_in(oid).expect("a built-in type"))
        };
        assert!(matches!(compile("hey", int4), Err(FilterError::Value(..))));
        assert!(matches!(compile("3000000000", int4), Err(FilterError::Value(..))));
        assert!(matches!(compile("1", json), Err(FilterError::Type(..))));
        assert!(compile("3000000000", int8).is_ok());
    }
}
