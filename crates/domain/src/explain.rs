//! Why a subscription did or did not get a change: the question, as the api asks it of the worker that leads the source,
//! and the ordered answer.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{ChangeKind, Position, SubscriptionSpec, words};

/// One change, one subscription.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Question {
    /// Which subscription; it need not be live.
    pub subscription: SubscriptionSpec,
    /// Which change.
    pub change: Which,
}

/// Which change is asked about.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Which {
    /// The newest one of the subscription's table that the worker remembers.
    Newest,
    /// The newest one of a row that has these values, in PostgreSQL's text form or as JSON scalars.
    Row(Map<String, Value>),
    /// The one at this position.
    At(Position),
    /// One that never happened.
    MadeUp(MadeUp),
}

/// A row that somebody makes up. Values are PostgreSQL's text forms, or JSON scalars.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MadeUp {
    /// What would happen to it.
    pub kind: ChangeKind,
    /// The row after; columns that aren't named are null.
    pub record: Option<Map<String, Value>>,
    /// The row before.
    pub old_record: Option<Map<String, Value>>,
}

/// What a worker answers to a [`Question`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The verdict.
    Explained(Explanation),
    /// Another question is being answered: the project's own, or too many at once.
    Busy,
    /// The source didn't answer in time.
    Late,
}

words! {
    /// What became, or would become, of the change for the subscription.
    Ending {
        /// It was among those for whom the change went to the bus.
        Sent = "sent",
        /// It wasn't; the first step that failed says why.
        Dropped = "dropped",
        /// A made-up row that it would get.
        WouldSend = "would_send",
        /// A made-up row that it would not get.
        WouldDrop = "would_drop",
        /// Not known (any more, or yet): the steps say what is missing.
        Unknown = "unknown",
    }
}

words! {
    /// The steps of a verdict, in the order in which the worker takes them.
    StepName {
        /// Whether realtime is on for the table.
        Registered = "registered",
        /// Whether the running filter covers the table, and did when the change was committed.
        InFilter = "in_filter",
        /// Whether the worker has read the change.
        Decoded = "decoded",
        /// Whether the subscription asks for changes of this table and kind.
        Binding = "binding",
        /// Whether the row fulfils the subscription's filter.
        Filter = "filter",
        /// Whether the role may read the table at all.
        Grants = "grants",
        /// Whether row security shows the row to the role and claims.
        Policies = "policies",
        /// Which columns are left.
        Columns = "columns",
        /// Whether the bus has received it.
        Sent = "sent",
    }
}

/// One step of a verdict.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(as = ExplainStep))]
pub struct Step {
    /// Which.
    pub step: StepName,
    /// Null: not known, or nothing to decide since an earlier step failed.
    pub passed: Option<bool>,
    /// For people.
    #[cfg_attr(feature = "openapi", schema(example = "The table is live."))]
    pub message: String,
    /// For programs; the members depend on the step.
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub detail: Map<String, Value>,
}

/// What a worker remembers of a table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RememberedRange {
    /// Oldest change.
    pub from: Position,
    /// Newest change.
    pub to: Position,
    /// How many.
    pub changes: usize,
}

/// The ordered verdict.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(
    feature = "openapi",
    schema(example = json!({
        "outcome": "dropped",
        "reason": "policies",
        "position": "1-00000000016b3748-00000000016b3700-0",
        "remembered": {
            "from": "1-00000000016b3748-00000000016b3700-0",
            "to": "1-00000000016b3748-00000000016b3700-0",
            "changes": 1
        },
        "steps": [
            {"step": "registered", "passed": true, "message": "The table is live.", "detail": {}},
            {"step": "policies", "passed": false, "message": "No policy shows the row.", "detail": {}}
        ]
    }))
)]
pub struct Explanation {
    /// What became of it.
    pub outcome: Ending,
    /// The first step that failed.
    pub reason: Option<StepName>,
    /// Of the change that was looked at; null for a made-up row.
    pub position: Option<Position>,
    /// Changes of the table that can be asked about; null when there is none.
    pub remembered: Option<RememberedRange>,
    /// Every step, in order.
    pub steps: Vec<Step>,
}
