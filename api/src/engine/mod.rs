//! Engines from outside (R-ENG-1, R-ENG-3, R-ENG-6, R-ENG-7): what is known of them without asking any of them, and
//! what the api does itself when nobody else ends them.

mod attend;
mod closer;
mod shared;
mod slot;
mod task;
mod verbs;
mod view;

pub(crate) use attend::is_unreachable;
pub(crate) use closer::{Closer, sweep};
pub(crate) use verbs::{StopTerms, Stopped, conflict, force_close, new_slot, start, stop};
pub(crate) use view::{EngineView, lag_now, view};
