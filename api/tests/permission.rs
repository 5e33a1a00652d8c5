//! Who may do what (R-SEC-1): every operation of the document × every kind of key. An operation that [`OPERATIONS`] doesn't
//! have fails here: whoever adds one says whom it is for.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    credentials::{self, Kind},
    harness::{Platform, Reply, Tenant},
};

/// Whom an operation is for.
#[derive(Debug, Clone, Copy)]
enum For {
    /// Also for who sends no key, or a bad one.
    Everybody,
    /// The project's service_role key.
    Service,
    /// The platform key.
    Platform,
    /// Either, and of a service_role key's own project only.
    KeyHolder,
    /// Either of the two.
    Owner,
}

/// Every operation, by its id.
const OPERATIONS: &[(&str, For)] = &[
    ("get_table_realtime", For::Service),
    ("put_table_realtime", For::Service),
    ("delete_table_realtime", For::Service),
    ("list_tables", For::Service),
    ("list_projects", For::Platform),
    ("create_project", For::Platform),
    ("get_project", For::Platform),
    ("update_project", For::Platform),
    ("delete_project", For::Platform),
    ("list_project_audit", For::Platform),
    ("list_audit", For::Platform),
    ("explain_change", For::Service),
    ("list_keys", For::Platform),
    ("rotate_keys", For::Platform),
    ("disconnect", For::Owner),
    ("list_sources", For::Platform),
    ("create_source", For::Platform),
    ("get_source", For::Platform),
    ("update_source", For::Platform),
    ("delete_source", For::Platform),
    ("validate_source", For::Platform),
    ("list_engines", For::Platform),
    ("get_engine", For::Platform),
    ("list_gaps", For::Platform),
    ("start_engine", For::Platform),
    ("stop_engine", For::Platform),
    ("force_close_engine", For::Platform),
    ("recreate_slot", For::Platform),
    ("list_workers", For::Platform),
    ("create_studio_session", For::KeyHolder),
    ("get_studio_session", For::KeyHolder),
    ("delete_studio_session", For::KeyHolder),
    ("create_inspector_token", For::KeyHolder),
    ("health", For::Everybody),
    ("ready", For::Everybody),
    ("metrics", For::Everybody),
    ("openapi", For::Everybody),
];

/// What an operation makes of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// It looks at what is asked.
    LetIn,
    /// 401 with this code.
    Refused(&'static str),
    /// 403.
    RoleTooLow,
    /// 404, as if there were no such project.
    Unknown,
}

impl For {
    fn expects(self, key: Kind) -> Verdict {
        match (self, key.refusal(), key) {
            (Self::Everybody, ..) => Verdict::LetIn,
            (_, Some(code), _) => Verdict::Refused(code),
            (Self::Platform, _, Kind::Platform) | (Self::Service, _, Kind::Service) => Verdict::LetIn,
            (Self::KeyHolder, _, Kind::Platform | Kind::Service | Kind::ForeignService) => Verdict::LetIn,
            (Self::Owner, _, Kind::Platform | Kind::Service) => Verdict::LetIn,
            (Self::Service | Self::Owner, _, key) if key.is_foreign() => Verdict::Unknown,
            _ => Verdict::RoleTooLow,
        }
    }
}

impl Verdict {
    fn of(reply: &Reply) -> Result<Self> {
        match (reply.status, reply.code()) {
            (StatusCode::UNAUTHORIZED, code) => {
                let codes = ["missing_credentials", "token_expired", "key_revoked", "invalid_token"];
                let known = codes.into_iter().find(|known| *known == code);
                known.map(Self::Refused).ok_or_else(|| anyhow::anyhow!("401 with {code}"))
            }
            (StatusCode::FORBIDDEN, "insufficient_role") => Ok(Self::RoleTooLow),
            (StatusCode::NOT_FOUND, "project_not_found") => Ok(Self::Unknown),
            // A body that isn't the operation's, or a state that isn't, proves as well that the key was let in.
            (StatusCode::UNPROCESSABLE_ENTITY | StatusCode::CONFLICT, _) => Ok(Self::LetIn),
            (status, _) if status.is_success() => Ok(Self::LetIn),
            // A probe's: no problem.
            (StatusCode::SERVICE_UNAVAILABLE, "") => Ok(Self::LetIn),
            (status, code) => anyhow::bail!("{status} {code}: {}", reply.body),
        }
    }
}

struct Operation {
    id: String,
    method: Method,
    path: String,
    takes_body: bool,
    r#for: For,
}

/// Every operation of the document with what is expected of it.
fn operations() -> Result<Vec<Operation>> {
    let document: Value = serde_json::from_str(&aura_api::document()?)?;
    let mut expected: BTreeMap<_, _> = OPERATIONS.iter().copied().collect();
    let (mut operations, mut unstated) = (Vec::new(), Vec::new());
    for (path, item) in document["paths"].as_object().context("paths")? {
        for (method, operation) in item.as_object().context("a path")? {
            let id = operation["operationId"].as_str().context("an id")?.to_owned();
            let Some(r#for) = expected.remove(id.as_str()) else {
                unstated.push(id);
                continue;
            };
            let takes_body = operation.get("requestBody").is_some();
            operations.push(Operation {
                id,
                method: method.to_uppercase().parse()?,
                path: path.clone(),
                takes_body,
                r#for,
            });
        }
    }
    assert!(unstated.is_empty(), "say in OPERATIONS whom these are for: {unstated:?}");
    assert!(expected.is_empty(), "OPERATIONS has what the document doesn't: {expected:?}");
    Ok(operations)
}

impl Operation {
    /// Asks with a body that no operation takes, so that nothing changes where a key is let in.
    async fn ask(&self, platform: &Platform, project: &str, token: Option<&str>) -> Result<Reply> {
        let path = self.path.replace("{project}", project).replace("{table}", "t").replace("{source}", "shared");
        assert!(!path.contains('{'), "say here what to put into {path}");
        let mut call = platform.call(self.method.clone(), &path);
        if self.takes_body {
            call = call.json(&json!({"no such member": true}));
        }
        token.into_iter().fold(call, |call, token| call.key(token)).send().await
    }
}

/// What a refused request could have changed: the platform's own tables, and the source's catalogue.
async fn everything(platform: &Platform) -> Result<Vec<String>> {
    let client = platform.postgres.client("platform").await?;
    let mut seen = Vec::new();
    for table in ["projects", "sources", "keys", "realtime_tables", "gaps"] {
        let sql = format!("select coalesce(md5(string_agg(t::text, ',' order by t::text)), '') from aura.{table} t");
        seen.push(client.query_one(&sql, &[]).await?.get(0));
    }
    let desired = client.query_one("select string_agg(desired, ',' order by source_id) from aura.engines", &[]).await?;
    seen.push(desired.get::<_, Option<String>>(0).unwrap_or_default());
    let client = platform.postgres.client("app").await?;
    let roles = "select string_agg(rolname, ',' order by rolname)::text from pg_roles";
    seen.push(client.query_one(roles, &[]).await?.get(0));
    seen.push(client.query_one("select count(*)::text from public.ddl", &[]).await?.get(0));
    Ok(seen)
}

/// Notes every DDL statement of the source.
const WATCH_DDL: &str = "create table public.ddl (tag text);
    create function public.note_ddl() returns event_trigger language plpgsql as
        $$ begin insert into public.ddl values (tg_tag); end $$;
    alter function public.note_ddl() security definer;
    create event trigger note_ddl on ddl_command_start execute function public.note_ddl()";

async fn with_table(platform: &Platform, name: &str) -> Result<Tenant> {
    let tenant = platform.tenant(name).await?;
    platform.sql(&format!("create table \"{}\".t (id int primary key)", tenant.schema)).await?;
    Ok(tenant)
}

#[tokio::test]
async fn r_sec_1_n_2_every_operation_asks_every_key_and_refused_ones_change_nothing() -> Result<()> {
    let platform = Platform::start().await?;
    let (own, other) = (with_table(&platform, "own").await?, platform.tenant("other").await?);
    platform.play_worker().await?;
    platform.sql(WATCH_DDL).await?;
    let keys = credentials::all(&platform, &own, &other)?;
    let before = everything(&platform).await?;
    for operation in operations()? {
        for (key, token) in &keys {
            let wanted = operation.r#for.expects(*key);
            if wanted == Verdict::LetIn {
                continue;
            }
            let reply = operation.ask(&platform, &own.id.to_string(), token.as_deref()).await?;
            assert_eq!(Verdict::of(&reply)?, wanted, "{} with {key:?}: {}", operation.id, reply.body);
            assert_eq!(reply.header("content-type"), "application/problem+json");
            let challenge = if reply.status == StatusCode::UNAUTHORIZED { "Bearer" } else { "" };
            assert_eq!(reply.header("www-authenticate"), challenge, "{} with {key:?}", operation.id);
            let detail = reply.body["detail"].as_str().unwrap();
            assert!(!detail.contains(&own.id.to_string()), "{} with {key:?}: {detail}", operation.id);
        }
    }
    assert_eq!(everything(&platform).await?, before);
    platform.stop().await
}

/// What changes a project gets one of its own, as it may be its end.
#[tokio::test]
async fn r_sec_1_every_operation_lets_in_whom_it_is_for() -> Result<()> {
    let platform = Platform::start().await?;
    let (shown, other) = (with_table(&platform, "shown").await?, platform.tenant("other").await?);
    platform.play_worker().await?;
    for operation in operations()? {
        let fresh = match operation.method {
            Method::GET => None,
            _ if operation.path.contains("{project}") => Some(with_table(&platform, &operation.id).await?),
            _ => None,
        };
        let own = fresh.as_ref().unwrap_or(&shown);
        for (key, token) in credentials::all(&platform, own, &other)? {
            if operation.r#for.expects(key) != Verdict::LetIn {
                continue;
            }
            let reply = operation.ask(&platform, &own.id.to_string(), token.as_deref()).await?;
            assert_eq!(Verdict::of(&reply)?, Verdict::LetIn, "{} with {key:?}: {}", operation.id, reply.body);
        }
    }
    platform.stop().await
}

/// Headers whose values differ between any two requests.
const OF_THE_REQUEST: &[&str] = &["x-request-id", "ratelimit-remaining", "ratelimit-reset"];

fn appearance(reply: &Reply) -> (StatusCode, Value, Vec<(String, String)>) {
    let header = |(name, value): (&axum::http::HeaderName, &axum::http::HeaderValue)| {
        let shown = if OF_THE_REQUEST.contains(&name.as_str()) { "" } else { value.to_str().unwrap_or("?") };
        (name.to_string(), shown.to_owned())
    };
    let mut headers: Vec<_> = reply.headers.iter().map(header).collect();
    headers.sort();
    (reply.status, reply.stable_body(), headers)
}

#[tokio::test]
async fn r_sec_1_n_1_a_foreign_project_looks_exactly_like_an_unknown_one() -> Result<()> {
    let platform = Platform::start().await?;
    let (own, other) = (with_table(&platform, "own").await?, platform.tenant("other").await?);
    let keys = credentials::all(&platform, &own, &other)?;
    let unknown = [Uuid::new_v4().to_string(), "no-id".to_owned()];
    let operations = operations()?;
    let of_a_project: Vec<_> = operations.iter().filter(|operation| operation.path.contains("{project}")).collect();
    assert!(of_a_project.len() >= 6);
    for operation in of_a_project {
        for (key, token) in keys.iter().filter(|(key, _)| key.is_foreign()) {
            let foreign = operation.ask(&platform, &own.id.to_string(), token.as_deref()).await?;
            for project in &unknown {
                let nobodys = operation.ask(&platform, project, token.as_deref()).await?;
                assert_eq!(appearance(&foreign), appearance(&nobodys), "{} with {key:?}", operation.id);
            }
        }
    }
    // Nor does it in a token that anybody can write.
    let header = json!({"alg": "HS256", "typ": "JWT"});
    let anybodys = |project: &str| {
        let claims = json!({"ref": project, "role": "service_role", "exp": 4_000_000_000_u64});
        let token = credentials::signed(&header, &claims, b"a guess");
        format!("{}.!", token.rsplit_once('.').map_or("", |(signed, _)| signed))
    };
    let list = |project: String| platform.call(Method::GET, "/v1/projects").key(&anybodys(&project)).send();
    let (foreign, nobodys) = (list(own.id.to_string()).await?, list(Uuid::new_v4().to_string()).await?);
    assert_eq!((foreign.status, appearance(&foreign)), (StatusCode::UNAUTHORIZED, appearance(&nobodys)));
    platform.stop().await
}
