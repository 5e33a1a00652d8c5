//! The engine on real parts: PostgreSQL with wal2json, the platform database, a bus.

#![allow(clippy::large_futures, reason = "a test runs once")]

mod deleted;
mod delivery;
mod faults;
mod filters;
mod flow;
mod hall;
mod http;
mod hung;
mod lifecycle;
mod losses;
mod names;
mod oracles;
mod partitions;
mod peers;
mod pool;
mod races;
mod refused;
mod slots;
mod stage;
mod successor;
