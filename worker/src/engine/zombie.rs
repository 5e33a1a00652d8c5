//! Who holds a slot and does no work (R-ENG-7): rules over two looks at it, some time apart.

use std::time::Duration;

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

    /// It does something: it confirms, or sends.
    pub(super) fn moved_to(&self, now: &Self) -> bool {
        (self.confirmed, self.sent) != (now.confirmed, now.sent)
    }

    /// B1: a large transaction is being decoded. The client may be silent, and so may the server.
    fn decodes(&self) -> bool {
        let event = self.wait_event.as_deref();
        !self.streaming || event.is_none_or(|event| event.starts_with("ReorderBuffer") || event.starts_with("WALRead"))
    }
}

/// The first look of a run of looks at one process, and whether it shows a zombie by now. `excused`: the holder's engine
/// says, lately, that it is paused or that the bus is away.
pub(super) fn verdict(first: &Look, now: &Look, apart: Duration, patience: Duration, excused: bool) -> Option<Rule> {
    let wait = now.wait_event.as_deref();
    if wait == Some("ClientWrite") {
        return Some(Rule::HalfKilled);
    }
    if now.streaming && now.flush_is_null && now.age > patience {
        return Some(Rule::NeverConfirmed);
    }
    let frozen = first.confirmed == now.confirmed && now.wal_end.0.saturating_sub(first.wal_end.0) > MOVED;
    let replies = now.reply_ms > first.reply_ms;
    if excused || apart < patience || !frozen || !replies || now.decodes() {
        return None;
    }
    let blocked = wait == Some("WalSenderWriteData") && first.sent == now.sent;
    Some(if blocked { Rule::BlockedWrite } else { Rule::Frozen })
}

/// Whether what we send to our own walsender doesn't arrive.
pub(super) fn unheard(first: &Look, now: &Look, apart: Duration) -> bool {
    apart >= SILENT && now.reply_ms == first.reply_ms && !now.decodes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(300);

    fn look(seconds: u64) -> Look {
        Look {
            pid: 1,
            confirmed: Some(Lsn(1000)),
            wal_end: Lsn(1000 + seconds * (1 << 20)),
            sent: Some(Lsn(2000)),
            flush_is_null: false,
            streaming: true,
            reply_ms: Some(i64::try_from(seconds * 1000).expect("small")),
            age: Duration::from_secs(seconds),
            wait_event: Some("WalSenderMain".to_owned()),
        }
    }

    fn after(seconds: u64, change: impl FnOnce(&mut Look)) -> Option<Rule> {
        let mut now = look(seconds);
        change(&mut now);
        verdict(&look(0), &now, Duration::from_secs(seconds), PATIENCE, false)
    }

    #[test]
    fn r_eng_7_each_rule_finds_its_zombie() {
        assert_eq!(after(301, |now| now.flush_is_null = true), Some(Rule::NeverConfirmed));
        assert_eq!(after(301, |_| {}), Some(Rule::Frozen));
        let blocked = |now: &mut Look| now.wait_event = Some("WalSenderWriteData".to_owned());
        assert_eq!(after(301, blocked), Some(Rule::BlockedWrite));
        let killed = |now: &mut Look| now.wait_event = Some("ClientWrite".to_owned());
        assert_eq!(after(10, killed), Some(Rule::HalfKilled));
    }

    #[test]
    fn r_eng_7_and_nobody_else_is_called_one() {
        assert_eq!(after(299, |now| now.flush_is_null = true), None, "it has just begun");
        assert_eq!(after(299, |_| {}), None);
        assert_eq!(after(301, |now| now.confirmed = Some(Lsn(1001))), None, "it confirms");
        assert_eq!(after(301, |now| now.wal_end = Lsn(2000)), None, "nothing was written");
        assert_eq!(after(301, |now| now.reply_ms = Some(0)), None, "wal_sender_timeout sees to the silent");
        assert_eq!(
            verdict(&look(0), &look(301), Duration::from_secs(301), PATIENCE, true),
            None,
            "paused, and says so"
        );
        assert!(!unheard(&look(0), &look(61), Duration::from_secs(61)), "it answers");
        let silent = |seconds| Look { reply_ms: Some(0), ..look(seconds) };
        assert!(unheard(&look(0), &silent(61), Duration::from_secs(61)));
        assert!(!unheard(&look(0), &silent(59), Duration::from_secs(59)));
        let decodes = Look { wait_event: None, ..silent(61) };
        assert!(!unheard(&look(0), &decodes, Duration::from_secs(61)), "B1: whoever decodes doesn't listen");
        // B1: busy decoding.
        assert_eq!(after(301, |now| now.streaming = false), None);
        assert_eq!(after(301, |now| now.wait_event = None), None);
        assert_eq!(after(301, |now| now.wait_event = Some("ReorderBufferRead".to_owned())), None);
    }
}
