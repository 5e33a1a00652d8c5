//! The words of the product as types: identifiers, names, positions and changes. No I/O, no async.

mod access;
mod change;
mod engine;
pub mod explain;
mod finding;
mod identity;
mod ids;
mod lsn;
mod names;
#[cfg(feature = "openapi")]
mod openapi;
mod position;
mod report;
mod words;

pub use access::{AccessRules, KeyRole, LiveKey, LiveSecret, Target};
pub use change::{Cell, Change, ChangeKind, Image, Relation, Value};
pub use engine::{
    Condition, Desired, EngineState, LAGGING_BYTES, OnDeadline, OperationKind, Verb, VerbEffect, state_tables,
};
pub use finding::{Finding, Severity};
pub use identity::{Claims, ClaimsError, EventFilter, SubIdKey, SubscriptionSpec};
pub use ids::{Epoch, FrontId, Generation, ParseIdError, ProjectId, SourceId, SubId, WorkerId};
pub use lsn::{Lsn, ParseLsnError};
pub use names::{NameError, SqlName, quote_ident, quote_literal};
#[cfg(feature = "openapi")]
#[doc(hidden)]
pub use openapi::word_schema;
pub use position::{ParsePositionError, Position};
pub use report::{
    ConditionNote, Culprit, DrainReport, EngineLive, EngineReport, ExitReport, ExitState, FlowLive, Lag, LsnReport,
    Outcome, Rung, ShardReport, SlotLive, Timed, Trigger, climb_again,
};
#[cfg(feature = "openapi")]
#[doc(hidden)]
pub use utoipa;
pub use words::ParseWordError;
