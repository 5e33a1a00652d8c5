//! What every binary gets from the kit.

mod limits;
mod problems;
mod process;
mod server;
