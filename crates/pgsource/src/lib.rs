//! The source database: the replication transport, the two decoders, slots and publications; catalogue, replica
//! identity and visibility. SQL to customers' databases is built in this crate only (R-SEC-3).

pub mod admin;
mod catalog;
pub mod conditions;
mod decode;
mod error;
mod filter;
mod frames;
mod hoist;
mod json;
pub mod ladder;
mod names;
mod pgoutput;
mod plugin;
pub mod preflight;
pub mod publication;
mod replication;
pub mod roles;
pub mod slot;
mod sockets;
mod sql;
mod transport;
mod types;
mod url;
pub mod visibility;
mod wal2json;

pub use catalog::{Column, RoleAccess, TableCatalog};
pub use decode::{Decoder, Frame, LogEvent, SkipReason};
pub use error::{ServerError, SourceError};
pub use filter::{FilterEntry, pgoutput_options, wal2json_options};
pub use json::{encode_string, encode_value, type_name};
pub use names::{Found, Partitions, names_of, never_written, partitions_of};
pub use plugin::{ParsePluginError, Plugin};
pub use replication::{ReplicationConnection, ReplicationStream, Status, StreamMessage, SystemIdentity};
pub use sockets::Sockets;
pub use sql::{SqlConnection, connect_sql};
pub use tokio_postgres::error::SqlState;
pub use types::{JsonForm, TypeInfo};
pub use url::SourceUrl;
pub use visibility::{CheckOutcome, CheckRequest, Identity, IdentityErrorKind, Verdict, VisibilityPool};
