use std::{collections::BTreeMap, time::Duration};

use aura_domain::Epoch;
use tokio::time::Instant;

/// A message may still be on its way when the worker's heartbeat already counts it.
const TAIL_GRACE: Duration = Duration::from_secs(1);
/// For so long a message waits for those before it. A worker whose connection to the bus broke in mid-batch may send the
/// batch's end first, from the client's queue, and then all of it again: at the latest 2 s after the connection is back.
const AHEAD_GRACE: Duration = Duration::from_secs(3);
/// So many bytes wait: more than a batch has, so that little memory is held for a loss that nobody mends.
const MOST_AHEAD: usize = 8 << 20;

/// Watches the `seq` of one project's messages (R-FRT-4): +1 per message, from 1 in each epoch.
#[derive(Debug)]
pub(crate) struct Sequence<M> {
    epoch: Option<Epoch>,
    /// Last message that was let through.
    seen: Option<u64>,
    /// What a heartbeat said before any message was seen: older ones are none of ours.
    floor: Option<u64>,
    /// What a heartbeat counted beyond that, and since when it is missing.
    tail: Option<(u64, Instant)>,
    /// Messages that came before others of a lower number, and until when these may still come.
    ahead: BTreeMap<u64, M>,
    ahead_bytes: usize,
    ahead_until: Option<Instant>,
}

/// What to do with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Deliver.
    Next,
    /// Keep it: see [`Sequence::hold`].
    Ahead,
    /// Drop: it came already, or its worker has lost the lease.
    Repeat,
}

/// A message that waits no longer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Released<M> {
    /// Those before it are missing for good.
    pub(crate) after_loss: bool,
    pub(crate) message: M,
}

impl<M> Default for Sequence<M> {
    fn default() -> Self {
        Self {
            epoch: None,
            seen: None,
            floor: None,
            tail: None,
            ahead: BTreeMap::new(),
            ahead_bytes: 0,
            ahead_until: None,
        }
    }
}

impl<M> Sequence<M> {
    /// Judges a message of the epoch that leads, or of a past one.
    pub(crate) fn message(&mut self, epoch: Epoch, seq: u64) -> Verdict {
        if self.is_past(epoch) {
            return Verdict::Repeat;
        }
        self.led(epoch);
        match self.seen.or(self.floor) {
            _ if self.seen.is_some_and(|seen| seq <= seen) => Verdict::Repeat,
            Some(last) if seq > last + 1 => Verdict::Ahead,
            _ => {
                self.pass(seq);
                Verdict::Next
            }
        }
    }

    /// Keeps a message that was judged [`Verdict::Ahead`], until [`Self::release`] gives it out.
    pub(crate) fn hold(&mut self, seq: u64, message: M, bytes: usize, now: Instant) {
        self.ahead.insert(seq, message);
        self.ahead_bytes += bytes;
        self.ahead_until.get_or_insert(now + AHEAD_GRACE);
    }

    /// The next message that was held and waits no longer: those before it have come, or will not come. To be asked until
    /// there is none, after each message and now and then.
    pub(crate) fn release(&mut self, now: Instant) -> Option<Released<M>> {
        let is_due = |due: Option<Instant>| due.is_some_and(|due| now >= due);
        // What a heartbeat counted, the bus had received: nobody sends it again.
        let counted = is_due(self.tail.map(|(_, due)| due));
        self.take_first(counted || is_due(self.ahead_until) || self.ahead_bytes > MOST_AHEAD)
    }

    /// The same for all, before an epoch ends: nobody sends again what is missing in it.
    pub(crate) fn release_all(&mut self) -> Option<Released<M>> {
        self.take_first(true)
    }

    fn take_first(&mut self, even_after_loss: bool) -> Option<Released<M>> {
        let last = self.seen.or(self.floor).unwrap_or(0);
        // What was held came again behind those it waited for.
        self.ahead = self.ahead.split_off(&(last + 1));
        let after_loss = self.ahead.first_key_value().is_some_and(|(seq, _)| *seq > last + 1);
        let first = if after_loss && !even_after_loss { None } else { self.ahead.pop_first() };
        if self.ahead.is_empty() {
            (self.ahead_until, self.ahead_bytes) = (None, 0);
        }
        let (seq, message) = first?;
        self.pass(seq);
        Some(Released { after_loss, message })
    }

    fn pass(&mut self, seq: u64) {
        self.seen = Some(seq);
        if self.tail.is_some_and(|(tail, _)| tail <= seq) {
            self.tail = None;
        }
    }

    /// A worker of this epoch leads: what older ones still say has no meaning, also before the new one says anything.
    pub(crate) fn led(&mut self, epoch: Epoch) {
        if self.is_new(epoch) {
            self.begin(epoch, self.epoch.is_some());
        }
    }

    /// Whether nobody of this epoch was heard of before.
    pub(crate) fn is_new(&self, epoch: Epoch) -> bool {
        self.epoch.is_none_or(|known| known < epoch)
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

    /// Whether messages that a heartbeat counted are missing by now. True once per loss; [`Self::release`] comes first.
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

    /// Something may have been lost and was announced, what waits included; start from whatever comes next.
    pub(crate) fn forget(&mut self) {
        *self = Self { epoch: self.epoch, ..Self::default() };
    }

    /// We listened when this epoch began if we knew the one before, so its first message is number 1.
    fn begin(&mut self, epoch: Epoch, listening: bool) {
        *self = Self { epoch: Some(epoch), floor: listening.then_some(0), ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(sequence: &mut Sequence<u64>, messages: &[(i64, u64)]) -> Vec<Verdict> {
        messages.iter().map(|(epoch, seq)| sequence.message(Epoch(*epoch), *seq)).collect()
    }

    /// What is delivered of a message and what waited for it; 0 = a loss is announced.
    fn deliver(sequence: &mut Sequence<u64>, seq: u64, now: Instant) -> Vec<u64> {
        let mut delivered = Vec::new();
        match sequence.message(Epoch(1), seq) {
            Next => delivered.push(seq),
            Ahead => sequence.hold(seq, seq, 1, now),
            Repeat => {}
        }
        delivered.extend(released(sequence, now));
        delivered
    }

    fn released(sequence: &mut Sequence<u64>, now: Instant) -> Vec<u64> {
        let next = std::iter::from_fn(|| sequence.release(now));
        next.flat_map(|next| next.after_loss.then_some(0).into_iter().chain([next.message])).collect()
    }

    use Verdict::{Ahead, Next, Repeat};

    #[test]
    fn r_frt_4_repeats_are_dropped_and_what_is_ahead_waits() {
        let mut sequence = Sequence::default();
        let verdicts = judge(&mut sequence, &[(1, 7), (1, 8), (1, 8), (1, 7), (1, 10), (1, 9), (1, 10)]);
        assert_eq!(verdicts, [Next, Next, Repeat, Repeat, Ahead, Next, Next]);
    }

    /// The end of a batch may come before the batch: the worker's client sends on a new connection what was in its queue.
    #[tokio::test(start_paused = true)]
    async fn r_ack_1_a_batch_that_comes_again_behind_its_own_end_is_delivered_in_order() {
        let (mut sequence, now) = (Sequence::default(), Instant::now());
        assert_eq!(deliver(&mut sequence, 3, now), [3]);
        assert_eq!(deliver(&mut sequence, 6, now), [0; 0]);
        assert_eq!(deliver(&mut sequence, 7, now), [0; 0]);
        assert_eq!(deliver(&mut sequence, 4, now), [4]);
        assert_eq!(deliver(&mut sequence, 5, now), [5, 6, 7]);
        assert_eq!(deliver(&mut sequence, 6, now), [0; 0], "came already");
        assert_eq!(deliver(&mut sequence, 8, now), [8]);
        assert_eq!(released(&mut sequence, now + AHEAD_GRACE), [0; 0], "nothing waits");
    }

    #[tokio::test(start_paused = true)]
    async fn r_frt_4_what_does_not_come_in_time_is_a_gap() {
        let (mut sequence, now) = (Sequence::default(), Instant::now());
        assert_eq!(deliver(&mut sequence, 1, now), [1]);
        assert_eq!(deliver(&mut sequence, 3, now), [0; 0]);
        assert_eq!(deliver(&mut sequence, 4, now), [0; 0]);
        assert_eq!(deliver(&mut sequence, 6, now), [0; 0]);
        assert_eq!(released(&mut sequence, now + AHEAD_GRACE), [0, 3, 4, 0, 6]);
        assert_eq!(deliver(&mut sequence, 2, now), [0; 0], "it was announced as missing");
        assert_eq!(deliver(&mut sequence, 7, now), [7]);
        sequence.hold(9, 9, MOST_AHEAD + 1, now);
        assert_eq!(released(&mut sequence, now), [0, 9], "too much to wait with");
    }

    #[tokio::test(start_paused = true)]
    async fn r_frt_4_what_the_bus_had_received_is_not_waited_for() {
        let (mut sequence, now) = (Sequence::default(), Instant::now());
        assert_eq!(deliver(&mut sequence, 1, now), [1]);
        assert_eq!(deliver(&mut sequence, 3, now), [0; 0]);
        sequence.heartbeat(Epoch(1), 3, now);
        assert_eq!(released(&mut sequence, now + TAIL_GRACE), [0, 3]);
        assert!(!sequence.tail_lost(now + TAIL_GRACE), "one loss, one gap");
        assert_eq!(deliver(&mut sequence, 5, now), [0; 0]);
        let all: Vec<_> = std::iter::from_fn(|| sequence.release_all()).collect();
        assert_eq!(all, [Released { after_loss: true, message: 5 }], "before an epoch ends");
    }

    #[test]
    fn r_frt_4_an_epoch_begins_at_1_and_the_old_one_is_over() {
        let mut sequence = Sequence::default();
        assert_eq!(judge(&mut sequence, &[(1, 7), (2, 1), (1, 8), (2, 2)]), [Next, Next, Repeat, Next]);
        assert_eq!(judge(&mut sequence, &[(3, 2)]), [Ahead], "number 1 of the epoch is missing");
    }

    #[test]
    fn r_lease_2_a_leader_that_has_said_nothing_yet_ends_the_one_before() {
        let mut sequence = Sequence::default();
        assert_eq!(judge(&mut sequence, &[(1, 7)]), [Next]);
        sequence.led(Epoch(2));
        assert!(sequence.is_past(Epoch(1)) && !sequence.is_past(Epoch(2)));
        assert_eq!(judge(&mut sequence, &[(1, 8), (2, 1)]), [Repeat, Next]);
        sequence.led(Epoch(1));
        assert_eq!(judge(&mut sequence, &[(2, 3)]), [Ahead]);
    }

    #[tokio::test(start_paused = true)]
    async fn r_frt_4_a_lost_tail_is_found_by_the_heartbeat() {
        let (mut sequence, now) = (Sequence::<u64>::default(), Instant::now());
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
