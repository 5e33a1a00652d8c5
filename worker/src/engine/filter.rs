//! What the running stream lets through: each name, or whole schemas with the exact check left to the intake.

use std::collections::{BTreeSet, HashSet};

use aura_domain::{Relation, SqlName};
use aura_pgsource::{FilterEntry, Plugin};

use super::registry::Wanted;

/// Above so many names a list of schemas is cheaper: each name costs 3 ns per change (R-HOLE-5).
const NAMES: usize = 300;
/// Below so many the names come back: a toggle to and fro at the limit restarts the stream once.
const NAMES_AGAIN: usize = 250;

/// The filter of a stream: these names, and everything in these schemas.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Filter {
    names: BTreeSet<Relation>,
    /// wal2json only: a publication finds a name by hash and changes without a restart.
    schemas: HashSet<SqlName>,
    /// There are too many names for a list.
    wide: bool,
}

impl Filter {
    /// The filter for what is wanted. `running` is the stream's, if there is one.
    pub(super) fn new(plugin: Plugin, wanted: Wanted<'_>, running: Option<&Self>) -> Self {
        let Wanted { mut names, mut schemas } = wanted;
        names.retain(|relation| !schemas.contains(&relation.schema));
        let limit = if running.is_some_and(|running| running.wide) { NAMES_AGAIN } else { NAMES };
        let wide = plugin == Plugin::Wal2json && names.len() > limit;
        if wide {
            schemas.extend(names.drain(..).map(|relation| &relation.schema));
        }
        let (names, schemas) = (names.into_iter().cloned().collect(), schemas.into_iter().cloned().collect());
        Self { names, schemas, wide }
    }

    /// Whether the table's changes come through.
    pub(super) fn covers(&self, relation: &Relation) -> bool {
        self.names.contains(relation) || self.schemas.contains(&relation.schema)
    }

    /// wal2json's list.
    pub(super) fn entries(&self) -> Vec<FilterEntry> {
        let schemas: BTreeSet<_> = self.schemas.iter().cloned().collect();
        let schemas = schemas.into_iter().map(FilterEntry::Schema);
        schemas.chain(self.names.iter().cloned().map(FilterEntry::Table)).collect()
    }

    /// A publication's tables.
    pub(super) fn tables(&self) -> Vec<Relation> {
        self.names.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> SqlName {
        SqlName::new(text).expect("a name")
    }

    fn names(schema: &str, count: usize) -> BTreeSet<Relation> {
        (0..count).map(|n| Relation { schema: name(schema), table: name(&format!("t{n}")) }).collect()
    }

    fn wanted(names: &BTreeSet<Relation>) -> Wanted<'_> {
        Wanted { names: names.iter().collect(), schemas: HashSet::new() }
    }

    /// Of names alone.
    fn listed(count: usize) -> Filter {
        Filter { names: names("s", count), schemas: HashSet::new(), wide: false }
    }

    fn wal2json(count: usize, running: Option<&Filter>) -> Filter {
        Filter::new(Plugin::Wal2json, wanted(&names("s", count)), running)
    }

    #[test]
    fn r_hole_5_above_300_names_the_schemas_are_listed() {
        assert_eq!(wal2json(300, None), listed(300));
        let both: BTreeSet<_> = names("s", 300).into_iter().chain(names("other", 1)).collect();
        let wide = Filter::new(Plugin::Wal2json, wanted(&both), None);
        let schema = |text| FilterEntry::Schema(name(text));
        assert_eq!(wide.entries(), [schema("other"), schema("s")]);
        assert!(names("s", 999).iter().all(|relation| wide.covers(relation)));
        assert!(!names("third", 1).iter().any(|relation| wide.covers(relation)));
        assert_eq!(Filter::new(Plugin::PgOutput, wanted(&names("s", 301)), None), listed(301));
    }

    #[test]
    fn r_hole_5_a_toggle_inside_a_listed_schema_leaves_the_filter_as_it_is() {
        let wide = wal2json(301, None);
        assert_eq!(wal2json(302, Some(&wide)), wide);
        assert_eq!(wal2json(299, Some(&wide)), wide, "to and fro at the limit");
        assert_eq!(wal2json(250, Some(&wide)), listed(250));
        assert_ne!(Filter::new(Plugin::Wal2json, wanted(&names("new", 301)), Some(&wide)), wide, "another schema");
    }

    #[test]
    fn r_hole_4_the_schema_of_a_partitioned_table_is_listed_whole() {
        let both: BTreeSet<_> = names("s", 2).into_iter().chain(names("other", 1)).collect();
        let schema = name("s");
        let wanted = |names| Wanted { schemas: [&schema].into(), ..wanted(names) };
        let filter = Filter::new(Plugin::Wal2json, wanted(&both), None);
        let [other] = names("other", 1).into_iter().collect::<Vec<_>>().try_into().expect("one");
        assert_eq!(filter.entries(), [FilterEntry::Schema(name("s")), FilterEntry::Table(other)]);
        assert!(names("s", 9).iter().all(|relation| filter.covers(relation)), "one that isn't there yet, too");
        // Its names don't count towards the limit of a list.
        let many = names("s", 301);
        let filter = Filter::new(Plugin::Wal2json, wanted(&many), None);
        assert_eq!((filter.entries(), filter.wide), (vec![FilterEntry::Schema(name("s"))], false));
    }
}
