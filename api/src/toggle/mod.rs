//! The toggle: what PUT, GET and DELETE of a table's realtime state do (R-REG).

mod change;
mod identity;
mod locks;
mod options;
mod partitions;
mod plan;
mod progress;
mod rate;
mod reconcile;
mod standing;
mod target;
mod view;
mod warnings;

pub(crate) use change::{Answer, Change, Desired, show};
pub(crate) use identity::problem;
pub(crate) use locks::TableLocks;
pub(crate) use options::Options;
pub(crate) use partitions::{Former, to_restore};
pub(crate) use progress::Progress;
pub(crate) use rate::ToggleRate;
pub(crate) use reconcile::reconcile;
pub(crate) use target::CHANGES_TABLE;
pub(crate) use view::{Mode, RegistrationView, Unregistered, etag, view};
