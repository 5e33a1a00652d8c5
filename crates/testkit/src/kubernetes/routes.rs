use std::{collections::HashMap, convert::Infallible, future::pending, time::Duration};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{FromRequestParts, Path, Query, Request, State},
    http::{HeaderMap, Method, StatusCode, header, request::Parts},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};

use super::{
    FakeKubernetes, Fault, On,
    objects::{Key, selects},
    status::Refusal,
};

/// A watch that tells nothing for so long tells that it lives; a real server does once a minute.
const BOOKMARK: Duration = Duration::from_secs(10);

type Answer = Result<Response, Refusal>;

pub(super) fn router(server: FakeKubernetes) -> Router {
    let leases = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases";
    Router::new()
        .route(leases, get(list).post(create))
        .route(&format!("{leases}/{{name}}"), get(read).put(replace).patch(patch).delete(delete))
        .layer(middleware::from_fn_with_state(server.clone(), fail))
        .with_state(server)
}

/// Who asks, by bearer token.
struct Token(String);

impl<S: Send + Sync> FromRequestParts<S> for Token {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::of(&parts.headers))
    }
}

impl Token {
    fn of(headers: &HeaderMap) -> Self {
        let value = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        Self(value.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or("anonymous").to_owned())
    }
}

/// Applies the client's faults around the request. As with a real server, what has been sent is done, whether or not anybody
/// still waits for the answer.
async fn fail(State(server): State<FakeKubernetes>, request: Request, next: Next) -> Response {
    let done = tokio::spawn(answer(server, request, next)).await;
    done.unwrap_or_else(|_| Refusal::internal().into_response())
}

async fn answer(server: FakeKubernetes, request: Request, next: Next) -> Response {
    let token = Token::of(request.headers()).0;
    let kind = match (request.method(), request.uri().path().ends_with("/leases")) {
        (&Method::GET, true) => On::List,
        (&Method::GET, false) => On::Get,
        _ => On::Write,
    };
    let faults = server.client(&token).with(|client| client.faults.of(kind));
    thawed(&server, &token).await;
    for fault in &faults {
        match fault {
            Fault::Delay(delay) => sleep(*delay).await,
            Fault::Drop => pending().await,
            Fault::ApplyAndDrop => {}
            Fault::TooManyRequests => return Refusal::too_many().into_response(),
            Fault::ServerError => return Refusal::internal().into_response(),
            Fault::Unauthorized => return Refusal::unauthorized().into_response(),
        }
    }
    let response = next.run(request).await;
    if faults.contains(&Fault::ApplyAndDrop) {
        pending::<()>().await;
    }
    thawed(&server, &token).await;
    response
}

/// Returns when neither the server nor the client's way to it is frozen.
async fn thawed(server: &FakeKubernetes, token: &str) {
    let own = server.client(token).with(|client| client.frozen.subscribe());
    for mut frozen in [server.shared.frozen.subscribe(), own] {
        // The senders live as long as the server.
        drop(frozen.wait_for(|frozen| !frozen).await);
    }
}

type Params = Query<HashMap<String, String>>;

async fn read(State(server): State<FakeKubernetes>, Path(key): Path<Key>) -> Answer {
    Ok(Json(server.state().objects.get(&key)?).into_response())
}

async fn create(
    State(server): State<FakeKubernetes>,
    Path(namespace): Path<String>,
    params: Params,
    headers: HeaderMap,
    body: Bytes,
) -> Answer {
    let body = parse(&body)?;
    let created = server.state().objects.create(&namespace, &body, &manager(&params, &headers))?;
    server.announce();
    Ok((StatusCode::CREATED, Json(created)).into_response())
}

async fn replace(
    State(server): State<FakeKubernetes>,
    Path(key): Path<Key>,
    params: Params,
    headers: HeaderMap,
    body: Bytes,
) -> Answer {
    let body = parse(&body)?;
    let (created, object) = server.state().objects.replace(&key, &body, &manager(&params, &headers))?;
    server.announce();
    let status = if created { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(object)).into_response())
}

async fn patch(
    State(server): State<FakeKubernetes>,
    Path(key): Path<Key>,
    params: Params,
    headers: HeaderMap,
    body: Bytes,
) -> Answer {
    let (body, manager) = (parse(&body)?, manager(&params, &headers));
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let object = match kind {
        "application/merge-patch+json" => server.state().objects.merge(&key, &body, &manager)?,
        kind if kind.starts_with("application/apply-patch") => {
            let force = params.get("force").is_some_and(|force| force == "true");
            server.state().objects.apply(&key, &body, &manager, force)?
        }
        other => return Err(Refusal::bad_request(&format!("no such patch: {other}"))),
    };
    server.announce();
    Ok(Json(object).into_response())
}

async fn delete(State(server): State<FakeKubernetes>, Path(key): Path<Key>, body: Bytes) -> Answer {
    let options = if body.is_empty() { json!({}) } else { parse(&body)? };
    server.state().objects.delete(&key, &options)?;
    server.announce();
    Ok(Json(json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})).into_response())
}

fn parse(body: &[u8]) -> Result<Value, Refusal> {
    serde_json::from_slice(body).map_err(|error| Refusal::bad_request(&error.to_string()))
}

fn manager(params: &Params, headers: &HeaderMap) -> String {
    let agent =
        || headers.get(header::USER_AGENT).and_then(|value| value.to_str().ok()).unwrap_or("unknown").to_owned();
    params.get("fieldManager").cloned().unwrap_or_else(agent)
}

/// GET of the collection: a list, or a watch.
async fn list(
    State(server): State<FakeKubernetes>,
    Path(namespace): Path<String>,
    token: Token,
    params: Params,
) -> Answer {
    let selector = params.get("labelSelector").cloned().unwrap_or_default();
    if params.get("watch").is_none_or(|watch| watch != "true") {
        let stale = server.client(&token.0).with(|client| client.faults.stale_list.clone());
        let objects = stale.unwrap_or_else(|| server.state().objects.clone());
        return Ok(Json(objects.list(&namespace, &selector)).into_response());
    }
    let number = |name: &str| params.get(name).and_then(|value| value.parse().ok());
    let (cuts, frozen) = server.client(&token.0).with(|client| (client.cuts.subscribe(), client.frozen.subscribe()));
    let watch = Watch {
        namespace,
        selector,
        bookmarks: params.get("allowWatchBookmarks").is_some_and(|allow| allow == "true"),
        at: number("resourceVersion").unwrap_or_else(|| server.state().objects.revision()),
        end: Instant::now() + Duration::from_secs(number("timeoutSeconds").unwrap_or(1800)),
        revision: server.shared.revision.subscribe(),
        frozen: [server.shared.frozen.subscribe(), frozen],
        cuts,
        server,
    };
    let lines = stream::unfold(Some(watch), |watch| async move { watch?.next().await });
    Ok(([(header::CONTENT_TYPE, "application/json")], Body::from_stream(lines)).into_response())
}

/// An open watch.
struct Watch {
    server: FakeKubernetes,
    namespace: String,
    selector: String,
    bookmarks: bool,
    /// Everything up to here was told.
    at: u64,
    end: Instant,
    revision: watch::Receiver<u64>,
    frozen: [watch::Receiver<bool>; 2],
    cuts: watch::Receiver<u64>,
}

type Line = Result<Bytes, std::io::Error>;

impl Watch {
    /// The next lines, and the watch unless it ends with them.
    async fn next(mut self) -> Option<(Line, Option<Self>)> {
        loop {
            for frozen in &mut self.frozen {
                drop(frozen.wait_for(|frozen| !frozen).await);
            }
            self.revision.mark_unchanged();
            let news = self.server.state().objects.since(self.at);
            let events = match news {
                Ok(events) => events,
                Err(gone) => return Some((Ok(line("ERROR", &gone.body())), None)),
            };
            let mut lines = Vec::new();
            for event in events {
                self.at = event.revision;
                if event.namespace == self.namespace && selects(&self.selector, &event.object) {
                    lines.extend(line(event.kind, &event.object));
                }
            }
            if !lines.is_empty() {
                return Some((Ok(lines.into()), Some(self)));
            }
            match self.turn().await {
                Turn::Changed => {}
                Turn::Cut => return Some((Err(std::io::Error::other("cut")), None)),
                Turn::Over => return None,
                Turn::Idle => return Some((Ok(self.bookmark()), Some(self))),
            }
        }
    }

    async fn turn(&mut self) -> Turn {
        let bookmark = Instant::now() + BOOKMARK;
        tokio::select! {
            _ = self.cuts.changed() => Turn::Cut,
            () = sleep_until(self.end) => Turn::Over,
            _ = self.revision.changed() => Turn::Changed,
            () = sleep_until(bookmark), if self.bookmarks => Turn::Idle,
        }
    }

    fn bookmark(&self) -> Bytes {
        let metadata = json!({"resourceVersion": self.at.to_string(), "creationTimestamp": null});
        line(
            "BOOKMARK",
            &json!({"kind": "Lease", "apiVersion": "coordination.k8s.io/v1", "metadata": metadata, "spec": {}}),
        )
    }
}

/// Why a watch that had nothing to tell goes on.
enum Turn {
    Changed,
    Cut,
    Over,
    Idle,
}

fn line(kind: &str, object: &Value) -> Bytes {
    format!("{}\n", json!({"type": kind, "object": object})).into()
}
