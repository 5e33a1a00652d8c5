//! The shared memory of the machines: the standard library's, or loom's under its test.

#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
};

#[cfg(not(feature = "loom"))]
pub(crate) use atomic_waker::AtomicWaker;
#[cfg(feature = "loom")]
pub(crate) use loom::{
    future::AtomicWaker,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

/// The two have different names for it.
pub(crate) fn register(waker: &AtomicWaker, by: &std::task::Waker) {
    #[cfg(not(feature = "loom"))]
    waker.register(by);
    #[cfg(feature = "loom")]
    waker.register_by_ref(by);
}
