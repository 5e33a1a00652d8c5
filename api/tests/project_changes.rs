//! Projects that are changed and deleted.

use anyhow::Result;
use aura_testkit::eventually;
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::harness::{Platform, Reply, SOON, Tenant, toggle};

impl Platform {
    pub(crate) async fn as_platform(&self, method: Method, path: &str, body: &Value) -> Result<Reply> {
        self.call(method, path).key(&self.platform_key).json(body).send().await
    }

    async fn patch(&self, tenant: &Tenant, body: &Value) -> Result<Reply> {
        self.as_platform(Method::PATCH, &project(tenant), body).await
    }

    async fn delete(&self, tenant: &Tenant, query: &str) -> Result<Reply> {
        self.call(Method::DELETE, &format!("{}{query}", project(tenant))).key(&self.platform_key).send().await
    }

    /// A table of the tenant's that is on.
    async fn live_table(&self, tenant: &Tenant, table: &str) -> Result<()> {
        self.sql(&format!("create table \"{}\".\"{table}\" (id int primary key, body text)", tenant.schema)).await?;
        let put = self.call(Method::PUT, &toggle(tenant, table)).key(&tenant.service).json(&json!({"enabled": true}));
        let put = put.send().await?;
        anyhow::ensure!(put.status == StatusCode::OK, "{}", put.body);
        Ok(())
    }

    async fn roles(&self, tenant: &Tenant) -> Result<Vec<String>> {
        let sql = "select rolname::text from pg_roles where starts_with(rolname::text, 'p_' || $1) order by 1";
        let rows = self.postgres.client("app").await?.query(sql, &[&tenant.id.to_string()]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }
}

fn project(tenant: &Tenant) -> String {
    format!("/v1/projects/{}", tenant.id)
}

#[tokio::test]
async fn settings_that_are_absent_stay_null_brings_the_default_and_values_replace() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    let fresh = platform.get(&project(&tenant)).await?;
    assert_eq!(fresh.header("etag"), "\"v1\"");
    let defaults = json!({"limits": {}, "jwks_url": null, "aud": null, "roles": [], "schemas": [], "require_rls": false,
        "private_only": false});
    for (member, value) in defaults.as_object().unwrap() {
        assert_eq!(&fresh.body[member], value, "{member}");
    }
    let wanted = json!({"name": "shop", "limits": {"sockets": 7}, "jwks_url": "https://id.example.com/jwks", "aud": "users",
        "roles": ["editor"], "require_rls": true, "private_only": true});
    let changed = platform.patch(&tenant, &wanted).await?;
    assert_eq!(changed.status, StatusCode::OK, "{}", changed.body);
    assert_eq!(changed.header("etag"), "\"v2\"");
    for (member, value) in wanted.as_object().unwrap() {
        assert_eq!(&changed.body[member], value, "{member}");
    }
    let partly = platform.patch(&tenant, &json!({"aud": null, "require_rls": null, "limits": null})).await?;
    assert_eq!(
        (&partly.body["aud"], &partly.body["require_rls"], &partly.body["limits"]),
        (&json!(null), &json!(false), &json!({}))
    );
    assert_eq!(
        (&partly.body["jwks_url"], &partly.body["name"]),
        (&wanted["jwks_url"], &wanted["name"]),
        "absent stays"
    );
    let same = platform.patch(&tenant, &json!({"private_only": true})).await?;
    assert_eq!((same.status, same.header("etag")), (StatusCode::OK, "\"v3\""), "nothing changes, so no new version");
    assert_eq!(platform.audited(&tenant, "project.update").await?, 2, "and no audit line");
    assert_eq!(platform.get(&project(&tenant)).await?.body, same.body);
    assert!(platform.roles(&tenant).await?.iter().any(|role| role.ends_with("_editor")), "R-RLS-8: its role was made");
    platform.stop().await
}

#[tokio::test]
async fn settings_that_can_not_be_are_refused_and_nothing_changes() -> Result<()> {
    let platform = Platform::start().await?;
    let (tenant, other) = (platform.tenant("demo").await?, platform.tenant("other").await?);
    let cases = [
        (json!({"name": null}), "invalid_body"),
        (json!({"name": ""}), "invalid_body"),
        (json!({"name": "other"}), "project_exists"),
        (json!({"limits": {"colour": 1}}), "invalid_body"),
        (json!({"limits": {"sockets": 0}}), "invalid_body"),
        (json!({"limits": {"sockets": "9"}}), "invalid_body"),
        (json!({"jwks_url": "http://id.example.com/jwks"}), "invalid_body"),
        (json!({"jwks_url": "https://u:hunter2@id.example.com/jwks"}), "invalid_body"),
        (json!({"jwks_url": "file:///etc/passwd"}), "invalid_body"),
        (json!({"jwks_url": "https://169.254.169.254/jwks"}), "invalid_body"),
        (json!({"jwks_url": "http://localhost:9/jwks"}), "invalid_body"),
        (json!({"aud": ""}), "invalid_body"),
        (json!({"roles": ["service_role"]}), "invalid_body"),
        (json!({"roles": ["visibility"]}), "invalid_body"),
        (json!({"roles": ["a", "a"]}), "invalid_body"),
        (json!({"roles": ["Postgres; drop"]}), "invalid_body"),
        (json!({"schemas": ["pg_catalog"]}), "system_schema_not_supported"),
        (json!({"schemas": ["public"]}), "invalid_body"),
        (json!({"schemas": ["nowhere"]}), "invalid_body"),
        (json!({"schemas": [other.schema]}), "schema_taken"),
        (json!({"colour": 1}), "invalid_body"),
        (json!({"require_rls": "yes"}), "invalid_body"),
    ];
    for (body, code) in cases {
        let refused = platform.patch(&tenant, &body).await?;
        assert_eq!(refused.code(), code, "{body}: {}", refused.body);
        assert!(!refused.body.to_string().contains("hunter2"), "{}", refused.body);
    }
    assert_eq!(platform.get(&project(&tenant)).await?.header("etag"), "\"v1\"");
    let usage = "select has_schema_privilege($1, $2, 'USAGE')";
    let anon = format!("p_{}_anon", tenant.id);
    let client = platform.postgres.client("app").await?;
    let sees: bool = client.query_one(usage, &[&anon, &other.schema]).await?.get(0);
    assert!(!sees, "the other project's schema stays closed");
    platform.stop().await
}

#[tokio::test]
async fn a_project_gets_further_schemas_and_gives_up_those_without_live_tables() -> Result<()> {
    let platform = Platform::start().await?;
    platform.play_worker().await?;
    let tenant = platform.tenant("demo").await?;
    platform.sql("create schema extra; create table extra.t (id int primary key)").await?;
    let wanted = json!({"schemas": ["extra"]});
    let dry_run = format!("{}?dry_run=true", project(&tenant));
    let preview = platform.as_platform(Method::PATCH, &dry_run, &wanted);
    assert_eq!(preview.await?.body["schemas"], json!(["extra"]));
    let client = platform.postgres.client("app").await?;
    let usage = "select has_schema_privilege($1, 'extra', 'USAGE')";
    let anon = format!("p_{}_anon", tenant.id);
    assert!(!client.query_one(usage, &[&anon]).await?.get::<_, bool>(0), "a preview does nothing");
    assert_eq!(platform.patch(&tenant, &json!({"schemas": ["extra"]})).await?.status, StatusCode::OK);
    assert!(client.query_one(usage, &[&anon]).await?.get::<_, bool>(0));
    let path = format!("{}?schema=extra", toggle(&tenant, "t"));
    let put = |enabled: bool| {
        platform.call(Method::PUT, &path).key(&tenant.service).json(&json!({"enabled": enabled})).send()
    };
    assert_eq!(put(true).await?.status, StatusCode::OK);
    let refused = platform.patch(&tenant, &json!({"schemas": null})).await?;
    assert_eq!((refused.code(), &refused.body["tables"]), ("schema_in_use", &json!(1)), "{}", refused.body);
    assert_eq!(put(false).await?.status, StatusCode::OK);
    assert_eq!(platform.patch(&tenant, &json!({"schemas": null})).await?.status, StatusCode::OK);
    assert!(!client.query_one(usage, &[&anon]).await?.get::<_, bool>(0), "who gives it up is kept out");
    platform.stop().await
}

#[tokio::test]
async fn if_match_is_asked_of_projects_and_sources_alike() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    for (path, body) in
        [(project(&tenant), json!({"aud": "a"})), ("/v1/sources/shared".to_owned(), json!({"slot_recreate": "manual"}))]
    {
        let etag = platform.get(&path).await?.header("etag").to_owned();
        let send = |method: Method, if_match: &str| {
            let call = platform.call(method, &path).key(&platform.platform_key).header("if-match", if_match);
            call.json(&body).send()
        };
        for (method, stale) in [(Method::PATCH, "\"v77\""), (Method::DELETE, "\"v77\""), (Method::PATCH, "W/\"v1\"")] {
            let refused = send(method, stale).await?;
            assert_eq!(
                (refused.status, refused.code()),
                (StatusCode::PRECONDITION_FAILED, "precondition_failed"),
                "{path}"
            );
        }
        assert_eq!(platform.get(&path).await?.header("etag"), etag, "{path}: nothing happened");
        let changed = send(Method::PATCH, &format!("\"x\", {etag}")).await?;
        assert_eq!(changed.status, StatusCode::OK, "{path}: {}", changed.body);
        assert_ne!(changed.header("etag"), etag);
        assert_eq!(
            send(Method::PATCH, &etag).await?.code(),
            "precondition_failed",
            "{path}: it is another version now"
        );
        assert_eq!(send(Method::PATCH, "*").await?.status, StatusCode::OK);
    }
    platform.stop().await
}

/// Two who read the same version: one of them learns that it wasn't the last.
#[tokio::test]
async fn of_two_changes_of_one_version_one_wins() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    let path = project(&tenant);
    let change = |aud: String| {
        let call = platform.call(Method::PATCH, &path).key(&platform.platform_key).header("if-match", "\"v1\"");
        call.json(&json!({"aud": aud})).send()
    };
    let replies = futures_util::future::join_all((0..8).map(|n| change(format!("a{n}")))).await;
    let statuses: Vec<_> = replies.into_iter().map(|reply| reply.map(|reply| reply.status)).collect::<Result<_>>()?;
    let count = |wanted| statuses.iter().filter(|status| **status == wanted).count();
    assert_eq!((count(StatusCode::OK), count(StatusCode::PRECONDITION_FAILED)), (1, 7), "{statuses:?}");
    platform.stop().await
}

#[tokio::test]
async fn a_deleted_project_leaves_the_customers_data_and_nothing_of_ours() -> Result<()> {
    let platform = Platform::start_without_superuser().await?;
    platform.play_worker().await?;
    let (tenant, other) = (platform.tenant("demo").await?, platform.tenant("other").await?);
    platform.patch(&tenant, &json!({"roles": ["editor"]})).await?;
    let schema = &tenant.schema;
    platform.sql(&format!("create table \"{schema}\".t (id int primary key, body text); alter table \"{schema}\".t owner to aura_admin;
        insert into \"{schema}\".t values (1, 'mine')")).await?;
    let put = platform.call(Method::PUT, &toggle(&tenant, "t")).key(&tenant.service).json(&json!({"enabled": true}));
    assert_eq!(put.send().await?.status, StatusCode::OK);
    assert_eq!(platform.replica_identity(&tenant, "t").await?, 'f');
    let plan = platform.delete(&tenant, "?dry_run=true").await?.body["plan"].to_string();
    assert!(plan.contains(".t off") && plan.contains("leave the schema"), "{plan}");
    assert_eq!(platform.roles(&tenant).await?.len(), 5, "a plan does nothing");

    let deleted = platform.delete(&tenant, "").await?;
    assert_eq!(deleted.status, StatusCode::OK, "{}", deleted.body);
    assert_eq!(deleted.body["tables_restored"], 1);
    assert_eq!((&deleted.body["roles_left"], &deleted.body["pending"]), (&json!([]), &json!(null)), "{}", deleted.body);
    assert_eq!(deleted.body["schema"], json!({"name": tenant.schema, "fate": "kept"}));
    assert_eq!(platform.replica_identity(&tenant, "t").await?, 'd', "its identity is restored");
    let client = platform.postgres.client("app").await?;
    let row = client.query_one(&format!("select body from \"{schema}\".t"), &[]).await?;
    assert_eq!(row.get::<_, String>(0), "mine");
    assert_eq!(platform.roles(&tenant).await?, Vec::<String>::new(), "login and roles are gone");
    assert_eq!(platform.roles(&other).await?.len(), 4, "the other project's are not");

    for key in [&tenant.service, &tenant.anon] {
        let reply = platform.call(Method::GET, &toggle(&tenant, "t")).key(key).send().await?;
        assert_eq!((reply.status, reply.code()), (StatusCode::UNAUTHORIZED, "invalid_token"));
    }
    for reply in [platform.get(&project(&tenant)).await?, platform.delete(&tenant, "").await?] {
        assert_eq!(reply.code(), "project_not_found");
    }
    let (registry, left) =
        (platform.store.registry(platform.source.id).await?, platform.store.deleted_projects().await?);
    assert!(registry.registrations.is_empty() && left.is_empty());
    let secrets = "select jwt_secret = '' and visibility_password = '' from aura.projects where id = $1";
    let gone: bool = platform.postgres.client("platform").await?.query_one(secrets, &[&tenant.id.0]).await?.get(0);
    assert!(gone, "its secrets are gone");
    let again = platform.tenant("demo").await?;
    assert_ne!(again.id, tenant.id, "the name is free");
    platform.stop().await
}

#[tokio::test]
async fn a_schema_is_dropped_only_when_that_is_confirmed() -> Result<()> {
    let platform = Platform::start().await?;
    platform.play_worker().await?;
    let tenant = platform.tenant("demo").await?;
    platform.live_table(&tenant, "t").await?;
    for query in ["?drop_schema=true", "?drop_schema=true&confirm=Demo", "?drop_schema=true&confirm="] {
        let refused = platform.delete(&tenant, query).await?;
        assert_eq!(
            (refused.status, refused.code()),
            (StatusCode::UNPROCESSABLE_ENTITY, "invalid_parameter"),
            "{query}"
        );
    }
    assert_eq!(platform.replica_identity(&tenant, "t").await?, 'f', "nothing happened");
    let deleted = platform.delete(&tenant, "?drop_schema=true&confirm=demo").await?;
    assert_eq!(
        (deleted.status, &deleted.body["schema"]["fate"]),
        (StatusCode::OK, &json!("dropped")),
        "{}",
        deleted.body
    );
    let there = "select from pg_namespace where nspname = $1";
    let client = platform.postgres.client("app").await?;
    assert!(client.query_opt(there, &[&tenant.schema]).await?.is_none());
    platform.stop().await
}

/// What is locked, or out of reach, is taken back later; from the first answer on nobody has access.
#[tokio::test]
async fn what_can_not_be_taken_back_at_once_is_taken_back_later() -> Result<()> {
    let platform = Platform::start().await?;
    platform.play_worker().await?;
    let tenant = platform.tenant("demo").await?;
    platform.live_table(&tenant, "t").await?;
    let mut reader = platform.postgres.client("app").await?;
    let lock = reader.transaction().await?;
    lock.batch_execute(&format!("select from \"{}\".t", tenant.schema)).await?;
    let pending = platform.delete(&tenant, "").await?;
    assert_eq!(pending.status, StatusCode::ACCEPTED, "{}", pending.body);
    assert_eq!((&pending.body["pending"], pending.header("retry-after")), (&json!("lock_timeout"), "1"));
    assert_eq!(platform.roles(&tenant).await?, Vec::<String>::new(), "the lock holds up nothing else");
    assert_eq!(platform.get(&project(&tenant)).await?.code(), "project_not_found");
    lock.rollback().await?;
    let done = platform.delete(&tenant, "").await?;
    assert_eq!((done.status, &done.body["tables_restored"]), (StatusCode::OK, &json!(1)), "{}", done.body);
    assert_eq!(platform.replica_identity(&tenant, "t").await?, 'd');
    assert_eq!(platform.audited(&tenant, "project.delete").await?, 1, "it was deleted once");
    platform.stop().await
}

/// As after a crash: nobody asks again, the reconciler finds it.
#[tokio::test]
async fn the_reconciler_finishes_what_a_crash_left_of_a_deletion() -> Result<()> {
    let platform = Platform::start().await?;
    platform.play_worker().await?;
    let tenant = platform.tenant("demo").await?;
    platform.live_table(&tenant, "t").await?;
    let written = platform.store.delete_project(tenant.id, false, |_| true, "platform".into()).await?;
    assert!(matches!(written, aura_store::ProjectWrite::Done(_)));
    let store = &platform.store;
    eventually(SOON * 2, || async { store.deleted_projects().await.is_ok_and(|left| left.is_empty()) }).await?;
    assert_eq!((platform.replica_identity(&tenant, "t").await?, platform.roles(&tenant).await?.len()), ('d', 0));
    platform.stop().await
}

/// A role that the customer made something depend on stays, and is of no use to anybody.
#[tokio::test]
async fn roles_that_are_still_needed_stay_without_a_login() -> Result<()> {
    let platform = Platform::start_without_superuser().await?;
    let tenant = platform.tenant("demo").await?;
    let anon = format!("p_{}_anon", tenant.id);
    platform.sql(&format!("create table public.theirs (id int); grant select on public.theirs to \"{anon}\"")).await?;
    let deleted = platform.delete(&tenant, "").await?;
    assert_eq!((deleted.status, &deleted.body["roles_left"]), (StatusCode::OK, &json!([anon])), "{}", deleted.body);
    assert_eq!(platform.roles(&tenant).await?, [anon.as_str()]);
    let client = platform.postgres.client("app").await?;
    let login: bool = client.query_one("select rolcanlogin from pg_roles where rolname = $1", &[&anon]).await?.get(0);
    assert!(!login);
    platform.stop().await
}

#[tokio::test]
async fn an_unknown_project_is_neither_changed_nor_deleted() -> Result<()> {
    let platform = Platform::start().await?;
    for id in [Uuid::new_v4().to_string(), "x".to_owned()] {
        for method in [Method::PATCH, Method::DELETE] {
            let reply = platform.as_platform(method, &format!("/v1/projects/{id}"), &json!({})).await?;
            assert_eq!(reply.code(), "project_not_found");
        }
        assert_eq!(platform.get(&format!("/v1/projects/{id}/audit")).await?.code(), "project_not_found");
    }
    platform.stop().await
}
