use std::{borrow::Cow, collections::HashMap, fmt, sync::Arc};

use aura_domain::{Cell, ChangeKind, Image, Lsn, Relation, SqlName, Value};
use bytes::Bytes;
use serde::{Deserialize, Deserializer, de::Visitor};
use serde_json::value::RawValue;

use crate::decode::{Context, LogEvent, Row, SkipReason, Transaction, fill_unchanged};

/// `pg_type.oid` of bytea; wal2json cuts the `\x` off its values.
const BYTEA: u32 = 17;
/// Names are forgotten and learnt again beyond this many tables, so that churn can't fill the memory.
const MAX_TABLES: usize = 10_000;
/// PostgreSQL has at most 1600 columns; more names than this are left-overs of renames.
const MAX_COLUMNS: usize = 3_200;

/// Reads wal2json's format 2 with the options of [`wal2json_options`](crate::wal2json_options). A TRUNCATE doesn't say
/// the relation's OID: the `n` of its positions is the index, zero.
#[derive(Debug, Default)]
pub(crate) struct Wal2json {
    tables: Vec<Table>,
    by_name: HashMap<Box<str>, HashMap<Box<str>, usize>>,
    last: usize,
}

/// A table's names, shared by all its rows.
#[derive(Debug)]
struct Table {
    relation: Arc<Relation>,
    columns: Vec<Arc<str>>,
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow)]
    action: Cow<'a, str>,
    #[serde(default)]
    xid: Option<u32>,
    #[serde(borrow, default)]
    timestamp: Text<'a>,
    #[serde(borrow, default)]
    lsn: Text<'a>,
    #[serde(borrow, default)]
    nextlsn: Text<'a>,
    #[serde(borrow, default)]
    schema: Text<'a>,
    #[serde(borrow, default)]
    table: Text<'a>,
    #[serde(borrow, default)]
    columns: Vec<Column<'a>>,
    #[serde(borrow, default)]
    identity: Vec<Column<'a>>,
}

#[derive(Deserialize)]
struct Column<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    // Printed with %d, so it is negative above 2^31.
    #[serde(default)]
    typeoid: i64,
    #[serde(borrow)]
    value: &'a RawValue,
}

/// A string, borrowed if it needs no unescaping; null is empty.
#[derive(Default)]
struct Text<'a>(Cow<'a, str>);

impl Wal2json {
    pub(crate) fn decode(&mut self, context: &mut Context, start: Lsn, payload: &Bytes) -> LogEvent {
        let Ok(text) = std::str::from_utf8(payload) else {
            return LogEvent::Skipped { reason: SkipReason::NotUtf8, relation: relation_hint(payload).map(Arc::new) };
        };
        let event = match serde_json::from_str::<Line<'_>>(text) {
            Ok(line) => self.interpret(context, start, line, payload.len()),
            Err(_) => Err(SkipReason::Malformed),
        };
        event.unwrap_or_else(|reason| skipped(context, reason, payload))
    }

    fn interpret(
        &mut self,
        context: &mut Context,
        start: Lsn,
        line: Line<'_>,
        wire_bytes: usize,
    ) -> Result<LogEvent, SkipReason> {
        match &*line.action {
            "B" => Ok(context.begin(transaction(&line)?)),
            "C" => Ok(commit(context, &line)?),
            "I" => self.row(context, start, ChangeKind::Insert, &line, wire_bytes).map(LogEvent::Change),
            "U" => self.row(context, start, ChangeKind::Update, &line, wire_bytes).map(LogEvent::Change),
            "D" => self.row(context, start, ChangeKind::Delete, &line, wire_bytes).map(LogEvent::Change),
            "T" => {
                let change = self.row(context, start, ChangeKind::Truncate, &line, wire_bytes)?;
                Ok(LogEvent::Truncate(vec![change]))
            }
            "M" => Ok(LogEvent::Other),
            _ => Err(SkipReason::Malformed),
        }
    }

    fn row(
        &mut self,
        context: &mut Context,
        start: Lsn,
        kind: ChangeKind,
        line: &Line<'_>,
        wire_bytes: usize,
    ) -> Result<aura_domain::Change, SkipReason> {
        let table = self.table(&line.schema.0, &line.table.0)?;
        let has_new = matches!(kind, ChangeKind::Insert | ChangeKind::Update);
        let has_old = matches!(kind, ChangeKind::Update | ChangeKind::Delete);
        let mut new = has_new.then(|| table.image(&line.columns)).transpose()?;
        let old = has_old.then(|| table.image(&line.identity)).transpose()?;
        if let (Some(new), Some(old)) = (&mut new, &old) {
            fill_unchanged(new, old);
        }
        let relation = Arc::clone(&table.relation);
        context.row(start, Row { kind, relation, new, old, wire_bytes })
    }

    fn table(&mut self, schema: &str, table: &str) -> Result<&mut Table, SkipReason> {
        let index = match self.tables.get(self.last) {
            Some(last) if *last.relation.table == *table && *last.relation.schema == *schema => self.last,
            _ => match self.by_name.get(schema).and_then(|tables| tables.get(table)) {
                Some(index) => *index,
                None => self.learn(schema, table)?,
            },
        };
        self.last = index;
        Ok(&mut self.tables[index])
    }

    fn learn(&mut self, schema: &str, table: &str) -> Result<usize, SkipReason> {
        if self.tables.len() >= MAX_TABLES {
            *self = Self::default();
        }
        let relation = relation(schema, table).ok_or(SkipReason::BadName)?;
        let index = self.tables.len();
        self.tables.push(Table { relation: Arc::new(relation), columns: Vec::new() });
        self.by_name.entry(schema.into()).or_default().insert(table.into(), index);
        Ok(index)
    }
}

impl Table {
    fn image(&mut self, columns: &[Column<'_>]) -> Result<Image, SkipReason> {
        let mut cells = Vec::with_capacity(columns.len());
        let mut hint = 0;
        for column in columns {
            let index = self.column(&column.name, hint);
            hint = index + 1;
            let type_oid = type_oid(column.typeoid);
            let value = value(column.value.get(), type_oid).ok_or(SkipReason::Malformed)?;
            cells.push(Cell { name: Arc::clone(&self.columns[index]), type_oid, value });
        }
        Ok(Image(cells))
    }

    /// Index of a column's shared name; rows name their columns in the same order, so `hint` mostly hits.
    fn column(&mut self, name: &str, hint: usize) -> usize {
        if self.columns.get(hint).is_some_and(|known| **known == *name) {
            return hint;
        }
        if let Some(index) = self.columns.iter().position(|known| **known == *name) {
            return index;
        }
        if self.columns.len() >= MAX_COLUMNS {
            self.columns.clear();
        }
        self.columns.push(name.into());
        self.columns.len() - 1
    }
}

fn transaction(line: &Line<'_>) -> Result<Transaction, SkipReason> {
    let commit = line.lsn.0.parse().map_err(|_| SkipReason::Malformed)?;
    let end = line.nextlsn.0.parse().map_err(|_| SkipReason::Malformed)?;
    let xid = line.xid.ok_or(SkipReason::Malformed)?;
    Ok(Transaction { xid, commit, end, commit_time_us: timestamp_us(&line.timestamp.0).unwrap_or(0) })
}

fn commit(context: &mut Context, line: &Line<'_>) -> Result<LogEvent, SkipReason> {
    let said = line.lsn.0.parse().ok().zip(line.nextlsn.0.parse().ok());
    let known = context.transaction.map(|open| (open.commit, open.end));
    let (commit, end) = said.or(known).ok_or(SkipReason::Malformed)?;
    Ok(context.commit(commit, end))
}

/// A line that can't be used. A commit that can't be read still ends its transaction, with what its begin said.
fn skipped(context: &mut Context, reason: SkipReason, payload: &[u8]) -> LogEvent {
    match context.transaction {
        Some(open) if payload.starts_with(br#"{"action":"C""#) => context.commit(open.commit, open.end),
        _ => LogEvent::Skipped { reason, relation: relation_hint(payload).map(Arc::new) },
    }
}

fn relation(schema: &str, table: &str) -> Option<Relation> {
    Some(Relation { schema: SqlName::new(schema).ok()?, table: SqlName::new(table).ok()? })
}

/// Whose row a line is that can't be parsed as a whole, or is cut off. Names come before values, so the first match is
/// not a value.
pub(crate) fn relation_hint(line: &[u8]) -> Option<Relation> {
    let mut rest = line;
    let mut member = |key: &[u8]| {
        let at = rest.windows(key.len()).position(|window| window == key)?;
        rest = &rest[at + key.len()..];
        let mut strings = serde_json::Deserializer::from_slice(rest).into_iter::<String>();
        let name = strings.next()?.ok()?;
        Some(name)
    };
    let schema = member(br#""schema":"#)?;
    let table = member(br#""table":"#)?;
    relation(&schema, &table)
}

fn type_oid(printed: i64) -> u32 {
    // `%d` of an unsigned 32-bit number.
    u32::try_from(printed).or_else(|_| i32::try_from(printed).map(i32::cast_unsigned)).unwrap_or(0)
}

/// PostgreSQL's text form of a JSON value: strings as they are, numbers digit by digit, booleans as `t` and `f`.
fn value(json: &str, type_oid: u32) -> Option<Value> {
    let text: Box<str> = match json.as_bytes().first()? {
        b'n' => return Some(Value::Null),
        b't' => "t".into(),
        b'f' => "f".into(),
        b'"' => return string(json, type_oid),
        b'-' | b'0'..=b'9' => json.into(),
        _ => return None,
    };
    Some(Value::Text(text))
}

fn string(json: &str, type_oid: u32) -> Option<Value> {
    let inner = json.get(1..json.len().checked_sub(1)?)?;
    let text: Cow<'_, str> = if inner.contains('\\') {
        Cow::Owned(serde_json::from_str::<String>(json).ok()?)
    } else {
        Cow::Borrowed(inner)
    };
    Some(Value::Text(if type_oid == BYTEA { format!("\\x{text}").into() } else { text.into() }))
}

/// Microseconds since 1970 of `2026-11-29 22:43:31.744691+00`, as the pinned DateStyle and TimeZone print it.
fn timestamp_us(text: &str) -> Option<i64> {
    let (date, time) = text.strip_suffix("+00")?.split_once(' ')?;
    let mut date = date.splitn(3, '-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let mut time = time.splitn(3, ':');
    let (hour, minute) = (time.next()?.parse::<i64>().ok()?, time.next()?.parse::<i64>().ok()?);
    let (second, fraction) = time.next().map(|part| part.split_once('.').unwrap_or((part, "")))?;
    let micros = if fraction.is_empty() { 0 } else { format!("{fraction:0<6}").get(..6)?.parse::<i64>().ok()? };
    let in_range = (1..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    let second = second.parse::<i64>().ok().filter(|s| in_range && (0..=60).contains(s))?;
    let seconds = days_since_1970(year, month, day) * 86_400 + hour * 3_600 + minute * 60 + second;
    Some(seconds * 1_000_000 + micros)
}

/// Days from civil, H. Hinnant, "chrono-Compatible Low-Level Date Algorithms".
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * (if month > 2 { month - 3 } else { month + 9 }) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or null")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
            fn visit_unit<E>(self) -> Result<Text<'de>, E> {
                Ok(Text::default())
            }
        }
        deserializer.deserialize_any(TextVisitor)
    }
}

#[cfg(test)]
mod tests;
