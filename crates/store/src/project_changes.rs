//! Projects that are changed and deleted.

use aura_domain::{ProjectId, SourceId, SqlName};
use serde_json::{Map, Value, json};
use sqlx::{FromRow, PgConnection, types::Json};
use uuid::Uuid;

use crate::{
    Caller, Project, Registration, Store, StoreError, audit, bounded,
    decode::rfc3339,
    projects::{ProjectRow, columns, notify_projects},
    registrations::{self, RegistrationRow, lock_registry},
    registry::raise_revision,
};

/// What changes of a project; `None` leaves a member as it is.
#[derive(Debug, Clone, Default)]
pub struct ProjectChange {
    /// See [`Project::name`].
    pub name: Option<String>,
    /// See [`ProjectSettings::limits`](crate::ProjectSettings::limits).
    pub limits: Option<Map<String, Value>>,
    /// See [`ProjectSettings::jwks_url`](crate::ProjectSettings::jwks_url); `Some(None)` = none.
    pub jwks_url: Option<Option<String>>,
    /// See [`ProjectSettings::aud`](crate::ProjectSettings::aud); `Some(None)` = any.
    pub aud: Option<Option<String>>,
    /// See [`ProjectSettings::roles`](crate::ProjectSettings::roles).
    pub roles: Option<Vec<String>>,
    /// See [`ProjectSettings::schemas`](crate::ProjectSettings::schemas).
    pub schemas: Option<Vec<SqlName>>,
    /// See [`ProjectSettings::require_rls`](crate::ProjectSettings::require_rls).
    pub require_rls: Option<bool>,
    /// See [`ProjectSettings::private_only`](crate::ProjectSettings::private_only).
    pub private_only: Option<bool>,
}

impl ProjectChange {
    /// The project as it will be.
    #[must_use]
    pub fn applied_to(self, project: Project) -> Project {
        let mut project = project;
        let settings = &mut project.settings;
        project.name = self.name.unwrap_or(project.name);
        settings.limits = self.limits.unwrap_or_else(|| std::mem::take(&mut settings.limits));
        settings.jwks_url = self.jwks_url.unwrap_or_else(|| settings.jwks_url.take());
        settings.aud = self.aud.unwrap_or_else(|| settings.aud.take());
        settings.roles = self.roles.unwrap_or_else(|| std::mem::take(&mut settings.roles));
        settings.schemas = self.schemas.unwrap_or_else(|| std::mem::take(&mut settings.schemas));
        settings.require_rls = self.require_rls.unwrap_or(settings.require_rls);
        settings.private_only = self.private_only.unwrap_or(settings.private_only);
        project
    }
}

/// What became of a change or a deletion.
#[derive(Debug, Clone, PartialEq)]
pub enum ProjectWrite {
    /// Done; the project as it is, or was.
    Done(Box<Project>),
    /// It isn't of the version that the change is based on.
    Changed,
    /// So many tables are on in schemas that it would give up.
    TablesOn(i64),
}

/// A project that is deleted, and of which something is left in its source.
#[derive(Debug, Clone, PartialEq)]
pub struct DeletedProject {
    /// As it was.
    pub project: Project,
    /// Its schema is to go, too.
    pub drop_schema: bool,
    /// Its tables that still have the replica identity that we set.
    pub tables: Vec<Registration>,
    /// Of the registry: once the engine has applied it, nothing of the project is read any more.
    pub revision: i64,
}

#[derive(FromRow)]
struct DeletedRow {
    #[sqlx(flatten)]
    project: ProjectRow,
    drop_schema: bool,
    registry_revision: i64,
}

impl Store {
    /// Changes a living project, if `based_on` takes its version. A change that changes nothing leaves no trace. `Taken` =
    /// the name, or another project's schema.
    pub async fn update_project(
        &self,
        id: ProjectId,
        change: ProjectChange,
        based_on: impl Fn(i64) -> bool,
        caller: Caller<'_>,
    ) -> Result<ProjectWrite, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let before = locked(&mut tx, id).await?;
            let written = write_change(&mut tx, &before, change, &based_on).await?;
            let ProjectWrite::Done(after) = &written else { return Ok(written) };
            if **after == before {
                return Ok(written);
            }
            let (from, to) = (Some(before.shown()), Some(after.shown()));
            audit::append(&mut tx, caller.project_entry(id, "project.update", &after.name, from, to)).await?;
            // The worker knows projects by the registry that they belong to.
            raise_revision(&mut tx, after.source).await?;
            notify_projects(&mut tx, id).await?;
            tx.commit().await?;
            Ok(written)
        })
        .await
    }

    /// What [`Store::update_project`] would answer now.
    pub async fn preview_project(
        &self,
        id: ProjectId,
        change: ProjectChange,
        based_on: impl Fn(i64) -> bool,
    ) -> Result<ProjectWrite, StoreError> {
        bounded(async {
            // Never committed.
            let mut tx = self.pool.begin().await?;
            let before = locked(&mut tx, id).await?;
            write_change(&mut tx, &before, change, &based_on).await
        })
        .await
    }

    /// Deletes a living project, if `based_on` takes its version: from the commit on its keys are refused and its tables are
    /// off. What we made for it in its source is taken back next: see [`Store::deleted_project`].
    pub async fn delete_project(
        &self,
        id: ProjectId,
        drop_schema: bool,
        based_on: impl Fn(i64) -> bool,
        caller: Caller<'_>,
    ) -> Result<ProjectWrite, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let before = locked(&mut tx, id).await?;
            if !based_on(before.version) {
                return Ok(ProjectWrite::Changed);
            }
            let mut shown = before.shown();
            shown["tables"] = json!(turn_off(&mut tx, id, caller.actor).await?);
            let query = "update aura.projects set deleted_at = now(), drop_schema = $2 where id = $1";
            sqlx::query(query).bind(id.0).bind(drop_schema).execute(&mut *tx).await?;
            let query = "update aura.keys set revoked_at = coalesce(revoked_at, now()) where project_id = $1";
            sqlx::query(query).bind(id.0).execute(&mut *tx).await?;
            let after = Some(json!({"deleted": true, "drop_schema": drop_schema}));
            audit::append(&mut tx, caller.project_entry(id, "project.delete", &before.name, Some(shown), after))
                .await?;
            raise_revision(&mut tx, before.source).await?;
            notify_projects(&mut tx, id).await?;
            tx.commit().await?;
            Ok(ProjectWrite::Done(Box::new(before)))
        })
        .await
    }

    /// A deleted project, as long as something of it is left in its source.
    pub async fn deleted_project(&self, id: ProjectId) -> Result<Option<DeletedProject>, StoreError> {
        Ok(self.select_deleted(Some(id)).await?.pop())
    }

    /// Every deleted project of which something is left.
    pub async fn deleted_projects(&self) -> Result<Vec<DeletedProject>, StoreError> {
        self.select_deleted(None).await
    }

    async fn select_deleted(&self, id: Option<ProjectId>) -> Result<Vec<DeletedProject>, StoreError> {
        let query = sqlx::query_as::<_, DeletedRow>(concat!(
            "select p.*, s.registry_revision from (select source_id as s_id, drop_schema, ",
            columns!(),
            " from aura.projects where deleted_at is not null and cleaned_at is null
                and ($1::uuid is null or id = $1)) p join aura.sources s on s.id = p.s_id order by p.id"
        ));
        let tables = sqlx::query_as::<_, RegistrationRow>(concat!(
            "select ",
            registrations::columns!(),
            " from aura.realtime_tables r join aura.projects p on p.id = r.project_id
              where p.deleted_at is not null and p.cleaned_at is null and ($1::uuid is null or p.id = $1)
                and r.previous_identity is not null order by r.schema_name, r.table_name"
        ));
        let id = id.map(|id| id.0);
        bounded(async {
            let rows = query.bind(id).fetch_all(&self.pool).await?;
            if rows.is_empty() {
                return Ok(vec![]);
            }
            let tables = registrations::registrations(tables.bind(id).fetch_all(&self.pool).await?)?;
            rows.into_iter().map(|row| row.with_tables(&tables)).collect()
        })
        .await
    }

    /// What we made for a deleted project is gone. Its secrets go with it.
    pub async fn project_cleaned(&self, id: ProjectId) -> Result<(), StoreError> {
        let query = sqlx::query(
            "with cleaned as (update aura.projects set cleaned_at = now(), jwt_secret = '', visibility_password = ''
                where id = $1 and deleted_at is not null returning id)
             delete from aura.retired_secrets s using cleaned where s.project_id = cleaned.id",
        );
        bounded(async { Ok(query.bind(id.0).execute(&self.pool).await.map(|_| ())?) }).await
    }
}

impl DeletedRow {
    fn with_tables(self, tables: &[Registration]) -> Result<DeletedProject, StoreError> {
        let project = self.project.project()?;
        let own = tables.iter().filter(|table| table.project == project.id).cloned();
        let tables = own.collect();
        Ok(DeletedProject { drop_schema: self.drop_schema, revision: self.registry_revision, tables, project })
    }
}

/// The living project, kept as it is until the transaction ends; its source's registry, too: the same order as that of the
/// toggles.
async fn locked(connection: &mut PgConnection, id: ProjectId) -> Result<Project, StoreError> {
    let query = sqlx::query_scalar::<_, Uuid>("select source_id from aura.projects where id = $1");
    let source = query.bind(id.0).fetch_optional(&mut *connection).await?.ok_or(StoreError::NotFound("project"))?;
    lock_registry(connection, SourceId(source)).await?;
    let query = sqlx::query_as::<_, ProjectRow>(concat!(
        "select ",
        columns!(),
        " from aura.projects where id = $1 and deleted_at is null for update"
    ));
    let row = query.bind(id.0).fetch_optional(connection).await?;
    row.ok_or(StoreError::NotFound("project"))?.project()
}

/// The change's row alone.
async fn write_change(
    connection: &mut PgConnection,
    before: &Project,
    change: ProjectChange,
    based_on: &impl Fn(i64) -> bool,
) -> Result<ProjectWrite, StoreError> {
    if !based_on(before.version) {
        return Ok(ProjectWrite::Changed);
    }
    let mut after = change.applied_to(before.clone());
    if after == *before {
        return Ok(ProjectWrite::Done(Box::new(after)));
    }
    unclaimed(connection, after.source, Some(after.id), &after.settings.schemas).await?;
    let on = tables_outside(connection, &after).await?;
    if on > 0 {
        return Ok(ProjectWrite::TablesOn(on));
    }
    after.version += 1;
    let query = sqlx::query(
        "update aura.projects set name = $2, settings = $3, version = $4, updated_at = now() where id = $1",
    );
    let query = query.bind(after.id.0).bind(&after.name).bind(Json(&after.settings)).bind(after.version);
    query.execute(connection).await?;
    Ok(ProjectWrite::Done(Box::new(after)))
}

/// Tables that are on although they are in none of the project's schemas.
async fn tables_outside(connection: &mut PgConnection, project: &Project) -> Result<i64, StoreError> {
    let own = project.settings.schemas.iter().chain([&project.schema]);
    let names: Vec<&str> = own.map(SqlName::as_str).collect();
    let query = sqlx::query_scalar(
        "select count(*) from aura.realtime_tables where project_id = $1 and enabled and schema_name <> all ($2)",
    );
    Ok(query.bind(project.id.0).bind(&names).fetch_one(connection).await?)
}

/// All its tables off; answers the names of those that were on.
async fn turn_off(connection: &mut PgConnection, id: ProjectId, actor: &str) -> Result<Vec<String>, StoreError> {
    let query = sqlx::query_scalar(
        "update aura.realtime_tables set enabled = false, status = 'disabled', reason = null, active_since_lsn = null,
            changed_from = null, updated_at = now(), updated_by = $2
         where project_id = $1 and enabled returning schema_name || '.' || table_name",
    );
    let mut names: Vec<String> = query.bind(id.0).bind(actor).fetch_all(connection).await?;
    names.sort();
    Ok(names)
}

/// Whether none of the schemas is another project's of the source: who names a schema reads it. That of a deleted project
/// that is still to be dropped is nobody's: whatever came into it would go with it.
pub(crate) async fn unclaimed(
    connection: &mut PgConnection,
    source: SourceId,
    except: Option<ProjectId>,
    schemas: &[SqlName],
) -> Result<(), StoreError> {
    let names: Vec<&str> = schemas.iter().map(SqlName::as_str).collect();
    let query = sqlx::query_scalar::<_, bool>(
        "select exists (select from aura.projects where source_id = $1 and id is distinct from $2
            and case when deleted_at is null then schema_name = any ($3) or settings -> 'schemas' ?| $3
                else drop_schema and cleaned_at is null and schema_name = any ($3) end)",
    );
    let taken = query.bind(source.0).bind(except.map(|id| id.0)).bind(&names).fetch_one(connection).await?;
    if taken { Err(StoreError::Taken("schema name")) } else { Ok(()) }
}
