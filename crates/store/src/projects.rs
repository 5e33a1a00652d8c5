use aura_domain::{KeyRole, ProjectId, SourceId, SqlName};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use sqlx::{FromRow, PgConnection, types::Json};
use uuid::Uuid;

use crate::{
    Caller, MasterKey, Store, StoreError, audit, bounded,
    decode::{self, rfc3339},
    keys::insert_key,
    project_changes::unclaimed,
    registrations::lock_registry,
};

/// A tenant.
#[derive(Debug, Clone, PartialEq)]
pub struct Project {
    /// Identity.
    pub id: ProjectId,
    /// Unique among living projects.
    pub name: String,
    /// Where its tables live.
    pub source: SourceId,
    /// Physical main schema, the client's `public`.
    pub schema: SqlName,
    /// What PATCH sets.
    pub settings: ProjectSettings,
    /// Raised by each change of name or settings.
    pub version: i64,
    /// RFC 3339, UTC.
    pub created_at: String,
}

/// A project's settings (design §6); absent ones have their defaults.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ProjectSettings {
    /// Overrides of R-FRT-2's limits by name.
    #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
    pub limits: serde_json::Map<String, serde_json::Value>,
    /// Keys of end users' tokens, besides the project's secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jwks_url: Option<String>,
    /// Required `aud` of end users' tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aud: Option<String>,
    /// Role words that tokens may carry besides `anon`, `authenticated`, `service_role` (R-RLS-8).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub roles: Vec<String>,
    /// Further physical schemas of the project.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub schemas: Vec<SqlName>,
    /// Tables without row security deliver nothing.
    pub require_rls: bool,
    /// Public channels are refused.
    pub private_only: bool,
}

/// What a project's tokens and visibility login are made with.
#[derive(Debug, Clone)]
pub struct ProjectSecrets {
    /// HS256 secret of the project's keys and end users' tokens, 43 characters.
    pub jwt_secret: SecretString,
    /// Password of `p_<id>_visibility` (R-RLS-9).
    pub visibility_password: SecretString,
}

/// What a project is made from.
#[derive(Debug, Clone)]
pub struct NewProject {
    /// `None` = a fresh one.
    pub id: Option<ProjectId>,
    /// See [`Project::name`].
    pub name: String,
    /// See [`Project::source`].
    pub source: SourceId,
    /// `None` = `project_<id>`.
    pub schema: Option<SqlName>,
    /// See [`Project::settings`].
    pub settings: ProjectSettings,
}

/// A project, with what is shown once.
#[derive(Debug, Clone)]
pub struct CreatedProject {
    /// The project.
    pub project: Project,
    /// Its secrets.
    pub secrets: ProjectSecrets,
    /// Row of the anon key.
    pub anon_key: Uuid,
    /// Row of the service_role key.
    pub service_role_key: Uuid,
}

#[derive(FromRow)]
pub(crate) struct ProjectRow {
    id: Uuid,
    name: String,
    source_id: Uuid,
    schema_name: String,
    settings: Json<ProjectSettings>,
    version: i64,
    created_at: String,
    jwt_secret: Vec<u8>,
    visibility_password: Vec<u8>,
}

macro_rules! columns {
    () => {
        concat!(
            "id, name, source_id, schema_name, settings, version, ",
            rfc3339!("created_at"),
            " as created_at, jwt_secret, visibility_password"
        )
    };
}
pub(crate) use columns;

impl ProjectRow {
    fn open(self, key: &MasterKey) -> Result<(Project, ProjectSecrets), StoreError> {
        let id = ProjectId(self.id);
        let secrets = ProjectSecrets {
            jwt_secret: open_text(key, &self.jwt_secret, &aad(id, "jwt_secret"))?,
            visibility_password: open_text(key, &self.visibility_password, &aad(id, "visibility_password"))?,
        };
        Ok((self.project()?, secrets))
    }

    pub(crate) fn project(self) -> Result<Project, StoreError> {
        Ok(Project {
            id: ProjectId(self.id),
            name: self.name,
            source: SourceId(self.source_id),
            schema: decode::name(self.schema_name)?,
            settings: self.settings.0,
            version: self.version,
            created_at: self.created_at,
        })
    }
}

pub(crate) fn aad(id: ProjectId, what: &str) -> String {
    format!("project {id} {what}")
}

/// Opens a sealed text.
pub(crate) fn open_text(key: &MasterKey, sealed: &[u8], aad: &str) -> Result<SecretString, StoreError> {
    let plain = key.open(sealed, aad)?;
    String::from_utf8(plain).map(SecretString::from).map_err(|_| StoreError::Corrupt("secret"))
}

/// 256 random bits as 43 URL-safe characters.
pub(crate) fn random_secret() -> SecretString {
    URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>()).into()
}

impl Store {
    /// Makes a tenant with fresh secrets and one key of each role. Its schema and roles in the source are the caller's
    /// next step (idempotent there). `Taken` = name or schema; `NotFound` = source.
    pub async fn create_project<'a>(
        &self,
        new: NewProject,
        caller: impl Into<Caller<'a>>,
    ) -> Result<CreatedProject, StoreError> {
        let caller = caller.into();
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let (project, secrets) = self.insert_new(&mut tx, new).await?;
            let anon_key = insert_key(&mut tx, project.id, KeyRole::Anon).await?.id;
            let service_role_key = insert_key(&mut tx, project.id, KeyRole::ServiceRole).await?.id;
            let after = Some(project.shown());
            let entry = caller.project_entry(project.id, "project.create", &project.name, None, after);
            audit::append(&mut tx, entry).await?;
            notify_projects(&mut tx, project.id).await?;
            tx.commit().await?;
            Ok(CreatedProject { project, secrets, anon_key, service_role_key })
        })
        .await
    }

    async fn insert_new(
        &self,
        connection: &mut PgConnection,
        new: NewProject,
    ) -> Result<(Project, ProjectSecrets), StoreError> {
        // Who claims a schema waits for whom claims another: neither gets the other's.
        lock_registry(connection, new.source).await?;
        if let Some(schema) = &new.schema {
            // Not an earlier try's of the same: who goes on with that is told so by its id.
            unclaimed(connection, new.source, new.id, std::slice::from_ref(schema)).await?;
        }
        let secrets = ProjectSecrets { jwt_secret: random_secret(), visibility_password: random_secret() };
        Ok((self.insert_project(connection, new, &secrets).await?, secrets))
    }

    async fn insert_project(
        &self,
        connection: &mut PgConnection,
        new: NewProject,
        secrets: &ProjectSecrets,
    ) -> Result<Project, StoreError> {
        let id = new.id.unwrap_or_else(|| ProjectId(Uuid::new_v4()));
        let seal = |secret: &SecretString, what| self.key.seal(secret.expose_secret().as_bytes(), &aad(id, what));
        let query = sqlx::query_as::<_, ProjectRow>(concat!(
            "insert into aura.projects (id, name, source_id, schema_name, settings, jwt_secret, visibility_password)
             values ($1, $2, $3, $4, $5, $6, $7) returning ",
            columns!()
        ));
        query
            .bind(id.0)
            .bind(new.name)
            .bind(new.source.0)
            .bind(new.schema.map_or_else(|| format!("project_{id}"), |schema| schema.to_string()))
            .bind(Json(new.settings))
            .bind(seal(&secrets.jwt_secret, "jwt_secret"))
            .bind(seal(&secrets.visibility_password, "visibility_password"))
            .fetch_one(connection)
            .await?
            .project()
    }

    /// A living project as [`Store::create_project`] answered it: who was cut off in between goes on with it.
    pub async fn created_project(&self, id: ProjectId) -> Result<Option<CreatedProject>, StoreError> {
        let Some((project, secrets)) = self.project_with_secrets(id).await? else { return Ok(None) };
        let query = sqlx::query_as::<_, (Option<Uuid>, Option<Uuid>)>(
            "select (array_agg(id order by created_at) filter (where role = 'anon'))[1],
                (array_agg(id order by created_at) filter (where role = 'service_role'))[1]
             from aura.keys where project_id = $1 and revoked_at is null",
        );
        let (anon, service) = bounded(async { Ok(query.bind(id.0).fetch_one(&self.pool).await?) }).await?;
        let (Some(anon_key), Some(service_role_key)) = (anon, service) else { return Ok(None) };
        Ok(Some(CreatedProject { project, secrets, anon_key, service_role_key }))
    }

    /// What [`Store::create_project`] would refuse now; nothing is made.
    pub async fn check_new_project(&self, new: NewProject) -> Result<(), StoreError> {
        bounded(async {
            // Never committed.
            let mut tx = self.pool.begin().await?;
            self.insert_new(&mut tx, new).await.map(drop)
        })
        .await
    }

    /// Takes back a project whose set-up failed before anybody was told its keys. Its audit line stays, and one more.
    pub async fn discard_project<'a>(&self, id: ProjectId, caller: impl Into<Caller<'a>>) -> Result<(), StoreError> {
        let caller = caller.into();
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let query = sqlx::query_as(concat!("delete from aura.projects where id = $1 returning ", columns!()));
            let row: Option<ProjectRow> = query.bind(id.0).fetch_optional(&mut *tx).await?;
            if let Some(project) = row.map(ProjectRow::project).transpose()? {
                let before = Some(project.shown());
                let entry = caller.project_entry(id, "project.discard", &project.name, before, None);
                audit::append(&mut tx, entry).await?;
                notify_projects(&mut tx, id).await?;
            }
            Ok(tx.commit().await?)
        })
        .await
    }

    /// One living project.
    pub async fn project(&self, id: ProjectId) -> Result<Option<Project>, StoreError> {
        self.project_row(id).await?.map(ProjectRow::project).transpose()
    }

    /// One living project with its secrets.
    pub async fn project_with_secrets(&self, id: ProjectId) -> Result<Option<(Project, ProjectSecrets)>, StoreError> {
        self.project_row(id).await?.map(|row| row.open(&self.key)).transpose()
    }

    async fn project_row(&self, id: ProjectId) -> Result<Option<ProjectRow>, StoreError> {
        let query =
            sqlx::query_as(concat!("select ", columns!(), " from aura.projects where id = $1 and deleted_at is null"));
        bounded(async { Ok(query.bind(id.0).fetch_optional(&self.pool).await?) }).await
    }

    /// The living project of a name.
    pub async fn project_by_name(&self, name: &str) -> Result<Option<Project>, StoreError> {
        let query = sqlx::query_as::<_, ProjectRow>(concat!(
            "select ",
            columns!(),
            " from aura.projects where name = $1 and deleted_at is null"
        ));
        let row = bounded(async { Ok(query.bind(name).fetch_optional(&self.pool).await?) }).await?;
        row.map(ProjectRow::project).transpose()
    }

    /// Every living project of a source, for its worker.
    pub async fn projects_of_source(&self, source: SourceId) -> Result<Vec<(Project, ProjectSecrets)>, StoreError> {
        let query = sqlx::query_as::<_, ProjectRow>(concat!(
            "select ",
            columns!(),
            " from aura.projects where source_id = $1 and deleted_at is null order by id"
        ));
        let rows = bounded(async { Ok(query.bind(source.0).fetch_all(&self.pool).await?) }).await?;
        rows.into_iter().map(|row| row.open(&self.key)).collect()
    }

    /// Living projects in the order of their ids, `limit` of them, above `after` (the cursor).
    pub async fn list_projects(&self, after: Option<ProjectId>, limit: u32) -> Result<Vec<Project>, StoreError> {
        let query = sqlx::query_as::<_, ProjectRow>(concat!(
            "select ",
            columns!(),
            " from aura.projects where deleted_at is null and ($1::uuid is null or id > $1) order by id limit $2"
        ));
        let query = query.bind(after.map(|id| id.0)).bind(i64::from(limit));
        let rows = bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?;
        rows.into_iter().map(ProjectRow::project).collect()
    }
}

pub(crate) async fn notify_projects(connection: &mut PgConnection, project: ProjectId) -> Result<(), StoreError> {
    sqlx::query("select pg_notify('aura_projects', $1)").bind(project.to_string()).execute(connection).await?;
    Ok(())
}

impl Project {
    /// For the audit; there is no secret in it.
    pub(crate) fn shown(&self) -> serde_json::Value {
        serde_json::json!({
            "name": self.name, "source": self.source, "schema": self.schema, "settings": self.settings
        })
    }
}
