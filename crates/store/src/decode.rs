//! From column types to the domain's.

use std::str::FromStr;

use aura_domain::{Generation, Lsn, SqlName};

use crate::StoreError;

pub(crate) fn name(text: String) -> Result<SqlName, StoreError> {
    SqlName::new(text).map_err(|_| StoreError::Corrupt("name"))
}

pub(crate) fn lsn(text: Option<String>) -> Result<Option<Lsn>, StoreError> {
    parsed(text, "log position")
}

/// A word of a closed set, or anything else with a `FromStr`.
pub(crate) fn parsed<T: FromStr>(text: Option<String>, what: &'static str) -> Result<Option<T>, StoreError> {
    text.map(|text| text.parse().map_err(|_| StoreError::Corrupt(what))).transpose()
}

pub(crate) fn word<T: FromStr>(text: &str, what: &'static str) -> Result<T, StoreError> {
    text.parse().map_err(|_| StoreError::Corrupt(what))
}

pub(crate) fn generation(number: i32) -> Result<Generation, StoreError> {
    u32::try_from(number).map(Generation).map_err(|_| StoreError::Corrupt("generation"))
}

/// `integer` of the database; generations rise by one per restore, so the limit is never met.
pub(crate) fn generation_column(generation: Generation) -> i32 {
    i32::try_from(generation.0).unwrap_or(i32::MAX)
}

/// A closed set of words with the same spelling in Rust, SQL and JSON.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $($(#[$variant_doc])* #[serde(rename = $word)] $variant,)+
        }

        impl $name {
            /// The stored and shown word.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::StoreError;
            fn from_str(word: &str) -> Result<Self, Self::Err> {
                match word {
                    $($word => Ok(Self::$variant),)+
                    _ => Err($crate::StoreError::Corrupt(stringify!($name))),
                }
            }
        }
    };
}
pub(crate) use words;

/// SQL text that shows a `timestamptz` as RFC 3339 in UTC.
macro_rules! rfc3339 {
    ($column:literal) => {
        concat!("to_char(", $column, " at time zone 'utc', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')")
    };
}
pub(crate) use rfc3339;
