//! aura-front
