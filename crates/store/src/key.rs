use std::fmt;

use aura_domain::SubIdKey;
use chacha20poly1305::{
    Key, KeyInit, XChaCha20Poly1305, XNonce,
    aead::{Aead, Payload},
};
use hmac::{Hmac, Mac};
use secrecy::{ExposeSecret, SecretBox};
use sha2::Sha256;

/// First byte of a sealed value: XChaCha20-Poly1305 with a random 24-byte nonce behind it.
const VERSION: u8 = 1;
const NONCE_BYTES: usize = 24;

/// `AURA_MASTER_KEY`: seals secrets at rest, and is the root of keys that must be equal in every process.
#[derive(Clone)]
pub struct MasterKey(std::sync::Arc<SecretBox<[u8; 32]>>);

/// Why a key or a sealed value is of no use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Fewer than 32 bytes of text.
    #[error("the master key must have at least 32 bytes")]
    TooShort,
    /// Sealed under another key or for another purpose, or damaged.
    #[error("a sealed value does not open with this master key")]
    Sealed,
}

impl MasterKey {
    /// Shortest accepted text, in bytes.
    pub const MIN_BYTES: usize = 32;

    /// From the text of `AURA_MASTER_KEY`, at least 32 bytes; all of them count.
    pub fn new(text: &str) -> Result<Self, KeyError> {
        if text.len() < Self::MIN_BYTES {
            return Err(KeyError::TooShort);
        }
        Ok(Self(std::sync::Arc::new(SecretBox::new(Box::new(hmac(text.as_bytes(), b"aura master key v1"))))))
    }

    /// Encrypts; `aad` says what it is and whose, and must be the same to open it.
    pub fn seal(&self, plain: &[u8], aad: &str) -> Vec<u8> {
        let nonce: [u8; NONCE_BYTES] = rand::random();
        let payload = Payload { msg: plain, aad: aad.as_bytes() };
        let sealed = self.cipher().encrypt(&XNonce::from(nonce), payload).expect("a secret is far below 256 GiB");
        [&[VERSION][..], &nonce, &sealed].concat()
    }

    /// Opens what [`MasterKey::seal`] made with the same `aad`.
    pub fn open(&self, sealed: &[u8], aad: &str) -> Result<Vec<u8>, KeyError> {
        let (&version, rest) = sealed.split_first().ok_or(KeyError::Sealed)?;
        let (nonce, body) = rest.split_first_chunk::<NONCE_BYTES>().ok_or(KeyError::Sealed)?;
        if version != VERSION {
            return Err(KeyError::Sealed);
        }
        let payload = Payload { msg: body, aad: aad.as_bytes() };
        self.cipher().decrypt(&XNonce::from(*nonce), payload).map_err(|_| KeyError::Sealed)
    }

    /// A key for one purpose, equal in every process with this master key.
    pub fn derive(&self, label: &str) -> [u8; 32] {
        hmac(self.0.expose_secret(), label.as_bytes())
    }

    /// The key of `sub_id`s (design §9).
    pub fn sub_id_key(&self) -> SubIdKey {
        SubIdKey::new(self.derive("sub_id v1"))
    }

    fn cipher(&self) -> XChaCha20Poly1305 {
        XChaCha20Poly1305::new(&Key::from(self.derive("seal v1")))
    }
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MasterKey(…)")
    }
}

fn hmac(key: &[u8], message: &[u8]) -> [u8; 32] {
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(key).expect("HMAC takes a key of any length");
    mac.update(message);
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(fill: char) -> MasterKey {
        MasterKey::new(&fill.to_string().repeat(32)).expect("long enough")
    }

    #[test]
    fn r_sec_2_sealing_round_trips_and_hides() {
        let sealed = key('a').seal(b"secret", "project x");
        assert_eq!(key('a').open(&sealed, "project x").as_deref(), Ok(&b"secret"[..]));
        assert!(!sealed.windows(6).any(|window| window == b"secret"));
        assert_ne!(sealed, key('a').seal(b"secret", "project x"), "nonces are fresh");
    }

    #[test]
    fn r_sec_2_another_key_purpose_or_bit_does_not_open() {
        let sealed = key('a').seal(b"secret", "project x");
        assert_eq!(key('b').open(&sealed, "project x"), Err(KeyError::Sealed));
        assert_eq!(key('a').open(&sealed, "project y"), Err(KeyError::Sealed));
        for at in 0..sealed.len() {
            let mut bad = sealed.clone();
            bad[at] ^= 1;
            assert_eq!(key('a').open(&bad, "project x"), Err(KeyError::Sealed), "byte {at}");
            assert_eq!(key('a').open(&sealed[..at], "project x"), Err(KeyError::Sealed), "{at} bytes");
        }
    }

    #[test]
    fn short_keys_are_refused_and_none_is_printed() {
        assert_eq!(MasterKey::new(&"x".repeat(31)).map(|_| ()), Err(KeyError::TooShort));
        assert_eq!(format!("{:?}", key('k')), "MasterKey(…)");
        assert_ne!(key('a').derive("x"), key('a').derive("y"));
        assert_ne!(key('a').derive("x"), MasterKey::new(&"a".repeat(33)).expect("long").derive("x"));
    }
}
