//! The engine on real parts: PostgreSQL with wal2json, the platform database, a bus.

mod delivery;
mod stage;
