use std::time::Duration;

use axum::http::{HeaderMap, header};

/// `Prefer: wait` without which a PUT waits so long (design §6).
const DEFAULT_WAIT: Duration = Duration::from_secs(5);
/// Longest wait.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// What a client may say besides the body.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Options {
    /// How long to wait for the worker.
    pub(crate) wait: Duration,
    /// `If-Match`.
    pub(crate) if_match: Option<String>,
    /// Only show what would be done.
    pub(crate) dry_run: bool,
}

impl Options {
    pub(crate) fn new(headers: &HeaderMap, dry_run: bool) -> Self {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        Self { wait: wait(headers), if_match: text(header::IF_MATCH).map(str::to_owned), dry_run }
    }

    /// Whether the version that the client knows is `etag`. `*` is any that exists.
    pub(crate) fn matches(&self, etag: &str, exists: bool) -> bool {
        match self.if_match.as_deref().map(str::trim) {
            None => true,
            Some("*") => exists,
            Some(list) => list.split(',').any(|one| one.trim() == etag),
        }
    }
}

/// `Prefer: wait=<seconds>`, at most 60. What can't be read is ignored, as RFC 7240 has it.
pub(crate) fn wait(headers: &HeaderMap) -> Duration {
    let preferences = headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
    let mut waits = preferences.flat_map(|text| text.split([',', ';'])).filter_map(|preference| {
        let (name, value) = preference.split_once('=')?;
        name.trim().eq_ignore_ascii_case("wait").then(|| value.trim().trim_matches('"').parse::<u64>().ok())?
    });
    waits.next().map_or(DEFAULT_WAIT, |seconds| Duration::from_secs(seconds).min(MAX_WAIT))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(headers: &[(&'static str, &str)]) -> Options {
        let pairs = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        Options::new(&pairs.collect(), false)
    }

    #[test]
    fn prefer_wait_is_read_as_rfc_7240_has_it() {
        let wait = |text| options(&[("prefer", text)]).wait.as_secs();
        assert_eq!(options(&[]).wait, DEFAULT_WAIT);
        assert_eq!((wait("wait=0"), wait("wait=7"), wait("respond-async, Wait=\"9\"")), (0, 7, 9));
        assert_eq!(wait("wait=100000"), 60);
        assert_eq!((wait("wait=soon"), wait("wait"), wait("waiting=3")), (5, 5, 5));
    }

    #[test]
    fn if_match_compares_versions() {
        let matches = |text, etag, exists| options(&[("if-match", text)]).matches(etag, exists);
        assert!(options(&[]).matches("\"a\"", false));
        assert!(matches("\"b\", \"a\"", "\"a\"", true) && !matches("\"b\"", "\"a\"", true));
        assert!(matches("*", "\"a\"", true) && !matches("*", "\"a\"", false));
    }
}
