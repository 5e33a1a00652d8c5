//! What the worker knows of subscribers.

pub(crate) mod admission;
pub(crate) mod control;
mod hearing;
pub(crate) mod index;
pub(crate) mod table;
