//! Whose filters fit a batch's rows: what PostgreSQL decides is asked before the rows are placed, and what conditions were
//! compiled against follows the tables.

use std::{sync::Arc, time::Duration};

use aura_domain::{Position, SubId};
use aura_pgsource::{SourceError, TableCatalog, conditions::Answers, visibility::CheckOutcome};
use aura_wire::{GapReason, control::Subscription};
use tokio::time::Instant;

use super::{
    judge::Judge,
    placing::{self, Placed, TableBatch},
    registry::RegisteredTable,
    shard::Row,
};
use crate::subs::{
    admission::{Refusal, compile_again},
    index::{ActiveSubscription, TableKey},
};

/// Times that a batch's open questions are asked: who joins meanwhile brings new ones.
const ROUNDS: usize = 4;
/// What compiling a table's conditions again may take; who isn't served by then ends, and is asked about again.
const COMPILE_BUDGET: Duration = Duration::from_secs(5);

impl Judge {
    /// Places rows, all of one project, with what PostgreSQL says to their subscribers' filters. Repeats while the source
    /// can't be reached.
    pub(super) async fn place<'a>(&self, rows: &'a [Row]) -> (Vec<TableBatch<'a>>, Vec<Placed>) {
        self.compile_wildcards(rows).await;
        let mut answers = Answers::default();
        let mut pause = Duration::from_millis(50);
        let (mut rows, mut rounds) = (rows, 0);
        loop {
            let placed = self.control.index(|index| placing::place(index, rows, &mut answers));
            if !answers.has_open() {
                return placed;
            }
            // Not more of them once these have their answers: those would be new questions.
            rows = &rows[..placed.1.len()];
            drop(placed);
            if rounds == ROUNDS {
                answers.give_up();
                continue;
            }
            let tenant = rows[0].body.table.project.tenant();
            match self.control.visibility.decide(tenant, &mut answers).await {
                Ok(()) => rounds += 1,
                Err(error) => self.wait_out(&error, &mut pause).await,
            }
        }
    }

    /// Wildcards with a filter find out about a table by its first row.
    async fn compile_wildcards(&self, rows: &[Row]) {
        let mut last: Option<&Arc<RegisteredTable>> = None;
        for row in rows {
            let table = &row.body.table;
            if last.is_some_and(|last| Arc::ptr_eq(last, table)) {
                continue;
            }
            last = Some(table);
            let missing = self.control.index(|index| index.uncompiled(&table.key));
            if missing.is_empty() {
                continue;
            }
            // What isn't there has no rows for anybody; the check says so.
            if let Some(catalog) = self.describe(table).await {
                self.compile(table, &catalog, missing, &[row.body.change.position], false).await;
            }
        }
    }

    async fn describe(&self, table: &RegisteredTable) -> Option<Arc<TableCatalog>> {
        let mut pause = Duration::from_millis(50);
        loop {
            let visibility = &self.control.visibility;
            let described = visibility.describe(table.project.id, &table.relation, "anon", &table.project.extra_roles);
            match described.await {
                Ok(described) => return described.map(|(catalog, _)| catalog),
                Err(error) => self.wait_out(&error, &mut pause).await,
            }
        }
    }

    /// Compiles the conditions of a table anew when the check found another type or collation than they were compiled
    /// for. Whether any was: then the rows are to be placed again. `last`: there is no other try, so who is affected ends.
    pub(super) async fn follow_types(
        &self,
        batches: &[TableBatch<'_>],
        outcomes: &[CheckOutcome],
        rows: &[Row],
        last: bool,
    ) -> bool {
        let mut any = false;
        for (batch, outcome) in batches.iter().zip(outcomes) {
            let Some(catalog) = outcome.table.as_ref().filter(|_| outcome.oid_matches) else { continue };
            let stale = self.control.index(|index| index.stale(&batch.table.key, catalog));
            if stale.is_empty() {
                continue;
            }
            any = true;
            let mine = rows.iter().filter(|row| Arc::ptr_eq(&row.body.table, batch.table));
            let positions: Vec<_> = mine.map(|row| row.body.change.position).collect();
            tracing::info!(source = %self.control.source, table = %batch.table.relation.table, subscriptions = stale.len(),
                "a column has another type, its filters are compiled again");
            self.compile(batch.table, catalog, stale, &positions, last).await;
        }
        any
    }

    /// Puts subscriptions under a table with conditions that fit its catalogue. Those that can't be have a gap from here on,
    /// and their fronts ask about them again and hear why.
    async fn compile(
        &self,
        table: &RegisteredTable,
        catalog: &TableCatalog,
        subscriptions: Vec<Subscription>,
        positions: &[Position],
        last: bool,
    ) {
        let mut deadline = Instant::now() + COMPILE_BUDGET;
        let mut lost = Vec::new();
        for subscription in subscriptions {
            let active = match self.try_compile(&subscription, table, catalog, &mut deadline).await {
                Some(active) if !last => active,
                _ => {
                    lost.push(subscription.sub_id);
                    continue;
                }
            };
            self.control.index_mut(|index| index.put(&table.key, active));
        }
        if !lost.is_empty() {
            self.end(&table.key, lost, positions).await;
        }
    }

    async fn try_compile(
        &self,
        subscription: &Subscription,
        table: &RegisteredTable,
        catalog: &TableCatalog,
        deadline: &mut Instant,
    ) -> Option<ActiveSubscription> {
        let mut pause = Duration::from_millis(50);
        loop {
            let compiling = compile_again(subscription, table, catalog, &self.control.visibility);
            match tokio::time::timeout_at(*deadline, compiling).await.ok()? {
                Ok(active) => return Some(active),
                // An outage is nobody's fault and takes nobody's time; nor is it anybody's that no connection is free.
                Err(Refusal::Unknown(error)) if error.is_unreachable() || matches!(error, SourceError::Busy { .. }) => {
                    self.wait_out(&error, &mut pause).await;
                    *deadline = Instant::now() + COMPILE_BUDGET;
                }
                Err(Refusal::Unknown(SourceError::Timeout { .. })) => return None,
                Err(Refusal::Unknown(error)) => {
                    tracing::warn!(source = %self.control.source, %error, "a filter can't be compiled again");
                    return None;
                }
                Err(_) => return None,
            }
        }
    }

    /// These subscriptions deliver nothing more until they are asked about again.
    async fn end(&self, key: &TableKey, lost: Vec<SubId>, positions: &[Position]) {
        metrics::counter!("cdc_filters_ended_total").increment(lost.len() as u64);
        self.control.index_mut(|index| lost.iter().for_each(|sub_id| index.deactivate(*sub_id)));
        let table = Some([key.schema.clone(), key.table.clone()]);
        let gap = self.gap(key.project, positions, GapReason::TableChanged, table, Some(lost));
        self.publish(std::slice::from_ref(&gap)).await;
        self.control.ask_for_snapshots().await;
    }
}
