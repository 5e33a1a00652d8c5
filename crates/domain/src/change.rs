use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{Position, SqlName};

/// What happened to the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum ChangeKind {
    /// A row came.
    Insert,
    /// A row changed.
    Update,
    /// A row went.
    Delete,
    /// All rows went.
    Truncate,
}

impl ChangeKind {
    /// The word clients know: `INSERT`, `UPDATE`, `DELETE`, `TRUNCATE`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Insert => "INSERT",
            Self::Update => "UPDATE",
            Self::Delete => "DELETE",
            Self::Truncate => "TRUNCATE",
        }
    }
}

/// A table by its *physical* names, as the log says them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Relation {
    /// Physical schema.
    pub schema: SqlName,
    /// Table, a partition's leaf.
    pub table: SqlName,
}

impl Relation {
    /// `"schema"."table"`, ready for SQL text.
    pub fn quoted(&self) -> String {
        format!("{}.{}", self.schema.quoted(), self.table.quoted())
    }
}

/// A column's value in PostgreSQL's text form, under the pinned session settings (R-DEC-1): `t`/`f`, `\xdeadbeef`,
/// `2026-01-02 03:04:05+00`, `{1,NULL}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// SQL NULL. wal2json says it of NaN and ±Infinity, too.
    Null,
    /// The text form.
    Text(Box<str>),
    /// TOASTed and not changed, so the log doesn't carry it, and the old image couldn't fill it in.
    Unchanged,
}

/// One column of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cell {
    /// Column name, shared by all rows of the table.
    pub name: Arc<str>,
    /// `pg_type.oid` when the row was written; 0 where the plugin doesn't say.
    pub type_oid: u32,
    /// The value.
    pub value: Value,
}

/// A row as it was at one moment: the whole row, or its replica identity.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Image(pub Vec<Cell>);

impl Image {
    /// The value of a column; `None` when the image doesn't have it.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|cell| &*cell.name == name).map(|cell| &cell.value)
    }
}

/// One row event.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// Where in the log.
    pub position: Position,
    /// The transaction's 32-bit id.
    pub xid: u32,
    /// Commit time, microseconds since 1970-01-01 UTC.
    pub commit_time_us: i64,
    /// What happened.
    pub kind: ChangeKind,
    /// To which table.
    pub relation: Arc<Relation>,
    /// INSERT and UPDATE: the row after. Unchanged TOAST is filled in where the old image has it (R-DEC-3).
    pub new: Option<Image>,
    /// UPDATE and DELETE: the replica identity before, the whole row under FULL.
    pub old: Option<Image>,
    /// Size in bytes of what the log said of it, for the memory quota.
    pub wire_bytes: usize,
}
