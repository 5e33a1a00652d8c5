//! One id per request: taken from `x-request-id` when it is harmless, else made here; in the answer, in problems, in the
//! log and in the audit.

use axum::{extract::Request, middleware::Next, response::Response};
use http::{HeaderMap, HeaderName, HeaderValue};
use uuid::Uuid;

const HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// Longest id that we take from a client, in bytes.
const MAX_LENGTH: usize = 64;

tokio::task_local! {
    static CURRENT: String;
}

/// The id of the request that this task serves.
pub fn current() -> Option<String> {
    CURRENT.try_with(Clone::clone).ok()
}

/// Middleware (`axum::middleware::from_fn`); outermost, so that every problem has an id.
pub async fn layer(request: Request, next: Next) -> Response {
    let id = from_client(request.headers()).unwrap_or_else(|| Uuid::now_v7().simple().to_string());
    let mut response = CURRENT.scope(id.clone(), next.run(request)).await;
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

fn from_client(headers: &HeaderMap) -> Option<String> {
    let text = headers.get(HEADER)?.to_str().ok()?;
    let harmless = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    ((1..=MAX_LENGTH).contains(&text.len()) && text.bytes().all(harmless)).then(|| text.to_owned())
}
