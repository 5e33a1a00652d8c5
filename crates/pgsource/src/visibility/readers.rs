//! Which roles may read anything of a table, as of a moment ago: what a join is answered with. No row goes by it.

use std::time::Duration;

use aura_domain::{ProjectId, Relation};
use moka::future::Cache;

use super::VisibilityPool;

/// How old an answer may be: as old as what the worker knows of its registry. So thousands of joins after a fail-over ask
/// once per table and role.
const FRESH: Duration = Duration::from_secs(3);
const MOST: u64 = 10_000;
/// A source that doesn't answer holds no join up for longer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Tenant, table and role word.
type Key = (ProjectId, Relation, String);

#[derive(Debug)]
pub(super) struct Readers(Cache<Key, bool>);

impl Default for Readers {
    fn default() -> Self {
        Self(Cache::builder().time_to_live(FRESH).max_capacity(MOST).build())
    }
}

impl VisibilityPool {
    /// Whether the role has USAGE on the table's schema and SELECT on any of its columns. Answers may be 3 s old, and are
    /// `true` where the source can't be asked: the rows themselves are judged when they come.
    pub async fn may_read(&self, project: ProjectId, relation: &Relation, role: &str, extra_roles: &[String]) -> bool {
        let ask = async {
            let described = tokio::time::timeout(PATIENCE, self.describe(project, relation, role, extra_roles)).await;
            match described {
                Ok(Ok(Some((_, access)))) => access.any(),
                Ok(Ok(None)) => false,
                Ok(Err(_)) | Err(_) => true,
            }
        };
        // On the heap: it is part of every join's future, and rarely asked.
        Box::pin(self.readers.0.get_with((project, relation.clone(), role.to_owned()), ask)).await
    }
}
