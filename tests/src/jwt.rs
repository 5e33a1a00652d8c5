//! Tokens as a tenant's own server signs them, and bad ones.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
use hmac::{Hmac, KeyInit, Mac};
use serde_json::{Value, json};
use sha2::Sha256;

/// An HS256 token.
pub fn sign(secret: &str, payload: &Value) -> String {
    let header = json!({"alg": "HS256", "typ": "JWT"});
    let signed = format!("{}.{}", BASE64.encode(header.to_string()), BASE64.encode(payload.to_string()));
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).expect("HMAC takes a key of any length");
    mac.update(signed.as_bytes());
    format!("{signed}.{}", BASE64.encode(mac.finalize().into_bytes()))
}
