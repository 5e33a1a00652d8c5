//! The front as clients see it: real sockets on an in-process bus, a leader of ours (for faults), tokens that say what they
//! stand for. `stored_projects` and `revoked` authenticate against a real platform database.

mod broadcast;
mod changes;
mod client;
mod failover;
mod joins;
mod leader;
mod outage;
mod revoked;
mod rig;
mod sockets;
mod stored_projects;
mod streams;
mod tokens;
