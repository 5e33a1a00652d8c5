//! The control plane on a real PostgreSQL, with a worker played by the test.

mod audit;
mod contract;
mod crash;
mod credentials;
mod document;
mod engines;
mod harness;
mod keys;
mod once;
mod permission;
mod process;
mod project_changes;
mod projects;
mod rotation;
mod sources;
mod studio;
mod takeover;
mod toggle;
mod toggle_crowd;
mod toggle_limits;
mod toggle_names;
mod toggle_partitions;
mod verbs;
