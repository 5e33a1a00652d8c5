//! The platform database: what is registered and what was promised about it, and the position that we remember.

use crate::source::Source;

/// One table's registration; each is made once and ended once.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Registration {
    pub(crate) enabled: Option<u64>,
    pub(crate) disabled: Option<u64>,
    /// End of the log when an engine first went by that: until then it may publish what comes.
    heard: Option<u64>,
    /// Every row committed from here on was promised (`active_since_lsn`).
    pub(crate) active: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct Platform {
    pub(crate) tables: Vec<Registration>,
    pub(crate) generation: u64,
    pub(crate) stored: Option<(u64, u64)>,
}

impl Platform {
    pub(crate) fn new(tables: usize) -> Self {
        Self { tables: vec![Registration::default(); tables], generation: 1, stored: None }
    }

    pub(crate) fn register(&mut self, table: usize, source: &Source) {
        let registration = &mut self.tables[table];
        registration.enabled = registration.enabled.or(Some(source.wal_end));
    }

    pub(crate) fn unregister(&mut self, table: usize, source: &Source) {
        let registration = &mut self.tables[table];
        if registration.enabled.is_some() {
            registration.disabled = registration.disabled.or(Some(source.wal_end));
        }
    }

    /// As an engine sees it: disabled tables stay until the confirmed position has passed them (R-REG-8).
    pub(crate) fn registry(&self, confirmed: u64) -> Registry {
        let left = |registration: &Registration| registration.disabled.is_some_and(|disabled| disabled <= confirmed);
        let seen = |registration: &Registration| if left(registration) { None } else { Some(*registration) };
        Registry(
            self.tables.iter().map(|registration| seen(registration).filter(|seen| seen.enabled.is_some())).collect(),
        )
    }

    /// An engine goes by this revision from now on.
    pub(crate) fn applied(&mut self, registry: &Registry, wal_end: u64) {
        for (of, seen) in self.tables.iter_mut().zip(&registry.0) {
            if of.disabled.is_some() && seen.is_none_or(|seen| seen.disabled.is_some()) {
                of.heard = of.heard.or(Some(wal_end));
            }
        }
    }

    /// Whether a row of this table with this commit may ever be published.
    pub(crate) fn eligible(&self, table: usize, commit: u64) -> bool {
        let of = &self.tables[table];
        let open = of.disabled.is_none() || of.heard.is_none_or(|heard| commit <= heard);
        of.enabled.is_some_and(|enabled| commit >= enabled) && open
    }

    /// Whether it must be.
    pub(crate) fn promised(&self, table: usize, commit: u64) -> bool {
        let of = &self.tables[table];
        of.active.is_some_and(|active| commit >= active) && of.disabled.is_none_or(|disabled| commit <= disabled)
    }
}

/// One revision, by table.
#[derive(Debug, Clone, Default)]
pub(crate) struct Registry(Vec<Option<Registration>>);

impl Registry {
    pub(crate) fn filter(&self) -> Vec<bool> {
        self.0.iter().map(Option::is_some).collect()
    }

    pub(crate) fn admits(&self, table: usize, commit: u64) -> bool {
        let within = |of: Registration| {
            of.enabled.is_some_and(|enabled| commit >= enabled) && of.disabled.is_none_or(|disabled| commit <= disabled)
        };
        self.0[table].is_some_and(within)
    }

    pub(crate) fn can_shrink(&self, confirmed: u64) -> bool {
        self.0.iter().flatten().any(|of| of.disabled.is_some_and(|disabled| disabled <= confirmed))
    }

    /// The running filter covers these tables from `e` on.
    pub(crate) fn promise(&self, platform: &mut Platform, e: u64) {
        for (table, of) in self.0.iter().enumerate() {
            if let Some(enabled) = of.and_then(|of| of.enabled) {
                let active = &mut platform.tables[table].active;
                *active = active.or(Some(enabled.max(e)));
            }
        }
    }
}
