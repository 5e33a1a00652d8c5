//! Types whose `=` and `<` can be decided exactly on PostgreSQL's text output: each value becomes a [`Key`], and keys are
//! equal and ordered as the values are.

use std::cmp::Reverse;

/// How values of a type become keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Exact {
    Int {
        bits: u8,
    },
    Oid,
    Bool,
    Uuid,
    Text,
    /// Trailing blanks don't count.
    PaddedText,
    /// Its input is cut at 63 bytes.
    Name,
    Numeric,
    Float4,
    Float8,
    Timestamp,
    /// Text forms must be in UTC (R-DEC-1).
    TimestampTz,
    Date,
    Time,
    Bytea,
}

/// A value of one type, ordered as PostgreSQL orders that type; texts as under the collation `C`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Key {
    /// Whole numbers and booleans.
    Int(i64),
    /// A float's bits, turned so that they are ordered; NaN is the greatest.
    Float(u64),
    /// `numeric`.
    Numeric(Decimal),
    /// Year, negative before Christ, and the rest of the text, whose fields have fixed widths.
    Moment(i64, Box<str>),
    /// Texts, and types whose text form is ordered like its values.
    Text(Box<str>),
}

/// A `numeric`. Of a number other than zero: `0.digits × 10^power`, the digits without zeros at either end.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Decimal {
    /// −∞
    NegativeInfinity,
    /// Power and digits.
    Negative(Reverse<(i64, Box<str>)>),
    /// 0, whatever its scale.
    Zero,
    /// Power and digits.
    Positive(i64, Box<str>),
    /// +∞
    Infinity,
    /// Equal to itself and greater than all others.
    NaN,
}

impl Exact {
    /// By the OID of the type below all domains (`pg_type.dat`); `None` where PostgreSQL is to be asked.
    pub(crate) fn of_type(base_oid: u32) -> Option<Self> {
        Some(match base_oid {
            16 => Self::Bool,
            17 => Self::Bytea,
            19 => Self::Name,
            20 => Self::Int { bits: 64 },
            21 => Self::Int { bits: 16 },
            23 => Self::Int { bits: 32 },
            // text, varchar
            25 | 1043 => Self::Text,
            26 => Self::Oid,
            700 => Self::Float4,
            701 => Self::Float8,
            1042 => Self::PaddedText,
            1082 => Self::Date,
            1083 => Self::Time,
            1114 => Self::Timestamp,
            1184 => Self::TimestampTz,
            1700 => Self::Numeric,
            2950 => Self::Uuid,
            _ => return None,
        })
    }

    /// Whether a collation has a say.
    pub(crate) fn is_collatable(self) -> bool {
        matches!(self, Self::Text | Self::PaddedText | Self::Name)
    }

    /// The key of PostgreSQL's own output; `None`: it isn't what that type puts out.
    pub(crate) fn key(self, text: &str) -> Option<Key> {
        Some(match self {
            Self::Int { .. } | Self::Oid => Key::Int(text.parse().ok()?),
            Self::Bool => Key::Int(match text {
                // `true` is what the cast to text makes of it.
                "t" | "true" => 1,
                "f" | "false" => 0,
                _ => return None,
            }),
            Self::Uuid | Self::Text | Self::Name | Self::Time => Key::Text(text.into()),
            Self::Bytea => Key::Text(text.strip_prefix("\\x")?.into()),
            Self::PaddedText => Key::Text(text.trim_end_matches(' ').into()),
            Self::Numeric => Key::Numeric(decimal(text)?),
            Self::Float4 => float(text.parse::<f32>().ok()?.into()),
            Self::Float8 => float(text.parse::<f64>().ok()?),
            Self::Timestamp | Self::Date => moment(text, "")?,
            Self::TimestampTz => moment(text, "+00")?,
        })
    }

    /// The key of what a client wrote, where it is plain that PostgreSQL takes it as just that. Otherwise PostgreSQL is
    /// asked for its own output.
    pub(crate) fn plain_input(self, text: &str) -> Option<Key> {
        let digits = |text: &str, most: usize| {
            (1..=most).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
        };
        let unsigned = text.strip_prefix('-').unwrap_or(text);
        match self {
            Self::Int { bits } if digits(unsigned, 19) => {
                let value: i64 = text.parse().ok()?;
                let limit = i64::MAX >> (64 - bits);
                (value <= limit && value >= -limit - 1).then_some(Key::Int(value))
            }
            Self::Bool if ["t", "f", "true", "false"].contains(&text) => self.key(text),
            Self::Uuid if text.len() == 36 => {
                uuid::Uuid::try_parse(text).ok().map(|id| Key::Text(id.to_string().into()))
            }
            Self::Text | Self::PaddedText => self.key(text),
            Self::Name if text.len() < 64 => self.key(text),
            Self::Numeric | Self::Float8 => {
                let (whole, fraction) = unsigned.split_once('.').unwrap_or((unsigned, "0"));
                (digits(whole, 15) && digits(fraction, 15)).then(|| self.key(text))?
            }
            _ => None,
        }
    }
}

/// All NaN are equal to each other, and −0 to 0, in PostgreSQL.
fn float(value: f64) -> Key {
    const SIGN: u64 = 1 << 63;
    let bits = if value == 0.0 { 0 } else { value.to_bits() };
    Key::Float(match bits {
        _ if value.is_nan() => u64::MAX,
        bits if bits & SIGN == 0 => bits | SIGN,
        bits => !bits,
    })
}

fn decimal(text: &str) -> Option<Decimal> {
    match text {
        "NaN" => return Some(Decimal::NaN),
        "Infinity" => return Some(Decimal::Infinity),
        "-Infinity" => return Some(Decimal::NegativeInfinity),
        _ => {}
    }
    let unsigned = text.strip_prefix('-').unwrap_or(text);
    let (whole, fraction) = unsigned.split_once('.').unwrap_or((unsigned, ""));
    let digits = format!("{whole}{fraction}");
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let significant = digits.trim_start_matches('0');
    let leading = digits.len() - significant.len();
    let power = i64::try_from(whole.len()).ok()? - i64::try_from(leading).ok()?;
    let significant = significant.trim_end_matches('0');
    Some(match significant {
        "" => Decimal::Zero,
        digits if unsigned.len() < text.len() => Decimal::Negative(Reverse((power, digits.into()))),
        digits => Decimal::Positive(power, digits.into()),
    })
}

/// `2026-01-02 03:04:05.6+00`, `0044-03-15 BC`, `infinity`.
fn moment(text: &str, zone: &str) -> Option<Key> {
    match text {
        "infinity" => return Some(Key::Moment(i64::MAX, "".into())),
        "-infinity" => return Some(Key::Moment(i64::MIN, "".into())),
        _ => {}
    }
    let (common, before_christ) = text.strip_suffix(" BC").map_or((text, false), |text| (text, true));
    let (year, rest) = common.strip_suffix(zone)?.split_once('-')?;
    let year: i64 = year.parse().ok().filter(|year| *year > 0)?;
    let plain = rest.bytes().all(|byte| byte.is_ascii_digit() || b"-: .".contains(&byte));
    plain.then(|| Key::Moment(if before_christ { 1 - year } else { year }, rest.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ascending(exact: Exact, texts: &[&str]) {
        let keys: Vec<_> = texts.iter().map(|text| exact.key(text).unwrap_or_else(|| panic!("{text}"))).collect();
        assert!(keys.windows(2).all(|pair| pair[0] < pair[1]), "{texts:?}: {keys:?}");
    }

    fn same(exact: Exact, a: &str, b: &str) {
        assert_eq!(exact.key(a), exact.key(b), "{a} {b}");
    }

    #[test]
    fn keys_are_ordered_as_postgresql_orders_values() {
        let numbers =
            ["-Infinity", "-10", "-9.5", "-0.01", "0", "0.001", "0.01", "0.1", "9.99", "10", "Infinity", "NaN"];
        ascending(Exact::Numeric, &numbers);
        ascending(Exact::Float8, &["-Infinity", "-1e+300", "-1", "-5e-324", "0", "1e-300", "1", "Infinity", "NaN"]);
        ascending(Exact::Float4, &["-3.4e+38", "0", "1e-45", "0.1", "NaN"]);
        ascending(Exact::Int { bits: 64 }, &["-9223372036854775808", "-1", "0", "9223372036854775807"]);
        ascending(Exact::Bool, &["f", "t"]);
        let dates =
            ["-infinity", "4713-01-01 BC", "0001-01-01 BC", "0001-01-01", "2026-01-02", "12026-01-01", "infinity"];
        ascending(Exact::Date, &dates);
        ascending(
            Exact::TimestampTz,
            &["0002-01-01 00:00:00+00 BC", "2026-01-02 00:00:00+00", "2026-01-02 00:00:00.5+00"],
        );
        ascending(Exact::Timestamp, &["2026-01-02 00:00:00.45", "2026-01-02 00:00:00.5", "2026-01-02 00:00:01"]);
        ascending(Exact::Time, &["00:00:00", "00:00:00.000001", "23:59:59.9", "24:00:00"]);
        ascending(Exact::Bytea, &["\\x", "\\x00", "\\x0000", "\\x01", "\\xff"]);
        ascending(Exact::Text, &["", " ", "A", "a", "é", "\u{1f600}"]);
    }

    #[test]
    fn one_value_has_one_key() {
        same(Exact::Numeric, "1.5", "1.500");
        same(Exact::Numeric, "0", "-0.00");
        same(Exact::Float8, "0", "-0");
        same(Exact::PaddedText, "ab", "ab  ");
        same(Exact::Bool, "t", "true");
    }

    #[test]
    fn what_is_not_plain_is_left_to_postgresql() {
        for (exact, text) in [
            (Exact::Int { bits: 16 }, "32768"),
            (Exact::Int { bits: 32 }, " 1"),
            (Exact::Int { bits: 32 }, "+1"),
            (Exact::Int { bits: 32 }, "1_0"),
            (Exact::Bool, "yes"),
            (Exact::Uuid, "{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"),
            (Exact::Numeric, "1e5"),
            (Exact::Numeric, "."),
            (Exact::Float8, "1e400"),
            (Exact::Float4, "1"),
            (Exact::Timestamp, "2026-01-02 00:00:00"),
            (Exact::Bytea, "\\x00"),
            (Exact::Name, &"x".repeat(64)),
        ] {
            assert_eq!(exact.plain_input(text), None, "{text}");
        }
        assert_eq!(Exact::Int { bits: 16 }.plain_input("-32768"), Some(Key::Int(-32768)));
        assert_eq!(Exact::TimestampTz.key("2026-01-02 00:00:00+01"), None, "not in UTC");
        let upper = Exact::Uuid.plain_input("A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11");
        assert_eq!(upper, Exact::Uuid.key("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"));
    }
}
