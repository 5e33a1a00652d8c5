//! aura-worker
