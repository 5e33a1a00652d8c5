use std::sync::Arc;

use aura_domain::{Change, ChangeKind, Generation, Image, Lsn, Position, Relation};
use bytes::Bytes;

use crate::{Plugin, pgoutput::PgOutput, wal2json::Wal2json};

/// What one message of the stream means, the same for both plugins (R-DEC-1).
#[derive(Debug, Clone, PartialEq)]
pub enum LogEvent {
    /// A committed transaction begins.
    Begin {
        /// Its 32-bit id.
        xid: u32,
        /// Start of its commit record: the commit LSN of its positions.
        commit: Lsn,
        /// End of its commit record, what is confirmed to the server. pgoutput says it only at the commit: zero here.
        end: Lsn,
        /// Commit time, microseconds since 1970-01-01 UTC.
        commit_time_us: i64,
    },
    /// A row came, changed or went.
    Change(Change),
    /// Tables were emptied by one statement. wal2json says one per message, pgoutput all in one.
    Truncate(Vec<Change>),
    /// The transaction ends.
    Commit {
        /// Start of the commit record.
        commit: Lsn,
        /// End of the commit record, what is confirmed to the server.
        end: Lsn,
    },
    /// A message that can't be used. The stream goes on; if it was a row, its subscribers have a gap (R-DEC-4).
    Skipped {
        /// Why.
        reason: SkipReason,
        /// Whose row it was, where that could be read.
        relation: Option<Arc<Relation>>,
    },
    /// Nothing for us: a logical message, an origin, a type, a relation.
    Other,
}

/// Why a message can't be used; a label of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SkipReason {
    /// The database's encoding gave bytes that are not UTF-8.
    NotUtf8,
    /// Not the plugin's format, or cut off.
    Malformed,
    /// A row outside of a transaction whose begin could be read.
    NoTransaction,
    /// A schema or table name that no PostgreSQL has.
    BadName,
    /// A row of a relation that was never described (pgoutput).
    UnknownRelation,
    /// Longer than the stream's limit.
    TooLong,
}

impl SkipReason {
    /// The label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotUtf8 => "not_utf8",
            Self::Malformed => "malformed",
            Self::NoTransaction => "no_transaction",
            Self::BadName => "bad_name",
            Self::UnknownRelation => "unknown_relation",
            Self::TooLong => "too_long",
        }
    }
}

/// What a message is to its transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame {
    /// Its begin.
    Begin,
    /// Its end.
    Commit,
    /// Anything else, or nothing that can be read.
    Inside,
}

/// Turns the plugin's messages into [`LogEvent`]s and gives each change its position (R-LSN-6). One per session: the
/// state is the open transaction and the names seen.
#[derive(Debug)]
pub struct Decoder {
    format: Format,
    context: Context,
}

#[derive(Debug)]
enum Format {
    Wal2json(Wal2json),
    PgOutput(PgOutput),
}

impl Decoder {
    /// A decoder for a new session.
    pub fn new(plugin: Plugin, generation: Generation) -> Self {
        let format = match plugin {
            Plugin::Wal2json => Format::Wal2json(Wal2json::default()),
            Plugin::PgOutput => Format::PgOutput(PgOutput::default()),
        };
        Self { format, context: Context { generation, transaction: None, rows: RowCounter::default() } }
    }

    /// The generation of its positions.
    pub fn generation(&self) -> Generation {
        self.context.generation
    }

    /// Decodes the payload of an XLogData whose header said `start`. Never fails and never panics (R-DEC-4).
    pub fn decode(&mut self, start: Lsn, payload: &Bytes) -> LogEvent {
        match &mut self.format {
            Format::Wal2json(format) => format.decode(&mut self.context, start, payload),
            Format::PgOutput(format) => format.decode(&mut self.context, start, payload),
        }
    }

    /// What a message is to its transaction, by its first bytes alone.
    pub fn frame(&self, payload: &[u8]) -> Frame {
        let (begin, commit): (&[u8], &[u8]) = match &self.format {
            Format::Wal2json(_) => (br#"{"action":"B""#, br#"{"action":"C""#),
            Format::PgOutput(_) => (b"B", b"C"),
        };
        match payload {
            _ if payload.starts_with(begin) => Frame::Begin,
            _ if payload.starts_with(commit) => Frame::Commit,
            _ => Frame::Inside,
        }
    }

    /// The message will not be decoded. Rows behind a begin that wasn't belong to no known transaction, and are
    /// [`SkipReason::NoTransaction`] until the next one.
    pub fn pass_over(&mut self, payload: &[u8]) -> Frame {
        let frame = self.frame(payload);
        if frame != Frame::Inside {
            self.context.transaction = None;
        }
        frame
    }

    /// What a message that was too long to be read means, from its beginning.
    pub fn oversize(&self, prefix: &[u8]) -> LogEvent {
        let relation = match &self.format {
            Format::Wal2json(_) => crate::wal2json::relation_hint(prefix).map(Arc::new),
            Format::PgOutput(format) => format.relation_hint(prefix),
        };
        LogEvent::Skipped { reason: SkipReason::TooLong, relation }
    }
}

/// What both formats need besides the message: the open transaction and the row count.
#[derive(Debug)]
pub(crate) struct Context {
    generation: Generation,
    pub(crate) transaction: Option<Transaction>,
    rows: RowCounter,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Transaction {
    pub(crate) xid: u32,
    pub(crate) commit: Lsn,
    pub(crate) end: Lsn,
    pub(crate) commit_time_us: i64,
}

/// A decoded row before it has its position.
pub(crate) struct Row {
    pub(crate) kind: ChangeKind,
    pub(crate) relation: Arc<Relation>,
    pub(crate) new: Option<Image>,
    pub(crate) old: Option<Image>,
    pub(crate) wire_bytes: usize,
}

impl Context {
    pub(crate) fn begin(&mut self, transaction: Transaction) -> LogEvent {
        self.transaction = Some(transaction);
        self.rows = RowCounter::default();
        let Transaction { xid, commit, end, commit_time_us } = transaction;
        LogEvent::Begin { xid, commit, end, commit_time_us }
    }

    pub(crate) fn commit(&mut self, commit: Lsn, end: Lsn) -> LogEvent {
        self.transaction = None;
        LogEvent::Commit { commit, end }
    }

    /// The change of a row; `n` counts the rows of the record and relation.
    pub(crate) fn row(&mut self, start: Lsn, row: Row) -> Result<Change, SkipReason> {
        let n = self.rows.next(start, &row.relation);
        self.change(start, n, row)
    }

    pub(crate) fn change(&self, start: Lsn, n: u32, row: Row) -> Result<Change, SkipReason> {
        let transaction = self.transaction.ok_or(SkipReason::NoTransaction)?;
        let position = Position { generation: self.generation, commit: transaction.commit, change: start, n };
        let Row { kind, relation, new, old, wire_bytes } = row;
        let Transaction { xid, commit_time_us, .. } = transaction;
        Ok(Change { position, xid, commit_time_us, kind, relation, new, old, wire_bytes })
    }
}

/// Counts the rows of one record per relation: all rows of a multi-insert share their record's LSN.
#[derive(Debug, Default)]
struct RowCounter {
    record: Lsn,
    counts: Vec<(Arc<Relation>, u32)>,
}

impl RowCounter {
    fn next(&mut self, record: Lsn, relation: &Arc<Relation>) -> u32 {
        if self.record != record {
            self.record = record;
            self.counts.clear();
        }
        let same = |other: &Arc<Relation>| Arc::ptr_eq(other, relation) || other == relation;
        if let Some((_, n)) = self.counts.iter_mut().find(|(other, _)| same(other)) {
            *n += 1;
            return *n;
        }
        self.counts.push((Arc::clone(relation), 0));
        0
    }
}

/// Fills what the new image lacks from the old one: under FULL that is unchanged TOAST (R-DEC-3). Keeps the old image's
/// column order. Columns that are in neither stay absent; the catalogue tells them.
pub(crate) fn fill_unchanged(new: &mut Image, old: &Image) {
    use aura_domain::Value;
    let mut at = 0;
    for cell in &old.0 {
        let is_same = |other: &aura_domain::Cell| Arc::ptr_eq(&other.name, &cell.name) || other.name == cell.name;
        let found = if new.0.get(at).is_some_and(is_same) { Some(at) } else { new.0.iter().position(is_same) };
        match found {
            Some(index) => {
                if new.0[index].value == Value::Unchanged {
                    new.0[index].value.clone_from(&cell.value);
                }
                at = index + 1;
            }
            None => {
                new.0.insert(at.min(new.0.len()), cell.clone());
                at += 1;
            }
        }
    }
}
