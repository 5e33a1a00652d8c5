//! Phoenix frames.
