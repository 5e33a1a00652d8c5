use aura_domain::{Position, ProjectId, SourceId, SubId};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// A change on the bus, payload v1 (design §9): one per (change, projection). Written by the worker.
#[derive(Debug, Serialize)]
pub struct ChangeEnvelope<'a> {
    /// Always 1.
    pub v: u8,
    /// Tenant; a front checks it against the subject's.
    pub project: ProjectId,
    /// Source that it came from.
    pub source: SourceId,
    /// Per project, +1 a message, from 1 in each epoch. A message that is published again keeps it.
    pub seq: u64,
    /// Which change.
    pub position: Position,
    /// Number of the projection among those of this change, from 0.
    pub m: u32,
    /// `INSERT`, `UPDATE`, `DELETE`, `TRUNCATE`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The client's schema word.
    pub schema: &'a str,
    /// Table, a partitioned one's root.
    pub table: &'a str,
    /// Exactly who may see it: matching bindings only; empty = nobody.
    pub allowed_sub_ids: &'a [SubId],
    /// `[i, n]` where the list was split, i from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<[u32; 2]>,
    /// The exact object a client receives.
    pub data: &'a RawValue,
}

impl ChangeEnvelope<'_> {
    /// The payload.
    pub fn encode(&self) -> Bytes {
        serde_json::to_vec(self).expect("an envelope has string keys only").into()
    }
}

/// The same as a front reads it; `data` is spliced into client frames, never re-encoded.
#[derive(Debug, Deserialize)]
pub struct IncomingChange<'a> {
    /// See [`ChangeEnvelope::v`].
    pub v: u8,
    /// See [`ChangeEnvelope::project`].
    pub project: ProjectId,
    /// See [`ChangeEnvelope::source`].
    pub source: SourceId,
    /// See [`ChangeEnvelope::seq`].
    pub seq: u64,
    /// See [`ChangeEnvelope::position`].
    pub position: Position,
    /// See [`ChangeEnvelope::m`].
    pub m: u32,
    /// See [`ChangeEnvelope::kind`].
    #[serde(rename = "type")]
    pub kind: &'a str,
    /// See [`ChangeEnvelope::schema`].
    #[serde(borrow)]
    pub schema: std::borrow::Cow<'a, str>,
    /// See [`ChangeEnvelope::table`].
    #[serde(borrow)]
    pub table: std::borrow::Cow<'a, str>,
    /// Required, and an array: absent or of another type is an error (fail closed).
    pub allowed_sub_ids: Vec<SubId>,
    /// See [`ChangeEnvelope::part`].
    #[serde(default)]
    pub part: Option<[u32; 2]>,
    /// See [`ChangeEnvelope::data`].
    #[serde(borrow)]
    pub data: &'a RawValue,
}

/// Why a payload is dropped (and counted).
#[derive(Debug, thiserror::Error)]
pub enum EnvelopeError {
    /// Not an envelope, or `allowed_sub_ids` is absent or not an array of ids.
    #[error("malformed envelope: {0}")]
    Malformed(#[from] serde_json::Error),
    /// Written by a newer worker.
    #[error("unknown envelope version {0}")]
    UnknownVersion(u8),
}

impl<'a> IncomingChange<'a> {
    /// Reads a payload; anything doubtful is an error, and the message goes to nobody.
    pub fn decode(payload: &'a [u8]) -> Result<Self, EnvelopeError> {
        let envelope: Self = serde_json::from_slice(payload)?;
        if envelope.v == 1 { Ok(envelope) } else { Err(EnvelopeError::UnknownVersion(envelope.v)) }
    }
}

/// Why changes may be missing (closed set).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GapReason {
    /// The slot was lost or gone and had to be made again.
    SlotRecreated,
    /// Positions lost their meaning (restore, failover, other source).
    NewGeneration,
    /// A policy or the source failed for this identity.
    PolicyError,
    /// A policy reads what an image of the log doesn't have, or writes (R-RLS-4): nobody can judge it.
    NotJudgeable,
    /// The event could not be decoded or was too large.
    Undecodable,
    /// The table was replaced, renamed or got a partition that was found late.
    TableChanged,
    /// The project was skipped since it held everybody up.
    Skipped,
    /// The bus lost messages between worker and front.
    Bus,
    /// Another worker took over before this front's subscriptions reached it.
    Failover,
}

/// `aura.realtime.<project>.gap`: a range of positions that some subscriber may have missed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GapEnvelope {
    /// Always 1.
    pub v: u8,
    /// Tenant.
    pub project: ProjectId,
    /// Source.
    pub source: SourceId,
    /// First position that may be missing; `null` = unknown.
    pub from: Option<Position>,
    /// Last position that may be missing; `null` = everything up to now.
    pub to: Option<Position>,
    /// Why.
    pub reason: GapReason,
    /// `[schema word, table]` it is limited to; absent = all of the project.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tables: Option<Vec<[String; 2]>>,
    /// Subscriptions it is limited to; absent = all. An error concerns only who caused it (R-RLS-6).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sub_ids: Option<Vec<SubId>>,
}

impl GapEnvelope {
    /// The payload.
    pub fn encode(&self) -> Bytes {
        serde_json::to_vec(self).expect("a gap has string keys only").into()
    }
}

#[cfg(test)]
mod tests {
    use aura_domain::{Generation, Lsn};

    use super::*;

    const GOLDEN: &str = include_str!("../golden/change.v1.json");

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).expect("JSON")
    }

    #[test]
    fn change_v1_is_the_golden_file() {
        let data = raw(r#"{"type":"INSERT","record":{"id":1.10}}"#);
        let envelope = ChangeEnvelope {
            v: 1,
            project: "6a0c2a2e-4f0a-4b62-9b5f-2f0f7e0d9c11".parse().expect("an id"),
            source: "0b0e9d6e-0000-4000-8000-000000000001".parse().expect("an id"),
            seq: 7,
            position: Position { generation: Generation(1), commit: Lsn(0x16b_3748), change: Lsn(0x16b_3700), n: 0 },
            m: 0,
            kind: "INSERT",
            schema: "public",
            table: "we\"ird",
            allowed_sub_ids: &[SubId(u64::MAX), SubId(1)],
            part: None,
            data: &data,
        };
        let bytes = envelope.encode();
        assert_eq!(std::str::from_utf8(&bytes).expect("UTF-8"), GOLDEN.trim_end());
        let read = IncomingChange::decode(&bytes).expect("it reads what it writes");
        assert_eq!(read.allowed_sub_ids, [SubId(u64::MAX), SubId(1)]);
        assert_eq!(read.table, "we\"ird");
        assert_eq!(read.data.get(), data.get(), "bytes of data are untouched");
    }

    #[test]
    fn a_doubtful_audience_is_nobody() {
        for list in ["", r#""allowed_sub_ids":null,"#, r#""allowed_sub_ids":"all","#, r#""allowed_sub_ids":[-1],"#] {
            let golden = GOLDEN.replace(r#""allowed_sub_ids":[18446744073709551615,1],"#, list);
            assert!(IncomingChange::decode(golden.as_bytes()).is_err(), "{list}");
        }
        assert!(IncomingChange::decode(GOLDEN.as_bytes()).is_ok());
        let newer = GOLDEN.replace(r#""v":1"#, r#""v":2"#);
        assert!(matches!(IncomingChange::decode(newer.as_bytes()), Err(EnvelopeError::UnknownVersion(2))));
    }
}
