//! A server with two tenants, an admin role that is no superuser, and shorthand for checks.

use std::time::Duration;

use anyhow::{Context, Result};
use aura_domain::{Claims, Image, ProjectId, Relation, SqlName, Value};
use aura_pgsource::{
    CheckOutcome, CheckRequest, Identity, Sockets, SourceError, SourceUrl, SqlConnection, Verdict, VisibilityPool,
    admin::Admin, connect_sql,
};
use aura_testkit::Postgres;
use secrecy::SecretString;
use serde_json::json;

pub(crate) const ALICE: &str = "a11ce000-0000-4000-8000-000000000001";
pub(crate) const BOB: &str = "b0b00000-0000-4000-8000-000000000002";

const PATIENCE: Duration = Duration::from_secs(20);
/// The admin and worker role: owns every schema, is no superuser.
const OWNER: &str = "aura_owner";

/// The first tenant owns `shop`, the second `bank`.
pub(crate) struct Tenants {
    pub(crate) postgres: Postgres,
    pub(crate) superuser: SqlConnection,
    /// As the owner of both schemas.
    pub(crate) sql: SqlConnection,
    pub(crate) admin: Admin,
    pub(crate) url: SourceUrl,
    pub(crate) pool: VisibilityPool,
    pub(crate) shop: ProjectId,
    pub(crate) bank: ProjectId,
    password: SecretString,
}

impl Tenants {
    pub(crate) async fn start() -> Result<Self> {
        let postgres = Postgres::start().await?;
        let superuser = connect_sql(&SourceUrl::parse(&postgres.url("postgres"))?, "test", None, PATIENCE).await?;
        let setup = format!(
            "create role {OWNER} login createrole replication password 'owner'; grant create on database postgres to {OWNER}"
        );
        superuser.batch_execute(&setup).await?;
        Admin::connect(&SourceUrl::parse(&postgres.url("postgres"))?).await?.bootstrap().await?;
        let url = SourceUrl::parse(&postgres.url_as(OWNER, "owner", "postgres"))?;
        let sql = connect_sql(&url, "test", None, PATIENCE).await?;
        let admin = Admin::connect(&url).await?;
        let (shop, bank) =
            ("5a0b0000-0000-4000-8000-000000000001".parse()?, "ba4c0000-0000-4000-8000-000000000002".parse()?);
        let password = SecretString::from("it's secret");
        for (project, schema) in [(shop, "shop"), (bank, "bank")] {
            admin.provision_project(project, &SqlName::new(schema)?, &["editor".to_owned()], &password).await?;
        }
        let pool = VisibilityPool::new(url.clone(), Sockets::new(), "test".to_owned(), 16);
        Ok(Self { postgres, superuser, sql, admin, url, pool, shop, bank, password })
    }

    /// Runs SQL as the owner. `{anon}`, `{authenticated}` and `{service_role}` stand for the shop's roles.
    pub(crate) async fn run(&self, sql: &str) -> Result<()> {
        let mut text = sql.to_owned();
        for word in ["anon", "authenticated", "service_role", "editor"] {
            text = text.replace(&format!("{{{word}}}"), &format!("\"p_{}_{word}\"", self.shop));
        }
        self.sql.batch_execute(&text).await.with_context(|| text.clone())
    }

    /// Everything goes over one pooled connection from now on.
    pub(crate) fn one_connection(&mut self) {
        self.pool = VisibilityPool::new(self.url.clone(), Sockets::new(), "test".to_owned(), 1);
    }

    /// Process ids of the open visibility connections.
    pub(crate) async fn sessions(&self) -> Result<Vec<i32>> {
        let sql = "select pid from pg_stat_activity where usename like 'p\\_%\\_visibility' order by pid";
        Ok(self.superuser.query(sql, &[]).await?.iter().map(|row| row.get(0)).collect())
    }

    pub(crate) async fn oid(&self, relation: &Relation) -> Result<u32> {
        let info = self.admin.table(&relation.schema, &relation.table).await?;
        Ok(info.context("no such table")?.oid)
    }

    /// On whose behalf the shop's filters are asked about.
    pub(crate) fn shop_tenant(&self) -> aura_pgsource::visibility::Tenant<'_> {
        aura_pgsource::visibility::Tenant { project: self.shop, password: &self.password, extra_roles: &[] }
    }

    /// A check of a table of the shop.
    pub(crate) async fn check(&self, table: &str, images: &[Image], identities: &[Identity]) -> Result<CheckOutcome> {
        let relation = relation("shop", table)?;
        let oid = self.oid(&relation).await?;
        Ok(self.check_oid(table, oid, &[], images, identities).await?)
    }

    /// The same where each identity is to be judged for some images only.
    pub(crate) async fn check_wanted(
        &self,
        table: &str,
        images: &[Image],
        identities: &[Identity],
        wanted: &[Vec<usize>],
    ) -> Result<CheckOutcome> {
        let relation = relation("shop", table)?;
        let images: Vec<&Image> = images.iter().collect();
        let request = CheckRequest {
            project: self.shop,
            password: &self.password,
            registered_oid: self.oid(&relation).await?,
            relation: &relation,
            xids: &[],
            images: &images,
            identities,
            wanted: Some(wanted),
            extra_roles: &[],
        };
        Ok(self.pool.check(request).await?)
    }

    pub(crate) async fn check_oid(
        &self,
        table: &str,
        oid: u32,
        xids: &[u32],
        images: &[Image],
        identities: &[Identity],
    ) -> Result<CheckOutcome, SourceError> {
        let relation = relation("shop", table).map_err(|_| SourceError::Protocol("name"))?;
        let images: Vec<&Image> = images.iter().collect();
        let request = CheckRequest {
            project: self.shop,
            password: &self.password,
            relation: &relation,
            registered_oid: oid,
            xids,
            images: &images,
            wanted: None,
            identities,
            extra_roles: &["editor".to_owned()],
        };
        self.pool.check(request).await
    }
}

pub(crate) fn relation(schema: &str, table: &str) -> Result<Relation> {
    Ok(Relation { schema: SqlName::new(schema)?, table: SqlName::new(table)? })
}

pub(crate) fn user(sub: &str) -> Identity {
    identity("authenticated", sub)
}

pub(crate) fn identity(role: &str, sub: &str) -> Identity {
    let claims = Claims::from_payload(&json!({"sub": sub, "role": role})).expect("an object");
    Identity { role: role.to_owned(), claims }
}

/// A row image; `None` is NULL.
pub(crate) fn image(cells: &[(&str, Option<&str>)]) -> Image {
    let cell = |(name, value): &(&str, Option<&str>)| aura_domain::Cell {
        name: (*name).into(),
        type_oid: 0,
        value: value.map_or(Value::Null, |text| Value::Text(text.into())),
    };
    Image(cells.iter().map(cell).collect())
}

/// What an identity sees of each image; an error is shown by its kind.
pub(crate) fn seen(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Decided { visible, .. } => visible.iter().map(|seen| if *seen { '1' } else { '0' }).collect(),
        Verdict::Error(kind) => format!("{kind:?}"),
    }
}

pub(crate) fn all_seen(outcome: &CheckOutcome) -> Vec<String> {
    outcome.verdicts.iter().map(seen).collect()
}
