//! The replication half against a real PostgreSQL with wal2json.

mod filters;
mod lab;
mod pgoutput;
mod slots;
mod stream;
mod transport;
