//! The toggle: what PUT, GET and DELETE of a table's realtime state do (R-REG).

mod change;
mod locks;
mod options;
mod partitions;
mod progress;
mod rate;
mod reconcile;
mod target;
mod view;

pub(crate) use change::{Answer, Change, show};
pub(crate) use locks::TableLocks;
pub(crate) use options::Options;
pub(crate) use partitions::{Former, to_restore};
pub(crate) use progress::Progress;
pub(crate) use rate::ToggleRate;
pub(crate) use reconcile::{problem, reconcile};
pub(crate) use target::CHANGES_TABLE;
pub(crate) use view::{RegistrationView, Unregistered, etag, view};
