//! What a project's roles may enter changes, and what was made for a project is taken back.

use aura_domain::{ProjectId, SqlName, quote_ident};
use tokio_postgres::{Client, error::SqlState};

use super::{Admin, bounded};
use crate::{SourceError, roles::visibility_login};

/// What became of what was made for a project.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Leftovers {
    /// Roles that something still depends on, or that aren't ours to drop: nobody can log in with them.
    pub roles: Vec<String>,
}

impl Admin {
    /// Which of these schemas the source doesn't have.
    pub async fn missing_schemas(&self, schemas: &[SqlName]) -> Result<Vec<String>, SourceError> {
        let names: Vec<&str> = schemas.iter().map(SqlName::as_str).collect();
        let sql = "select name from unnest($1::text[]) name where not exists (
            select from pg_namespace where nspname = name)";
        let rows = bounded(self.session().await.query(sql, &[&names])).await?;
        rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
    }

    /// Lets all the project's roles into these schemas. Nothing is granted on their tables.
    pub async fn open_schemas(&self, project: ProjectId, schemas: &[SqlName]) -> Result<(), SourceError> {
        let session = self.session().await;
        let roles = own_roles(&session, project).await?;
        let login = visibility_login(project);
        let members = list(roles.iter().filter(|role| **role != login));
        let grant = |schema: &SqlName| format!("grant usage on schema {} to {members};", schema.quoted());
        one_transaction(&session, &schemas.iter().map(grant).collect::<String>()).await
    }

    /// Keeps the project's roles out of these schemas from now on. One that is gone needs nothing.
    pub async fn close_schemas(&self, project: ProjectId, schemas: &[SqlName]) -> Result<(), SourceError> {
        let missing = self.missing_schemas(schemas).await?;
        let session = self.session().await;
        let roles = list(own_roles(&session, project).await?.iter());
        let there = schemas.iter().filter(|schema| !missing.iter().any(|name| name.as_str() == schema.as_str()));
        let revoke = |schema: &SqlName| format!("revoke usage on schema {} from {roles};", schema.quoted());
        one_transaction(&session, &there.map(revoke).collect::<String>()).await
    }

    /// Whether the admin role may drop a schema; one that is gone needs nobody's leave.
    pub async fn owns_schema(&self, schema: &SqlName) -> Result<bool, SourceError> {
        let sql = "select coalesce((select pg_has_role(nspowner, 'USAGE') from pg_namespace where nspname = $1), true)";
        Ok(bounded(self.session().await.query_one(sql, &[&schema.as_str()])).await?.try_get(0)?)
    }

    /// Drops a schema with all that is in it; one that is gone needs nothing.
    pub async fn drop_schema(&self, schema: &SqlName) -> Result<(), SourceError> {
        let session = self.session().await;
        one_transaction(&session, &format!("drop schema if exists {} cascade;", schema.quoted())).await
    }

    /// Takes back the roles of a project: its login's sessions end at once, and what the roles own becomes the admin role's.
    /// Nothing of anybody's is dropped but the roles' own privileges. Idempotent.
    pub async fn deprovision_project(&self, project: ProjectId) -> Result<Leftovers, SourceError> {
        let session = self.session().await;
        let mut left = Leftovers::default();
        let roles = own_roles(&session, project).await?;
        if roles.contains(&visibility_login(project)) {
            shut_out(&session, project).await?;
        }
        for role in roles {
            match one_transaction(&session, &drop_role_sql(&role)).await {
                Ok(()) => {}
                Err(error) if stays(&error) => left.roles.push(role),
                Err(error) => return Err(error),
            }
        }
        Ok(left)
    }
}

/// From now on nobody logs in as the project, and who did is out.
async fn shut_out(session: &Client, project: ProjectId) -> Result<(), SourceError> {
    let login = visibility_login(project);
    let quoted = quote_ident(&login);
    bounded(session.batch_execute(&format!("alter role {quoted} nologin password null"))).await?;
    // Only who has a role's rights may end its sessions.
    bounded(session.batch_execute(&format!("grant {quoted} to current_user"))).await?;
    let sql = "select pg_terminate_backend(pid) from pg_stat_activity where usename = $1";
    bounded(session.query(sql, &[&login])).await.map(drop)
}

/// A role must have no rights left before it goes. What is an owner's stays: the admin role gets it.
fn drop_role_sql(role: &str) -> String {
    let role = quote_ident(role);
    format!(
        "grant {role} to current_user; reassign owned by {role} to current_user; drop owned by {role}; drop role {role};"
    )
}

/// Something of somebody else's depends on the role, or it isn't ours.
fn stays(error: &SourceError) -> bool {
    let codes = [SqlState::DEPENDENT_OBJECTS_STILL_EXIST, SqlState::INSUFFICIENT_PRIVILEGE];
    error.sqlstate().is_some_and(|code| codes.contains(code))
}

/// The roles that there are of the project, extra ones that it no longer has included.
async fn own_roles(session: &Client, project: ProjectId) -> Result<Vec<String>, SourceError> {
    let sql = "select rolname::text from pg_roles where starts_with(rolname::text, $1) order by rolname";
    let rows = bounded(session.query(sql, &[&format!("p_{project}_")])).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

async fn one_transaction(session: &Client, statements: &str) -> Result<(), SourceError> {
    if statements.is_empty() {
        return Ok(());
    }
    let Err(error) = bounded(session.batch_execute(&format!("begin; {statements} commit"))).await else {
        return Ok(());
    };
    // The first error counts.
    drop(bounded(session.batch_execute("rollback")).await);
    Err(error)
}

fn list<'a>(roles: impl Iterator<Item = &'a String>) -> String {
    roles.map(|role| quote_ident(role)).collect::<Vec<_>>().join(", ")
}
