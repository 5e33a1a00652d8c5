//! Against PostgreSQL 15, as an owner who is no superuser.

mod engines;
mod lease;
mod migrations;
mod operations;
mod projects;
mod registrations;
mod signals;

use std::time::Duration;

use aura_domain::{ProjectId, SourceId, SqlName};
use aura_store::{
    Caller, MasterKey, NewProject, NewRegistration, NewSource, Plugin, ProjectSettings, Registration, RegistrationMode,
    ReplicaIdentity, Store, TableRef, migrate,
};
use aura_testkit::Postgres;

/// Far above what anything here takes; a test fails with it, never passes by it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Who asks in these tests.
pub(crate) const CALLER: Caller<'static> = Caller { actor: "platform", request_id: Some("r1") };

pub(crate) fn key() -> MasterKey {
    MasterKey::new("0123456789abcdef0123456789abcdef").expect("32 bytes")
}

/// A migrated platform database with the source `shared`.
pub(crate) struct Platform {
    pub(crate) postgres: Postgres,
    pub(crate) url: String,
    pub(crate) store: Store,
    pub(crate) source: SourceId,
}

pub(crate) async fn platform() -> Platform {
    let postgres = Postgres::start().await.expect("PostgreSQL");
    let url = owned_database(&postgres).await;
    migrate(&url).await.expect("migrated");
    let store = Store::connect(&url, key()).await.expect("connected");
    let source = store.upsert_source(new_source("shared")).await.expect("registered").id;
    Platform { postgres, url, store, source }
}

/// A database whose owner is nothing but its owner; answers the owner's URL.
pub(crate) async fn owned_database(postgres: &Postgres) -> String {
    let admin = postgres.client("postgres").await.expect("a superuser");
    let role = "create role platform_owner login password 'pw' nosuperuser nocreatedb nocreaterole";
    admin.batch_execute(role).await.expect("a role");
    admin.batch_execute("create database platform owner platform_owner").await.expect("a database");
    postgres.url_as("platform_owner", "pw", "platform")
}

pub(crate) fn new_source(name: &str) -> NewSource {
    NewSource {
        name: name.to_owned(),
        replication_url: format!("postgres://cdc:replsecret@db/{name}").into(),
        admin_url: Some("postgres://admin:adminsecret@db/x".to_owned().into()),
        slot_name: None,
        plugin: Plugin::Auto,
        slot_recreate: aura_store::SlotRecreate::Auto,
    }
}

pub(crate) fn new_project(name: &str, source: SourceId) -> NewProject {
    NewProject { id: None, name: name.to_owned(), source, schema: None, settings: ProjectSettings::default() }
}

pub(crate) fn name(text: &str) -> SqlName {
    SqlName::new(text).expect("a name")
}

impl Platform {
    pub(crate) async fn project(&self, name: &str) -> ProjectId {
        let new = new_project(name, self.source);
        self.store.create_project(new, "platform").await.expect("created").project.id
    }

    /// Enables a table with OID `oid` that had its default identity.
    pub(crate) async fn enable(&self, project: ProjectId, table: &str, oid: u32) -> Registration {
        let identity = ReplicaIdentity { kind: 'd', index: None };
        let new = NewRegistration {
            table: TableRef { project, schema: &name("app"), table: &name(table) },
            source: self.source,
            oid,
            mode: RegistrationMode::Auto,
            identity: Some(&identity),
            partitions: &[],
            actor: "key 1 service_role",
            request_id: Some("req-1"),
        };
        self.store.enable_table(new).await.expect("enabled")
    }
}
