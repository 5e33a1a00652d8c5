//! One line per (change, subscription) for those projects that asked for it (`CDC_EXPLAIN`), in the words of explanations.

use std::{collections::HashMap, sync::Arc};

use aura_domain::{SubId, explain::StepName};
use aura_pgsource::{
    TableCatalog,
    visibility::{CheckOutcome, Verdict},
};

use super::{judge, placing::Placed, shard::Row};
use crate::{
    explain,
    subs::{control::Control, index::ActiveSubscription},
};

/// Logs what became of a row for every subscription of its table. `table` is `None` if another one stands under the name.
pub(super) fn write(
    control: &Control,
    row: &Row,
    placed: &Placed,
    table: Option<&TableCatalog>,
    outcome: &CheckOutcome,
) {
    let body = &row.body;
    let judged: HashMap<SubId, usize> = placed.subscribers.iter().map(|(sub, n)| (sub.sub_id, *n)).collect();
    let of_table = control.index(|index| index.of_table(&body.table.key));
    let others = of_table.into_iter().filter(|sub| !judged.contains_key(&sub.sub_id));
    for sub in placed.subscribers.iter().map(|(sub, _)| Arc::clone(sub)).chain(others) {
        let verdict = judged.get(&sub.sub_id).map(|n| &outcome.verdicts[*n]);
        let (step, reason) = match (verdict, table) {
            (Some(verdict), Some(table)) => of_verdict(&sub, verdict, placed, table),
            (Some(_), None) => (StepName::Policies, "Another table stands under the name.".to_owned()),
            (None, _) => unmatched(&sub, row, placed),
        };
        let sent = step == StepName::Sent;
        tracing::info!(target: "aura::explain", source = %control.source, project = %body.table.key.project,
            position = %body.change.position, kind = body.change.kind.as_str(), schema = %body.table.key.schema,
            table = %body.table.key.table, sub_id = %sub.sub_id.0, role = %sub.identity.role,
            outcome = if sent { "sent" } else { "dropped" }, step = step.as_str(), reason, "verdict");
    }
}

fn of_verdict(
    sub: &ActiveSubscription,
    verdict: &Verdict,
    placed: &Placed,
    table: &TableCatalog,
) -> (StepName, String) {
    let (access, visible) = match verdict {
        Verdict::Error(kind) => return (StepName::Policies, explain::error(kind).1),
        Verdict::Decided { access, visible } => (access, visible),
    };
    if !access.any() {
        return (StepName::Grants, "The role may read nothing of the table.".to_owned());
    }
    let seen = placed.new.or(placed.old).is_some_and(|image| visible.get(image) == Some(&true));
    match judge::projection(sub, verdict, placed, table) {
        Some(_) => (StepName::Sent, "It goes to the bus.".to_owned()),
        None if seen => (StepName::Columns, "No column is left.".to_owned()),
        None => (StepName::Policies, "Row security hides the row.".to_owned()),
    }
}

fn unmatched(sub: &ActiveSubscription, row: &Row, placed: &Placed) -> (StepName, String) {
    let kind = row.body.change.kind;
    if !sub.event.wants(kind) {
        return (
            StepName::Binding,
            format!("The subscription asks for {}, this is {}.", sub.event.as_str(), kind.as_str()),
        );
    }
    let undecided = placed.failed.iter().any(|(failed, _)| failed.sub_id == sub.sub_id);
    let reason = if undecided { "A condition could not be decided." } else { "The row does not fulfil the filter." };
    (StepName::Filter, reason.to_owned())
}
