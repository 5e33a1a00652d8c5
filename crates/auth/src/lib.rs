//! aura-auth
