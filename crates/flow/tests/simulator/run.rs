//! One run: time goes from one event to the next.

use std::time::{Duration, Instant};

use crate::{
    chance::Chance,
    check::{self, Confirmed},
    script::{Event, Fault, Script},
    source::{Ms, Source},
    worker::Worker,
    world::World,
};

/// A run of a seed that takes more is cut; most take a tenth.
pub(crate) const STEPS: u64 = 20_000;
/// After the last fault everything must be delivered within this.
const PATIENCE: Ms = 1_500_000;
/// A new worker comes after one that went.
const SUCCESSOR: std::ops::Range<Ms> = 200..3000;

/// How a run ended well.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Stats {
    pub(crate) steps: u64,
    pub(crate) cut: bool,
    pub(crate) rows: u64,
    pub(crate) gaps: u64,
    pub(crate) pauses: u64,
    pub(crate) failures: u64,
    pub(crate) virtual_ms: Ms,
}

struct Run {
    script: Script,
    seed: u64,
    world: World,
    worker: Worker,
    now: Ms,
    base: Instant,
    workers: u64,
    successor: Option<Ms>,
    /// When the worker hears of what is registered.
    news: Option<Ms>,
    thaws: bool,
    confirmed: Confirmed,
    chance: Chance,
    stats: Stats,
    looks: u64,
}

/// Runs a script; the error names the invariant.
pub(crate) fn run(seed: u64, script: &Script) -> Result<Stats, String> {
    let mut run = Run::new(seed, script.clone());
    let outcome = run.go();
    outcome.map_err(|violation| format!("at {} ms: {violation}", run.now))?;
    Ok(run.stats)
}

impl Run {
    fn new(seed: u64, script: Script) -> Self {
        let base = Instant::now();
        let source = Source::new(script.timeout, script.window, script.keep);
        let world = World::new(script.projects, source, script.timeout, Chance::new(seed, 4));
        let worker = Worker::new(1, script.settings.clone(), base, Chance::new(seed, 100), 0);
        let mut run = Self {
            script,
            seed,
            world,
            worker,
            now: 0,
            base,
            workers: 1,
            successor: None,
            news: None,
            thaws: false,
            confirmed: Confirmed::default(),
            chance: Chance::new(seed, 5),
            stats: Stats::default(),
            looks: 0,
        };
        if run.script.strict {
            run.worker.watch.strictly();
            run.world.quick = true;
        }
        run
    }

    fn go(&mut self) -> Result<(), String> {
        let (events, faults) = (self.script.events.clone(), self.script.faults.clone());
        let (mut event, mut fault) = (0, 0);
        let mut ending = false;
        loop {
            self.stats.steps += 1;
            if self.stats.steps > self.script.steps {
                self.stats.cut = true;
                return Ok(());
            }
            while let Some((_, happens)) = events.get(event).filter(|(at, _)| *at <= self.now) {
                self.event(happens.clone());
                event += 1;
            }
            while let Some((_, happens)) = faults.get(fault).filter(|(at, _)| *at <= self.now) {
                self.fault(*happens);
                fault += 1;
            }
            self.turn()?;
            if !ending && self.is_settled(event == events.len()) {
                ending = true;
                self.worker.signal(&mut self.world, self.now);
            }
            if ending && self.worker.is_dead() {
                self.bury()?;
                return self.end();
            }
            if self.now > self.script.heals + PATIENCE {
                return Err(format!("9: not everything is delivered and confirmed: {}", self.state()));
            }
            self.advance(events.get(event).map(|(at, _)| *at), faults.get(fault).map(|(at, _)| *at));
        }
    }

    /// To the next moment at which anything may happen.
    fn advance(&mut self, event: Option<Ms>, fault: Option<Ms>) {
        let healing = Some(self.script.heals).filter(|at| *at > self.now);
        let times = [
            event,
            fault,
            healing,
            self.successor,
            self.news,
            self.world.source.due(self.now),
            self.world.bus.due(),
            self.worker.due(&self.world, self.now),
        ];
        let next = times.into_iter().flatten().min().unwrap_or(self.now + 1000);
        self.now = next.max(self.now + 1);
        self.stats.virtual_ms = self.now;
    }

    fn turn(&mut self) -> Result<(), String> {
        let now = self.now;
        self.world.bus.run(now);
        self.world.source.run(now);
        if self.thaws && now >= self.worker.frozen_until {
            self.thaws = false;
            self.worker.thawed(now);
        }
        if self.news.is_some_and(|at| now >= at) {
            self.news = None;
            self.worker.registry_changed(&self.world, now);
        }
        self.worker.run(&mut self.world, now);
        self.looks += 1;
        self.world.source.run(now);
        if self.worker.is_dead() && self.successor.is_none() {
            self.bury()?;
            self.successor = Some(now + self.chance.range(SUCCESSOR.start, SUCCESSOR.end));
        }
        if self.successor.is_some_and(|at| now >= at) {
            self.successor = None;
            self.workers += 1;
            let chance = Chance::new(self.seed, 100 + self.workers);
            self.worker = Worker::new(self.workers, self.script.settings.clone(), self.base, chance, now);
        }
        if let Some(violation) = self.worker.watch.violations.first() {
            return Err(violation.clone());
        }
        self.confirmed.check(&self.world, self.world.source.flushed)
    }

    /// The worker is gone; what it said must be true.
    fn bury(&mut self) -> Result<(), String> {
        let steps = self.worker.shards.iter().map(aura_flow::Shard::steps).sum();
        self.worker.watch.cost(&self.worker.reader, steps, 64 * (self.looks + self.stats.steps));
        self.stats.failures += self.worker.watch.failures;
        self.stats.pauses += self.worker.reader.quota().counts().pauses;
        if let Some(violation) = self.worker.watch.violations.first() {
            return Err(violation.clone());
        }
        match self.worker.report.take() {
            Some(report) => check::report(&self.world, &report, self.script.settings.drain_timeout + 2000),
            None => Ok(()),
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Commit(rows) => drop(self.world.source.commit(&rows)),
            Event::Foreign(bytes) => self.world.source.foreign(bytes),
            Event::Register(table) => {
                self.world.platform.register(table, &self.world.source);
                self.notify();
            }
            Event::Unregister(table) => {
                self.world.platform.unregister(table, &self.world.source);
                self.notify();
            }
        }
    }

    /// By NOTIFY, or with the next refresh.
    fn notify(&mut self) {
        let delay = if self.chance.one_in(10) { 3000 } else { 5 };
        self.news = self.news.or(Some(self.now + delay));
    }

    fn fault(&mut self, fault: Fault) {
        let now = self.now;
        let world = &mut self.world;
        match fault {
            Fault::KillWorker | Fault::LeaseLost => self.worker.kill(world, now),
            Fault::FreezeWorker(ms) if self.worker.is_running() => {
                self.worker.frozen_until = now + ms;
                self.thaws = true;
            }
            Fault::Signal if !self.worker.is_dead() && now >= self.worker.frozen_until => {
                self.worker.signal(world, now);
            }
            Fault::ServerCrash(ms) => world.source.restart(false, now + ms),
            Fault::ServerRestart(ms) => world.source.restart(true, now + ms),
            Fault::Terminate => world.source.terminate(),
            Fault::Checkpoint => world.source.checkpoint(),
            Fault::Cut(ms) => world.source.cut(now + ms),
            Fault::SqlDown(ms) => world.source.sql_down_until = now + ms,
            Fault::SqlHangs(ms) => world.source.sql_hangs_until = now + ms,
            Fault::BusDisconnects(ms) => world.bus.disconnect(now + ms),
            Fault::BusStops(ms) => world.bus.stop(now + ms),
            Fault::BusSlow(ms) => world.bus.slow(now + ms),
            Fault::PolicyHangs(project, until) => world.hangs[project] = until,
            Fault::PoliciesSlow(ms) => world.slow_until = now + ms,
            Fault::FreezeWorker(_) | Fault::Signal | Fault::WallClockJumps => {}
        }
    }

    /// All that was committed is confirmed, what is registered is covered, and the worker runs.
    fn is_settled(&self, events_over: bool) -> bool {
        let source = &self.world.source;
        let all = source.log.last().is_none_or(|last| source.confirmed >= last.end);
        let covered = self
            .world
            .platform
            .tables
            .iter()
            .all(|of| of.enabled.is_none() || of.active.is_some() || of.disabled.is_some());
        let running = self.worker.is_running() && self.worker.is_connected() && self.worker.reader.is_settled();
        let idle = self.news.is_none() && self.worker.reader.holes_since().is_none();
        events_over && self.now >= self.script.heals && all && covered && running && idle && !source.lost
    }

    fn end(&mut self) -> Result<(), String> {
        check::at_the_end(&self.world)?;
        if self.script.strict {
            check::only_the_first_misses_anything(&self.world)?;
        }
        self.stats.rows = self.world.bus.fronts.iter().map(|front| front.rows.len() as u64).sum();
        self.stats.gaps = self.world.bus.fronts.iter().map(|front| front.gaps.len() as u64).sum();
        Ok(())
    }

    fn state(&self) -> String {
        let source = &self.world.source;
        let last = source.log.last().map_or(0, |last| last.end);
        let reader = &self.worker.reader;
        format!(
            "confirmed {} of {last}, resolved {}, received {}, running {}, used {}, holes {:?}, culprit {:?}",
            source.confirmed,
            reader.resolved(),
            reader.received(),
            self.worker.is_running(),
            reader.quota().used(),
            reader.holes_since(),
            reader.culprit(self.base + Duration::from_millis(self.now)),
        )
    }
}
