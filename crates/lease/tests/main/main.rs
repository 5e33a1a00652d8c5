//! Leases: the holder's loop, the Kubernetes back end, and the fake API server that it is tested against.

mod contract;
mod holder;
mod kubernetes;
mod model;
mod none;
mod server;
