//! System tests: the built binaries, real PostgreSQL, real NATS, stock clients.

mod attack;
mod clients;
mod dev;
mod direction;
mod joins;
mod keys;
mod load;
mod names;
mod plugin;
mod serve;
mod shutdown;
