//! aura-store
