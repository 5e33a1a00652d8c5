//! The words of the product as types: identifiers, names, positions and changes. No I/O, no async.

mod change;
mod identity;
mod ids;
mod lsn;
mod names;
mod position;

pub use change::{Cell, Change, ChangeKind, Image, Relation, Value};
pub use identity::{Claims, ClaimsError, EventFilter, SubIdKey, SubscriptionSpec};
pub use ids::{Epoch, FrontId, Generation, ParseIdError, ProjectId, SourceId, SubId, WorkerId};
pub use lsn::{Lsn, ParseLsnError};
pub use names::{NameError, SqlName, quote_ident, quote_literal};
pub use position::{ParsePositionError, Position};
