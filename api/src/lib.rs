//! aura-api
