use serde_json::Value;
use sqlx::PgConnection;

use aura_domain::ProjectId;

use crate::{Store, StoreError, bounded, decode::rfc3339};

/// Who changed what; appended in the transaction of the change.
#[derive(Debug, Clone)]
pub struct NewAudit<'a> {
    /// Whose; `None` = the installation's.
    pub project: Option<ProjectId>,
    /// Key id and role, or `platform`.
    pub actor: &'a str,
    /// `table.enable`, `project.create`, …
    pub action: &'static str,
    /// `schema.table`, a name or an id.
    pub target: String,
    /// State before; no secrets.
    pub before: Option<Value>,
    /// State after; no secrets.
    pub after: Option<Value>,
    /// Of the HTTP request.
    pub request_id: Option<&'a str>,
}

/// Who asks for a change, for its audit entry.
#[derive(Debug, Clone, Copy)]
pub struct Caller<'a> {
    /// See [`NewAudit::actor`].
    pub actor: &'a str,
    /// See [`NewAudit::request_id`].
    pub request_id: Option<&'a str>,
}

impl<'a> From<&'a str> for Caller<'a> {
    /// Somebody who asks outside of any request.
    fn from(actor: &'a str) -> Self {
        Self { actor, request_id: None }
    }
}

impl<'a> Caller<'a> {
    /// An entry about something of a project.
    pub(crate) fn project_entry(
        self,
        project: ProjectId,
        action: &'static str,
        target: impl ToString,
        before: Option<Value>,
        after: Option<Value>,
    ) -> NewAudit<'a> {
        NewAudit { project: Some(project), ..self.entry(action, target, before, after) }
    }

    /// An entry about something of the installation.
    pub(crate) fn entry(
        self,
        action: &'static str,
        target: impl ToString,
        before: Option<Value>,
        after: Option<Value>,
    ) -> NewAudit<'a> {
        let Self { actor, request_id } = self;
        NewAudit { project: None, actor, action, target: target.to_string(), before, after, request_id }
    }
}

/// Which entries to list.
#[derive(Debug, Clone, Copy, Default)]
pub struct AuditFilter<'a> {
    /// Only this project's.
    pub project: Option<ProjectId>,
    /// Only of this action.
    pub action: Option<&'a str>,
    /// Only those with a smaller id (the cursor).
    pub before: Option<i64>,
    /// At most so many.
    pub limit: u32,
}

/// A line of the audit log.
#[derive(Debug, Clone, PartialEq, serde::Serialize, sqlx::FromRow)]
pub struct AuditEntry {
    /// Ascending.
    pub id: i64,
    /// RFC 3339, UTC.
    pub at: String,
    /// See [`NewAudit::project`].
    pub project_id: Option<uuid::Uuid>,
    /// See [`NewAudit::actor`].
    pub actor: String,
    /// See [`NewAudit::action`].
    pub action: String,
    /// See [`NewAudit::target`].
    pub target: String,
    /// See [`NewAudit::before`].
    pub before: Option<Value>,
    /// See [`NewAudit::after`].
    pub after: Option<Value>,
    /// See [`NewAudit::request_id`].
    pub request_id: Option<String>,
}

pub(crate) async fn append(connection: &mut PgConnection, entry: NewAudit<'_>) -> Result<(), StoreError> {
    sqlx::query(
        "insert into aura.audit (project_id, actor, action, target, before, after, request_id)
         values ($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind(entry.project.map(|project| project.0))
    .bind(entry.actor)
    .bind(entry.action)
    .bind(entry.target)
    .bind(entry.before)
    .bind(entry.after)
    .bind(entry.request_id)
    .execute(connection)
    .await?;
    Ok(())
}

impl Store {
    /// Appends an entry for a change that has no method of its own.
    pub async fn audit(&self, entry: NewAudit<'_>) -> Result<(), StoreError> {
        bounded(async { append(&mut *self.pool.acquire().await?, entry).await }).await
    }

    /// A project's entries, newest first; `before`: only those with a smaller id (the cursor).
    pub async fn audit_of_project(
        &self,
        project: ProjectId,
        before: Option<i64>,
        limit: u32,
    ) -> Result<Vec<AuditEntry>, StoreError> {
        self.audit_entries(AuditFilter { project: Some(project), action: None, before, limit }).await
    }

    /// Entries, newest first.
    pub async fn audit_entries(&self, filter: AuditFilter<'_>) -> Result<Vec<AuditEntry>, StoreError> {
        let query = sqlx::query_as(concat!(
            "select id, ",
            rfc3339!("at"),
            " as at, project_id, actor, action, target, before, after, request_id from aura.audit
             where ($1::uuid is null or project_id = $1) and ($2::text is null or action = $2)
                and ($3::bigint is null or id < $3) order by id desc limit $4",
        ));
        let query = query.bind(filter.project.map(|project| project.0)).bind(filter.action).bind(filter.before);
        bounded(async { Ok(query.bind(i64::from(filter.limit)).fetch_all(&self.pool).await?) }).await
    }
}
