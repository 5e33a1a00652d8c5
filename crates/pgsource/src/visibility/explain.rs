//! What each policy of a table says of one row, one by one: for people who want to know why. What is delivered is decided
//! by [`VisibilityPool::check`] alone.
//!
//! Like a check it runs as the project's own login, read only, and is rolled back. A time-out here opens no circuit: a
//! question may not cost anybody an event.

use std::time::Duration;

use aura_domain::{Image, ProjectId, Value, quote_ident};
use secrecy::SecretString;
use serde::Deserialize;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_postgres::{
    Client, Row,
    error::SqlState,
    types::{ToSql, Type},
};

use super::{Identity, VisibilityPool, statement};
use crate::{SourceError, TableCatalog, catalog::Effective, roles};

/// `statement_timeout` of one policy, in milliseconds: a check's (R-RLS-6).
const LIMIT_MS: &str = "2000";
/// Bounds one policy with the network.
const POLICY_LIMIT: Duration = Duration::from_millis(2500);
/// Bounds all of them: what is left then isn't asked.
const ALL_LIMIT: Duration = Duration::from_secs(5);

const NAMES: &str = "select pg_catalog.set_config('search_path', '', true), \
     pg_catalog.set_config('statement_timeout', '2000', true)";

/// The policies that decide what a role reads of a table, in the order of their names.
const POLICIES: &str = "select pg_catalog.json_build_object(\
     'name', p.polname, 'permissive', p.polpermissive, 'command', case p.polcmd when '*' then 'ALL' else 'SELECT' end, \
     'roles', array(select case m.oid when 0 then 'public' else pg_catalog.pg_get_userbyid(m.oid)::pg_catalog.text end \
         from pg_catalog.unnest(p.polroles) as m (oid)), \
     'expression', pg_catalog.pg_get_expr(p.polqual, p.polrelid), \
     'columns', array(select d.refobjsubid from pg_catalog.pg_depend d \
         where d.classid = 'pg_catalog.pg_policy'::pg_catalog.regclass and d.objid = p.oid \
             and d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass and d.refobjid = p.polrelid \
             and d.refobjsubid > 0))::pg_catalog.text \
     from pg_catalog.pg_policy p \
     where p.polrelid = $1 and p.polcmd in ('r', '*') and p.polqual is not null and exists (\
         select from pg_catalog.unnest(p.polroles) as m (oid) where m.oid = 0 \
             or pg_catalog.pg_has_role($2::pg_catalog.name, m.oid, 'USAGE')) \
     order by p.polname";

/// One row and who wants to see it.
#[derive(Debug, Clone, Copy)]
pub struct PolicyQuestion<'a> {
    /// Tenant.
    pub project: ProjectId,
    /// Password of the project's visibility login.
    pub password: &'a SecretString,
    /// The table as it is now.
    pub table: &'a TableCatalog,
    /// Who.
    pub identity: &'a Identity,
    /// The project's role words besides the built-in three.
    pub extra_roles: &'a [String],
    /// The row.
    pub image: &'a Image,
}

/// A policy that applies to the role, and what it says of the row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyVerdict {
    /// Name.
    pub name: String,
    /// Any permissive one lets the row through; every restrictive one must.
    pub permissive: bool,
    /// `ALL` or `SELECT`.
    pub command: String,
    /// Roles that it is for, `public` = everybody.
    pub roles: Vec<String>,
    /// Its USING expression, as PostgreSQL prints it with an empty search path.
    pub expression: String,
    /// What it said.
    pub said: PolicyWord,
}

/// What a policy says of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyWord {
    /// True.
    Yes,
    /// False.
    No,
    /// NULL, which shows nothing.
    Null,
    /// It raised this.
    Raised(SqlState, String),
    /// It took longer than 2 s.
    TimedOut,
    /// It reads columns that the image lacks (R-RLS-4).
    Missing(Vec<String>),
    /// The connection was lost, or there was no time left.
    NotAsked,
}

impl PolicyWord {
    /// Whether it lets the row through.
    pub fn passes(&self) -> bool {
        *self == Self::Yes
    }
}

#[derive(Deserialize)]
struct Policy {
    name: String,
    permissive: bool,
    command: String,
    roles: Vec<String>,
    expression: String,
    columns: Vec<i16>,
}

impl VisibilityPool {
    /// Asks every policy that applies to the identity's role by itself. Empty for a role that is none of the project's,
    /// and for `service_role`, whom none binds. Takes 5 s at most. Cancel-safe: the connection is closed.
    pub async fn policies(&self, question: PolicyQuestion<'_>) -> Result<Vec<PolicyVerdict>, SourceError> {
        let word = question.identity.role.as_str();
        let role = roles::allowed_role(question.project, word, question.extra_roles);
        let Some(role) = role.filter(|_| word != roles::SERVICE_ROLE) else { return Ok(Vec::new()) };
        let session = self.sessions.take(question.project, question.password).await?;
        let asked = Asked { client: &session.client, question, role: role.as_str(), until: Instant::now() + ALL_LIMIT };
        let (verdicts, alive) = asked.all().await?;
        if alive && asked.close().await {
            self.sessions.put_back(session);
        }
        Ok(verdicts)
    }
}

struct Asked<'a> {
    client: &'a Client,
    question: PolicyQuestion<'a>,
    /// Database role.
    role: &'a str,
    until: Instant,
}

impl Asked<'_> {
    /// The verdicts, and whether the connection is still good.
    async fn all(&self) -> Result<(Vec<PolicyVerdict>, bool), SourceError> {
        let policies = self.bounded(self.read()).await?;
        let (mut verdicts, mut alive) = (Vec::new(), true);
        for policy in policies {
            let said = match policy.missing(self.question.image, self.question.table) {
                missing if !missing.is_empty() => PolicyWord::Missing(missing),
                _ if alive => self.ask(&policy).await,
                _ => PolicyWord::NotAsked,
            };
            alive &= said != PolicyWord::NotAsked;
            let Policy { name, permissive, command, roles, expression, .. } = policy;
            verdicts.push(PolicyVerdict { name, permissive, command, roles, expression, said });
        }
        Ok((verdicts, alive))
    }

    async fn read(&self) -> Result<Vec<Policy>, SourceError> {
        self.client.batch_execute(statement::BEGIN).await?;
        self.client.query_typed(NAMES, &[]).await?;
        let params: [(&(dyn ToSql + Sync), Type); 2] =
            [(&self.question.table.oid, Type::OID), (&self.role, Type::TEXT)];
        let rows = self.client.query_typed(POLICIES, &params).await?;
        let parse = |row: &Row| {
            let text: String = row.try_get(0)?;
            serde_json::from_str(&text).map_err(|_| SourceError::Protocol("a policy that can't be read"))
        };
        rows.iter().map(parse).collect()
    }

    async fn ask(&self, policy: &Policy) -> PolicyWord {
        let limit = self.until.min(Instant::now() + POLICY_LIMIT);
        match timeout_at(limit, self.evaluate(policy)).await {
            Ok(Ok(said)) => match self.bounded(self.simple(statement::ROLLBACK_TO)).await {
                Ok(()) => said,
                Err(_) => PolicyWord::NotAsked,
            },
            Ok(Err(_)) | Err(_) => PolicyWord::NotAsked,
        }
    }

    /// `Err`: the connection is lost.
    async fn evaluate(&self, policy: &Policy) -> Result<PolicyWord, SourceError> {
        self.simple(statement::SAVEPOINT).await?;
        let identity = self.question.identity;
        let claims = identity.claims.as_json();
        let sub = subject(claims);
        let texts = [self.role, claims, &identity.role, &sub, LIMIT_MS];
        let [role, claims, word, sub, limit] = texts.each_ref().map(|text| (text as &(dyn ToSql + Sync), Type::TEXT));
        let params = [role, claims, word, sub, limit, (&self.question.table.oid, Type::OID)];
        let needed = Effective { columns: policy.needed(self.question.table), ..Effective::default() };
        let row = statement::row_text(self.question.image, self.question.table, &needed);
        let answer = async {
            self.client.query_typed(statement::BECOME, &params).await?;
            let answer = self.client.query_typed(&self.sql(policy), &[(&row, Type::TEXT)]).await?;
            answer.first().map_or(Ok(None), |row| row.try_get::<_, Option<bool>>(0))
        };
        let error = match answer.await {
            Ok(Some(true)) => return Ok(PolicyWord::Yes),
            Ok(Some(false)) => return Ok(PolicyWord::No),
            Ok(None) => return Ok(PolicyWord::Null),
            Err(error) => error,
        };
        match error.as_db_error() {
            Some(raised) if raised.severity() == "FATAL" => Err(error.into()),
            Some(raised) if *raised.code() == SqlState::QUERY_CANCELED => Ok(PolicyWord::TimedOut),
            Some(raised) => Ok(PolicyWord::Raised(raised.code().clone(), raised.message().to_owned())),
            None => Err(error.into()),
        }
    }

    /// As a check does it: the table's name is the alias, and a whole-row reference finds the row type.
    fn sql(&self, policy: &Policy) -> String {
        let relation = &self.question.table.relation;
        let (schema, name) = (relation.schema.quoted(), relation.table.quoted());
        let alias = quote_ident(&relation.table);
        format!(
            "select ({}) from pg_catalog.unnest(array[$1::pg_catalog.text::{schema}.{name}]) as {alias}",
            policy.expression
        )
    }

    async fn simple(&self, sql: &str) -> Result<(), SourceError> {
        Ok(self.client.batch_execute(sql).await?)
    }

    async fn bounded<T>(&self, what: impl Future<Output = Result<T, SourceError>>) -> Result<T, SourceError> {
        let late = SourceError::Timeout { what: "asking the policies", limit: POLICY_LIMIT };
        timeout(POLICY_LIMIT, what).await.map_err(|_| late)?
    }

    /// Ends the transaction and cleans the session; whether it can be used again.
    async fn close(&self) -> bool {
        let both = async {
            self.simple(statement::ROLLBACK).await?;
            self.simple(statement::DISCARD).await
        };
        self.bounded(both).await.is_ok()
    }
}

impl Policy {
    /// Indexes of the columns that it reads. A whole-row reference prints as `tab.*` and needs all; a domain may not allow
    /// null, whoever reads it.
    fn needed(&self, table: &TableCatalog) -> Vec<usize> {
        let whole = self.expression.contains(".*");
        let columns = table.columns.iter().enumerate().filter(|(_, column)| {
            whole || self.columns.contains(&column.attnum) || column.ty.oid != column.ty.base_oid
        });
        columns.map(|(n, _)| n).collect()
    }

    /// Those that the image doesn't have.
    fn missing(&self, image: &Image, table: &TableCatalog) -> Vec<String> {
        let absent = |name: &str| matches!(image.get(name), None | Some(Value::Unchanged));
        let needed = self.needed(table).into_iter().map(|n| &*table.columns[n].name);
        needed.filter(|name| absent(name)).map(str::to_owned).collect()
    }
}

/// PostgREST's old `request.jwt.claim.sub`: empty if it isn't a text.
fn subject(claims: &str) -> String {
    let claims: serde_json::Value = serde_json::from_str(claims).unwrap_or_default();
    claims["sub"].as_str().unwrap_or_default().to_owned()
}
