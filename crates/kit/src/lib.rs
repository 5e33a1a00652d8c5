//! What every binary needs and no part of the product is about: boot, configuration, telemetry, problem+json, shutdown
//! phases, health and metrics listener.

pub mod boot;
pub mod code;
pub mod config;
mod exit;
mod failure;
pub mod http;
pub mod json;
pub mod probes;
pub mod problem;
pub mod request_id;
pub mod shutdown;
pub mod telemetry;

pub use boot::{Configuration, run, supervise};
pub use code::Code;
pub use config::{Environment, PlatformArgs, PlatformKeyArgs, Problems};
pub use failure::{Component, Failure, with_causes};
pub use json::{Json, JsonBytes};
pub use probes::{MetricsAccess, Probes, Report};
pub use problem::Problem;
pub use shutdown::{Cap, ShutdownArgs, ShutdownHandle, ShutdownOptions};
pub use telemetry::{Metrics, TelemetryArgs};
