//! What every back end must do. Each function panics with the rule that it broke.
