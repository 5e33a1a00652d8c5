use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

/// A failed request, as the server words it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    code: u16,
    reason: &'static str,
    message: String,
}

impl Refusal {
    fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into() }
    }

    pub(super) fn not_found(name: &str) -> Self {
        Self::new(404, "NotFound", format!("leases.coordination.k8s.io {name:?} not found"))
    }

    pub(super) fn already_exists(name: &str) -> Self {
        Self::new(409, "AlreadyExists", format!("leases.coordination.k8s.io {name:?} already exists"))
    }

    pub(super) fn conflict(name: &str) -> Self {
        let what = "the object has been modified; please apply your changes to the latest version and try again";
        Self::new(
            409,
            "Conflict",
            format!("Operation cannot be fulfilled on leases.coordination.k8s.io {name:?}: {what}"),
        )
    }

    pub(super) fn precondition(name: &str, wanted: &str, is: &str) -> Self {
        let what = format!("Precondition failed: UID in precondition: {wanted}, UID in object meta: {is}");
        Self::new(
            409,
            "Conflict",
            format!("Operation cannot be fulfilled on leases.coordination.k8s.io {name:?}: {what}"),
        )
    }

    pub(super) fn field_conflict(owner: &str, field: &str) -> Self {
        Self::new(409, "Conflict", format!("Apply failed with 1 conflict: conflict with {owner:?}: .spec.{field}"))
    }

    pub(super) fn invalid(name: &str, what: &str) -> Self {
        Self::new(422, "Invalid", format!("Lease.coordination.k8s.io {name:?} is invalid: {what}"))
    }

    pub(super) fn bad_request(what: &str) -> Self {
        Self::new(400, "BadRequest", what)
    }

    pub(super) fn gone(wanted: u64, oldest: u64) -> Self {
        Self::new(410, "Expired", format!("too old resource version: {wanted} ({oldest})"))
    }

    pub(super) fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    pub(super) fn internal() -> Self {
        Self::new(500, "InternalError", "Internal error occurred")
    }

    pub(super) fn too_many() -> Self {
        Self::new(429, "TooManyRequests", "Too many requests, please try again later.")
    }

    /// The `Status` object.
    pub(super) fn body(&self) -> Value {
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code})
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(self.body())).into_response();
        if self.code == 429 {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
