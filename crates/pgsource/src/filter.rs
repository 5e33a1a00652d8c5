use aura_domain::{Relation, SqlName, quote_ident};

/// What the running filter lets through.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FilterEntry {
    /// One table; of a partitioned table each leaf is its own entry.
    Table(Relation),
    /// Every table of a schema: above some 300 names the exact list costs more than it saves (R-HOLE-5), and a schema
    /// that holds a partitioned table can get new leaves (R-HOLE-4).
    Schema(SqlName),
}

impl From<Relation> for FilterEntry {
    fn from(relation: Relation) -> Self {
        Self::Table(relation)
    }
}

/// Options of `START_REPLICATION` for wal2json: format 2 with the ids, times and positions that a change needs; type
/// OIDs instead of type names, since those break the JSON when they need quotes. With no entries nothing matches.
pub fn wal2json_options(entries: &[FilterEntry]) -> Vec<(String, String)> {
    let tables: Vec<String> = entries.iter().map(add_tables_entry).collect();
    let fixed = [
        ("format-version", "2"),
        ("include-xids", "true"),
        ("include-timestamp", "true"),
        ("include-lsn", "true"),
        ("include-transaction", "true"),
        ("include-types", "false"),
        ("include-type-oids", "true"),
    ];
    let fixed = fixed.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
    // Anybody may write messages into the log, of any size and bytes: only those with a prefix that nobody can know come.
    let messages = ("add-msg-prefixes".to_owned(), format!("aura_{:032x}", rand::random::<u128>()));
    fixed.chain([messages, ("add-tables".to_owned(), tables.join(","))]).collect()
}

/// Options of `START_REPLICATION` for pgoutput.
pub fn pgoutput_options(publication: &str) -> Vec<(String, String)> {
    let options = [("proto_version", "1".to_owned()), ("publication_names", quote_ident(publication))];
    options.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn add_tables_entry(entry: &FilterEntry) -> String {
    match entry {
        FilterEntry::Table(relation) => format!("{}.{}", escape(&relation.schema), escape(&relation.table)),
        FilterEntry::Schema(schema) => format!("{}.*", escape(schema)),
    }
}

/// A backslash before every ASCII character outside `[A-Za-z0-9_]` (R-REG-5): wal2json takes the character behind it
/// literally, whichever it is. Bytes from 0x80 on stay alone.
fn escape(name: &str) -> String {
    let mut escaped = String::with_capacity(name.len() + 8);
    for c in name.chars() {
        if c.is_ascii() && !c.is_ascii_alphanumeric() && c != '_' {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(schema: &str, table: &str) -> FilterEntry {
        FilterEntry::Table(Relation { schema: SqlName::new(schema).unwrap(), table: SqlName::new(table).unwrap() })
    }

    fn add_tables(entries: &[FilterEntry]) -> String {
        let options = wal2json_options(entries);
        options.into_iter().find(|(name, _)| name == "add-tables").unwrap().1
    }

    #[test]
    fn r_reg_5_every_special_character_is_escaped() {
        assert_eq!(add_tables(&[table("public", "Orders")]), "public.Orders");
        assert_eq!(add_tables(&[table("t", "we,ird. t'b*l")]), r"t.we\,ird\.\ t\'b\*l");
        assert_eq!(add_tables(&[table("a.b", "back\\slash")]), r"a\.b.back\\slash");
        assert_eq!(add_tables(&[table("t", "*"), table("t", "é🦀")]), r"t.\*,t.é🦀");
        assert_eq!(add_tables(&[FilterEntry::Schema(SqlName::new("my schema").unwrap())]), r"my\ schema.*");
        assert_eq!(add_tables(&[]), "");
    }
}
