//! The step of the filter: what a join is told of it, then each condition with the row's value.

use aura_domain::{Image, SubId, SubscriptionSpec, Value as Cell, explain::StepName};
use aura_pgsource::conditions::{Answers, DecidedBy, Explained, Truth};
use aura_wire::control::Subscription;
use serde_json::{Value, json};

use super::{Explainer, steps::Steps, verdict::UNREACHABLE};
use crate::{
    engine::registry::{RegisteredTable, Registry},
    subs::{
        admission::{self, Refusal},
        index::{Active, ActiveSubscription},
    },
};

/// What was found out before any row.
enum Admitted {
    Active(ActiveSubscription),
    /// Why there is nothing to try, and whether that is the filter's fault.
    Not(Option<bool>, String),
}

impl Explainer {
    /// Answers the subscription with its conditions, if they could be compiled.
    pub(super) async fn filter(
        &self,
        steps: &mut Steps,
        registry: &Registry,
        table: &RegisteredTable,
        (spec, image): (&SubscriptionSpec, Option<&Image>),
    ) -> Option<ActiveSubscription> {
        let text = spec.filter.as_deref().unwrap_or_default();
        if text.trim().is_empty() {
            steps.add(StepName::Filter, Some(true), "There is no filter.", json!({"filter": null}));
            return None;
        }
        let detail = json!({"filter": text});
        let active = match self.admitted(registry, table, spec).await {
            Admitted::Active(active) => active,
            Admitted::Not(passed, message) => {
                steps.add(StepName::Filter, passed, message, detail);
                return None;
            }
        };
        let Some(image) = image else {
            let message = "The filter is valid; the row's images are not remembered, so it can't be tried.";
            steps.add(StepName::Filter, None, message, detail);
            return Some(active);
        };
        self.tried(steps, table, &active, (text, image)).await;
        Some(active)
    }

    async fn admitted(&self, registry: &Registry, table: &RegisteredTable, spec: &SubscriptionSpec) -> Admitted {
        if !admission::is_role(&spec.role, &table.project) {
            return Admitted::Not(None, "The role is none of the project's.".to_owned());
        }
        // Nobody joins: the ids mean nothing here.
        let alone = SubscriptionSpec { select: None, ..spec.clone() };
        let subscription = Subscription { sub_id: SubId(0), twin: SubId(0), spec: alone };
        match admission::admit(&subscription, registry, &self.control.visibility).await {
            Ok(Active::Table(_, active)) => Admitted::Active(active),
            Err(Refusal::Fatal(message)) => {
                Admitted::Not(Some(false), format!("A join with this filter is refused: {message}"))
            }
            Ok(_) | Err(_) => Admitted::Not(None, UNREACHABLE.to_owned()),
        }
    }

    async fn tried(
        &self,
        steps: &mut Steps,
        table: &RegisteredTable,
        active: &ActiveSubscription,
        (text, image): (&str, &Image),
    ) {
        let mut answers = Answers::default();
        let _opened = active.explain(image, &mut answers);
        if answers.has_open() && self.control.visibility.decide(table.project.tenant(), &mut answers).await.is_err() {
            return steps.add(StepName::Filter, None, UNREACHABLE, json!({"filter": text}));
        }
        let tried = active.explain(image, &mut answers);
        let passed = tried.iter().all(|tried| tried.truth == Truth::True);
        let failed = tried.iter().any(|tried| matches!(tried.truth, Truth::Failed | Truth::Open));
        let message = match (passed, failed) {
            (true, _) => "The row fulfils the filter.",
            (false, true) => "A condition could not be decided, so the row does not fulfil the filter.",
            (false, false) => "The row does not fulfil the filter.",
        };
        let conditions: Vec<Value> = tried.iter().map(|tried| condition(tried, image)).collect();
        steps.add(StepName::Filter, Some(passed), message, json!({"filter": text, "conditions": conditions}));
    }
}

fn condition(tried: &Explained<'_>, image: &Image) -> Value {
    let condition = tried.condition;
    let truth = match tried.truth {
        Truth::True => "true",
        Truth::False => "false",
        Truth::Null => "null",
        Truth::Failed | Truth::Open => "undecided",
    };
    let by = if tried.by == DecidedBy::Us { "worker" } else { "postgres" };
    json!({"column": condition.column, "operator": condition.operator.word(), "negated": condition.negated,
        "values": condition.values, "row": shown(image.get(&condition.column)), "result": truth, "decided_by": by,
        "passed": tried.truth == Truth::True})
}

/// A value of the row as text; what isn't there is said.
fn shown(value: Option<&Cell>) -> Value {
    match value {
        Some(Cell::Text(text)) => json!({"value": text}),
        Some(Cell::Null) => json!({"value": null}),
        Some(Cell::Unchanged) => json!({"absent": "unchanged"}),
        None => json!({"absent": "not_in_the_image"}),
    }
}
