use aura_kit::{Code, Problem};
use axum::extract::{FromRequestParts, Query};
use http::request::Parts;

/// The parameters of a request's query. Unknown ones are ignored, and of one that comes twice the last counts, as in the
/// original: clients and proxies append their own.
#[derive(Debug)]
pub(crate) struct Params(Vec<(String, String)>);

impl Params {
    /// The value of a parameter that is given.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().rfind(|(given, _)| given == name).map(|(_, value)| value.as_str())
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Params {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let pairs = Query::try_from_uri(&parts.uri);
        let pairs = pairs.map_err(|_| Problem::new(Code::MalformedRequest, "The query can't be read."))?;
        Ok(Self(pairs.0))
    }
}
