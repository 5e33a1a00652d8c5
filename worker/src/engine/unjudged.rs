//! Whose rows nobody could judge, and why: they get nothing, and are told (R-RLS-4, R-RLS-6).

use std::collections::BTreeMap;

use aura_domain::{Image, Position, SubId, Value};
use aura_pgsource::{
    TableCatalog,
    visibility::{CheckOutcome, IdentityErrorKind, Verdict},
};
use aura_wire::GapReason;

use super::{judge::projection, placing::Placed, shard::Row};
use crate::subs::index::ActiveSubscription;

/// Counters and reasons.
const POLICY_ERROR: (&str, GapReason) = ("cdc_policy_errors_total", GapReason::PolicyError);
const NOT_JUDGEABLE: (&str, GapReason) = ("cdc_not_judgeable_total", GapReason::NotJudgeable);

/// Whom one reason concerns, and where.
#[derive(Debug, Default)]
pub(super) struct Unjudged {
    pub(super) sub_ids: Vec<SubId>,
    /// In order.
    pub(super) positions: Vec<Position>,
}

/// What a check tells of itself.
pub(super) fn count(outcome: &CheckOutcome) {
    if outcome.unjudgeable > 0 {
        metrics::counter!("cdc_unjudgeable_images_total").increment(outcome.unjudgeable as u64);
    }
    if outcome.failed_statements > 0 {
        metrics::counter!("cdc_check_fallbacks_total").increment(outcome.failed_statements as u64);
    }
}

/// The project takes only tables with row security: without, nobody sees anything.
pub(super) fn withhold(outcome: &mut CheckOutcome) {
    metrics::counter!("cdc_withheld_batches_total", "reason" => "require_rls").increment(1);
    for verdict in &mut outcome.verdicts {
        if let Verdict::Decided { visible, .. } = verdict {
            visible.fill(false);
        }
    }
}

/// By reason; the rows are all of one table.
pub(super) fn by_reason<'a>(
    rows: impl Iterator<Item = (&'a Row, &'a Placed)>,
    outcome: &CheckOutcome,
) -> BTreeMap<&'static str, (GapReason, Unjudged)> {
    let mut found: BTreeMap<&'static str, (GapReason, Unjudged)> = BTreeMap::new();
    for (row, placed) in rows {
        let judged = placed.subscribers.iter();
        let judged =
            judged.filter_map(|(sub, n)| Some((cause(row, placed, &outcome.verdicts[*n], outcome)?, sub.sub_id)));
        let undecided = placed.failed.iter();
        let undecided = undecided.filter_map(|(sub, n)| {
            Some((undecided_cause(row, placed, sub, &outcome.verdicts[*n], outcome)?, sub.sub_id))
        });
        for ((metric, reason), sub_id) in judged.chain(undecided) {
            let (_, unjudged) = found.entry(metric).or_insert_with(|| (reason, Unjudged::default()));
            unjudged.sub_ids.push(sub_id);
            let position = row.body.change.position;
            if unjudged.positions.last() != Some(&position) {
                unjudged.positions.push(position);
            }
        }
    }
    for (metric, (_, unjudged)) in &mut found {
        unjudged.sub_ids.sort_unstable();
        unjudged.sub_ids.dedup();
        metrics::counter!(*metric).increment(unjudged.sub_ids.len() as u64);
    }
    found
}

/// The counter of the reason, and the reason.
fn cause(row: &Row, placed: &Placed, verdict: &Verdict, outcome: &CheckOutcome) -> Option<(&'static str, GapReason)> {
    match verdict {
        Verdict::Error(IdentityErrorKind::NotJudgeable) => Some(NOT_JUDGEABLE),
        Verdict::Error(_) => Some(POLICY_ERROR),
        Verdict::Decided { visible, .. } if outcome.unjudgeable > 0 => {
            let change = &row.body.change;
            let hidden = placed.new.or(placed.old).is_some_and(|image| !visible.get(image).copied().unwrap_or(false));
            let image = change.new.as_ref().or(change.old.as_ref());
            let lacking = image.zip(outcome.table.as_ref()).is_some_and(|(image, table)| lacks(image, table));
            (hidden && lacking).then_some(NOT_JUDGEABLE)
        }
        Verdict::Decided { .. } => None,
    }
}

/// Whose filter could not be decided is told of rows that he may see: a condition that fails for some values only would
/// otherwise tell of the others', too.
fn undecided_cause(
    row: &Row,
    placed: &Placed,
    sub: &ActiveSubscription,
    verdict: &Verdict,
    outcome: &CheckOutcome,
) -> Option<(&'static str, GapReason)> {
    let shown = outcome.table.as_ref().and_then(|table| projection(sub, verdict, placed, table));
    cause(row, placed, verdict, outcome).or_else(|| shown.map(|_| POLICY_ERROR))
}

/// Which columns the policies read is the check's knowledge: it has denied some image since that lacks one.
fn lacks(image: &Image, table: &TableCatalog) -> bool {
    let absent = |name: &str| matches!(image.get(name), None | Some(Value::Unchanged));
    table.columns.iter().any(|column| absent(&column.name))
}
