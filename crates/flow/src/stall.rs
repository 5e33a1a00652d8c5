use std::time::{Duration, Instant};

/// A deadline that is found so long after it passed says that this process slept (SIGSTOP, a paused machine), not that
/// anybody else was silent: then the time begins anew.
pub(crate) const ASLEEP: Duration = Duration::from_secs(5);

/// Why an engine that has work must not go on as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stall {
    /// Nothing was acknowledged for `stall_limit`, and no known outage explains it (R-SH-5): nobody knows why.
    Sink,
    /// A known outage has lasted for `outage_limit`.
    Outage,
}

/// What is known to be away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outage {
    /// The bus is disconnected.
    pub bus: bool,
    /// Our own login can't connect to the source.
    pub source: bool,
}

impl Outage {
    /// Whether anything is.
    pub fn any(self) -> bool {
        self.bus || self.source
    }

    /// For logs.
    pub fn as_str(self) -> &'static str {
        match (self.bus, self.source) {
            (false, false) => "none",
            (true, false) => "bus",
            (false, true) => "source",
            (true, true) => "bus and source",
        }
    }
}

/// Tells a stall from an outage and from having nothing to do (R-SH-5, R-FB-3).
#[derive(Debug)]
pub struct StallWatch {
    stall_limit: Duration,
    outage_limit: Duration,
    /// Last acknowledgement; or when the work that is out began, an outage ended, or the watch did.
    acked: Instant,
    /// Last sign of progress of any kind.
    moved: Instant,
    outage_since: Option<Instant>,
    outage: Outage,
    /// There was work when it was last looked at.
    working: bool,
}

impl StallWatch {
    /// Begins to watch.
    pub fn new(stall_limit: Duration, outage_limit: Duration, now: Instant) -> Self {
        let outage = Outage::default();
        Self { stall_limit, outage_limit, acked: now, moved: now, outage_since: None, outage, working: false }
    }

    /// Rows were acknowledged and their bytes released.
    pub fn acked(&mut self, now: Instant) {
        (self.acked, self.moved) = (now, now);
    }

    /// Something was read.
    pub fn read(&mut self, now: Instant) {
        self.moved = now;
    }

    /// What is known to be away now. An outage that ends gives everybody a fresh start.
    pub fn outage(&mut self, outage: Outage, now: Instant) {
        self.outage = outage;
        match (outage.any(), self.outage_since) {
            (true, None) => self.outage_since = Some(now),
            (false, Some(_)) => {
                self.outage_since = None;
                self.acked(now);
            }
            _ => {}
        }
    }

    /// The known outage.
    pub fn present_outage(&self) -> Outage {
        self.outage
    }

    /// Whether work is out. It may begin now.
    pub fn working(&mut self, working: bool, now: Instant) {
        if !working || !self.working {
            self.acked(now);
        }
        self.working = working;
    }

    /// Whether the engine must end.
    pub fn check(&mut self, now: Instant) -> Option<Stall> {
        let due = self.due()?;
        if now >= due + ASLEEP {
            self.acked(now);
            self.outage_since = self.outage_since.map(|_| now);
            return None;
        }
        (now >= due).then_some(if self.outage_since.is_some() { Stall::Outage } else { Stall::Sink })
    }

    /// When it must end if nothing happens until then.
    pub fn due(&self) -> Option<Instant> {
        let limit = self.outage_since.map_or(self.acked + self.stall_limit, |since| since + self.outage_limit);
        self.working.then_some(limit)
    }

    /// Whether the server may be told that we live (R-FB-3): not by a worker that has work, moves in no way and doesn't
    /// know why. Its slot is then free after `wal_sender_timeout` at the latest.
    pub fn may_feed(&self, now: Instant) -> bool {
        !self.working || self.outage_since.is_some() || now < self.moved + self.stall_limit
    }

    /// Since when nothing was acknowledged although work is out.
    pub fn idle_for(&self, now: Instant) -> Duration {
        if self.working { now.saturating_duration_since(self.acked) } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    fn watch(start: Instant) -> StallWatch {
        let mut watch = StallWatch::new(s(120), s(900), start);
        watch.working(true, start);
        watch
    }

    #[test]
    fn r_sh_5_no_acknowledgement_for_the_limit_is_a_stall() {
        let start = Instant::now();
        let mut watch = watch(start);
        watch.read(start + s(100));
        assert_eq!(watch.check(start + s(119)), None);
        assert_eq!(watch.check(start + s(120)), Some(Stall::Sink), "reading is no progress of the sink");
        watch.acked(start + s(119));
        assert_eq!(watch.check(start + s(238)), None);
        assert_eq!(watch.check(start + s(239)), Some(Stall::Sink));
    }

    #[test]
    fn r_sh_5_a_process_that_slept_does_not_blame_others() {
        let start = Instant::now();
        let mut watch = watch(start);
        assert_eq!(watch.check(start + s(300)), None);
        assert_eq!(watch.check(start + s(420)), Some(Stall::Sink), "the time has begun anew");
    }

    #[test]
    fn r_sh_5_having_nothing_to_do_is_no_stall() {
        let start = Instant::now();
        let mut watch = watch(start);
        watch.working(false, start + s(1));
        assert_eq!((watch.due(), watch.check(start + s(1000))), (None, None));
        watch.working(true, start + s(1000));
        assert_eq!(watch.due(), Some(start + s(1120)), "the clock starts with the work");
    }

    #[test]
    fn r_sh_5_a_known_outage_is_no_stall_but_has_a_limit_of_its_own() {
        let start = Instant::now();
        let mut watch = watch(start);
        let bus = Outage { bus: true, source: false };
        watch.outage(bus, start + s(100));
        assert_eq!(watch.check(start + s(999)), None);
        watch.outage(Outage { bus: true, source: true }, start + s(500));
        assert_eq!(watch.check(start + s(1000)), Some(Stall::Outage), "another cause doesn't start it again");
        watch.outage(Outage::default(), start + s(900));
        assert_eq!(watch.check(start + s(1019)), None, "a fresh start after it");
        assert_eq!(watch.check(start + s(1020)), Some(Stall::Sink));
    }

    #[test]
    fn r_fb_3_who_moves_in_no_way_says_nothing() {
        let start = Instant::now();
        let mut watch = watch(start);
        watch.read(start + s(60));
        assert!(watch.may_feed(start + s(179)) && !watch.may_feed(start + s(180)));
        watch.outage(Outage { bus: false, source: true }, start + s(10));
        assert!(watch.may_feed(start + s(500)), "a known outage: keep feeding back");
        watch.working(false, start + s(500));
        watch.outage(Outage::default(), start + s(500));
        assert!(watch.may_feed(start + s(5000)), "idle");
    }
}
