//! Engines from outside: what is known of them, without asking any of them (R-ENG-1).

mod view;

pub(crate) use view::{EngineView, view};
