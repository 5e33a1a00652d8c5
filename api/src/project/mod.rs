//! Tenants: what may be set, what a change does in the source, and their end.

mod change;
mod delete;
mod settings;

pub(crate) use change::{change, preview};
pub(crate) use delete::{DeletedView, Deletion, delete, finish, plan_deletion, reconcile};
pub(crate) use settings::{PatchProject, SettingsView, check_name, check_schema};
