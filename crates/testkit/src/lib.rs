//! aura-testkit
