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

/// SQL text that shows a `timestamptz` as RFC 3339 in UTC.
macro_rules! rfc3339 {
    ($column:literal) => {
        concat!("to_char(", $column, " at time zone 'utc', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')")
    };
}
pub(crate) use rfc3339;
