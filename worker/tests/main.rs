//! The engine on real parts: PostgreSQL with wal2json, the platform database, a bus.

#![allow(clippy::large_futures, reason = "a test runs once")]

mod delivery;
mod faults;
mod flow;
mod http;
mod hung;
mod lifecycle;
mod losses;
mod names;
mod pool;
mod slots;
mod stage;
mod successor;
