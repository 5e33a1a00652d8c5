use std::{fmt, ops::Deref, sync::Arc};

use serde::{Deserialize, Serialize};

/// A PostgreSQL identifier exactly as the catalogue stores it: 1 to 63 bytes, no NUL (R-REG-5). Case is significant.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct SqlName(Arc<str>);

/// Why a text can't be an identifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Zero bytes.
    #[error("a name must not be empty")]
    Empty,
    /// NAMEDATALEN − 1.
    #[error("a name has at most 63 bytes")]
    TooLong,
    /// PostgreSQL can't store U+0000.
    #[error("a name must not contain NUL")]
    Nul,
}

impl SqlName {
    /// Longest identifier in bytes (NAMEDATALEN − 1).
    pub const MAX_BYTES: usize = 63;

    /// Checks a text from outside.
    pub fn new(text: impl Into<Arc<str>>) -> Result<Self, NameError> {
        let text = text.into();
        match text.len() {
            0 => Err(NameError::Empty),
            n if n > Self::MAX_BYTES => Err(NameError::TooLong),
            _ if text.contains('\0') => Err(NameError::Nul),
            _ => Ok(Self(text)),
        }
    }

    /// The bare text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// `"name"`, ready for SQL text.
    pub fn quoted(&self) -> String {
        quote_ident(&self.0)
    }
}

impl Deref for SqlName {
    type Target = str;
    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SqlName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for SqlName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

/// Quotes an identifier, always: `we"ird` → `"we""ird"`.
pub fn quote_ident(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Quotes a string constant so that it means the same whatever `standard_conforming_strings` says.
pub fn quote_literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if quoted.contains('\\') { format!(" E'{}'", quoted.replace('\\', "\\\\")) } else { format!("'{quoted}'") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_reg_5_any_legal_identifier_is_a_name() {
        for name in ["Orders", "we,ird. t'b*l", "quo\"te", "back\\slash", "select", "🦀", &"x".repeat(63)] {
            assert_eq!(SqlName::new(name).as_deref(), Ok(name));
        }
        assert_eq!(SqlName::new(""), Err(NameError::Empty));
        assert_eq!(SqlName::new("x".repeat(64)), Err(NameError::TooLong));
        assert_eq!(SqlName::new("a\0b"), Err(NameError::Nul));
    }

    #[test]
    fn quoting_leaves_no_way_out() {
        assert_eq!(quote_ident("a\"; drop table x; --"), "\"a\"\"; drop table x; --\"");
        assert_eq!(quote_literal("it's"), "'it''s'");
        assert_eq!(quote_literal("a\\'b"), " E'a\\\\''b'");
    }
}
