use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::{ChangeKind, ProjectId, SubId};

/// Which events a binding wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EventFilter {
    /// Every change of a row.
    #[serde(rename = "*")]
    All,
    /// Only INSERT.
    #[serde(rename = "INSERT")]
    Insert,
    /// Only UPDATE.
    #[serde(rename = "UPDATE")]
    Update,
    /// Only DELETE.
    #[serde(rename = "DELETE")]
    Delete,
}

impl EventFilter {
    /// As the original reads it: case-insensitive, anything unknown behaves as `*` (supabase-wire.md §2.1).
    pub fn from_client(word: &str) -> Self {
        match word.to_ascii_uppercase().as_str() {
            "INSERT" => Self::Insert,
            "UPDATE" => Self::Update,
            "DELETE" => Self::Delete,
            _ => Self::All,
        }
    }

    /// Whether it asks for changes of this kind. TRUNCATE is no event of clients.
    pub fn wants(self, kind: ChangeKind) -> bool {
        match kind {
            ChangeKind::Insert => matches!(self, Self::All | Self::Insert),
            ChangeKind::Update => matches!(self, Self::All | Self::Update),
            ChangeKind::Delete => matches!(self, Self::All | Self::Delete),
            ChangeKind::Truncate => false,
        }
    }

    /// The word on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::All => "*",
            Self::Insert => "INSERT",
            Self::Update => "UPDATE",
            Self::Delete => "DELETE",
        }
    }
}

/// A subscriber's JWT claims as policies see them: a JSON object without `iat`, `exp` and `jti`, keys sorted, so that
/// a refreshed token is the same identity (design §9).
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Claims(String);

/// Why claims can't be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ClaimsError {
    /// Not a JSON object.
    #[error("claims must be a JSON object")]
    NotAnObject,
    /// PostgreSQL's `jsonb` refuses U+0000; one such claim would fail every policy.
    #[error("claims must not contain NUL")]
    Nul,
}

impl Claims {
    /// Canonical form of a token's payload.
    pub fn from_payload(payload: &serde_json::Value) -> Result<Self, ClaimsError> {
        let serde_json::Value::Object(map) = payload else { return Err(ClaimsError::NotAnObject) };
        let mut map = map.clone();
        for volatile in ["iat", "exp", "jti"] {
            map.remove(volatile);
        }
        map.sort_keys();
        let text = serde_json::Value::Object(map).to_string();
        if has_nul_escape(&text) { Err(ClaimsError::Nul) } else { Ok(Self(text)) }
    }

    /// The JSON text.
    pub fn as_json(&self) -> &str {
        &self.0
    }
}

/// Whether JSON text holds the escape of U+0000: `\u0000` behind an even number of backslashes.
fn has_nul_escape(json: &str) -> bool {
    json.match_indices("\\u0000").any(|(at, _)| json[..at].bytes().rev().take_while(|b| *b == b'\\').count() % 2 == 0)
}

/// Everything a `sub_id` stands for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SubscriptionSpec {
    /// Tenant.
    pub project: ProjectId,
    /// The client's schema word (`public` for the main schema), `*` = all of the project's.
    pub schema: String,
    /// Table; `None` = all of the schema.
    pub table: Option<String>,
    /// Events.
    pub event: EventFilter,
    /// The filter text as the client wrote it; `None` = all rows.
    pub filter: Option<String>,
    /// Selected columns; `None` = all the role may read.
    pub select: Option<Vec<String>>,
    /// Role word of the token (`anon`, `authenticated`, `service_role`, …).
    pub role: String,
    /// Claims of the token.
    pub claims: Claims,
}

/// The key under which `sub_id`s are computed, equal in every process of an installation.
#[derive(Clone)]
pub struct SubIdKey([u8; 32]);

impl SubIdKey {
    /// Wraps key bytes derived from the master key.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Keyed 64-bit hash of (project, schema, table, event, filter, select, role, claims).
    pub fn sub_id(&self, spec: &SubscriptionSpec) -> SubId {
        self.hash(spec, Some(spec.claims.as_json()))
    }

    /// The claim-less twin, listed where the table has no row security: one id for all viewers of a public table.
    pub fn twin(&self, spec: &SubscriptionSpec) -> SubId {
        self.hash(spec, None)
    }

    fn hash(&self, spec: &SubscriptionSpec, claims: Option<&str>) -> SubId {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes a key of any length");
        mac.update(spec.project.0.as_bytes());
        let mut field = |text: Option<&str>| match text {
            // The length keeps fields apart, the tag keeps "absent" apart from "empty".
            Some(text) => {
                mac.update(&[1]);
                mac.update(&(text.len() as u64).to_le_bytes());
                mac.update(text.as_bytes());
            }
            None => mac.update(&[0]),
        };
        field(Some(&spec.schema));
        field(spec.table.as_deref());
        field(Some(spec.event.as_str()));
        field(spec.filter.as_deref());
        field(spec.select.as_ref().map(|columns| columns.len().to_string()).as_deref());
        for column in spec.select.iter().flatten() {
            field(Some(column));
        }
        field(Some(&spec.role));
        field(claims);
        let digest = mac.finalize().into_bytes();
        SubId(u64::from_le_bytes(digest[..8].try_into().expect("a SHA-256 digest has 32 bytes")))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(sub: &str) -> SubscriptionSpec {
        SubscriptionSpec {
            project: ProjectId(uuid::Uuid::nil()),
            schema: "public".to_owned(),
            table: Some("t".to_owned()),
            event: EventFilter::All,
            filter: None,
            select: None,
            role: "authenticated".to_owned(),
            claims: Claims::from_payload(&json!({"sub": sub, "exp": 1, "iat": 2, "jti": "x"})).expect("an object"),
        }
    }

    #[test]
    fn a_refreshed_token_is_the_same_identity() {
        let a = Claims::from_payload(&json!({"sub": "a", "role": "r", "exp": 1}));
        let b = Claims::from_payload(&json!({"role": "r", "exp": 2, "iat": 9, "jti": "q", "sub": "a"}));
        assert_eq!(a, b);
        assert_eq!(a.as_ref().map(Claims::as_json), Ok(r#"{"role":"r","sub":"a"}"#));
    }

    #[test]
    fn claims_that_postgres_refuses_are_refused_first() {
        assert_eq!(Claims::from_payload(&json!({"a": "x\u{0}y"})), Err(ClaimsError::Nul));
        assert!(Claims::from_payload(&json!({"a": "\\u0000 as text"})).is_ok());
        assert_eq!(Claims::from_payload(&json!([1])), Err(ClaimsError::NotAnObject));
    }

    #[test]
    fn every_part_of_a_binding_changes_its_sub_id() {
        let key = SubIdKey::new([7; 32]);
        let base = spec("a");
        let variants = [
            SubscriptionSpec { schema: "other".to_owned(), ..base.clone() },
            SubscriptionSpec { table: None, ..base.clone() },
            SubscriptionSpec { event: EventFilter::Insert, ..base.clone() },
            SubscriptionSpec { filter: Some(String::new()), ..base.clone() },
            SubscriptionSpec { select: Some(vec![]), ..base.clone() },
            SubscriptionSpec { select: Some(vec!["a".to_owned()]), ..base.clone() },
            SubscriptionSpec { role: "anon".to_owned(), ..base.clone() },
            spec("b"),
        ];
        let mut ids: Vec<_> = variants.iter().chain([&base]).map(|spec| key.sub_id(spec)).collect();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), variants.len() + 1);
        assert_eq!(key.twin(&base), key.twin(&spec("b")), "the twin leaves the claims out");
        assert_ne!(key.sub_id(&base), SubIdKey::new([8; 32]).sub_id(&base));
    }
}
