//! The JSON object that clients receive for a change (supabase-wire.md §3.1), one per projection.

use std::sync::Arc;

use aura_domain::{Cell, Change, ChangeKind, Image, Value};
use aura_pgsource::{TableCatalog, encode_value, type_name};
use serde_json::value::RawValue;

/// What of the old row a projection shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum OldRow {
    /// The old image is visible: all of it that the role may read.
    Whole,
    /// It isn't (R-RLS-1): the key of the *new* row, `{}` if the key changed.
    KeyOfNew,
}

/// Which part of a change somebody sees.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Projection {
    /// Indices into the catalogue's columns, ascending.
    pub(crate) columns: Vec<usize>,
    pub(crate) old_row: OldRow,
}

/// Encodes changes of one table as it is now; texts that don't depend on the row are made once.
pub(crate) struct Encoder {
    catalog: Arc<TableCatalog>,
    /// `"name":` of each column.
    keys: Vec<String>,
    /// `{"name":…,"type":…}` of each column.
    descriptions: Vec<String>,
    head: String,
    commit_time: (i64, String),
}

/// Only values of at most this many bytes stay in a record that is too large (supabase-wire.md §3.4).
const SMALL_VALUE: usize = 64;

impl Encoder {
    /// `schema` and `table` in the client's words.
    pub(crate) fn new(catalog: Arc<TableCatalog>, schema: &str, table: &str) -> Self {
        let quoted = |text: &str| serde_json::Value::from(text).to_string();
        let keys = catalog.columns.iter().map(|column| format!("{}:", quoted(&column.name))).collect();
        let describe = |name: &str, ty: &str| format!("{{\"name\":{},\"type\":{}}}", quoted(name), quoted(ty));
        let descriptions = catalog.columns.iter().map(|c| describe(&c.name, type_name(&c.ty))).collect();
        let head = format!("\"schema\":{},\"table\":{}", quoted(schema), quoted(table));
        Self { catalog, keys, descriptions, head, commit_time: (i64::MIN, String::new()) }
    }

    /// The catalogue this was made for.
    pub(crate) fn catalog(&self) -> &Arc<TableCatalog> {
        &self.catalog
    }

    /// The object, reduced with error 413 when it would pass `limit` bytes (R-BIG-4).
    pub(crate) fn encode(&mut self, change: &Change, projection: &Projection, limit: usize) -> Box<RawValue> {
        let whole = self.object(change, projection, false);
        let text = if whole.len() > limit { self.object(change, projection, true) } else { whole };
        RawValue::from_string(text).expect("the encoder writes JSON")
    }

    fn object(&mut self, change: &Change, projection: &Projection, reduced: bool) -> String {
        let mut out = String::with_capacity(256 + change.wire_bytes * 2);
        out.push_str("{\"type\":\"");
        out.push_str(change.kind.as_str());
        out.push_str("\",");
        out.push_str(&self.head);
        out.push_str(",\"commit_timestamp\":\"");
        out.push_str(self.commit_time(change.commit_time_us));
        out.push_str("\",\"columns\":[");
        for (n, column) in projection.columns.iter().enumerate() {
            if n > 0 {
                out.push(',');
            }
            out.push_str(&self.descriptions[*column]);
        }
        out.push(']');
        if let Some(new) = &change.new {
            self.record(&mut out, "record", new, &projection.columns, reduced);
        }
        self.old_record(&mut out, change, projection, reduced);
        self.unchanged(&mut out, change, projection);
        out.push_str(if reduced { ",\"errors\":[\"Error 413: Payload Too Large\"]" } else { ",\"errors\":null" });
        out.push_str(",\"position\":\"");
        out.push_str(&change.position.to_string());
        out.push_str("\"}");
        out
    }

    fn commit_time(&mut self, us: i64) -> &str {
        if self.commit_time.0 != us {
            let time = jiff::Timestamp::from_microsecond(us).unwrap_or_default();
            self.commit_time = (us, time.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string());
        }
        &self.commit_time.1
    }

    fn old_record(&self, out: &mut String, change: &Change, projection: &Projection, reduced: bool) {
        match (change.kind, &change.old, &change.new, projection.old_row) {
            (ChangeKind::Update | ChangeKind::Delete, Some(old), _, OldRow::Whole) => {
                self.record(out, "old_record", old, &projection.columns, reduced);
            }
            // pgoutput sends no old key when it didn't change; then it is the new row's.
            (ChangeKind::Update, old, Some(new), _) => {
                let changed = old.as_ref().is_some_and(|old| self.key_changed(old, new));
                let keys =
                    projection.columns.iter().copied().filter(|c| !changed && self.catalog.columns[*c].primary_key);
                self.record(out, "old_record", new, &keys.collect::<Vec<_>>(), reduced);
            }
            (ChangeKind::Delete, ..) => out.push_str(",\"old_record\":{}"),
            _ => {}
        }
    }

    fn key_changed(&self, old: &Image, new: &Image) -> bool {
        let mut keys = self.catalog.columns.iter().filter(|column| column.primary_key);
        keys.any(|column| old.get(&column.name).is_some_and(|value| new.get(&column.name) != Some(value)))
    }

    fn record(&self, out: &mut String, name: &str, image: &Image, columns: &[usize], reduced: bool) {
        out.push_str(",\"");
        out.push_str(name);
        out.push_str("\":{");
        let mut first = true;
        for column in columns {
            let Some(value) = self.value(image, *column) else { continue };
            let before = out.len();
            if !first {
                out.push(',');
            }
            out.push_str(&self.keys[*column]);
            let at = out.len();
            match value {
                Value::Null => out.push_str("null"),
                Value::Text(text) => encode_value(out, text, &self.catalog.columns[*column].ty),
                Value::Unchanged => {}
            }
            let absent = matches!(value, Value::Unchanged);
            if absent || (reduced && (out.len() - at > SMALL_VALUE || matches!(value, Value::Null))) {
                out.truncate(before);
            } else {
                first = false;
            }
        }
        out.push('}');
    }

    /// Names what an UPDATE left out since it is TOASTed, unchanged and not in the old image (R-DEC-3).
    fn unchanged(&self, out: &mut String, change: &Change, projection: &Projection) {
        let Some(new) = change.new.as_ref().filter(|_| change.kind == ChangeKind::Update) else { return };
        let missing = |column: &&usize| !matches!(self.value(new, **column), Some(Value::Null | Value::Text(_)));
        let names: Vec<_> =
            projection.columns.iter().filter(missing).map(|c| &*self.catalog.columns[*c].name).collect();
        if !names.is_empty() {
            out.push_str(",\"unchanged\":");
            out.push_str(&serde_json::Value::from(names).to_string());
        }
    }

    /// Images come in the catalogue's order unless the table was altered in between.
    fn value<'a>(&self, image: &'a Image, column: usize) -> Option<&'a Value> {
        let name = &self.catalog.columns[column].name;
        let same = |cell: &&Cell| cell.name == *name;
        image.0.get(column).filter(same).map_or_else(|| image.get(name), |cell| Some(&cell.value))
    }
}
