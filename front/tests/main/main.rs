//! The front as clients see it: real sockets on an in-process bus, a leader of ours (for faults), tokens that say what they
//! stand for. The last module authenticates against a real platform database.

mod broadcast;
mod changes;
mod client;
mod failover;
mod joins;
mod leader;
mod outage;
mod rig;
mod sockets;
mod stored_projects;
mod streams;
mod tokens;
