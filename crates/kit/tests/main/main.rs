//! What every binary gets from the kit.

mod problems;
mod process;
mod server;
