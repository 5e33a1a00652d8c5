use aura_domain::{KeyRole, ProjectId, SourceId};
use aura_store::{KeyRotation, MasterKey, NewProject, NewSource, Plugin, ProjectSettings, Store, StoreError};
use secrecy::ExposeSecret;
use uuid::Uuid;

use crate::{CALLER, PATIENCE, name, new_project, new_source, platform};

#[tokio::test]
async fn a_project_is_made_with_secrets_keys_and_an_audit_line() {
    let platform = platform().await;
    let settings = ProjectSettings { roles: vec!["editor".to_owned()], require_rls: true, ..Default::default() };
    let new = NewProject { settings: settings.clone(), ..new_project("demo", platform.source) };
    let created = platform.store.create_project(new, "platform").await.expect("created");
    let id = created.project.id;
    assert_eq!(created.project.schema, name(&format!("project_{id}")));
    assert_eq!(created.project.settings, settings);
    assert!(created.project.created_at.ends_with('Z'), "{}", created.project.created_at);
    assert_eq!(created.secrets.jwt_secret.expose_secret().len(), 43);
    assert_ne!(created.secrets.jwt_secret.expose_secret(), created.secrets.visibility_password.expose_secret());
    assert_eq!(platform.store.project(id).await.expect("read"), Some(created.project.clone()));
    assert_eq!(platform.store.project_by_name("demo").await.expect("read"), Some(created.project.clone()));
    let auth = platform.store.project_auth(id).await.expect("read").expect("it exists");
    assert_eq!(auth.jwt_secret.expose_secret(), created.secrets.jwt_secret.expose_secret());
    let keys: std::collections::HashMap<_, _> = auth.rules.keys.iter().map(|key| (key.id, key.role)).collect();
    assert_eq!(keys.len(), 2);
    assert_eq!(keys[&created.anon_key], KeyRole::Anon);
    assert_eq!(keys[&created.service_role_key], KeyRole::ServiceRole);
    let audit = platform.store.audit_of_project(id, None, 10).await.expect("read");
    assert_eq!(audit.iter().map(|line| line.action.as_str()).collect::<Vec<_>>(), ["project.create"]);
    let of_source = platform.store.projects_of_source(platform.source).await.expect("read");
    assert_eq!(of_source.len(), 1);
    assert_eq!(of_source[0].1.visibility_password.expose_secret(), created.secrets.visibility_password.expose_secret());
}

#[tokio::test]
async fn names_and_schemas_are_taken_once_and_sources_exist() {
    let platform = platform().await;
    platform.project("one").await;
    let again = platform.store.create_project(new_project("one", platform.source), "platform").await.map(|_| ());
    assert!(matches!(again, Err(StoreError::Taken("project name"))), "{again:?}");
    for (project, expected_ok) in [("two", true), ("three", false)] {
        let new = NewProject { schema: Some(name("main")), ..new_project(project, platform.source) };
        let created = platform.store.create_project(new, "platform").await.map(|_| ());
        assert_eq!(created.is_ok(), expected_ok, "{created:?}");
    }
    let nowhere = new_project("four", SourceId(Uuid::new_v4()));
    let nowhere = platform.store.create_project(nowhere, "platform").await.map(|_| ());
    assert!(matches!(nowhere, Err(StoreError::NotFound("source"))), "{nowhere:?}");
    assert_eq!(platform.store.project(ProjectId(Uuid::new_v4())).await.expect("read"), None);
    let page = platform.store.list_projects(None, 1).await.expect("read");
    let rest = platform.store.list_projects(Some(page[0].id), 10).await.expect("read");
    assert_eq!((page.len(), rest.len()), (1, 1));
    assert!(page[0].id < rest[0].id);
}

#[tokio::test]
async fn r_sec_2_secrets_are_sealed_at_rest_and_need_the_master_key() {
    let platform = platform().await;
    let created = platform.store.create_project(new_project("p", platform.source), "platform").await.expect("created");
    let client = platform.postgres.client("platform").await.expect("a superuser");
    let dump = "select (select string_agg(p::text, '') from aura.projects p)
        || (select string_agg(s::text, '') from aura.sources s)
        || (select string_agg(encode(jwt_secret, 'escape') || encode(visibility_password, 'escape'), '')
            from aura.projects)
        || (select string_agg(encode(replication_url, 'escape') || encode(admin_url, 'escape'), '')
            from aura.sources)
        || (select string_agg(a::text, '') from aura.audit a)";
    let dump: String = client.query_one(dump, &[]).await.expect("a row").get(0);
    let secrets = [created.secrets.jwt_secret.expose_secret(), created.secrets.visibility_password.expose_secret()];
    for secret in secrets.into_iter().chain(["replsecret", "adminsecret"]) {
        assert!(!dump.contains(secret));
    }
    let other = MasterKey::new("another key another key another k").expect("long enough");
    let other = Store::connect(&platform.url, other).await.expect("connected");
    assert!(matches!(other.project_auth(created.project.id).await, Err(StoreError::Key(_))));
    assert!(matches!(other.sources().await, Err(StoreError::Key(_))));
    assert!(matches!(other.check().await, Err(StoreError::Key(_))), "a process doesn't start with it");
    platform.store.check().await.expect("the right one");
    // A sealed value moved to another row doesn't open either.
    let second = platform.project("q").await;
    let moved = "update aura.projects set jwt_secret = (select jwt_secret from aura.projects where name = 'p')";
    client.batch_execute(moved).await.expect("updated");
    assert!(platform.store.project_auth(created.project.id).await.is_ok());
    assert!(matches!(platform.store.project_auth(second).await, Err(StoreError::Key(_))));
}

#[tokio::test]
async fn r_eng_8_sources_are_upserted_by_name_and_get_their_slots() {
    let platform = platform().await;
    let store = &platform.store;
    let shared = store.source_by_name("shared").await.expect("read").expect("it exists");
    assert_eq!((shared.id, shared.slot_name.as_str()), (platform.source, "aura_cdc_slot"));
    let changed = NewSource {
        replication_url: "postgres://new".to_owned().into(),
        admin_url: None,
        plugin: Plugin::PgOutput,
        slot_recreate: aura_store::SlotRecreate::Auto,
        ..new_source("shared")
    };
    let changed = store.upsert_source(changed).await.expect("updated");
    assert_eq!((changed.id, changed.plugin), (platform.source, Plugin::PgOutput));
    assert_eq!(changed.replication_url.expose_secret(), "postgres://new");
    let admin = changed.admin_url.expect("kept");
    assert_eq!(admin.expose_secret(), "postgres://admin:adminsecret@db/x");
    let other = store.upsert_source(new_source("other")).await.expect("inserted");
    assert_eq!(other.slot_name, format!("aura_cdc_{}", &other.id.0.simple().to_string()[..8]));
    let at_once = futures_util::future::join_all((0..8).map(|_| store.upsert_source(new_source("busy")))).await;
    let ids: std::collections::HashSet<_> = at_once.into_iter().map(|source| source.expect("upserted").id).collect();
    assert_eq!(ids.len(), 1);
    assert_eq!(store.sources().await.expect("read").len(), 3);
    assert_eq!(store.engines().await.expect("read").len(), 3, "each has its engine");
}

#[tokio::test]
async fn an_unreachable_database_says_why() {
    let port = aura_testkit::free_port().expect("a port");
    let key = MasterKey::new("a master key of the tests, long enough").expect("a key");
    let error =
        Store::connect(&format!("postgres://u:secret@127.0.0.1:{port}/d"), key).await.expect_err("nobody there");
    let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert!(cause.contains("refused"), "{cause}");
}

#[tokio::test]
async fn a_schema_that_is_still_to_be_dropped_is_nobodys() {
    let platform = platform().await;
    let on = |project: &str| NewProject { schema: Some(name("shop")), ..new_project(project, platform.source) };
    let first = platform.store.create_project(on("one"), "platform").await.expect("created").project.id;
    platform.store.delete_project(first, true, |_| true, CALLER).await.expect("deleted");
    let early = platform.store.create_project(on("two"), "platform").await.map(|_| ());
    assert!(matches!(early, Err(StoreError::Taken("schema name"))), "its data would be dropped: {early:?}");
    platform.store.project_cleaned(first).await.expect("dropped");
    let second = platform.store.create_project(on("two"), "platform").await.expect("it is free").project.id;
    // Where nothing is dropped, the schema may have its next project at once.
    platform.store.delete_project(second, false, |_| true, CALLER).await.expect("deleted");
    platform.store.create_project(on("three"), "platform").await.expect("created");
}

#[tokio::test]
async fn who_repeats_a_creation_is_told_so_whatever_its_schema() {
    let platform = platform().await;
    let id = Some(ProjectId(Uuid::new_v4()));
    let new = NewProject { id, schema: Some(name("shop")), ..new_project("one", platform.source) };
    platform.store.create_project(new.clone(), "platform").await.expect("created");
    let again = platform.store.create_project(new, "platform").await.map(|_| ());
    assert!(matches!(again, Err(StoreError::Taken("project id"))), "{again:?}");
}

#[tokio::test]
async fn r_sec_2_no_secret_of_a_deleted_project_is_kept() {
    let platform = platform().await;
    let id = platform.project("one").await;
    let rotation = KeyRotation { roles: vec![], secret: true, overlap: PATIENCE };
    platform.store.rotate_keys(id, rotation, CALLER).await.expect("rotated");
    platform.store.delete_project(id, false, |_| true, CALLER).await.expect("deleted");
    platform.store.project_cleaned(id).await.expect("cleaned");
    let sql = "select count(*) from aura.retired_secrets where project_id = $1";
    let client = platform.postgres.client("platform").await.expect("a superuser");
    assert_eq!(client.query_one(sql, &[&id.0]).await.expect("a row").get::<_, i64>(0), 0);
}

#[tokio::test]
async fn what_the_server_took_back_may_be_tried_again() {
    let platform = platform().await;
    for state in ["25P03", "40P01", "40001"] {
        let sql = format!("do $$ begin raise sqlstate '{state}'; end $$");
        let refused = sqlx::query(sqlx::AssertSqlSafe(sql)).execute(platform.store.pool()).await;
        let error = StoreError::from(refused.expect_err("raised"));
        assert!(error.is_retryable(), "{state}: {error:?}");
    }
    // As it comes from a process that got no time.
    let mut connection = platform.store.pool().acquire().await.expect("a connection");
    sqlx::query("set idle_in_transaction_session_timeout = 1").execute(&mut *connection).await.expect("set");
    sqlx::query("begin").execute(&mut *connection).await.expect("begun");
    let client = platform.postgres.client("platform").await.expect("a superuser");
    let gone = "select not exists (select from pg_stat_activity where state like 'idle in transaction%')";
    let ended =
        aura_testkit::eventually(PATIENCE, async || client.query_one(gone, &[]).await.is_ok_and(|row| row.get(0)));
    ended.await.expect("its session is ended");
    let error = StoreError::from(sqlx::query("select 1").execute(&mut *connection).await.expect_err("ended"));
    assert!(error.is_retryable(), "{error:?}");
}
