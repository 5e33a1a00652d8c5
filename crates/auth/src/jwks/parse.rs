use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use jsonwebtoken::{
    Algorithm, DecodingKey,
    jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, KeyOperations, PublicKeyUse},
};
use serde::Deserialize;
use serde_json::Value;

/// Most keys of a set.
const MAX_KEYS: usize = 32;
/// Longest key id in bytes.
pub(super) const MAX_KID: usize = 256;
/// Longest modulus of an RSA key as base64url: 4096 bits, the most that the verifier takes.
const MAX_MODULUS: usize = 684;
/// Shortest: 2048 bits.
const MIN_MODULUS: usize = 342;

/// Keys by their ids.
pub(super) type Keys = HashMap<String, Arc<SetKey>>;

/// A public key, with the only algorithm that it verifies.
#[derive(Debug)]
pub(crate) struct SetKey {
    pub(crate) algorithm: Algorithm,
    pub(crate) key: DecodingKey,
}

/// Why an answer is no key set.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SetError {
    #[error("the answer is not a key set")]
    Malformed,
    #[error("the set has more than {MAX_KEYS} keys")]
    TooMany,
    /// Whoever added the second one could speak for the first.
    #[error("two keys of the set have the same id")]
    Duplicate,
}

#[derive(Deserialize)]
struct Set {
    keys: Vec<Value>,
}

/// Reads a set. Keys that we can't use (for encryption, without an id, of another kind) are left out: sets have many uses.
pub(super) fn parse(body: &[u8]) -> Result<Keys, SetError> {
    let set: Set = serde_json::from_slice(body).map_err(|_| SetError::Malformed)?;
    if set.keys.len() > MAX_KEYS {
        return Err(SetError::TooMany);
    }
    let mut seen = HashSet::new();
    let ids = set.keys.iter().filter_map(|key| key["kid"].as_str());
    if !ids.into_iter().all(|kid| seen.insert(kid)) {
        return Err(SetError::Duplicate);
    }
    Ok(set.keys.iter().filter_map(usable).collect())
}

fn usable(value: &Value) -> Option<(String, Arc<SetKey>)> {
    let kid = value["kid"].as_str().filter(|kid| !kid.is_empty() && kid.len() <= MAX_KID)?;
    let jwk = Jwk::deserialize(value).ok()?;
    let common = &jwk.common;
    let signs = common.public_key_use.as_ref().is_none_or(|usage| *usage == PublicKeyUse::Signature);
    let verifies = common.key_operations.as_ref().is_none_or(|all| all.contains(&KeyOperations::Verify));
    let algorithm = algorithm(&jwk).filter(|_| signs && verifies)?;
    let key = DecodingKey::from_jwk(&jwk).ok()?;
    Some((kid.to_owned(), Arc::new(SetKey { algorithm, key })))
}

/// From the key's own words. Symmetric keys have no place in a public set.
fn algorithm(jwk: &Jwk) -> Option<Algorithm> {
    use KeyAlgorithm as K;
    let named = jwk.common.key_algorithm;
    match &jwk.algorithm {
        AlgorithmParameters::RSA(rsa) if (MIN_MODULUS..=MAX_MODULUS).contains(&rsa.n.trim_end_matches('=').len()) => {
            match named {
                None | Some(K::RS256) => Some(Algorithm::RS256),
                Some(K::RS384) => Some(Algorithm::RS384),
                Some(K::RS512) => Some(Algorithm::RS512),
                Some(K::PS256) => Some(Algorithm::PS256),
                Some(K::PS384) => Some(Algorithm::PS384),
                Some(K::PS512) => Some(Algorithm::PS512),
                Some(_) => None,
            }
        }
        AlgorithmParameters::EllipticCurve(curve) => match (&curve.curve, named) {
            (EllipticCurve::P256, None | Some(K::ES256)) => Some(Algorithm::ES256),
            (EllipticCurve::P384, None | Some(K::ES384)) => Some(Algorithm::ES384),
            _ => None,
        },
        AlgorithmParameters::OctetKeyPair(pair) => match (&pair.curve, named) {
            (EllipticCurve::Ed25519, None | Some(K::EdDSA)) => Some(Algorithm::EdDSA),
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The P-256 key of RFC 7517, appendix A.1.
    fn elliptic(kid: &str) -> Value {
        json!({"kty": "EC", "crv": "P-256", "kid": kid,
            "x": "MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4", "y": "4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM"})
    }

    fn with(mut key: Value, name: &str, value: Value) -> Value {
        key[name] = value;
        key
    }

    fn parsed(keys: &[Value]) -> Result<Keys, SetError> {
        parse(json!({"keys": keys}).to_string().as_bytes())
    }

    #[test]
    fn r_sec_2_a_key_id_that_is_there_twice_refuses_the_set() {
        assert!(parsed(&[elliptic("a"), elliptic("b")]).is_ok_and(|keys| keys.len() == 2));
        assert_eq!(parsed(&[elliptic("a"), elliptic("a")]).map(|_| ()), Err(SetError::Duplicate));
        let useless = json!({"kty": "oct", "k": "c2VjcmV0", "kid": "a"});
        assert_eq!(parsed(&[elliptic("a"), useless]).map(|_| ()), Err(SetError::Duplicate), "useless ones count, too");
    }

    #[test]
    fn r_sec_2_symmetric_and_unsuitable_keys_are_left_out() {
        let short = json!({"kty": "RSA", "n": "a".repeat(171), "e": "AQAB", "kid": "k"});
        let long = json!({"kty": "RSA", "n": "a".repeat(10_000), "e": "AQAB", "kid": "k"});
        for key in [
            json!({"kty": "oct", "k": "c2VjcmV0", "alg": "HS256", "kid": "k"}),
            with(elliptic("k"), "use", json!("enc")),
            with(elliptic("k"), "key_ops", json!(["deriveKey"])),
            with(elliptic("k"), "alg", json!("HS256")),
            with(elliptic("k"), "alg", json!("RS256")),
            with(elliptic("k"), "alg", json!("none")),
            with(elliptic("k"), "crv", json!("P-521")),
            with(elliptic("k"), "kid", json!(7)),
            with(elliptic("k"), "kid", json!("")),
            with(elliptic("k"), "kid", json!("x".repeat(MAX_KID + 1))),
            json!({"kty": "EC"}),
            json!("text"),
            short,
            long,
        ] {
            assert_eq!(parsed(std::slice::from_ref(&key)).map(|keys| keys.len()), Ok(0), "{key}");
        }
        let usable = parsed(&[with(elliptic("k"), "use", json!("sig"))]).expect("a set");
        assert_eq!(usable["k"].algorithm, Algorithm::ES256);
    }

    #[test]
    fn r_sec_2_what_is_no_set_or_too_large_a_one_is_refused() {
        for body in ["", "[]", "{}", "{\"keys\": 7}", "<html>", "{\"keys\": null}"] {
            assert_eq!(parse(body.as_bytes()).map(|_| ()), Err(SetError::Malformed), "{body}");
        }
        let deep = format!("{{\"keys\": {}", "[".repeat(10_000));
        assert_eq!(parse(deep.as_bytes()).map(|_| ()), Err(SetError::Malformed));
        let many: Vec<_> = (0..=MAX_KEYS).map(|n| elliptic(&n.to_string())).collect();
        assert_eq!(parsed(&many).map(|_| ()), Err(SetError::TooMany));
    }
}
