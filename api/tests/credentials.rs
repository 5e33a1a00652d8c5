//! Every kind of key and token that somebody may send (R-SEC-1), good ones and bad ones.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result};
use aura_auth::{KeyRole, Minter, generate_secret, peek};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
use hmac::{Hmac, KeyInit, Mac};
use secrecy::ExposeSecret;
use serde_json::{Map, Value, json};
use sha2::Sha256;
use uuid::Uuid;

use crate::harness::{Platform, Tenant};

const HOUR: Duration = Duration::from_secs(3600);
/// A public key as a project's JWKS would hold it. Everybody has it, so nothing may be signed with it as if it were a secret.
const RSA_PUBLIC_KEY: &str = "-----BEGIN PUBLIC KEY-----
MIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8AMIIBCgKCAQEAz7bzsf2WTcXu6rksCWnv
fG31C/8WdUtPYtWSqKr1HbLFrOfAt02X1vjya2E9QzRZsSrr1njWads9ZdY1SqqM
v0kRt/84uw2grrvjsWayA53L5LNdiMW+LULf85eQBJCPOwXqcDhVRySKzmZChRtF
Q70H+VBtpZ1TpLZ666a5aZGMYlI0BskGwD0064QPio2VR1uNnN0A8N0euREO4jFz
DbHYt25pY4s9oYmkrb5eksANCsn19+/G0/+a0lvZK9s+8bALEwDwDs6yy910gNy+
i9I7SosSYOwthQ6AVCMUdb5LzM1S0mfm6n+r5f0lp2B2yfRuxGFvirZLJPXTLXa4
ZQIDAQAB
-----END PUBLIC KEY-----
";

/// What somebody sends, named from the point of view of one project, the path's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    None,
    Anon,
    Authenticated,
    Service,
    ForeignAnon,
    ForeignAuthenticated,
    ForeignService,
    Platform,
    Expired,
    ExpiredPlatform,
    Forged,
    ForgedPlatform,
    UnknownKey,
    AlgNone,
    /// Says RS256, signed with the project's HS256 secret.
    RsHeader,
    /// Says HS256, signed with a public key in place of the secret.
    HsWithPublicKey,
    /// A role that only keys have, in a token that the project's own server signed without a key id.
    SelfMadeService,
    SelfMadePlatform,
    NoToken,
}

impl Kind {
    /// Why the token is refused, whatever is asked; `None` if it is a good one.
    pub(crate) fn refusal(self) -> Option<&'static str> {
        match self {
            Self::None => Some("missing_credentials"),
            Self::Expired | Self::ExpiredPlatform => Some("token_expired"),
            Self::UnknownKey => Some("key_revoked"),
            Self::Forged
            | Self::ForgedPlatform
            | Self::AlgNone
            | Self::RsHeader
            | Self::HsWithPublicKey
            | Self::SelfMadeService
            | Self::SelfMadePlatform
            | Self::NoToken => Some("invalid_token"),
            Self::Anon
            | Self::Authenticated
            | Self::Service
            | Self::ForeignAnon
            | Self::ForeignAuthenticated
            | Self::ForeignService
            | Self::Platform => None,
        }
    }

    pub(crate) fn is_foreign(self) -> bool {
        matches!(self, Self::ForeignAnon | Self::ForeignAuthenticated | Self::ForeignService)
    }
}

/// One token of each kind; none for [`Kind::None`].
pub(crate) fn all(platform: &Platform, own: &Tenant, other: &Tenant) -> Result<BTreeMap<Kind, Option<String>>> {
    let (minter, foreign) = (Minter::new(&own.secret), Minter::new(&other.secret));
    let nobodys = generate_secret();
    let kid = peek(&own.service)?.kid.context("a key has an id")?;
    let claims = |exp: u64| json!({"iss": "aura", "ref": own.id, "role": "service_role", "exp": exp});
    let (good, past, secret) = (claims(4_000_000_000), claims(1), own.secret.expose_secret().as_bytes());
    let header = |alg: &str| json!({"alg": alg, "typ": "JWT", "kid": kid});
    let without_kid = json!({"alg": "HS256", "typ": "JWT"});
    let admin = json!({"iss": "aura", "ref": own.id, "role": "platform_admin", "exp": 4_000_000_000_u64});
    let tokens = [
        (Kind::Anon, own.anon.clone()),
        (Kind::Authenticated, minter.user_token(own.id, "alice", Map::new(), HOUR)?),
        (Kind::Service, own.service.clone()),
        (Kind::ForeignAnon, other.anon.clone()),
        (Kind::ForeignAuthenticated, foreign.user_token(other.id, "alice", Map::new(), HOUR)?),
        (Kind::ForeignService, other.service.clone()),
        (Kind::Platform, platform.platform_key.clone()),
        (Kind::Expired, signed(&header("HS256"), &past, secret)),
        (Kind::ExpiredPlatform, platform.expired_platform_key()),
        (Kind::Forged, Minter::new(&nobodys).project_key(own.id, kid, KeyRole::ServiceRole)?),
        (Kind::ForgedPlatform, Minter::new(&nobodys).platform_key(HOUR)?),
        (Kind::UnknownKey, minter.project_key(own.id, Uuid::new_v4(), KeyRole::ServiceRole)?),
        (Kind::AlgNone, format!("{}.", unsigned(&header("none"), &good))),
        (Kind::RsHeader, signed(&header("RS256"), &good, secret)),
        (Kind::HsWithPublicKey, signed(&header("HS256"), &good, RSA_PUBLIC_KEY.as_bytes())),
        (Kind::SelfMadeService, signed(&without_kid, &good, secret)),
        (Kind::SelfMadePlatform, signed(&without_kid, &admin, secret)),
        (Kind::NoToken, "abc".to_owned()),
    ];
    let tokens = tokens.into_iter().map(|(kind, token)| (kind, Some(token)));
    Ok(tokens.chain([(Kind::None, None)]).collect())
}

fn unsigned(header: &Value, claims: &Value) -> String {
    format!("{}.{}", BASE64.encode(header.to_string()), BASE64.encode(claims.to_string()))
}

/// An HS256 signature, whatever the header says.
pub(crate) fn signed(header: &Value, claims: &Value, secret: &[u8]) -> String {
    let unsigned = unsigned(header, claims);
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes a key of any length");
    mac.update(unsigned.as_bytes());
    format!("{unsigned}.{}", BASE64.encode(mac.finalize().into_bytes()))
}
