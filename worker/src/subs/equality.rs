//! PostgreSQL's `=` of those types whose equality can be decided exactly on text forms: both sides are brought to one
//! canonical text, and equal texts are equal values.

use std::fmt::Write;

/// How values of a type compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Equality {
    Int {
        bits: u8,
    },
    Bool,
    Uuid,
    Text,
    /// Trailing blanks don't count.
    PaddedText,
    Numeric,
    Float4,
    Float8,
}

impl Equality {
    /// By the OID of the type below all domains (`pg_type.dat`); `None` where equality can't be decided here.
    pub(crate) fn of_type(base_oid: u32) -> Option<Self> {
        Some(match base_oid {
            21 => Self::Int { bits: 16 },
            23 => Self::Int { bits: 32 },
            20 => Self::Int { bits: 64 },
            16 => Self::Bool,
            2950 => Self::Uuid,
            // text, varchar, name
            25 | 1043 | 19 => Self::Text,
            1042 => Self::PaddedText,
            1700 => Self::Numeric,
            700 => Self::Float4,
            701 => Self::Float8,
            _ => return None,
        })
    }

    /// Canonical form of what a client wrote; `None` when it doesn't cast.
    pub(crate) fn canonical_input(self, text: &str) -> Option<String> {
        match self {
            Self::Int { bits } => {
                let value: i64 = text.trim().parse().ok()?;
                let limit = i64::MAX >> (64 - bits);
                (value <= limit && value >= -limit - 1).then(|| value.to_string())
            }
            Self::Bool => bool_word(text).map(|value| if value { "t" } else { "f" }.to_owned()),
            Self::Uuid => uuid::Uuid::try_parse(text.trim()).ok().map(|id| id.to_string()),
            _ => self.canonical(text),
        }
    }

    /// Canonical form of PostgreSQL's own output.
    pub(crate) fn canonical(self, text: &str) -> Option<String> {
        match self {
            Self::Int { .. } | Self::Bool | Self::Uuid | Self::Text => Some(text.to_owned()),
            Self::PaddedText => Some(text.trim_end_matches(' ').to_owned()),
            Self::Numeric => numeric(text.trim()),
            Self::Float4 => text.trim().parse::<f32>().ok().map(|value| float(value.into())),
            Self::Float8 => text.trim().parse::<f64>().ok().map(float),
        }
    }
}

/// The words of PostgreSQL's bool input, any unambiguous prefix of them included.
fn bool_word(text: &str) -> Option<bool> {
    let word = text.trim().to_ascii_lowercase();
    let prefix_of = |full: &str, least: usize| word.len() >= least && full.starts_with(&word);
    match word.as_str() {
        "1" => Some(true),
        "0" => Some(false),
        _ if prefix_of("true", 1) || prefix_of("yes", 1) || prefix_of("on", 2) => Some(true),
        _ if prefix_of("false", 1) || prefix_of("no", 1) || prefix_of("off", 2) => Some(false),
        _ => None,
    }
}

/// All NaN are equal to each other, and −0 to 0, in PostgreSQL.
fn float(value: f64) -> String {
    if value == 0.0 { "0".to_owned() } else { value.to_string() }
}

/// Digits without leading or trailing zeros, and the power of ten of the first: `1.50` and `15e-1` are one value.
fn numeric(text: &str) -> Option<String> {
    let (negative, unsigned) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    match unsigned.to_ascii_lowercase().as_str() {
        "nan" => return (unsigned.len() == text.len()).then(|| "NaN".to_owned()),
        "inf" | "infinity" => return Some(if negative { "-inf" } else { "inf" }.to_owned()),
        _ => {}
    }
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok().filter(|e| e.abs() < 200_000)?),
        None => (unsigned, 0),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{whole}{fraction}");
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let significant = digits.trim_start_matches('0');
    if significant.is_empty() {
        return Some("0".to_owned());
    }
    let leading = digits.len() - significant.len();
    let power = i64::try_from(whole.len()).ok()? - i64::try_from(leading).ok()? + i64::from(exponent);
    let mut out = String::from(if negative { "-" } else { "" });
    write!(out, "{}e{power}", significant.trim_end_matches('0')).ok()?;
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_value_has_one_canonical_text() {
        let same = |equality: Equality, forms: &[&str]| {
            let all: Vec<_> = forms.iter().map(|form| equality.canonical_input(form).expect("it casts")).collect();
            assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{forms:?} → {all:?}");
        };
        same(Equality::Numeric, &["1.5", "1.50", "15e-1", "0.15E1", "+01.500"]);
        same(Equality::Numeric, &["0", "0.00", "-0", "0e5"]);
        same(Equality::Numeric, &["nan", "NaN"]);
        same(Equality::Float8, &["1e3", "1000", "1000.0"]);
        same(Equality::Float8, &["0", "-0"]);
        same(Equality::Int { bits: 32 }, &["7", " 07 ", "+7"]);
        same(Equality::Bool, &["t", "TRUE", "yes", "on", "1"]);
        same(Equality::PaddedText, &["ab", "ab  "]);
        same(Equality::Uuid, &["A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"]);
    }

    #[test]
    fn different_values_differ_and_nonsense_does_not_cast() {
        let differ = |equality: Equality, a: &str, b: &str| {
            assert_ne!(equality.canonical_input(a), equality.canonical_input(b));
        };
        differ(Equality::Numeric, "1.5", "15");
        differ(Equality::Numeric, "1", "-1");
        differ(Equality::Numeric, "10", "100");
        differ(Equality::Text, "a", "A");
        differ(Equality::Text, "a", "a ");
        for (equality, text) in [
            (Equality::Numeric, "1.2.3"),
            (Equality::Numeric, ""),
            (Equality::Numeric, "."),
            (Equality::Numeric, "1e"),
            (Equality::Int { bits: 16 }, "32768"),
            (Equality::Int { bits: 64 }, "1.0"),
            (Equality::Bool, "o"),
            (Equality::Uuid, "x"),
            (Equality::Float8, "abc"),
        ] {
            assert_eq!(equality.canonical_input(text), None, "{text}");
        }
    }
}
