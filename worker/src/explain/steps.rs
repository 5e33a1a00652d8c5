//! A list of steps in the making, and what follows from it.

use aura_domain::explain::{Ending, Step, StepName};
use serde_json::{Map, Value};

/// Steps so far, in order.
#[derive(Debug, Default)]
pub(super) struct Steps(Vec<Step>);

impl Steps {
    /// `detail` is an object.
    pub(super) fn add(&mut self, step: StepName, passed: Option<bool>, message: impl Into<String>, detail: Value) {
        let detail = if let Value::Object(detail) = detail { detail } else { Map::new() };
        self.0.push(Step { step, passed, message: message.into(), detail });
    }

    pub(super) fn failed(&self) -> Option<StepName> {
        self.0.iter().find(|step| step.passed == Some(false)).map(|step| step.step)
    }

    /// The first step that failed decides; without one, a step of which nothing is known leaves it open.
    pub(super) fn ending(&self, made_up: bool) -> Ending {
        let (yes, no) = if made_up { (Ending::WouldSend, Ending::WouldDrop) } else { (Ending::Sent, Ending::Dropped) };
        let open = |step: &Step| step.passed.is_none() && !(made_up && step.step == StepName::Sent);
        match self.failed() {
            Some(_) => no,
            None if self.0.iter().any(open) => Ending::Unknown,
            None => yes,
        }
    }

    /// All of them; those that are missing had nothing to go by.
    pub(super) fn finish(mut self) -> Vec<Step> {
        for step in StepName::ALL {
            if !self.0.iter().any(|known| known.step == *step) {
                self.add(*step, None, "Not looked at: the steps before it leave nothing to decide.", Value::Null);
            }
        }
        self.0.sort_by_key(|step| step.step);
        self.0
    }
}
