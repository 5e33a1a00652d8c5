//! aura-pgsource
