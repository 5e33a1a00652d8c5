use std::time::Duration;

use axum::http::HeaderMap;

use crate::headers::{IfMatch, Wait};

/// What a client may say besides the body.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Options {
    /// How long to wait for the worker.
    pub(crate) wait: Duration,
    /// `If-Match`.
    pub(crate) if_match: IfMatch,
    /// Only show what would be done.
    pub(crate) dry_run: bool,
}

impl Options {
    pub(crate) fn new(headers: &HeaderMap, dry_run: bool) -> Self {
        Self { wait: Wait::new(headers).0, if_match: IfMatch::new(headers), dry_run }
    }
}
