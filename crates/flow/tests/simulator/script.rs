//! What happens in a run: a workload and faults, all from one seed, so that leaving a fault out changes nothing else.

use crate::{chance::Chance, run::STEPS, source::Ms, worker::Settings, world::TABLES};

/// Of the world.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// Rows are (table, bytes).
    Commit(Vec<(usize, usize)>),
    Foreign(u64),
    Register(usize),
    Unregister(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    KillWorker,
    LeaseLost,
    FreezeWorker(Ms),
    Signal,
    ServerCrash(Ms),
    ServerRestart(Ms),
    Terminate,
    Checkpoint,
    Cut(Ms),
    SqlDown(Ms),
    SqlHangs(Ms),
    BusDisconnects(Ms),
    BusStops(Ms),
    BusSlow(Ms),
    PolicyHangs(usize, Ms),
    PoliciesSlow(Ms),
    /// The machines never see the wall clock, so a jump of it can't be felt; that is the point.
    WallClockJumps,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Workload {
    Steady,
    HotProject,
    Foreign,
    Huge,
    Tiny,
    Toggles,
    ExactlyTheQuota,
}

const WORKLOADS: [Workload; 7] = [
    Workload::Steady,
    Workload::HotProject,
    Workload::Foreign,
    Workload::Huge,
    Workload::Tiny,
    Workload::Toggles,
    Workload::ExactlyTheQuota,
];

/// A whole run.
#[derive(Debug, Clone)]
pub(crate) struct Script {
    pub(crate) workload: Workload,
    pub(crate) settings: Settings,
    pub(crate) projects: usize,
    pub(crate) timeout: Ms,
    pub(crate) window: usize,
    pub(crate) keep: Option<u64>,
    pub(crate) events: Vec<(Ms, Event)>,
    pub(crate) faults: Vec<(Ms, Fault)>,
    /// When all faults have passed.
    pub(crate) heals: Ms,
    /// Nothing is ill but one project's policies.
    pub(crate) strict: bool,
    /// It is cut after so many.
    pub(crate) steps: u64,
}

impl Script {
    pub(crate) fn new(seed: u64) -> Self {
        let mut chance = Chance::new(seed, 1);
        let workload = chance.pick(&WORKLOADS);
        let projects = usize::try_from(chance.range(1, 7)).expect("small");
        // Half of the runs live ten times as fast, so that limits are met within few steps.
        let scale = chance.pick(&[1, 10]);
        let quota = chance.pick(&[20_000, 100_000, 400_000]);
        let settings = Settings {
            quota,
            shards: chance.pick(&[1, 2, 4]),
            advance: chance.pick(&[0, 100, 100]),
            skip_after: 60_000 / scale,
            stall_limit: 120_000 / scale,
            outage_limit: 900_000 / scale,
            drain_timeout: chance.pick(&[2000, 25_000]),
            batch_rows: chance.pick(&[1, 8, 64]),
            busy: chance.pick(&[1, 4]),
        };
        let mut events = work(workload, projects, quota, &mut Chance::new(seed, 2));
        events.sort_by_key(|(at, _)| *at);
        let last = events.last().map_or(0, |(at, _)| *at);
        let faults = faults(projects, last + 20_000, scale, &mut Chance::new(seed, 3));
        Self {
            workload,
            projects,
            timeout: chance.pick(&[3000, 60_000]),
            window: chance.pick(&[quota / 8, quota * 4]),
            keep: chance.one_in(4).then_some(quota as u64 * 3),
            heals: last + 20_000 + 120_000 / scale,
            steps: STEPS,
            strict: false,
            settings,
            events,
            faults,
        }
    }

    /// One project is stuck for ever, and all else is as it should be (invariant 10).
    pub(crate) fn one_is_stuck(seed: u64) -> Self {
        let script = Self::new(seed);
        let mut chance = Chance::new(seed, 6);
        let projects = script.projects.max(2);
        let workload = chance.pick(&[Workload::Steady, Workload::HotProject, Workload::Foreign, Workload::Tiny]);
        let mut events = work(workload, projects, script.settings.quota, &mut Chance::new(seed, 2));
        events.retain(|(_, event)| !matches!(event, Event::Unregister(_)));
        events.sort_by_key(|(at, _)| *at);
        let last = events.last().map_or(0, |(at, _)| *at);
        let skip_after = chance.pick(&[6000, 60_000]);
        let settings =
            Settings { skip_after, stall_limit: 120_000, outage_limit: 900_000, batch_rows: 64, ..script.settings };
        let (keep, faults) = (None, vec![(1, Fault::PolicyHangs(0, Ms::MAX))]);
        Self { workload, settings, projects, keep, events, faults, heals: last + 20_000, strict: true, ..script }
    }

    /// A hundred thousand transactions of a row each, while as many tables are registered (invariant 11).
    pub(crate) fn hundred_thousand() -> Self {
        const MANY: usize = 100_000;
        let seed = Self::new(1);
        let mut events: Vec<_> = (0..MANY).map(|table| (1 + table as u64 % 1000, Event::Register(table))).collect();
        events.extend((0..MANY).map(|n| (5000 + n as u64 / 10, Event::Commit(vec![(n * 7919 % MANY, 40)]))));
        events.sort_by_key(|(at, _)| *at);
        let settings = Settings { advance: 100, batch_rows: 64, ..seed.settings };
        Self {
            workload: Workload::Tiny,
            settings,
            projects: MANY / TABLES,
            timeout: 60_000,
            window: 100_000,
            keep: None,
            events,
            faults: Vec::new(),
            heals: 20_000,
            steps: 10_000_000,
            strict: false,
        }
    }
}

/// Registrations come first, most of them; then transactions.
fn work(workload: Workload, projects: usize, quota: usize, chance: &mut Chance) -> Vec<(Ms, Event)> {
    let tables = projects * TABLES;
    let late = workload == Workload::Toggles;
    let mut events: Vec<_> = (0..tables)
        .map(|table| (if late { chance.range(0, 20_000) } else { chance.range(0, 50) }, Event::Register(table)))
        .collect();
    if late || chance.one_in(3) {
        let table = chance.pick(&(0..tables).collect::<Vec<_>>());
        events.push((chance.range(5000, 20_000), Event::Unregister(table)));
    }
    let small = quota / 100;
    let table = |chance: &mut Chance| usize::try_from(chance.range(0, tables as u64)).expect("small");
    let bytes =
        |chance: &mut Chance, most: usize| usize::try_from(chance.range(20, most.max(21) as u64)).expect("small");
    let mut at = 100;
    let (count, pause, rows) = match workload {
        Workload::Tiny => (400, 20, 2),
        Workload::Foreign => (10, 2000, 3),
        Workload::Huge | Workload::ExactlyTheQuota => (20, 1000, 5),
        _ => (120, 200, 12),
    };
    for n in 0..count {
        at += chance.range(0, pause * 2);
        let hot = workload == Workload::HotProject && !chance.one_in(5);
        let many = chance.range(1, rows + 1);
        let pick = |chance: &mut Chance| if hot { 0 } else { table(chance) };
        let commit: Vec<_> = (0..many).map(|_| (pick(chance), bytes(chance, small * 3))).collect();
        events.push((at, Event::Commit(commit)));
        match workload {
            Workload::Foreign => {
                events.extend((1..20).map(|n| (at + n * 100, Event::Foreign(quota as u64 / 10))));
            }
            Workload::Huge if n == 7 => {
                let piece = quota / 30;
                let commit: Vec<_> =
                    (0..300).map(|row| (if row % 7 == 0 { table(chance) } else { 0 }, piece)).collect();
                events.push((at + 1, Event::Commit(commit)));
            }
            Workload::ExactlyTheQuota if n % 4 == 0 => {
                let exact = quota + usize::from(n % 8 == 0);
                events.push((at + 1, Event::Commit(vec![(table(chance), 30), (table(chance), exact)])));
            }
            _ => {}
        }
    }
    events
}

fn faults(projects: usize, last: Ms, scale: Ms, chance: &mut Chance) -> Vec<(Ms, Fault)> {
    let mut faults = Vec::new();
    for _ in 0..chance.range(0, 9) {
        let at = chance.range(200, last);
        let short = chance.range(100, 6000);
        let long = chance.range(1000, 130_000) / scale;
        let project = usize::try_from(chance.range(0, projects as u64)).expect("small");
        let fault = match chance.range(0, 20) {
            0 | 1 => Fault::KillWorker,
            2 => Fault::LeaseLost,
            3 => Fault::FreezeWorker(short * 2),
            4 | 5 => Fault::Signal,
            6 => Fault::ServerCrash(short),
            7 => Fault::ServerRestart(short),
            8 => Fault::Terminate,
            9 => Fault::Checkpoint,
            10 => Fault::Cut(short * 2),
            11 => Fault::SqlDown(long),
            12 => Fault::SqlHangs(short),
            13 | 14 => Fault::BusDisconnects(long),
            15 => Fault::BusStops(long * 2),
            16 => Fault::BusSlow(long),
            17 => Fault::PolicyHangs(project, if chance.one_in(2) { Ms::MAX } else { at + long }),
            18 => Fault::PoliciesSlow(short),
            _ => Fault::WallClockJumps,
        };
        faults.push((at, fault));
        // A second and a third signal come while the first is obeyed.
        for _ in 0..if fault == Fault::Signal { chance.range(0, 3) } else { 0 } {
            faults.push((at + chance.range(1, 3000), Fault::Signal));
        }
    }
    faults.sort_by_key(|(at, _)| *at);
    faults
}
