//! Who holds a slot and does no work (R-ENG-7): rules over looks at it, each over a run of its own in which what it goes by
//! stands still. No clock: whoever looks says when.

use std::time::{Duration, Instant};

use aura_domain::Lsn;
use aura_pgsource::slot::{Sender, SlotStatus};

/// Ours says something every 10 s at least (R-FB-2).
const SILENT: Duration = Duration::from_secs(60);
/// A walsender that is behind by less may just have nothing to confirm.
const MOVED: u64 = 16 << 20;

/// A look at a slot that somebody holds.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Look {
    pub(super) pid: i32,
    confirmed: Option<Lsn>,
    wal_end: Lsn,
    sent: Option<Lsn>,
    flush_is_null: bool,
    streaming: bool,
    reply_ms: Option<i64>,
    age: Duration,
    wait_event: Option<String>,
}

/// Which rule found it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rule {
    /// Streaming for long, and has never confirmed anything.
    NeverConfirmed,
    /// The confirmed position stands still while the log grows and the client says that it is alive.
    Frozen,
    /// The same, and the server can't write: the client doesn't read.
    BlockedWrite,
    /// It was told to end and couldn't: blocked writing its last words.
    HalfKilled,
    /// Ours, and our statuses don't arrive; a server without `wal_sender_timeout` doesn't mind.
    Unheard,
}

impl Rule {
    /// Label in metrics.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::NeverConfirmed => "z1_never_confirmed",
            Self::Frozen => "z2_frozen",
            Self::BlockedWrite => "z3_blocked_write",
            Self::HalfKilled => "z4_half_killed",
            Self::Unheard => "unheard",
        }
    }
}

impl Look {
    pub(super) fn new(status: &SlotStatus, sender: &Sender) -> Self {
        Self {
            pid: sender.pid,
            confirmed: status.confirmed_flush,
            wal_end: status.wal_end,
            sent: sender.sent,
            flush_is_null: sender.flush.is_none(),
            streaming: sender.state == "streaming",
            reply_ms: sender.reply_ms,
            age: sender.age,
            wait_event: sender.wait_event.clone(),
        }
    }

    /// B1: a large transaction is being decoded. The client may be silent, and so may the server.
    fn decodes(&self) -> bool {
        let event = self.wait_event.as_deref();
        !self.streaming || event.is_none_or(|event| event.starts_with("ReorderBuffer") || event.starts_with("WALRead"))
    }
}

/// Whom a look was at.
#[derive(Debug, Clone, Copy)]
pub(super) struct Holder {
    /// Our own stream.
    pub(super) ours: bool,
    /// Its engine says, lately, why nothing is confirmed: it is paused, the bus is away, or it reads one large transaction.
    pub(super) excused: bool,
}

/// Looks at the process that holds the slot.
#[derive(Debug, Default)]
pub(super) struct Looks(Option<Runs>);

#[derive(Debug)]
struct Runs {
    last: Look,
    /// The first look at the present confirmed position.
    frozen: (Look, Instant),
    /// Since when nothing more was sent.
    blocked: Instant,
    /// Since when no reply was heard by a server that listens.
    unheard: Instant,
}

impl Looks {
    /// What was seen before is no beginning of anything.
    pub(super) fn forget(&mut self) {
        self.0 = None;
    }

    /// Whether it shows a zombie by now; then the looks begin anew.
    pub(super) fn look(&mut self, now: Look, at: Instant, holder: Holder, patience: Duration) -> Option<Rule> {
        let runs = self.0.take().filter(|runs| runs.last.pid == now.pid);
        let mut runs = runs.unwrap_or_else(|| Runs::new(&now, at));
        runs.extend(&now, at, holder.excused);
        let rule =
            runs.verdict(&now, at, patience).or_else(|| (holder.ours && runs.is_unheard(at)).then_some(Rule::Unheard));
        if rule.is_none() {
            if at - runs.frozen.1 > patience && !runs.stalls(&now) {
                // It had nothing to confirm in all that time.
                runs.frozen = (now.clone(), at);
            }
            self.0 = Some(Runs { last: now, ..runs });
        }
        rule
    }
}

impl Runs {
    fn new(now: &Look, at: Instant) -> Self {
        Self { last: now.clone(), frozen: (now.clone(), at), blocked: at, unheard: at }
    }

    /// Each run begins anew when what it goes by has moved, and while there is an excuse.
    fn extend(&mut self, now: &Look, at: Instant, excused: bool) {
        if excused || self.last.confirmed != now.confirmed {
            self.frozen = (now.clone(), at);
        }
        if excused || self.last.sent != now.sent {
            self.blocked = at;
        }
        if now.decodes() || self.last.reply_ms != now.reply_ms {
            self.unheard = at;
        }
    }

    fn verdict(&self, now: &Look, at: Instant, patience: Duration) -> Option<Rule> {
        let wait = now.wait_event.as_deref();
        if wait == Some("ClientWrite") {
            return Some(Rule::HalfKilled);
        }
        if now.streaming && now.flush_is_null && now.age > patience {
            return Some(Rule::NeverConfirmed);
        }
        if at - self.frozen.1 < patience || !self.stalls(now) || now.decodes() {
            return None;
        }
        let blocked = wait == Some("WalSenderWriteData") && at - self.blocked >= patience;
        Some(if blocked { Rule::BlockedWrite } else { Rule::Frozen })
    }

    /// The log grows, the client says that it lives, and still confirms nothing.
    fn stalls(&self, now: &Look) -> bool {
        let (first, _) = &self.frozen;
        now.wal_end.0.saturating_sub(first.wal_end.0) > MOVED && now.reply_ms > first.reply_ms
    }

    /// Whether what we send to our own walsender doesn't arrive.
    fn is_unheard(&self, at: Instant) -> bool {
        at - self.unheard >= SILENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(300);
    const FOREIGN: Holder = Holder { ours: false, excused: false };
    const OURS: Holder = Holder { ours: true, excused: false };
    const EXCUSED: Holder = Holder { ours: true, excused: true };

    /// A zombie of the general kind: it reads and replies, and confirms nothing.
    fn look(seconds: u64) -> Look {
        Look {
            pid: 1,
            confirmed: Some(Lsn(1000)),
            wal_end: Lsn(1000 + seconds * (1 << 20)),
            sent: Some(Lsn(1000 + seconds * (1 << 20))),
            flush_is_null: false,
            streaming: true,
            reply_ms: Some(i64::try_from(seconds * 1000).expect("small")),
            age: Duration::from_secs(seconds),
            wait_event: Some("WalSenderMain".to_owned()),
        }
    }

    /// Looks every 10 s, as they are and whom they are at; the first finding, with its second.
    fn watch(until: u64, at: impl Fn(u64, &mut Look) -> Holder) -> Option<(u64, Rule)> {
        let (mut looks, start) = (Looks::default(), Instant::now());
        (0..=until).step_by(10).find_map(|seconds| {
            let mut now = look(seconds);
            let holder = at(seconds, &mut now);
            let rule = looks.look(now, start + Duration::from_secs(seconds), holder, PATIENCE);
            rule.map(|rule| (seconds, rule))
        })
    }

    #[test]
    fn r_eng_7_z2_is_reset_by_what_is_confirmed_alone() {
        assert_eq!(watch(600, |_, _| FOREIGN), Some((300, Rule::Frozen)), "it reads on and on");
        let confirms = |seconds, now: &mut Look| {
            now.confirmed = Some(Lsn(if seconds < 200 { 1000 } else { 1001 }));
            FOREIGN
        };
        assert_eq!(watch(600, confirms), Some((500, Rule::Frozen)), "a little, once");
        let steadily = |seconds, now: &mut Look| {
            now.confirmed = Some(Lsn(1000 + seconds / 290));
            FOREIGN
        };
        assert_eq!(watch(2000, steadily), None);
        let another = |seconds, now: &mut Look| {
            now.pid = if seconds < 200 { 1 } else { 2 };
            FOREIGN
        };
        assert_eq!(watch(600, another), Some((500, Rule::Frozen)), "another process");
    }

    #[test]
    fn r_eng_7_z2_needs_a_log_that_grows_and_a_client_that_replies() {
        let quiet = |_, now: &mut Look| {
            now.wal_end = Lsn(2000);
            FOREIGN
        };
        assert_eq!(watch(2000, quiet), None, "nothing was written");
        let silent = |_, now: &mut Look| {
            now.reply_ms = Some(0);
            FOREIGN
        };
        assert_eq!(watch(2000, silent), None, "wal_sender_timeout sees to the silent");
        let burst = |seconds, now: &mut Look| {
            now.wal_end = Lsn(if seconds < 1000 { 2000 } else { 1 << 30 });
            FOREIGN
        };
        assert_eq!(watch(990, burst), None);
        assert!(watch(2000, burst).is_some(), "quiet before, and frozen since");
    }

    #[test]
    fn r_eng_7_z3_needs_a_sender_that_stood_still_for_as_long() {
        let blocked_at = |from: u64| {
            move |seconds: u64, now: &mut Look| {
                now.wait_event = Some("WalSenderWriteData".to_owned());
                now.sent = Some(Lsn(seconds.min(from)));
                FOREIGN
            }
        };
        assert_eq!(watch(600, blocked_at(0)), Some((300, Rule::BlockedWrite)));
        assert_eq!(watch(600, blocked_at(100)), Some((300, Rule::Frozen)), "it has sent something meanwhile");
        let catches_up = |seconds, now: &mut Look| {
            now.confirmed = Some(Lsn(if seconds < 100 { 1000 } else { 1001 }));
            blocked_at(0)(seconds, now)
        };
        assert_eq!(watch(600, catches_up), Some((400, Rule::BlockedWrite)), "and what it confirmed begins its time");
    }

    #[test]
    fn r_eng_7_z1_and_z4_need_no_run() {
        let never = |_, now: &mut Look| {
            now.flush_is_null = true;
            FOREIGN
        };
        assert_eq!(
            watch(600, |seconds, now| {
                now.confirmed = Some(Lsn(seconds));
                never(seconds, now)
            }),
            Some((310, Rule::NeverConfirmed))
        );
        let killed = |seconds, now: &mut Look| {
            now.wait_event = Some(if seconds < 20 { "WalSenderMain" } else { "ClientWrite" }.to_owned());
            FOREIGN
        };
        assert_eq!(watch(600, killed), Some((20, Rule::HalfKilled)));
    }

    #[test]
    fn r_eng_7_unheard_is_whose_replies_stand_still_whatever_else_moves() {
        let unheard_from = |from: u64, holder: Holder| {
            move |seconds: u64, now: &mut Look| {
                now.reply_ms = Some(i64::try_from(seconds.min(from)).expect("small"));
                now.confirmed = Some(Lsn(seconds));
                holder
            }
        };
        assert_eq!(watch(600, unheard_from(0, OURS)), Some((60, Rule::Unheard)));
        assert_eq!(watch(600, unheard_from(200, OURS)), Some((260, Rule::Unheard)), "its own run");
        assert_eq!(watch(600, unheard_from(0, FOREIGN)), None, "others may have their own way");
        let listens_late = |seconds, now: &mut Look| {
            // B1: whoever decodes doesn't listen, and has heard nothing yet at the first look after it.
            now.wait_event = Some(if seconds < 200 { "ReorderBufferRead" } else { "WalSenderMain" }.to_owned());
            unheard_from(0, OURS)(seconds, now)
        };
        assert_eq!(watch(600, listens_late), Some((250, Rule::Unheard)));
    }

    #[test]
    fn r_eng_7_an_excuse_lasts_as_long_as_it_is_one_and_then_the_time_begins() {
        assert_eq!(watch(2000, |_, _| EXCUSED), None, "paused, and says so");
        let goes_on = |seconds, _: &mut Look| if seconds < 400 { EXCUSED } else { OURS };
        assert_eq!(watch(2000, goes_on), Some((690, Rule::Frozen)), "not at the first look after it");
    }

    #[test]
    fn r_eng_7_b1_busy_decoding_is_no_zombie() {
        for busy in [Some("ReorderBufferRead"), Some("WALRead"), None] {
            let decodes = |_, now: &mut Look| {
                now.wait_event = busy.map(str::to_owned);
                OURS
            };
            assert_eq!(watch(2000, decodes), None);
        }
        let catches_up = |_, now: &mut Look| {
            now.streaming = false;
            OURS
        };
        assert_eq!(watch(2000, catches_up), None);
        let on_cpu_at_times = |seconds, now: &mut Look| {
            now.wait_event = now.wait_event.take().filter(|_| !(290..400).contains(&seconds));
            FOREIGN
        };
        assert_eq!(watch(2000, on_cpu_at_times), Some((400, Rule::Frozen)), "who is busy at times is found later");
    }
}
