//! Everything around the worker.

use aura_domain::ProjectId;

use crate::{
    bus::{Bus, Place},
    chance::Chance,
    platform::Platform,
    source::{Ms, Source},
};

/// Tables of a project.
pub(crate) const TABLES: usize = 2;

pub(crate) struct World {
    pub(crate) source: Source,
    pub(crate) bus: Bus,
    pub(crate) platform: Platform,
    pub(crate) timeout: Ms,
    /// Until when each project's policies hang; `Ms::MAX` = for ever.
    pub(crate) hangs: Vec<Ms>,
    pub(crate) slow_until: Ms,
    /// No check takes long that doesn't hang.
    pub(crate) quick: bool,
    /// Generation and position of the last verified end: nothing at or below it is sent again (15).
    pub(crate) verified: Option<(u64, u64)>,
}

impl World {
    pub(crate) fn new(projects: usize, source: Source, timeout: Ms, chance: Chance) -> Self {
        Self {
            source,
            bus: Bus::new(projects, chance),
            platform: Platform::new(projects * TABLES),
            timeout,
            hangs: vec![0; projects],
            slow_until: 0,
            quick: false,
            verified: None,
        }
    }

    #[expect(clippy::unused_self, reason = "where a table belongs is the world's business")]
    pub(crate) fn project(&self, table: usize) -> usize {
        table / TABLES
    }

    pub(crate) fn project_id(&self, table: usize) -> ProjectId {
        ProjectId(uuid::Uuid::from_u128(self.project(table) as u128 + 1))
    }

    /// How long a check of this project takes; `None` = for ever.
    pub(crate) fn latency(&self, table: usize, now: Ms, chance: &mut Chance) -> Option<Ms> {
        let draw = chance.range(0, 100);
        let latency = match draw {
            _ if now < self.slow_until => 2000,
            0..60 => 1,
            _ if self.quick => 5,
            60..97 => 5,
            _ => 2000,
        };
        (self.hangs[self.project(table)] != Ms::MAX).then_some(latency)
    }

    /// When a check that is ready now gets its answer.
    pub(crate) fn until_judged(&self, table: usize, now: Ms) -> Ms {
        let hang = self.hangs[self.project(table)];
        let source = &self.source;
        let sql =
            if source.sql(now) { 0 } else { source.up_at.max(source.sql_down_until).max(source.sql_hangs_until) + 5 };
        hang.max(sql)
    }

    /// A new slot in place of a lost one: a new generation, and a gap for everybody.
    pub(crate) fn recreate_slot(&mut self) {
        let to = Place { generation: self.platform.generation, commit: self.source.wal_end, lsn: u64::MAX };
        let from = Place { generation: 0, commit: 0, lsn: 0 };
        self.bus.fronts.iter_mut().for_each(|front| front.gaps.push((from, to)));
        self.platform.generation += 1;
        self.source.recreate();
    }
}
