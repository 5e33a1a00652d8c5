//! The source database: the replication transport, the two decoders, slots and publications; catalogue, replica
//! identity and visibility. SQL to customers' databases is built in this crate only (R-SEC-3).

mod error;
mod sockets;
mod sql;
mod transport;
mod url;

pub use error::{ServerError, SourceError};
pub use sockets::Sockets;
pub use sql::{SqlConnection, connect_sql};
pub use tokio_postgres::error::SqlState;
pub use url::SourceUrl;
