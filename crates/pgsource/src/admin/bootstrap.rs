use super::{Admin, bounded};
use crate::SourceError;

const BOOTSTRAP_SQL: &str = include_str!("bootstrap.sql");

/// What bootstrap could not do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BootstrapReport {
    /// PUBLIC can't read `pg_stats`, `pg_stats_ext` and `pg_stats_ext_exprs` (R-RLS-9): tenant code could see values of
    /// other tenants' tables there. Taking that right away needs the views' owner, a superuser.
    pub statistics_hidden: bool,
}

impl Admin {
    /// Makes the roles `aura_anon`, `aura_authenticated` and `aura_service_role`, and `auth.uid()`, `auth.role()`,
    /// `auth.jwt()`. Idempotent; needs CREATEROLE and CREATE on the database.
    pub async fn bootstrap(&self) -> Result<BootstrapReport, SourceError> {
        let session = self.session().await;
        bounded(session.batch_execute(BOOTSTRAP_SQL)).await?;
        if !hidden(&session).await? {
            // A warning, not an error, when we may not.
            bounded(session.batch_execute(HIDE_STATISTICS_SQL)).await?;
        }
        Ok(BootstrapReport { statistics_hidden: hidden(&session).await? })
    }
}

async fn hidden(client: &tokio_postgres::Client) -> Result<bool, SourceError> {
    Ok(bounded(client.query_one(STATISTICS_HIDDEN_SQL, &[])).await?.try_get(0)?)
}

/// `pg_stats_ext_exprs` came with version 14.
const HIDE_STATISTICS_SQL: &str = "do $$ declare view regclass; begin \
     for view in select oid from pg_class where relnamespace = 'pg_catalog'::regnamespace \
         and relname in ('pg_stats', 'pg_stats_ext', 'pg_stats_ext_exprs') loop \
         begin execute format('revoke all on %s from public', view); \
         exception when insufficient_privilege then null; end; \
     end loop; end $$";

/// An expression: whether `aura_source.judge` is the one that bootstrap makes. Who may make schemas may have made one before
/// us, so only owners are believed whose rights no tenant has. It is evaluated beside tenant code: every name is qualified.
pub(crate) const JUDGE_IS_OURS: &str = "exists (\
     select from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid operator(pg_catalog.=) p.pronamespace \
     where n.nspname operator(pg_catalog.=) 'aura_source' and p.proname operator(pg_catalog.=) 'judge' \
     and p.pronargs operator(pg_catalog.=) 9 having pg_catalog.bool_and((\
     select pg_catalog.count(*) operator(pg_catalog.=) 0 from pg_catalog.pg_roles r \
     where (r.oid operator(pg_catalog.=) p.proowner or r.oid operator(pg_catalog.=) n.nspowner) \
     and not r.rolsuper and not r.rolcreaterole)))";

/// Whether PUBLIC lacks SELECT on the statistics views.
pub(crate) const STATISTICS_HIDDEN_SQL: &str = "select not exists (select from pg_class c, \
     aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) a \
     where c.relnamespace = 'pg_catalog'::regnamespace and c.relname in ('pg_stats', 'pg_stats_ext', 'pg_stats_ext_exprs') \
     and a.grantee = 0 and a.privilege_type = 'SELECT')";
