//! What the system tests and the benchmark stand on: stages (the product running), stock clients, curl, tokens.
//! Everything is black-box: built binaries, HTTP, sockets, SQL.

use std::time::Duration;

mod client;
mod curl;
mod jwt;
mod ledger;
mod scene;
mod socket;
mod split;
mod stage;
mod tap;

pub use client::{Client, Kind};
pub use curl::{Answer, curl};
pub use jwt::sign;
pub use ledger::{Audit, Ledger, Writer};
pub use scene::{QUOTA, Scene, peak};
pub use socket::{Announcement, Arrival, At, Seen, Subscriber};
pub use split::{MASTER_KEY, SLOT, Split, SplitOptions, Worker};
pub use stage::{Dev, Directory, Project, now};
pub use tap::{BusTap, Tapped};

/// Long enough for a busy machine, short enough for a person.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Subjects of two end users.
pub const ALICE: &str = "a11ce000-0000-4000-8000-000000000001";
/// See [`ALICE`].
pub const BOB: &str = "b0b00000-0000-4000-8000-000000000002";
