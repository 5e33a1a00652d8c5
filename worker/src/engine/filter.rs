//! What the running stream lets through: each name, or whole schemas with the exact check left to the intake.

use std::collections::BTreeSet;

use aura_domain::{Relation, SqlName};
use aura_pgsource::{FilterEntry, Plugin};

/// Above so many names a list of schemas is cheaper: each name costs 3 ns per change (R-HOLE-5).
const NAMES: usize = 300;
/// Below so many the names come back: a toggle to and fro at the limit restarts the stream once.
const NAMES_AGAIN: usize = 250;

/// The filter of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Filter {
    Names(BTreeSet<Relation>),
    /// wal2json only: a publication finds a name by hash and changes without a restart.
    Schemas(BTreeSet<SqlName>),
}

impl Filter {
    /// The filter for these names. `running` is the stream's, if there is one.
    pub(super) fn new(plugin: Plugin, names: BTreeSet<Relation>, running: Option<&Self>) -> Self {
        let limit = if matches!(running, Some(Self::Schemas(_))) { NAMES_AGAIN } else { NAMES };
        if plugin == Plugin::PgOutput || names.len() <= limit {
            return Self::Names(names);
        }
        Self::Schemas(names.into_iter().map(|relation| relation.schema).collect())
    }

    /// Whether the table's changes come through.
    pub(super) fn covers(&self, relation: &Relation) -> bool {
        match self {
            Self::Names(names) => names.contains(relation),
            Self::Schemas(schemas) => schemas.contains(&relation.schema),
        }
    }

    /// wal2json's list.
    pub(super) fn entries(&self) -> Vec<FilterEntry> {
        match self {
            Self::Names(names) => names.iter().cloned().map(FilterEntry::Table).collect(),
            Self::Schemas(schemas) => schemas.iter().cloned().map(FilterEntry::Schema).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(schema: &str, count: usize) -> BTreeSet<Relation> {
        let name = |text: &str| SqlName::new(text).expect("a name");
        (0..count).map(|n| Relation { schema: name(schema), table: name(&format!("t{n}")) }).collect()
    }

    fn wal2json(count: usize, running: Option<&Filter>) -> Filter {
        Filter::new(Plugin::Wal2json, names("s", count), running)
    }

    #[test]
    fn r_hole_5_above_300_names_the_schemas_are_listed() {
        assert_eq!(wal2json(300, None), Filter::Names(names("s", 300)));
        let both = names("s", 300).into_iter().chain(names("other", 1)).collect();
        let wide = Filter::new(Plugin::Wal2json, both, None);
        let schema = |text| FilterEntry::Schema(SqlName::new(text).expect("a name"));
        assert_eq!(wide.entries(), [schema("other"), schema("s")]);
        assert!(names("s", 999).iter().all(|relation| wide.covers(relation)));
        assert!(!names("third", 1).iter().any(|relation| wide.covers(relation)));
        assert_eq!(Filter::new(Plugin::PgOutput, names("s", 301), None), Filter::Names(names("s", 301)));
    }

    #[test]
    fn r_hole_5_a_toggle_inside_a_listed_schema_leaves_the_filter_as_it_is() {
        let wide = wal2json(301, None);
        assert_eq!(wal2json(302, Some(&wide)), wide);
        assert_eq!(wal2json(299, Some(&wide)), wide, "to and fro at the limit");
        assert_eq!(wal2json(250, Some(&wide)), Filter::Names(names("s", 250)));
        assert_ne!(Filter::new(Plugin::Wal2json, names("new", 301), Some(&wide)), wide, "another schema");
    }
}
