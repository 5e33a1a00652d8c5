//! Flow control, positions and the phases of a drain, as state machines.
//!
//! No I/O, no runtime and no clock: whoever drives a machine tells it what happened and what time it is, and does what it
//! answers. So the worker, property tests, loom and the simulator all run the very same code.

mod debounce;
mod drain;
mod feedback;
mod heartbeat;
mod quota;
mod resolved;
mod sync;

pub use debounce::Debounce;
pub use drain::{Budget, DrainEvent, DrainPlanner, DrainTimes, Phase};
pub use feedback::{Feedback, FeedbackKind};
pub use heartbeat::Heartbeat;
pub use quota::{Quota, Reservation, Turn};
pub use resolved::{Culprit, Owner, ResolvedTracker, RowClaim};
