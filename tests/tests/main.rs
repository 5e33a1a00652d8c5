//! System tests: the built binaries, real PostgreSQL, real NATS, stock clients.

mod direction;
