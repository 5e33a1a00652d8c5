//! What the worker knows of subscribers.

pub(crate) mod admission;
pub(crate) mod control;
pub(crate) mod equality;
pub(crate) mod filter;
mod hearing;
pub(crate) mod index;
