//! Errors have one shape, whatever went wrong.

use aura_kit::{Code, Json, Metrics, MetricsAccess, Probes, Problem, Report, http::with_layers};
use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, StatusCode},
    response::Response,
    routing::{get, post},
};
use serde_json::{Value, json};
use tower::ServiceExt;

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Thing {
    #[serde(rename = "size")]
    _size: u8,
}

fn router() -> Router {
    with_layers(
        Router::new()
            .route("/panic", get(|| async { panic!("a secret") as () }))
            .route("/thing", post(|_: Json<Thing>| async {}))
            .route(
                "/locked",
                get(|| async { Problem::new(Code::LockTimeout, "Held.").with("blocking_pid", 7).retry_after(3) }),
            ),
    )
}

async fn send(request: Request<Body>) -> Response {
    router().oneshot(request).await.expect("infallible")
}

async fn json_of(response: Response) -> Value {
    let bytes = to_bytes(response.into_body(), 1 << 20).await.expect("a body");
    serde_json::from_slice(&bytes).expect("JSON")
}

fn get_request(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).expect("a request")
}

#[tokio::test]
async fn a_problem_has_the_members_of_rfc_9457_and_ours() {
    let response = send(get_request("/locked")).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    assert_eq!(response.headers()["retry-after"], "3");
    let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
    let expected = json!({
        "type": "urn:aura:error:lock_timeout", "code": "lock_timeout", "status": 503,
        "title": "The table is locked by another transaction", "detail": "Held.", "retryable": true,
        "request_id": id, "blocking_pid": 7
    });
    assert_eq!(json_of(response).await, expected);
}

#[tokio::test]
async fn panics_unknown_routes_and_wrong_methods_are_problems_too() {
    for (path, status, code) in
        [("/panic", 500, "internal"), ("/nothing", 404, "route_not_found"), ("/thing", 405, "method_not_allowed")]
    {
        let response = send(get_request(path)).await;
        assert_eq!(response.status().as_u16(), status, "{path}");
        let body = json_of(response).await;
        assert_eq!((&body["code"], body["request_id"].is_string()), (&json!(code), true), "{path}");
        assert!(!body.to_string().contains("secret"), "the panic's text stays with us");
    }
}

#[tokio::test]
async fn a_harmless_request_id_is_kept_and_any_other_replaced() {
    for (sent, kept) in [("abc-1.2_3", true), ("a b", false), ("x\"y", false), (&*"x".repeat(65), false), ("", false)] {
        let request = Request::get("/locked").header("x-request-id", sent).body(Body::empty()).expect("a request");
        let response = send(request).await;
        assert_eq!(response.headers()["x-request-id"] == sent, kept, "{sent:?}");
    }
}

#[tokio::test]
async fn bodies_are_400_415_or_422_by_what_is_wrong_with_them() {
    let cases = [
        ("application/json", "{\"size\": 1}", 200),
        ("application/json; charset=utf-8", "{\"size\": 1}", 200),
        ("application/json", "{\"size\": 1", 400),
        ("application/json", "{\"size\": 300}", 422),
        ("application/json", "{\"size\": 1, \"colour\": 2}", 422),
        ("text/plain", "{\"size\": 1}", 415),
    ];
    for (content_type, body, status) in cases {
        let request = Request::post("/thing").header("content-type", content_type).body(Body::from(body));
        assert_eq!(send(request.expect("a request")).await.status().as_u16(), status, "{body}");
    }
}

#[tokio::test]
async fn probes_answer_200_or_503_and_metrics_may_ask_for_a_token() {
    let metrics = Metrics::install().expect("the only recorder");
    metrics::counter!("kit_test_total").increment(3);
    let probes = Probes::new(metrics).ready(|| async { Report::failing(json!({"status": "draining"})) });
    let guarded = probes.clone().metrics_access(MetricsAccess::Token("let me in".into())).router();
    let open = probes.router();
    let status = |router: &Router, request: Request<Body>| {
        let router = router.clone();
        async move { router.oneshot(request).await.expect("infallible").status() }
    };
    assert_eq!(status(&open, get_request("/health")).await, StatusCode::OK);
    assert_eq!(status(&open, get_request("/ready")).await, StatusCode::SERVICE_UNAVAILABLE);
    let response = open.clone().oneshot(get_request("/metrics")).await.expect("infallible");
    let text = to_bytes(response.into_body(), 1 << 20).await.expect("a body");
    assert!(String::from_utf8_lossy(&text).contains("kit_test_total 3"));
    assert_eq!(status(&guarded, get_request("/metrics")).await, StatusCode::UNAUTHORIZED);
    let wrong = Request::get("/metrics").header("authorization", "Bearer let me out").body(Body::empty());
    assert_eq!(status(&guarded, wrong.expect("a request")).await, StatusCode::UNAUTHORIZED);
    let with_token = Request::get("/metrics").header("authorization", "Bearer let me in").body(Body::empty());
    assert_eq!(status(&guarded, with_token.expect("a request")).await, StatusCode::OK);
}
