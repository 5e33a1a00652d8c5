//! System tests: the built binaries, real PostgreSQL, real NATS, stock clients.

mod attack;
mod clients;
mod contract;
mod dev;
mod direction;
mod explain;
mod force;
mod joins;
mod keys;
mod kubernetes;
mod large;
mod load;
mod names;
mod network;
mod outside;
mod partitions;
mod pause;
mod plugin;
mod pool;
mod production;
mod rivals;
mod rls_faults;
mod serve;
mod shutdown;
mod source;
mod stop;
