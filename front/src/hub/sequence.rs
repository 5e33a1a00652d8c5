use std::time::Duration;

use aura_domain::Epoch;
use tokio::time::Instant;

/// A message may still be on its way when the worker's heartbeat already counts it.
const TAIL_GRACE: Duration = Duration::from_secs(1);

/// Watches the `seq` of one project's messages (R-FRT-4): +1 per message, from 1 in each epoch.
#[derive(Debug, Default)]
pub(crate) struct Sequence {
    epoch: Option<Epoch>,
    /// Last message seen.
    seen: Option<u64>,
    /// What a heartbeat said before any message was seen: older ones are none of ours.
    floor: Option<u64>,
    /// What a heartbeat counted beyond that, and since when it is missing.
    tail: Option<(u64, Instant)>,
}

/// What to do with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Deliver.
    Next,
    /// Announce a gap, then deliver.
    Jump,
    /// Drop: it came already, or its worker has lost the lease.
    Repeat,
}

impl Sequence {
    /// Judges a message.
    pub(crate) fn message(&mut self, epoch: Epoch, seq: u64) -> Verdict {
        if self.is_past(epoch) {
            return Verdict::Repeat;
        }
        self.led(epoch);
        if self.seen.is_some_and(|seen| seq <= seen) {
            return Verdict::Repeat;
        }
        let last = self.seen.or(self.floor);
        self.seen = Some(seq);
        if self.tail.is_some_and(|(tail, _)| tail <= seq) {
            self.tail = None;
        }
        if last.is_some_and(|last| seq > last + 1) { Verdict::Jump } else { Verdict::Next }
    }

    /// A worker of this epoch leads: what older ones still say has no meaning, also before the new one says anything.
    pub(crate) fn led(&mut self, epoch: Epoch) {
        if self.epoch.is_none_or(|known| known < epoch) {
            self.begin(epoch, self.epoch.is_some());
        }
    }

    /// Whether a worker of this epoch has lost the lease.
    pub(crate) fn is_past(&self, epoch: Epoch) -> bool {
        self.epoch.is_some_and(|known| epoch < known)
    }

    /// The leader says that `last` is the seq of the project's last message.
    pub(crate) fn heartbeat(&mut self, epoch: Epoch, last: u64, now: Instant) {
        if self.is_past(epoch) {
            return;
        }
        self.led(epoch);
        match self.seen.or(self.floor) {
            None => self.floor = Some(last),
            Some(known) if last > known => self.tail = self.tail.or(Some((last, now + TAIL_GRACE))),
            Some(_) => {}
        }
    }

    /// Whether messages that a heartbeat counted are missing by now. True once per loss.
    pub(crate) fn tail_lost(&mut self, now: Instant) -> bool {
        match self.tail {
            Some((tail, due)) if now >= due => {
                self.tail = None;
                // Whoever comes late was announced as missing.
                self.seen = Some(tail);
                true
            }
            _ => false,
        }
    }

    /// Something may have been lost and was announced; start from whatever comes next.
    pub(crate) fn forget(&mut self) {
        *self = Self { epoch: self.epoch, ..Self::default() };
    }

    /// We listened when this epoch began if we knew the one before, so its first message is number 1.
    fn begin(&mut self, epoch: Epoch, listening: bool) {
        *self = Self { epoch: Some(epoch), seen: None, floor: listening.then_some(0), tail: None };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(sequence: &mut Sequence, messages: &[(i64, u64)]) -> Vec<Verdict> {
        messages.iter().map(|(epoch, seq)| sequence.message(Epoch(*epoch), *seq)).collect()
    }

    use Verdict::{Jump, Next, Repeat};

    #[test]
    fn r_frt_4_repeats_are_dropped_and_a_jump_is_a_gap() {
        let mut sequence = Sequence::default();
        let verdicts = judge(&mut sequence, &[(1, 7), (1, 8), (1, 8), (1, 7), (1, 10), (1, 9), (1, 11)]);
        assert_eq!(verdicts, [Next, Next, Repeat, Repeat, Jump, Repeat, Next]);
    }

    #[test]
    fn r_frt_4_an_epoch_begins_at_1_and_the_old_one_is_over() {
        let mut sequence = Sequence::default();
        assert_eq!(judge(&mut sequence, &[(1, 7), (2, 1), (1, 8), (2, 2)]), [Next, Next, Repeat, Next]);
        assert_eq!(judge(&mut sequence, &[(3, 2)]), [Jump], "number 1 of the epoch is missing");
    }

    #[test]
    fn r_lease_2_a_leader_that_has_said_nothing_yet_ends_the_one_before() {
        let mut sequence = Sequence::default();
        assert_eq!(judge(&mut sequence, &[(1, 7)]), [Next]);
        sequence.led(Epoch(2));
        assert!(sequence.is_past(Epoch(1)) && !sequence.is_past(Epoch(2)));
        assert_eq!(judge(&mut sequence, &[(1, 8), (2, 1)]), [Repeat, Next]);
        sequence.led(Epoch(1));
        assert_eq!(judge(&mut sequence, &[(2, 3)]), [Jump]);
    }

    #[tokio::test(start_paused = true)]
    async fn r_frt_4_a_lost_tail_is_found_by_the_heartbeat() {
        let mut sequence = Sequence::default();
        let now = Instant::now();
        sequence.heartbeat(Epoch(1), 5, now);
        assert_eq!(sequence.message(Epoch(1), 5), Next, "it was on its way when the heartbeat came");
        sequence.heartbeat(Epoch(1), 7, now);
        assert!(!sequence.tail_lost(now));
        assert_eq!(sequence.message(Epoch(1), 6), Next);
        assert!(sequence.tail_lost(now + TAIL_GRACE));
        assert!(!sequence.tail_lost(now + TAIL_GRACE), "once");
        assert_eq!(sequence.message(Epoch(1), 7), Repeat, "a late fill was announced as missing");
        sequence.heartbeat(Epoch(1), 8, now);
        assert_eq!(sequence.message(Epoch(1), 8), Next);
        assert!(!sequence.tail_lost(now + TAIL_GRACE));
        sequence.heartbeat(Epoch(2), 1, now);
        assert!(sequence.tail_lost(now + TAIL_GRACE), "of a new epoch, too");
    }
}
