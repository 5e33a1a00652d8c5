//! `application/problem+json` (RFC 9457).

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::{Code, request_id};

/// An error as the client sees it. Never SQL text, a DSN or a row value.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct Problem(Box<ProblemBody>);

/// The members of a [`Problem`], for the OpenAPI document.
#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
#[schema(as = Problem)]
pub struct ProblemBody {
    /// `urn:aura:error:<code>`.
    #[schema(example = "urn:aura:error:table_not_found")]
    r#type: String,
    /// Stable word for programs.
    code: Code,
    /// HTTP status.
    status: u16,
    /// Short sentence, the same for every occurrence of the code.
    title: &'static str,
    /// What happened this time.
    detail: String,
    /// Whether the same request may succeed later.
    retryable: bool,
    /// The request's id, also in `x-request-id` and in our log.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
    /// Members that some codes add, such as `blocking_pid` or `sql`.
    #[serde(flatten)]
    extra: Map<String, Value>,
    /// Seconds for the `Retry-After` header.
    #[serde(skip)]
    retry_after: Option<u64>,
}

impl Problem {
    /// A problem of this code; the title, the status and whether it is retryable come with the code.
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self(Box::new(ProblemBody {
            r#type: format!("urn:aura:error:{code}"),
            code,
            status: code.status(),
            title: code.title(),
            detail: detail.into(),
            retryable: code.retryable(),
            request_id: None,
            extra: Map::new(),
            retry_after: None,
        }))
    }

    /// A defect of ours. The cause goes to the log, where the request id finds it; the client learns nothing of it.
    pub fn internal(cause: &(dyn std::error::Error + 'static)) -> Self {
        tracing::error!(error = %chain(cause), request_id = request_id::current(), "internal error");
        Self::new(Code::Internal, "The log has more under this request id.")
    }

    /// Adds a member.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.0.extra.insert(name.to_owned(), value.into());
        self
    }

    /// Adds a `Retry-After` header, in seconds.
    #[must_use]
    pub fn retry_after(mut self, seconds: u64) -> Self {
        self.0.retry_after = Some(seconds);
        self
    }

    /// The code.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// What happened this time.
    pub fn detail(&self) -> &str {
        &self.0.detail
    }
}

/// The error and its causes in one line.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

impl IntoResponse for Problem {
    fn into_response(mut self) -> Response {
        self.0.request_id = request_id::current();
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, axum::Json(&self)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(seconds) = self.0.retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if self.0.status == 401 {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self.0.code);
        response
    }
}
