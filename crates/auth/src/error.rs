use jsonwebtoken::errors::{Error, ErrorKind};

/// Why a token was not accepted. Never holds the token or a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// No token was sent.
    #[error("no key was sent")]
    Missing,
    /// Not a JSON web token, or longer than 8 KiB.
    #[error("not a JSON web token")]
    Malformed,
    /// `exp` has passed.
    #[error("the token has expired")]
    Expired,
    /// `nbf` is still to come.
    #[error("the token is not valid yet")]
    NotYetValid,
    /// The signature isn't ours, or the header names an algorithm that isn't the key's.
    #[error("the signature is not valid")]
    Forged,
    /// A claim that must be there isn't.
    #[error("the claim `{0}` is missing")]
    MissingClaim(&'static str),
    /// A claim of the wrong type or with a value that can't be.
    #[error("the claim `{0}` is not acceptable")]
    BadClaim(&'static str),
    /// `aud` isn't the project's.
    #[error("the token is for another audience")]
    WrongAudience,
    /// The key that `kid` names is revoked or never was.
    #[error("the key has been revoked")]
    Revoked,
    /// `ref` names another project.
    #[error("the token belongs to another project")]
    WrongProject,
    /// The role is only accepted from a key with a live `kid`.
    #[error("this role is only accepted from an API key")]
    RoleNeedsKey,
    /// Neither `anon` nor `authenticated` nor one of the project's own role words.
    #[error("the project has no such role")]
    UnknownRole,
    /// The token names a key of the project's JWKS, which could never be read, or not for a day.
    #[error("the project's key set can't be read now")]
    KeySetUnavailable,
}

impl From<Error> for AuthError {
    fn from(error: Error) -> Self {
        match error.kind() {
            ErrorKind::ExpiredSignature => Self::Expired,
            ErrorKind::ImmatureSignature => Self::NotYetValid,
            ErrorKind::InvalidSignature | ErrorKind::InvalidAlgorithm => Self::Forged,
            ErrorKind::InvalidAudience => Self::WrongAudience,
            ErrorKind::InvalidIssuer => Self::BadClaim("iss"),
            ErrorKind::MissingRequiredClaim(claim) => Self::MissingClaim(known(claim)),
            ErrorKind::InvalidClaimFormat(claim) => Self::BadClaim(known(claim)),
            _ => Self::Malformed,
        }
    }
}

/// Names only claims that we ask for, so that nothing of a token's contents gets into an error.
fn known(claim: &str) -> &'static str {
    ["exp", "nbf", "aud", "iss", "sub"].into_iter().find(|known| *known == claim).unwrap_or("unknown")
}
