//! What the system tests and the benchmark stand on: stages (the product running), stock clients, curl, tokens.
//! Everything is black-box: built binaries, HTTP, sockets, SQL.

use std::time::Duration;

mod client;
mod curl;
mod jwt;
mod split;
mod stage;

pub use client::{Client, Kind};
pub use curl::{Answer, curl};
pub use jwt::sign;
pub use split::Split;
pub use stage::{Dev, Directory, Project, now};

/// Long enough for a busy machine, short enough for a person.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Subjects of two end users.
pub const ALICE: &str = "a11ce000-0000-4000-8000-000000000001";
/// See [`ALICE`].
pub const BOB: &str = "b0b00000-0000-4000-8000-000000000002";
