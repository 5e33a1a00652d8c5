//! `?dry_run=true`: what a PUT would do, in order.

use aura_pgsource::admin::TableInfo;
use aura_store::{Registration, RegistrationMode, Store};

use super::partitions::{full_sql, restore_sql, to_restore};
use crate::error::Result;

/// Of turning it on.
pub(super) fn on(known: Option<&Registration>, info: &TableInfo, mode: RegistrationMode) -> Vec<String> {
    let mut plan = Vec::new();
    let live = known.is_some_and(|known| known.enabled && (known.oid, known.mode) == (info.oid, mode));
    if !live {
        plan.push("register the table and signal the worker".to_owned());
    }
    if !info.is_full() {
        let waits = |sql: String| format!("{sql} (waits for its lock at most 3 s)");
        plan.extend(full_sql(info).into_iter().map(waits));
    }
    plan
}

/// Of turning it off.
pub(super) async fn off(store: &Store, known: Option<&Registration>, info: Option<&TableInfo>) -> Result<Vec<String>> {
    let mut plan = Vec::new();
    let Some(known) = known.filter(|known| known.enabled) else { return Ok(plan) };
    plan.push("take the table out of the filter and signal the worker".to_owned());
    if known.mode == RegistrationMode::Auto {
        plan.extend(to_restore(store, known, info).await?.iter().map(restore_sql));
    }
    Ok(plan)
}
