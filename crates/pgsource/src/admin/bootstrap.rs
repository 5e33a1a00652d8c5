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

/// Whether PUBLIC lacks SELECT on the statistics views.
pub(crate) const STATISTICS_HIDDEN_SQL: &str = "select not exists (select from pg_class c, \
     aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) a \
     where c.relnamespace = 'pg_catalog'::regnamespace and c.relname in ('pg_stats', 'pg_stats_ext', 'pg_stats_ext_exprs') \
     and a.grantee = 0 and a.privilege_type = 'SELECT')";
