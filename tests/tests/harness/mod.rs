//! What the system tests stand on: stages (the product running), stock clients, curl, tokens.

use std::time::Duration;

mod client;
mod curl;
mod jwt;
mod split;
mod stage;

pub(crate) use client::{Client, Kind};
pub(crate) use curl::{Answer, curl};
pub(crate) use jwt::sign;
pub(crate) use split::Split;
pub(crate) use stage::{Dev, Directory, Project};

/// Long enough for a busy machine, short enough for a person.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Subjects of two end users.
pub(crate) const ALICE: &str = "a11ce000-0000-4000-8000-000000000001";
/// See [`ALICE`].
pub(crate) const BOB: &str = "b0b00000-0000-4000-8000-000000000002";
