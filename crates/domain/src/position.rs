use std::{fmt, str::FromStr};

use crate::{Generation, Lsn};

/// Identifies a change whatever the filter was (R-LSN-6). Ordered; positions of two generations have nothing to do
/// with each other, though the order puts the later generation last.
///
/// Wire form `g-<16 hex>-<16 hex>-n`, for example `1-00000000016b3748-00000000016b3700-0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// See [`Generation`].
    pub generation: Generation,
    /// Start of the transaction's commit record: `lsn` of wal2json's B, `final_lsn` of pgoutput's Begin.
    pub commit: Lsn,
    /// Start of the change's own record: `dataStart` of its XLogData header, the same in both plugins.
    pub change: Lsn,
    /// Index among the rows of that record and relation; of a TRUNCATE, the relation's OID.
    pub n: u32,
}

/// A text that is not a position.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a position")]
pub struct ParsePositionError;

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:016x}-{:016x}-{}", self.generation, self.commit.0, self.change.0, self.n)
    }
}

impl FromStr for Position {
    type Err = ParsePositionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split('-');
        let mut next = || parts.next().filter(|part| !part.is_empty()).ok_or(ParsePositionError);
        let decimal = |part: &str| {
            let plain = part.bytes().all(|b| b.is_ascii_digit());
            if plain { part.parse::<u32>().map_err(|_| ParsePositionError) } else { Err(ParsePositionError) }
        };
        let hex = |part: &str| {
            let plain = part.len() == 16 && part.bytes().all(|b| b.is_ascii_hexdigit());
            if plain { u64::from_str_radix(part, 16).map_err(|_| ParsePositionError) } else { Err(ParsePositionError) }
        };
        let position = Self {
            generation: Generation(decimal(next()?)?),
            commit: Lsn(hex(next()?)?),
            change: Lsn(hex(next()?)?),
            n: decimal(next()?)?,
        };
        if parts.next().is_some() { Err(ParsePositionError) } else { Ok(position) }
    }
}

impl serde::Serialize for Position {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Position {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_lsn_6_wire_form_round_trips() {
        let position = Position { generation: Generation(3), commit: Lsn(0x16b_3748), change: Lsn(0x16b_3700), n: 2 };
        let text = position.to_string();
        assert_eq!(text, "3-00000000016b3748-00000000016b3700-2");
        assert_eq!(text.parse(), Ok(position));
        for bad in [
            "",
            "3",
            "3-0-0-0",
            "3-00000000016b3748-00000000016b3700",
            "a-00000000016b3748-00000000016b3700-2",
            "3-00000000016b3748-00000000016b3700-2-1",
            "+3-00000000016b3748-00000000016b3700-2",
        ] {
            assert_eq!(bad.parse::<Position>(), Err(ParsePositionError), "{bad}");
        }
    }

    #[test]
    fn order_is_commit_then_record_then_index() {
        let at = |g, c, l, n| Position { generation: Generation(g), commit: Lsn(c), change: Lsn(l), n };
        let sorted = [at(1, 1, 9, 9), at(1, 2, 1, 0), at(1, 2, 1, 1), at(1, 2, 2, 0), at(2, 0, 0, 0)];
        assert!(sorted.is_sorted());
    }
}
