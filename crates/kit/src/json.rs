//! Bodies as JSON, with our errors.

use std::{fmt, marker::PhantomData, time::Duration};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{FromRequest, OptionalFromRequest, Request, rejection::JsonRejection},
    response::{IntoResponse, Response},
};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeOwned, MapAccess, Visitor, value::MapAccessDeserializer},
};
use tokio::time::timeout;

use crate::{Code, Problem};

/// Longest time for a body to arrive; at [`crate::http::BODY_LIMIT`] that is a slow telephone line.
const ARRIVAL: Duration = Duration::from_secs(10);

/// A JSON body: 415 for another content type, 400 for what isn't JSON or is nested deeper than 127 (`serde_json`'s limit),
/// 408 for one that doesn't arrive, 413 for one over the path's limit, 422 for JSON of another shape. Refuse unknown fields
/// with `#[serde(deny_unknown_fields)]` on `T`.
#[derive(Debug, Clone, Copy)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        match timeout(ARRIVAL, <axum::Json<Object<T>> as FromRequest<S>>::from_request(request, state)).await {
            Ok(Ok(axum::Json(Object(body)))) => Ok(Self(body)),
            Ok(Err(rejection)) => Err(problem(&rejection)),
            Err(_) => Err(late()),
        }
    }
}

fn late() -> Problem {
    Problem::new(Code::RequestTimeout, "The body did not arrive in 10 s.")
}

/// A JSON body as [`Json`] has it, and its bytes as they came.
#[derive(Debug, Clone)]
pub struct JsonBytes<T>(pub T, pub Bytes);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBytes<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let (parts, body) = request.into_parts();
        let whole = Request::from_parts(parts.clone(), body);
        let bytes = timeout(ARRIVAL, Bytes::from_request(whole, state)).await.map_err(|_| late())?;
        let bytes = bytes.map_err(|rejection| problem(&JsonRejection::from(rejection)))?;
        let again = Request::from_parts(parts, Body::from(bytes.clone()));
        let Json(value) = <Json<T> as FromRequest<S>>::from_request(again, state).await?;
        Ok(Self(value, bytes))
    }
}

/// A JSON object. Serde would also take a list for a struct, by the order of its members: `[]` for all defaults.
#[derive(Debug)]
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Members(PhantomData))
    }
}

struct Members<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Members<T> {
    type Value = Object<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<Self::Value, A::Error> {
        T::deserialize(MapAccessDeserializer::new(members)).map(Object)
    }
}

/// No body at all is `None`, whatever the content type; any other body is read as it must be.
impl<T: DeserializeOwned, S: Send + Sync> OptionalFromRequest<S> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Option<Self>, Problem> {
        if request.body().is_end_stream() {
            return Ok(None);
        }
        <Self as FromRequest<S>>::from_request(request, state).await.map(Some)
    }
}

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        axum::Json(self.0).into_response()
    }
}

fn problem(rejection: &JsonRejection) -> Problem {
    match rejection {
        JsonRejection::MissingJsonContentType(_) => {
            Problem::new(Code::UnsupportedMediaType, "Send the body with content-type: application/json.")
        }
        JsonRejection::JsonDataError(error) => Problem::new(Code::InvalidBody, sentence(error)),
        JsonRejection::JsonSyntaxError(error) => Problem::new(Code::MalformedRequest, sentence(error)),
        other if other.status() == http::StatusCode::PAYLOAD_TOO_LARGE => {
            Problem::new(Code::PayloadTooLarge, "The body is over the limit of this path.")
        }
        _ => Problem::new(Code::MalformedRequest, "The body could not be read."),
    }
}

/// The innermost cause says where it is wrong; what wraps it only names the extractor.
fn sentence(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
