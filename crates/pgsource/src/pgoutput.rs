use std::{collections::HashMap, sync::Arc};

use aura_domain::{Cell, Change, ChangeKind, Image, Lsn, Relation, SqlName, Value};
use bytes::{Buf, Bytes};

use crate::decode::{Context, LogEvent, Row, SkipReason, Transaction, fill_unchanged};

/// Microseconds from 1970 to 2000, PostgreSQL's epoch.
const POSTGRES_EPOCH_US: i64 = 946_684_800_000_000;
/// Flag of a column that belongs to the replica identity.
const KEY_COLUMN: u8 = 1;

/// Reads pgoutput's protocol 1 ("Logical Replication Message Formats" in PostgreSQL's manual), text values. Generated
/// columns are not in it before PostgreSQL 18.
#[derive(Debug, Default)]
pub(crate) struct PgOutput {
    relations: HashMap<u32, Description>,
}

#[derive(Debug)]
struct Description {
    relation: Arc<Relation>,
    columns: Vec<ColumnDescription>,
}

#[derive(Debug)]
struct ColumnDescription {
    name: Arc<str>,
    type_oid: u32,
    key: bool,
}

/// A message's bytes; every read is checked.
struct Reader<'a>(&'a [u8]);

impl PgOutput {
    pub(crate) fn decode(&mut self, context: &mut Context, start: Lsn, payload: &Bytes) -> LogEvent {
        self.interpret(context, start, payload)
            .unwrap_or_else(|reason| LogEvent::Skipped { reason, relation: self.relation_hint(payload) })
    }

    /// Whose row a message is that can't be used or is cut off.
    pub(crate) fn relation_hint(&self, message: &[u8]) -> Option<Arc<Relation>> {
        let (b'I' | b'U' | b'D', mut rest) = message.split_first()? else { return None };
        let oid = rest.try_get_u32().ok()?;
        self.relations.get(&oid).map(|description| Arc::clone(&description.relation))
    }

    fn interpret(&mut self, context: &mut Context, start: Lsn, payload: &[u8]) -> Result<LogEvent, SkipReason> {
        let mut reader = Reader(payload);
        match reader.u8()? {
            b'B' => Ok(context.begin(reader.begin()?)),
            b'C' => commit(context, &mut reader),
            b'R' => self.describe(&mut reader).map(|()| LogEvent::Other),
            b'I' => self.row(context, start, ChangeKind::Insert, reader, payload.len()).map(LogEvent::Change),
            b'U' => self.row(context, start, ChangeKind::Update, reader, payload.len()).map(LogEvent::Change),
            b'D' => self.row(context, start, ChangeKind::Delete, reader, payload.len()).map(LogEvent::Change),
            b'T' => self.truncate(context, start, reader, payload.len()),
            b'M' | b'O' | b'Y' => Ok(LogEvent::Other),
            _ => Err(SkipReason::Malformed),
        }
    }

    fn describe(&mut self, reader: &mut Reader<'_>) -> Result<(), SkipReason> {
        let oid = reader.u32()?;
        // A relation whose description can't be read must not keep its old one.
        self.relations.remove(&oid);
        let schema = match reader.text()? {
            // The server's way to save bytes.
            "" => "pg_catalog",
            schema => schema,
        };
        let schema = SqlName::new(schema).map_err(|_| SkipReason::BadName)?;
        let table = SqlName::new(reader.text()?).map_err(|_| SkipReason::BadName)?;
        let _replica_identity = reader.u8()?;
        let columns = (0..reader.u16()?).map(|_| reader.column()).collect::<Result<_, _>>()?;
        let relation = Arc::new(Relation { schema, table });
        self.relations.insert(oid, Description { relation, columns });
        Ok(())
    }

    fn row(
        &self,
        context: &mut Context,
        start: Lsn,
        kind: ChangeKind,
        mut reader: Reader<'_>,
        wire_bytes: usize,
    ) -> Result<Change, SkipReason> {
        let oid = reader.u32()?;
        let description = self.relations.get(&oid).ok_or(SkipReason::UnknownRelation)?;
        let (mut new, mut old) = (None, None);
        while !reader.0.is_empty() {
            match reader.u8()? {
                b'N' => new = Some(reader.image(description, false)?),
                b'O' => old = Some(reader.image(description, false)?),
                b'K' => old = Some(reader.image(description, true)?),
                _ => return Err(SkipReason::Malformed),
            }
        }
        check_images(kind, new.as_ref(), old.as_ref())?;
        if let (ChangeKind::Update, Some(new)) = (kind, &mut new) {
            let old = old.get_or_insert_with(|| description.key_of(new));
            fill_unchanged(new, old);
        }
        context.row(start, Row { kind, relation: Arc::clone(&description.relation), new, old, wire_bytes })
    }

    fn truncate(
        &self,
        context: &Context,
        start: Lsn,
        mut reader: Reader<'_>,
        wire_bytes: usize,
    ) -> Result<LogEvent, SkipReason> {
        let count = reader.u32()?;
        let _cascade_and_restart = reader.u8()?;
        let mut changes = Vec::new();
        for _ in 0..count {
            let oid = reader.u32()?;
            let description = self.relations.get(&oid).ok_or(SkipReason::UnknownRelation)?;
            let relation = Arc::clone(&description.relation);
            let row = Row { kind: ChangeKind::Truncate, relation, new: None, old: None, wire_bytes };
            // One message for all tables: the OID tells them apart (R-LSN-6).
            changes.push(context.change(start, oid, row)?);
        }
        Ok(LogEvent::Truncate(changes))
    }
}

impl Description {
    /// The key of an UPDATE that didn't change it: the server sends no old image then, wal2json sends the key.
    fn key_of(&self, new: &Image) -> Image {
        let keys = self.columns.iter().zip(&new.0).filter(|(column, _)| column.key);
        Image(keys.map(|(_, cell)| cell.clone()).collect())
    }
}

fn check_images(kind: ChangeKind, new: Option<&Image>, old: Option<&Image>) -> Result<(), SkipReason> {
    let complete = match kind {
        ChangeKind::Insert => new.is_some() && old.is_none(),
        ChangeKind::Update => new.is_some(),
        ChangeKind::Delete => new.is_none() && old.is_some(),
        ChangeKind::Truncate => true,
    };
    if complete { Ok(()) } else { Err(SkipReason::Malformed) }
}

fn commit(context: &mut Context, reader: &mut Reader<'_>) -> Result<LogEvent, SkipReason> {
    let _flags = reader.u8()?;
    let (commit, end) = (Lsn(reader.u64()?), Lsn(reader.u64()?));
    Ok(context.commit(commit, end))
}

impl<'a> Reader<'a> {
    fn u8(&mut self) -> Result<u8, SkipReason> {
        self.0.try_get_u8().map_err(|_| SkipReason::Malformed)
    }

    fn u16(&mut self) -> Result<u16, SkipReason> {
        self.0.try_get_u16().map_err(|_| SkipReason::Malformed)
    }

    fn u32(&mut self) -> Result<u32, SkipReason> {
        self.0.try_get_u32().map_err(|_| SkipReason::Malformed)
    }

    fn u64(&mut self) -> Result<u64, SkipReason> {
        self.0.try_get_u64().map_err(|_| SkipReason::Malformed)
    }

    fn i64(&mut self) -> Result<i64, SkipReason> {
        self.0.try_get_i64().map_err(|_| SkipReason::Malformed)
    }

    /// A text that ends with NUL.
    fn text(&mut self) -> Result<&'a str, SkipReason> {
        let end = self.0.iter().position(|byte| *byte == 0).ok_or(SkipReason::Malformed)?;
        let (text, rest) = self.0.split_at(end);
        self.0 = &rest[1..];
        std::str::from_utf8(text).map_err(|_| SkipReason::NotUtf8)
    }

    fn begin(&mut self) -> Result<Transaction, SkipReason> {
        let commit = Lsn(self.u64()?);
        let commit_time_us = self.i64()?.saturating_add(POSTGRES_EPOCH_US);
        Ok(Transaction { xid: self.u32()?, commit, end: Lsn::ZERO, commit_time_us })
    }

    fn column(&mut self) -> Result<ColumnDescription, SkipReason> {
        let key = self.u8()? & KEY_COLUMN != 0;
        let name = self.text()?.into();
        let type_oid = self.u32()?;
        let _type_modifier = self.u32()?;
        Ok(ColumnDescription { name, type_oid, key })
    }

    /// A tuple; of a key tuple only the key columns count, the others are sent as NULL.
    fn image(&mut self, description: &Description, key_only: bool) -> Result<Image, SkipReason> {
        let count = usize::from(self.u16()?);
        if count != description.columns.len() {
            return Err(SkipReason::Malformed);
        }
        let mut cells = Vec::with_capacity(count);
        for column in &description.columns {
            let value = self.value()?;
            if column.key || !key_only {
                cells.push(Cell { name: Arc::clone(&column.name), type_oid: column.type_oid, value });
            }
        }
        Ok(Image(cells))
    }

    fn value(&mut self) -> Result<Value, SkipReason> {
        match self.u8()? {
            b'n' => Ok(Value::Null),
            b'u' => Ok(Value::Unchanged),
            b't' => {
                let length = usize::try_from(self.u32()?).map_err(|_| SkipReason::Malformed)?;
                let (text, rest) = self.0.split_at_checked(length).ok_or(SkipReason::Malformed)?;
                self.0 = rest;
                Ok(Value::Text(std::str::from_utf8(text).map_err(|_| SkipReason::NotUtf8)?.into()))
            }
            _ => Err(SkipReason::Malformed),
        }
    }
}

#[cfg(test)]
mod tests;
