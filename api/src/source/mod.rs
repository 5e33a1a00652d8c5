//! Customers' databases as the control plane sees them: connections, what they have and lack, change and deletion.

mod check;
mod pool;
mod write;

pub(crate) use check::{Checked, check};
pub(crate) use pool::{AdminLease, Sources};
pub(crate) use write::{Deleted, Fate, Remains, change, delete, plan_deletion};
