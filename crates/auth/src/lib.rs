//! Keys and tokens: who is asking, and as what. Verification only; what a role may do is decided by the extractors of
//! the surfaces (R-SEC-1). The only crate that knows jsonwebtoken.

mod error;
#[cfg(feature = "issuer")]
pub mod issuer;
mod jwks;
mod mint;
mod peek;
mod verify;

pub use aura_domain::{AccessRules, KeyRole, LiveKey, LiveSecret};
pub use error::AuthError;
pub use jwks::{JwksOptions, UrlError};
pub use mint::{INSPECTOR_LIFETIME, KEY_LIFETIME, MintError, Minter, generate_secret};
pub use peek::{Peeked, peek, token_from_headers};
pub use verify::{Role, Verified, Verifier, is_inspector};

/// `iss` of every key that we mint.
pub const ISSUER: &str = "aura";
/// Clock skew between issuer and us that we accept, in seconds (R-SEC-2).
pub const LEEWAY_SECONDS: u64 = 10;
/// Longest token in bytes that is looked at; servers in front of us cut headers at 8 KiB.
pub const MAX_TOKEN_BYTES: usize = 8192;
