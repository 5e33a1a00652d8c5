//! What the server or its plugin refuses to stream is kept out, and nothing else (R-REG-6).

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use aura_domain::{Lsn, Relation};
use aura_pgsource::{FilterEntry, Plugin, ReplicationConnection, SqlConnection, SqlState, wal2json_options};
use aura_store::RegistrationStatus;
use uuid::Uuid;

use super::{
    error::EngineError,
    filter::Filter,
    registry::Registry,
    session::{CONNECT, Session},
};

/// What passes by itself: somebody else's lock, a server short of something.
const PASSING: [SqlState; 5] = [
    SqlState::LOCK_NOT_AVAILABLE,
    SqlState::T_R_DEADLOCK_DETECTED,
    SqlState::QUERY_CANCELED,
    SqlState::OUT_OF_MEMORY,
    SqlState::TOO_MANY_CONNECTIONS,
];
/// First pause before what passes by itself is tried again; doubles.
const AGAIN: Duration = Duration::from_secs(10);
/// Longest pause.
const MAX_AGAIN: Duration = Duration::from_secs(300);

/// Registrations that stay out of the filter: until they are changed, or for a while.
#[derive(Debug, Default)]
pub(crate) struct Quarantine(HashMap<Uuid, Held>);

#[derive(Debug)]
struct Held {
    revision: i64,
    /// `None`: until it is changed.
    until: Option<Instant>,
    pause: Duration,
    /// Its time has come, and it is being tried again.
    released: bool,
}

impl Quarantine {
    /// Whether this revision of a registration is kept out.
    pub(crate) fn holds(&self, registration: Uuid, revision: i64) -> bool {
        self.0.get(&registration).is_some_and(|held| held.revision == revision && !held.released)
    }

    fn add(&mut self, registration: Uuid, revision: i64, passes: bool, now: Instant) {
        let before = self.0.get(&registration).filter(|held| held.revision == revision);
        let pause = before.map_or(AGAIN, |held| (held.pause * 2).min(MAX_AGAIN));
        let until = passes.then(|| now + pause);
        self.0.insert(registration, Held { revision, until, pause, released: false });
    }

    /// When the next one is to be tried again.
    pub(super) fn due(&self) -> Option<Instant> {
        self.0.values().filter(|held| !held.released).filter_map(|held| held.until).min()
    }

    /// Lets those go whose time has come; whether there were any.
    pub(super) fn release(&mut self, now: Instant) -> bool {
        let due = self.0.values_mut().filter(|held| !held.released && held.until.is_some_and(|until| until <= now));
        due.map(|held| held.released = true).count() > 0
    }
}

impl Session<'_> {
    /// Keeps these tables out of the filter, and says so in their registrations.
    pub(super) async fn keep_out(
        &mut self,
        registry: &Registry,
        refused: &[(Relation, SqlState)],
    ) -> Result<(), EngineError> {
        let (store, source, epoch) = (&self.engine.deps.store, self.engine.source.id, self.engine.epoch);
        for (relation, code) in refused {
            let passes = PASSING.contains(code);
            let code_word = code.code();
            tracing::warn!(%source, table = %relation.table, code = code_word, passes, "a table is refused, and kept out");
            metrics::counter!("cdc_refused_tables_total", "code" => code_word.to_owned()).increment(1);
            // Of a partitioned table the one that is refused may be a partition.
            let mut tables: Vec<_> = registry.table(relation).into_iter().chain(registry.of(relation)).collect();
            tables.dedup_by_key(|table| table.registration);
            for table in tables {
                if passes {
                    let reason =
                        format!("the source can't take it into the publication now ({code_word}); it is tried again");
                    let which = (table.registration, table.oid, &table.relation.table);
                    let pending = RegistrationStatus::Pending;
                    store.mark_status(source, epoch, which, pending, Some(&reason)).await?;
                } else if *code != SqlState::UNDEFINED_TABLE {
                    // What is gone is the census's: it becomes missing.
                    let reason =
                        format!("the source refuses to stream it ({code_word}); enable it again when that is mended");
                    store.block_table(source, epoch, (table.registration, table.revision), &reason).await?;
                }
                self.quarantine.add(table.registration, table.revision, passes, Instant::now());
            }
        }
        Ok(())
    }

    /// The plugin has refused a filter: finds out by trying which names it doesn't take, and keeps their tables out. The
    /// server's position stays as it is, so nothing is lost meanwhile.
    pub(super) async fn try_filter(
        &mut self,
        registry: &Registry,
        filter: &Filter,
        (sql, start): (&SqlConnection, Lsn),
    ) -> Result<(), EngineError> {
        let mut halves = Halves::new(filter.entries());
        while let Some(entries) = halves.question() {
            let options = wal2json_options(entries);
            halves.answer(self.accepts(&options, (sql, start)).await?);
        }
        let entries = halves.refused;
        let of_entry = |entry: &FilterEntry, relation: &Relation| match entry {
            FilterEntry::Table(table) => table == relation,
            FilterEntry::Schema(schema) => *schema == relation.schema,
        };
        let relations = registry.wanted(Plugin::Wal2json).names.into_iter();
        let relations = relations.filter(|relation| entries.iter().any(|entry| of_entry(entry, relation)));
        let refused: Vec<_> = relations.map(|relation| (relation.clone(), SqlState::INVALID_NAME)).collect();
        self.keep_out(registry, &refused).await
    }

    /// Whether the server streams with these options; it is not let.
    async fn accepts(
        &self,
        options: &[(String, String)],
        (sql, start): (&SqlConnection, Lsn),
    ) -> Result<bool, EngineError> {
        let engine = self.engine;
        let name = engine.application_name();
        let connection = ReplicationConnection::connect(&engine.url, &name, &engine.sockets, CONNECT).await?;
        match self.start_streaming(connection, sql, start, options).await {
            Ok(_) => Ok(true),
            Err(error) if refuses_names(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// The plugin can't read its list of names.
pub(super) fn refuses_names(error: &EngineError) -> bool {
    matches!(error, EngineError::Source(error) if error.sqlstate() == Some(&SqlState::INVALID_NAME))
}

/// Finds out by halves which names a plugin doesn't take: some 2 log n questions for each. None, if it is not the names.
struct Halves {
    /// Still to be asked about, the next one last.
    parts: Vec<Vec<FilterEntry>>,
    refused: Vec<FilterEntry>,
}

impl Halves {
    fn new(entries: Vec<FilterEntry>) -> Self {
        // The empty list first.
        Self { parts: vec![entries, Vec::new()], refused: Vec::new() }
    }

    /// The next list to try.
    fn question(&self) -> Option<&[FilterEntry]> {
        self.parts.last().map(Vec::as_slice)
    }

    /// Whether it was taken.
    fn answer(&mut self, taken: bool) {
        match self.parts.pop() {
            Some(part) if !taken && part.is_empty() => self.parts.clear(),
            Some(part) if !taken && part.len() == 1 => self.refused.extend(part),
            Some(mut part) if !taken => {
                let half = part.split_off(part.len() / 2);
                self.parts.extend([part, half]);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use aura_domain::SqlName;

    use super::*;

    fn entry(number: usize) -> FilterEntry {
        let name = |text: &str| SqlName::new(text).expect("a name");
        FilterEntry::Table(Relation { schema: name("s"), table: name(&format!("t{number}")) })
    }

    /// With a plugin that takes no list with one of these in it; also how often it was asked.
    fn found(bad: &[usize], takes_empty: bool) -> (Vec<FilterEntry>, usize) {
        let bad: Vec<_> = bad.iter().copied().map(entry).collect();
        let (mut halves, mut questions) = (Halves::new((0..100).map(entry).collect()), 0);
        while let Some(list) = halves.question() {
            questions += 1;
            let taken = !list.iter().any(|one| bad.contains(one)) && (takes_empty || !list.is_empty());
            halves.answer(taken);
        }
        halves.refused.sort();
        (halves.refused, questions)
    }

    #[test]
    fn r_reg_6_only_the_names_that_are_refused_are_kept_out() {
        assert_eq!(found(&[], true), (vec![], 2));
        let (one, questions) = found(&[42], true);
        assert_eq!(one, [entry(42)]);
        assert!(questions <= 2 + 2 * 7, "{questions}");
        assert_eq!(found(&[0, 50, 99], true).0, [entry(0), entry(50), entry(99)]);
        assert_eq!(found(&[1], false), (vec![], 1), "it isn't the names");
    }

    #[test]
    fn r_reg_6_what_passes_is_tried_again_and_the_rest_when_it_is_changed() {
        let (a, b, now) = (Uuid::from_u128(1), Uuid::from_u128(2), Instant::now());
        let mut quarantine = Quarantine::default();
        quarantine.add(a, 5, false, now);
        quarantine.add(b, 6, true, now);
        assert!(quarantine.holds(a, 5) && quarantine.holds(b, 6) && !quarantine.holds(a, 7));
        assert_eq!(quarantine.due(), Some(now + AGAIN));
        assert!(!quarantine.release(now));
        assert!(quarantine.release(now + AGAIN) && !quarantine.release(now + AGAIN));
        assert!(quarantine.holds(a, 5) && !quarantine.holds(b, 6));
        quarantine.add(b, 6, true, now);
        assert_eq!(quarantine.due(), Some(now + 2 * AGAIN), "the second time later");
        quarantine.add(b, 8, true, now);
        assert_eq!(quarantine.due(), Some(now + AGAIN), "changed, so from the start");
    }
}
