//! aura-kit
