use aura_domain::{ProjectId, SqlName, quote_ident, quote_literal};
use secrecy::{ExposeSecret, SecretString};
use tokio_postgres::error::SqlState;

use super::{Admin, bounded};
use crate::{
    SourceError,
    roles::{ANON, AUTHENTICATED, SERVICE_ROLE, project_role, visibility_login},
};

/// Tries when another provisioning makes the same things at the same time.
const TRIES: usize = 5;

impl Admin {
    /// Makes a project's schema and roles, or what is missing of them (R-RLS-8, R-RLS-9):
    ///
    /// - `p_<id>_anon`, `p_<id>_authenticated`, `p_<id>_service_role` and one per extra role word, NOLOGIN, each a member
    ///   of the `aura_*` role of its kind, with USAGE on the schema;
    /// - the login `p_<id>_visibility`: NOINHERIT, member of those but the service role;
    /// - when the schema is made here, SELECT for them on all tables that the admin role will make in it. A schema that
    ///   was there before is its owner's: nothing is granted on its tables.
    ///
    /// A role whose word is no longer among `extra_roles` stays, as grants and policies may name it, but the login can't
    /// become it any more.
    ///
    /// The password is set each time. A word that can't be a role name is [`SourceError::Protocol`].
    pub async fn provision_project(
        &self,
        project: ProjectId,
        schema: &SqlName,
        extra_roles: &[String],
        visibility_password: &SecretString,
    ) -> Result<(), SourceError> {
        let roles = Roles::new(project, extra_roles)?;
        let session = self.session().await;
        let mut tries = 0;
        loop {
            tries += 1;
            let existing = existing(&session, schema, &roles).await?;
            let sql = roles.sql(schema, &existing, visibility_password);
            let Err(error) = bounded(session.batch_execute(&sql)).await else { return Ok(()) };
            // The first error counts.
            let rolled_back = bounded(session.batch_execute("rollback")).await;
            if tries >= TRIES || rolled_back.is_err() || !made_by_another(&error) {
                return Err(error);
            }
        }
    }
}

struct Roles {
    login: String,
    /// (database role, the installation-wide role of its kind).
    members: Vec<(SqlName, &'static str)>,
    service: SqlName,
}

/// What there is already.
struct Existing {
    schema: bool,
    roles: Vec<String>,
    /// What the login can become.
    login_of: Vec<String>,
    /// The schema was made here: tables of ours in it grant SELECT to the project's roles.
    grants: bool,
}

async fn existing(session: &tokio_postgres::Client, schema: &SqlName, roles: &Roles) -> Result<Existing, SourceError> {
    let names: Vec<&str> = roles.all().map(|(name, _)| name.as_str()).chain([roles.login.as_str()]).collect();
    let sql = "select exists (select from pg_namespace where nspname = $1), \
         array(select rolname::text from pg_roles where rolname = any ($2::text[])), \
         array(select pg_get_userbyid(roleid)::text from pg_auth_members where pg_get_userbyid(member) = $3), \
         exists (select from pg_default_acl, aclexplode(defaclacl) granted \
             where pg_get_userbyid(defaclrole) = current_user and defaclobjtype = 'r' \
             and defaclnamespace = (select oid from pg_namespace where nspname = $1) \
             and pg_get_userbyid(grantee) = $4)";
    let (schema, service) = (schema.as_str(), roles.service.as_str());
    let row = bounded(session.query_one(sql, &[&schema, &names, &roles.login, &service])).await?;
    Ok(Existing { schema: row.try_get(0)?, roles: row.try_get(1)?, login_of: row.try_get(2)?, grants: row.try_get(3)? })
}

impl Roles {
    fn new(project: ProjectId, extra: &[String]) -> Result<Self, SourceError> {
        let role = |word: &str| {
            let illegal = SourceError::Protocol("a role word must be 1 to 24 of a-z, 0-9 and _");
            project_role(project, word).ok_or(illegal)
        };
        let mut members = vec![(role(ANON)?, "aura_anon"), (role(AUTHENTICATED)?, "aura_authenticated")];
        let service = role(SERVICE_ROLE)?;
        for word in extra {
            let name = role(word)?;
            if name != service && members.iter().all(|(known, _)| *known != name) {
                members.push((name, "aura_authenticated"));
            }
        }
        Ok(Self { login: visibility_login(project), members, service })
    }

    fn all(&self) -> impl Iterator<Item = (&SqlName, &'static str)> {
        let members = self.members.iter().map(|(name, kind)| (name, *kind));
        members.chain([(&self.service, "aura_service_role")])
    }

    /// One transaction.
    fn sql(&self, schema: &SqlName, existing: &Existing, password: &SecretString) -> String {
        let mut sql = String::from("begin;");
        for (role, kind) in self.all() {
            if !existing.has(role) {
                sql += &format!("create role {} nologin;", role.quoted());
            }
            sql += &format!("grant {kind} to {};", role.quoted());
        }
        self.push_login(&mut sql, existing, password);
        self.push_schema(&mut sql, schema, existing);
        sql + "commit"
    }

    fn push_login(&self, sql: &mut String, existing: &Existing, password: &SecretString) {
        let login = quote_ident(&self.login);
        let verb = if existing.has(&self.login) { "alter" } else { "create" };
        // A verifier, since the server may log its statements.
        let verifier = postgres_protocol::password::scram_sha_256(password.expose_secret().as_bytes());
        *sql += &format!("{verb} role {login} login noinherit password {};", quote_literal(&verifier));
        *sql += &format!("grant {} to {login};", list(self.members.iter().map(|(name, _)| name)));
        let is_member = |role: &String| self.members.iter().any(|(name, _)| name.as_str() == role);
        for former in existing.login_of.iter().filter(|role| !is_member(role)) {
            *sql += &format!("revoke {} from {login};", quote_ident(former));
        }
    }

    fn push_schema(&self, sql: &mut String, schema: &SqlName, existing: &Existing) {
        let (schema, roles) = (schema.quoted(), list(self.all().map(|(name, _)| name)));
        if !existing.schema {
            *sql += &format!("create schema {schema};");
        }
        if !existing.schema || existing.grants {
            *sql += &format!("alter default privileges in schema {schema} grant select on tables to {roles};");
        }
        *sql += &format!("grant usage on schema {schema} to {roles};");
    }
}

impl Existing {
    fn has(&self, role: &str) -> bool {
        self.roles.iter().any(|name| name == role)
    }
}

fn list<'a>(names: impl Iterator<Item = &'a SqlName>) -> String {
    names.map(SqlName::quoted).collect::<Vec<_>>().join(", ")
}

/// Somebody made a role or the schema, or changed the same row, since we looked.
fn made_by_another(error: &SourceError) -> bool {
    let codes = [
        SqlState::DUPLICATE_OBJECT,
        SqlState::DUPLICATE_SCHEMA,
        SqlState::UNIQUE_VIOLATION,
        SqlState::T_R_DEADLOCK_DETECTED,
        // "tuple concurrently updated" has no code of its own.
        SqlState::INTERNAL_ERROR,
    ];
    error.sqlstate().is_some_and(|code| codes.contains(code))
}
