//! The phases of a drain and when each must end (F.9).

use std::time::{Duration, Instant};

const INTAKE_STOP: Duration = Duration::from_millis(50);
const SEAL: Duration = Duration::from_millis(250);
const ABANDON: Duration = Duration::from_millis(500);
const FINAL_POSITION: Duration = Duration::from_millis(1500);
const LEAVE: Duration = Duration::from_secs(1);
/// What comes after the drain, inside `CDC_DRAIN_TIMEOUT`: the three above.
const TAIL: Duration = Duration::from_secs(3);
/// R-ENG-3: the longest reserve of a stop with a deadline; else a fifth of it.
const STOP_RESERVE: Duration = Duration::from_secs(2);
/// A deadline of 0 skips the drain; saying the position and closing politely may still take this long.
const AT_ONCE: Duration = Duration::from_millis(500);
/// What a second signal leaves (R-SD-4).
const HURRIED: Duration = Duration::from_secs(1);
/// A phase that ends this late has not obeyed its limit; less is the scheduler's.
const SLACK: Duration = Duration::from_millis(250);

/// Phases, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Read no more; feedback goes on.
    IntakeStop,
    /// Partial batches are sealed.
    Seal,
    /// Wait until every row that was read is acknowledged.
    Drain,
    /// Abort what is left; its rows are never acknowledged.
    Abandon,
    /// Send the resolved LSN and read it back by SQL.
    FinalPosition,
    /// Close, politely if no transaction is open, and see the slot inactive.
    Leave,
    /// Over, or out of time.
    Done,
}

impl Phase {
    const ALL: [Self; 6] = [Self::IntakeStop, Self::Seal, Self::Drain, Self::Abandon, Self::FinalPosition, Self::Leave];

    /// Label in metrics and reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::IntakeStop => "intake_stop",
            Self::Seal => "seal",
            Self::Drain => "drain",
            Self::Abandon => "abandon",
            Self::FinalPosition => "final_position",
            Self::Leave => "leave",
            Self::Done => "done",
        }
    }

    fn next(self) -> Self {
        Self::ALL.get(self as usize + 1).copied().unwrap_or(Self::Done)
    }
}

/// How long a drain may take, and what of it is kept for what comes after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    total: Duration,
    reserve: Duration,
    tail: Duration,
}

impl Budget {
    /// The process ends: `CDC_DRAIN_TIMEOUT`, 3 s of it kept (half of it if it is short).
    pub fn shutdown(total: Duration) -> Self {
        let reserve = TAIL.min(total / 2);
        Self { total, reserve, tail: reserve }
    }

    /// A stop with a deadline (R-ENG-3): min(2 s, 20 %) is kept. A deadline of 0 skips the drain.
    pub fn stop(deadline: Duration) -> Self {
        let reserve = STOP_RESERVE.min(deadline / 5);
        Self { total: deadline, reserve, tail: if deadline.is_zero() { AT_ONCE } else { reserve } }
    }

    fn drain_end(self, start: Instant) -> Instant {
        start + (self.total - self.reserve)
    }
}

/// What happens to a drain.
#[derive(Debug, Clone, Copy)]
pub enum DrainEvent {
    /// The present phase has nothing more to do (R-SD-3: the next begins at once).
    Finished,
    /// Time has passed.
    Tick,
    /// Another stop with this budget from now on joins; it can only make things end sooner.
    Tighten(Budget),
    /// A second signal: 1 s from now, and straight to the final position (R-SD-4).
    Hurry,
}

/// Where a drain's time went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrainTimes {
    /// Each phase that was entered, in order. Their sum is the whole.
    pub phases: Vec<(&'static str, Duration)>,
    /// A phase did not obey its limit: a bug, never an operating state.
    pub overrun: bool,
}

/// One drain. Whoever drives it does what [`Self::phase`] says until [`Self::ends`], and tells what happened; the answer
/// is the phase to be in now.
///
/// ```
/// # use std::time::{Duration, Instant};
/// # use aura_flow::{Budget, DrainEvent, DrainPlanner, Phase};
/// let start = Instant::now();
/// let mut plan = DrainPlanner::new(Budget::shutdown(Duration::from_secs(25)), start);
/// assert_eq!(plan.on(DrainEvent::Finished, start), Phase::Seal);
/// assert_eq!(plan.on(DrainEvent::Tick, start + Duration::from_millis(300)), Phase::Drain);
/// assert_eq!(plan.ends(), start + Duration::from_secs(22));
/// assert_eq!(plan.on(DrainEvent::Finished, start + Duration::from_secs(1)), Phase::FinalPosition);
/// ```
#[derive(Debug)]
pub struct DrainPlanner {
    phase: Phase,
    entered: Instant,
    /// When each phase must be over, whatever came before.
    limits: [Instant; 6],
    /// How long each may take once it is entered.
    caps: [Duration; 6],
    times: DrainTimes,
    drained: bool,
}

impl DrainPlanner {
    /// The drain begins.
    pub fn new(budget: Budget, now: Instant) -> Self {
        let (limits, caps) = lay_out(budget, now);
        let times = DrainTimes { phases: Vec::with_capacity(Phase::ALL.len()), overrun: false };
        let mut plan = Self { phase: Phase::IntakeStop, entered: now, limits, caps, times, drained: false };
        plan.expire(now);
        plan
    }

    /// The present phase.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// When the present phase must end. Of [`Phase::Done`]: when the whole had to.
    pub fn ends(&self) -> Instant {
        let n = self.phase as usize;
        match self.phase {
            Phase::Done => self.deadline(),
            // It has all that is left.
            Phase::Drain => self.limits[n],
            _ => self.limits[n].min(self.entered + self.caps[n]),
        }
    }

    /// When the whole must be over.
    pub fn deadline(&self) -> Instant {
        self.limits[Phase::Leave as usize]
    }

    /// Every row that was read was acknowledged in time.
    pub fn drained(&self) -> bool {
        self.drained
    }

    /// Where the time went so far.
    pub fn times(&self) -> &DrainTimes {
        &self.times
    }

    /// Takes an event; answers the phase to be in now.
    pub fn on(&mut self, event: DrainEvent, now: Instant) -> Phase {
        match event {
            DrainEvent::Finished => self.finish(now),
            DrainEvent::Tick => {}
            DrainEvent::Tighten(budget) => self.tighten(budget, now),
            DrainEvent::Hurry => self.hurry(now),
        }
        self.expire(now);
        self.phase
    }

    fn finish(&mut self, now: Instant) {
        match self.phase {
            Phase::Drain => {
                self.drained = true;
                self.enter(Phase::FinalPosition, now);
            }
            Phase::Done => {}
            phase => self.enter(phase.next(), now),
        }
    }

    fn expire(&mut self, now: Instant) {
        while self.phase != Phase::Done && now >= self.ends() {
            self.enter(self.phase.next(), now);
        }
    }

    fn enter(&mut self, next: Phase, now: Instant) {
        self.times.overrun |= now > self.ends() + SLACK;
        self.times.phases.push((self.phase.as_str(), now.saturating_duration_since(self.entered)));
        (self.phase, self.entered) = (next, now);
    }

    fn tighten(&mut self, budget: Budget, now: Instant) {
        let (limits, caps) = lay_out(budget, now);
        for n in 0..limits.len() {
            self.limits[n] = self.limits[n].min(limits[n]);
            // The present phase has used some of its cap already.
            if n > self.phase as usize {
                self.caps[n] = self.caps[n].min(caps[n]);
            }
        }
    }

    fn hurry(&mut self, now: Instant) {
        let all = Budget { total: HURRIED, reserve: HURRIED, tail: HURRIED };
        self.tighten(all, now);
        if self.phase < Phase::FinalPosition {
            self.enter(Phase::FinalPosition, now);
        }
    }
}

/// Limits and caps of a budget that begins now. The three phases after the drain share the reserve as they share 3 s.
fn lay_out(budget: Budget, start: Instant) -> ([Instant; 6], [Duration; 6]) {
    let share = |whole: Duration| whole.mul_f64(budget.tail.as_secs_f64() / TAIL.as_secs_f64());
    let drain = budget.drain_end(start);
    let (abandon, last) = (share(ABANDON), share(FINAL_POSITION));
    // What rounding leaves belongs to the last phase, so that the whole ends exactly when it must.
    let leave = budget.tail.saturating_sub(abandon + last).min(LEAVE);
    let limits = [
        drain.min(start + INTAKE_STOP),
        drain.min(start + INTAKE_STOP + SEAL),
        drain,
        drain + abandon,
        drain + abandon + last,
        drain + budget.tail,
    ];
    (limits, [INTAKE_STOP, SEAL, budget.total, abandon, last, leave])
}

#[cfg(test)]
mod tests;
