//! Filter texts of bindings: `column=[not.]operator.value`, joined by commas (supabase-wire.md §3.6).

use std::fmt;

/// Most values of an `in` list, as the original has it.
pub const MAX_IN: usize = 100;

/// What a condition asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operator {
    /// `=`
    Eq,
    /// `<>`
    Neq,
    /// `<`
    Lt,
    /// `<=`
    Lte,
    /// `>`
    Gt,
    /// `>=`
    Gte,
    /// `= any (…)`
    In,
    /// `LIKE`
    Like,
    /// `ILIKE`
    Ilike,
    /// `~`
    Match,
    /// `~*`
    Imatch,
    /// `IS NULL`, `IS TRUE`, `IS FALSE`, `IS UNKNOWN`
    Is,
    /// `IS DISTINCT FROM`
    IsDistinct,
}

impl Operator {
    const ALL: [Self; 13] = [
        Self::Eq,
        Self::Neq,
        Self::Lt,
        Self::Lte,
        Self::Gt,
        Self::Gte,
        Self::In,
        Self::Like,
        Self::Ilike,
        Self::Match,
        Self::Imatch,
        Self::Is,
        Self::IsDistinct,
    ];

    /// The word of the grammar.
    pub fn word(self) -> &'static str {
        match self {
            Self::Eq => "eq",
            Self::Neq => "neq",
            Self::Lt => "lt",
            Self::Lte => "lte",
            Self::Gt => "gt",
            Self::Gte => "gte",
            Self::In => "in",
            Self::Like => "like",
            Self::Ilike => "ilike",
            Self::Match => "match",
            Self::Imatch => "imatch",
            Self::Is => "is",
            Self::IsDistinct => "isdistinct",
        }
    }

    fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|operator| operator.word() == word)
    }
}

/// One condition as written.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Condition {
    /// Column name.
    pub column: String,
    /// What is asked of it.
    pub operator: Operator,
    /// `not.` before the operator.
    pub negated: bool,
    /// One, except for `in`: 0 to [`MAX_IN`], of which `None` is NULL.
    pub values: Vec<Option<String>>,
}

impl fmt::Display for Condition {
    /// As the original prints it: `{"id", "eq", "1", false}`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = match (self.operator, self.values.as_slice()) {
            (Operator::In, values) => {
                let texts: Vec<_> = values.iter().map(|value| value.as_deref().unwrap_or("NULL")).collect();
                format!("{{{}}}", texts.join(","))
            }
            (_, [Some(value)]) => value.clone(),
            _ => String::new(),
        };
        write!(f, "{{{:?}, {:?}, {value:?}, {}}}", self.column, self.operator.word(), self.negated)
    }
}

/// What the client is told about a filter text that can't be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// `a=eq.1,`
    #[error("Error parsing `filter` params: filter must not contain empty segments (check for extra commas)")]
    EmptySegment,
    /// No `=`, no `.`, or an unknown operator; the parts that it fell into.
    #[error("Error parsing `filter` params: {0:?}")]
    Malformed(Vec<String>),
    /// `a=in.1`
    #[error("Error parsing `filter` params: `in` filter value must be wrapped by parentheses")]
    NoParentheses,
    /// What stands in the parentheses is no list.
    #[error("malformed array literal: \"{{{0}}}\"")]
    List(String),
    /// More than [`MAX_IN`].
    #[error("too many values for `in` filter. Maximum {MAX_IN}")]
    TooManyValues,
    /// `is` knows four words.
    #[error("invalid value for is filter: must be null, true, false, or unknown")]
    IsWord,
    /// PostgreSQL's text can't hold it.
    #[error("Error parsing `filter` params: a filter must not contain the NUL character")]
    Nul,
}

/// Parses a filter text; blank = no condition. All conditions must hold.
pub fn parse(text: &str) -> Result<Vec<Condition>, GrammarError> {
    if text.contains('\0') {
        return Err(GrammarError::Nul);
    }
    let text = text.trim();
    if text.is_empty() {
        return Ok(Vec::new());
    }
    split_top_level(text).into_iter().map(|segment| parse_condition(segment.trim())).collect()
}

fn parse_condition(segment: &str) -> Result<Condition, GrammarError> {
    if segment.is_empty() {
        return Err(GrammarError::EmptySegment);
    }
    let malformed = |parts: &[&str]| GrammarError::Malformed(parts.iter().map(|part| (*part).to_owned()).collect());
    let (column, rest) = segment.split_once('=').ok_or_else(|| malformed(&[segment]))?;
    let (negated, rest) = rest.strip_prefix("not.").map_or((false, rest), |rest| (true, rest));
    let (word, value) = rest.split_once('.').ok_or_else(|| malformed(&[rest]))?;
    let operator = Operator::parse(word).ok_or_else(|| malformed(&[word, value]))?;
    let values = match operator {
        Operator::In => parse_list(value)?,
        _ => vec![Some(unquote(value))],
    };
    let is_word = |word: &String| ["null", "true", "false", "unknown"].contains(&word.as_str());
    if operator == Operator::Is && !values.iter().flatten().all(is_word) {
        return Err(GrammarError::IsWord);
    }
    Ok(Condition { column: column.to_owned(), operator, negated, values })
}

/// Splits at commas outside parentheses and quotes; a quote opens only directly after `.`, `(` or `,`.
fn split_top_level(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut depth, mut quoted) = (Vec::new(), 0, 0_usize, false);
    let mut previous = None;
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' if quoted => drop(chars.next()),
            '"' if quoted => quoted = false,
            '"' if matches!(previous, Some('.' | '(' | ',')) => quoted = true,
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

/// `"a\"b"` → `a"b`; what isn't one quoted text from end to end is itself.
fn unquote(value: &str) -> String {
    let Some(inner) = value.strip_prefix('"') else { return value.to_owned() };
    let mut out = String::with_capacity(inner.len());
    let mut chars = inner.chars();
    loop {
        match chars.next() {
            Some('"') if chars.as_str().is_empty() => return out,
            None | Some('"') => return value.to_owned(),
            Some('\\') => match chars.next() {
                Some(c) => out.push(c),
                None => return value.to_owned(),
            },
            Some(c) => out.push(c),
        }
    }
}

/// The list between parentheses is what PostgreSQL reads between the braces of an array, as in the original: blanks around
/// an element don't count, an unquoted `null` is NULL, `\` makes the next character itself.
fn parse_list(value: &str) -> Result<Vec<Option<String>>, GrammarError> {
    let inner = value.strip_prefix('(').and_then(|v| v.strip_suffix(')')).ok_or(GrammarError::NoParentheses)?;
    let malformed = || GrammarError::List(inner.to_owned());
    let mut values = Vec::new();
    if inner.chars().all(is_blank) {
        return Ok(values);
    }
    let mut rest = inner;
    loop {
        let (element, after) = parse_element(rest).ok_or_else(malformed)?;
        values.push(element);
        match after {
            Some(after) => rest = after,
            None => break,
        }
    }
    if values.len() > MAX_IN { Err(GrammarError::TooManyValues) } else { Ok(values) }
}

/// One element, and what follows the comma behind it. `None`: malformed.
fn parse_element(text: &str) -> Option<(Option<String>, Option<&str>)> {
    let text = text.trim_start_matches(is_blank);
    if let Some(quoted) = text.strip_prefix('"') {
        let mut out = String::new();
        let mut chars = quoted.chars();
        loop {
            match chars.next()? {
                '"' => break,
                '\\' => out.push(chars.next()?),
                c => out.push(c),
            }
        }
        let after = chars.as_str().trim_start_matches(is_blank);
        return if after.is_empty() {
            Some((Some(out), None))
        } else {
            Some((Some(out), Some(after.strip_prefix(',')?)))
        };
    }
    let (mut out, mut kept, mut escaped) = (String::new(), 0, false);
    let mut chars = text.chars();
    let after = loop {
        match chars.next() {
            None => break None,
            Some(',') => break Some(chars.as_str()),
            Some('"' | '{' | '}') => return None,
            Some('\\') => {
                out.push(chars.next()?);
                (kept, escaped) = (out.len(), true);
            }
            Some(c) => {
                out.push(c);
                if !is_blank(c) {
                    kept = out.len();
                }
            }
        }
    };
    out.truncate(kept);
    match (out.is_empty(), !escaped && out.eq_ignore_ascii_case("null")) {
        (true, _) => None,
        (_, true) => Some((None, after)),
        _ => Some((Some(out), after)),
    }
}

/// What `array_in` skips.
fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r' | '\u{b}' | '\u{c}')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> Condition {
        let mut all = parse(text).expect("it parses");
        assert_eq!(all.len(), 1, "{text}");
        all.remove(0)
    }

    fn list(text: &str) -> Vec<Option<String>> {
        one(&format!("a=in.({text})")).values
    }

    fn some(values: &[&str]) -> Vec<Option<String>> {
        values.iter().map(|value| Some((*value).to_owned())).collect()
    }

    #[test]
    fn every_operator_with_and_without_not() {
        for operator in Operator::ALL {
            let value = if operator == Operator::In { "(null)" } else { "null" };
            for negated in [false, true] {
                let not = if negated { "not." } else { "" };
                let parsed = one(&format!("c={not}{}.{value}", operator.word()));
                assert_eq!((parsed.operator, parsed.negated, parsed.column.as_str()), (operator, negated, "c"));
            }
        }
    }

    #[test]
    fn conditions_are_split_outside_quotes_and_parentheses_and_trimmed() {
        assert_eq!(parse("  "), Ok(vec![]));
        let all = parse(r#" id=eq.1 , b=eq.x=y.z,c=in.(1,2),d=eq."x,y" "#).expect("it parses");
        let values: Vec<_> = all.iter().map(|condition| condition.values.clone()).collect();
        assert_eq!(values, [some(&["1"]), some(&["x=y.z"]), some(&["1", "2"]), some(&["x,y"])]);
        assert_eq!(one(r#"a=eq."q\"\\,""#).values, some(&[r#"q"\,"#]));
        assert_eq!(one(r#"a=eq."x"y"#).values, some(&[r#""x"y"#]), "not one quoted text");
        assert_eq!(one(r#"a=eq.it"s"#).values, some(&[r#"it"s"#]));
        assert_eq!(one("a=eq.").values, some(&[""]));
        assert_eq!(one("a=eq.null").values, some(&["null"]));
        assert_eq!(one("a=like.50\\%").values, some(&["50\\%"]), "escapes are for quotes only");
    }

    #[test]
    fn lists_are_read_as_postgresql_reads_arrays() {
        assert_eq!(list(""), []);
        assert_eq!(list(r#"x, y ,"y,)","q\"\\", "" ,a\,b"#), some(&["x", "y", "y,)", r#"q"\"#, "", "a,b"]));
        assert_eq!(list("NULL,\"null\",\\null"), [None, Some("null".to_owned()), Some("null".to_owned())]);
        assert_eq!(list("a b\\ "), some(&["a b "]));
        for bad in ["a,", ",a", "a,,b", "{a}", "a\"b", "\"a\"b", "\"a", "a\\"] {
            assert_eq!(parse(&format!("a=in.({bad})")), Err(GrammarError::List(bad.to_owned())), "{bad}");
        }
    }

    #[test]
    fn what_can_t_be_read_is_refused_in_the_original_s_words() {
        let told = |text: &str| parse(text).expect_err("it is refused").to_string();
        assert_eq!(told("foo=foo.hey"), r#"Error parsing `filter` params: ["foo", "hey"]"#);
        assert_eq!(told("undefined"), r#"Error parsing `filter` params: ["undefined"]"#);
        assert_eq!(told("a=hey"), r#"Error parsing `filter` params: ["hey"]"#);
        assert!(told("a=eq.1,").ends_with("filter must not contain empty segments (check for extra commas)"));
        assert!(told("a=in.1,b=eq.2").ends_with("`in` filter value must be wrapped by parentheses"));
        assert_eq!(told("a=is.maybe"), "invalid value for is filter: must be null, true, false, or unknown");
        let many = format!("a=in.({})", vec!["1"; 101].join(","));
        assert_eq!(told(&many), "too many values for `in` filter. Maximum 100");
        assert!(parse(&many.replacen("1,", "", 1)).is_ok());
        assert_eq!(parse("a=eq.\0"), Err(GrammarError::Nul));
    }

    #[test]
    fn conditions_are_printed_as_the_original_does() {
        assert_eq!(one("id=eq.hey").to_string(), r#"{"id", "eq", "hey", false}"#);
        assert_eq!(one("id=not.in.(1,2)").to_string(), r#"{"id", "in", "{1,2}", true}"#);
    }
}
