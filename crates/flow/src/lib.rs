//! Flow control, positions and the phases of a drain, as state machines.
//!
//! No I/O, no runtime and no clock: whoever drives a machine tells it what happened and what time it is, and does what it
//! answers. So the worker, property tests, loom and the simulator all run the very same code.

mod debounce;
mod drain;
mod feedback;
mod heartbeat;
mod quota;
mod reader;
mod resolved;
mod row;
mod shard;
mod stall;
mod sync;

pub use debounce::Debounce;
pub use drain::{Budget, DrainEvent, DrainPlanner, DrainTimes, Phase};
pub use feedback::{Feedback, FeedbackKind};
pub use heartbeat::Heartbeat;
pub use quota::{Quota, QuotaCounts, Reservation, Turn};
pub use reader::{Change, Opening, Reader, ReaderLimits, StatusUpdate, Step};
pub use resolved::{Culprit, Owner, ResolvedTracker, RowClaim};
pub use row::{Admission, Row};
pub use shard::{Batch, Job, Outcome, Shard, ShardGauges, ShardLimits};
pub use stall::{Outage, Stall, StallWatch};
