//! Lists: `{"items": […], "next_cursor": string|null}`. A cursor is opaque; it names the last item of the page.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use serde::{Serialize, de::DeserializeOwned};

use crate::error::{ApiError, Result};

/// Items of a page unless the client says otherwise.
pub(crate) const DEFAULT_LIMIT: u32 = 100;
/// Most items of a page.
pub(crate) const MAX_LIMIT: u32 = 1000;

/// Checks `?limit=`.
pub(crate) fn limit(wanted: Option<u32>) -> Result<u32> {
    match wanted.unwrap_or(DEFAULT_LIMIT) {
        limit @ 1..=MAX_LIMIT => Ok(limit),
        _ => Err(ApiError::invalid_parameter(format!("limit is 1 to {MAX_LIMIT}."))),
    }
}

/// The cursor behind an item with this key.
pub(crate) fn cursor(key: &impl Serialize) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(serde_json::to_vec(key).unwrap_or_default())
}

/// The key that a cursor names.
pub(crate) fn key<K: DeserializeOwned>(cursor: Option<&str>) -> Result<Option<K>> {
    let Some(cursor) = cursor else { return Ok(None) };
    let bytes = BASE64_URL_SAFE_NO_PAD.decode(cursor).ok();
    let key = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    key.map(Some).ok_or_else(|| ApiError::invalid_parameter("That is no cursor of this list."))
}
