use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Bound,
};

use aura_domain::{Epoch, FrontId, SubId};
use aura_wire::control::{Exception, Reply, Request, Subscription};
use tokio::sync::watch;

/// Largest chunk of a request in bytes, below the bus's payload limit with room to spare (design §9).
const CHUNK_BYTES: usize = 256 << 10;
/// What a request has besides its subscriptions.
const HEAD_BYTES: usize = 1 << 10;
/// Waiting bindings that are asked about again per heartbeat.
const ASK_SOME: usize = 1000;

/// What the leader said of a subscription.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Status {
    /// Nothing yet.
    Pending,
    /// It delivers.
    Live,
    /// It will deliver once its table is registered; the text is for the client.
    Waiting(String),
    /// It never will; the text is for the client.
    Rejected(String),
}

/// This front's subscriptions of one source, and what the leader has yet to hear of them. No I/O: [`SourceBook::next`] says
/// what to send, [`SourceBook::answered`] takes the reply.
#[derive(Debug)]
pub(crate) struct SourceBook {
    front: FrontId,
    /// Revision given out last, and the one that the leader has confirmed.
    rev: u64,
    acked_rev: u64,
    epoch: Option<Epoch>,
    entries: BTreeMap<SubId, Entry>,
    /// To be joined or asked about again.
    asks: BTreeSet<SubId>,
    /// Without holders, to be left.
    leaves: BTreeSet<SubId>,
    /// Sent without an answer: the same again, so that its revision keeps its meaning.
    unanswered: Option<Step>,
    snapshot: Option<Snapshot>,
    next_ticket: u64,
    /// Where [`Self::ask_some_again`] stopped.
    cursor: SubId,
}

/// A snapshot that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Snapshot {
    /// Whether subscribers may have missed something in the meantime.
    gap: bool,
}

#[derive(Debug)]
struct Entry {
    subscription: Subscription,
    /// Size of its JSON, exact: what a client can put in must not make a request that the bus refuses for ever.
    bytes: usize,
    holders: usize,
    /// Tells this entry from an earlier one of the same id.
    ticket: u64,
    /// The leader has it.
    acked: bool,
    status: watch::Sender<Status>,
}

/// What to send next, chunk by chunk; all chunks must be answered.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Step {
    pub(crate) requests: Vec<Request>,
    rev: u64,
    asked: Vec<SubId>,
    snapshot: bool,
    gap: bool,
}

/// What an answer means for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Effects {
    /// Announce a gap to everybody of this source.
    pub(crate) gap: bool,
}

impl SourceBook {
    pub(crate) fn new(front: FrontId) -> Self {
        Self {
            front,
            rev: 0,
            acked_rev: 0,
            epoch: None,
            entries: BTreeMap::new(),
            asks: BTreeSet::new(),
            leaves: BTreeSet::new(),
            unanswered: None,
            snapshot: None,
            next_ticket: 0,
            cursor: SubId(0),
        }
    }

    /// Takes hold of a subscription; equal ones share an entry. Returns the ticket for [`Self::release`] and the status.
    pub(crate) fn acquire(&mut self, subscription: Subscription) -> (u64, watch::Receiver<Status>) {
        let sub_id = subscription.sub_id;
        if let Some(entry) = self.entries.get_mut(&sub_id) {
            entry.holders += 1;
            self.leaves.remove(&sub_id);
            return (entry.ticket, entry.status.subscribe());
        }
        let (status, receiver) = watch::channel(Status::Pending);
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let bytes = serde_json::to_vec(&subscription).map_or(0, |json| json.len() + 1);
        self.entries.insert(sub_id, Entry { subscription, bytes, holders: 1, ticket, acked: false, status });
        self.asks.insert(sub_id);
        (ticket, receiver)
    }

    /// Lets go of it.
    pub(crate) fn release(&mut self, sub_id: SubId, ticket: u64) {
        let Some(entry) = self.entries.get_mut(&sub_id).filter(|entry| entry.ticket == ticket) else { return };
        entry.holders = entry.holders.saturating_sub(1);
        if entry.holders == 0 {
            self.leaves.insert(sub_id);
        }
    }

    /// A whole snapshot is due; `gap` when subscribers may have missed something that nobody else announces.
    pub(crate) fn want_snapshot(&mut self, gap: bool) {
        let gap = gap && self.entries.values().any(|entry| entry.acked);
        let due = self.snapshot.get_or_insert_default();
        due.gap |= gap;
    }

    /// Bindings that wait for their table are asked about again.
    pub(crate) fn ask_again(&mut self) {
        let waiting = self.entries.iter().filter(|(_, entry)| matches!(*entry.status.borrow(), Status::Waiting(_)));
        self.asks.extend(waiting.map(|(sub_id, _)| *sub_id));
    }

    /// The same for some of them, by turns: the leader may not have been able to tell.
    pub(crate) fn ask_some_again(&mut self) {
        let later = self.entries.range((Bound::Excluded(self.cursor), Bound::Unbounded));
        let waiting = later.filter(|(_, entry)| matches!(*entry.status.borrow(), Status::Waiting(_)));
        let some: Vec<_> = waiting.map(|(sub_id, _)| *sub_id).take(ASK_SOME).collect();
        self.cursor = if some.len() < ASK_SOME { SubId(0) } else { some[ASK_SOME - 1] };
        self.asks.extend(some);
    }

    /// A leader begins to read and says which revisions it has.
    pub(crate) fn leader(&mut self, epoch: Epoch, fronts: &[(FrontId, u64)]) {
        if !self.note_epoch(epoch) {
            return;
        }
        // A leader that has the step on its way to it has more than we know.
        let sent = self.unanswered.as_ref().map_or(self.acked_rev, |step| step.rev);
        let current = |rev| rev == self.acked_rev || rev == sent;
        let listed = fronts.iter().any(|(front, rev)| *front == self.front && current(*rev));
        if !listed && !self.entries.is_empty() {
            self.want_snapshot(true);
        }
    }

    /// Whether a message of this epoch counts: older leaders have lost their lease.
    pub(crate) fn note_epoch(&mut self, epoch: Epoch) -> bool {
        if self.epoch.is_some_and(|known| epoch < known) {
            return false;
        }
        self.epoch = Some(epoch);
        true
    }

    /// Revision and count for the heartbeat; `None` while there is nothing to say.
    pub(crate) fn state(&self) -> Option<(u64, u64)> {
        let count = self.entries.values().filter(|entry| entry.acked).count();
        (self.acked_rev > 0).then_some((self.acked_rev, count as u64))
    }

    /// What to send now. The same step comes again until it is answered, unless a snapshot makes it needless.
    pub(crate) fn next(&mut self) -> Option<Step> {
        if let Some(due) = self.snapshot {
            // Whatever was on its way is part of it.
            let earlier = self.unanswered.take().filter(|step| step.snapshot).is_some_and(|step| step.gap);
            self.snapshot = None;
            self.unanswered = Some(self.snapshot_step(due.gap || earlier));
        } else if self.unanswered.is_none() {
            self.unanswered = self.leave_step().or_else(|| self.join_step());
        }
        self.unanswered.clone()
    }

    fn leave_step(&mut self) -> Option<Step> {
        let gone = self.drop_leaves();
        if gone.is_empty() {
            return None;
        }
        let rev = self.raise();
        let request = Request::Leave { front: self.front.clone(), rev, sub_ids: gone };
        Some(Step { requests: vec![request], rev, asked: Vec::new(), snapshot: false, gap: false })
    }

    /// Takes entries without holders out; those that the leader has are returned.
    fn drop_leaves(&mut self) -> Vec<SubId> {
        let mut known = Vec::new();
        for sub_id in std::mem::take(&mut self.leaves) {
            self.asks.remove(&sub_id);
            if self.entries.remove(&sub_id).is_some_and(|entry| entry.acked) {
                known.push(sub_id);
            }
        }
        known
    }

    fn join_step(&mut self) -> Option<Step> {
        let mut asked = Vec::new();
        let mut subscriptions = Vec::new();
        let mut bytes = HEAD_BYTES;
        while let Some(sub_id) = self.asks.first().copied() {
            let Some(entry) = self.entries.get(&sub_id) else {
                self.asks.remove(&sub_id);
                continue;
            };
            bytes += entry.bytes;
            if bytes > CHUNK_BYTES && !asked.is_empty() {
                break;
            }
            self.asks.remove(&sub_id);
            asked.push(sub_id);
            subscriptions.push(entry.subscription.clone());
        }
        if asked.is_empty() {
            return None;
        }
        let rev = self.raise();
        let request = Request::Join { front: self.front.clone(), rev, subscriptions };
        Some(Step { requests: vec![request], rev, asked, snapshot: false, gap: false })
    }

    fn snapshot_step(&mut self, gap: bool) -> Step {
        self.drop_leaves();
        self.asks.clear();
        let rev = self.raise();
        let asked: Vec<_> = self.entries.keys().copied().collect();
        let chunks = self.chunks();
        let parts = u32::try_from(chunks.len()).unwrap_or(u32::MAX);
        let request =
            |(part, subscriptions)| Request::Snapshot { front: self.front.clone(), rev, part, parts, subscriptions };
        Step { requests: (0..).zip(chunks).map(request).collect(), rev, asked, snapshot: true, gap }
    }

    /// All subscriptions in chunks; at least one chunk, maybe empty.
    fn chunks(&self) -> Vec<Vec<Subscription>> {
        let (mut chunks, mut bytes) = (vec![Vec::new()], HEAD_BYTES);
        for entry in self.entries.values() {
            bytes += entry.bytes;
            if bytes > CHUNK_BYTES && chunks.last().is_some_and(|chunk| !chunk.is_empty()) {
                chunks.push(Vec::new());
                bytes = HEAD_BYTES + entry.bytes;
            }
            if let Some(chunk) = chunks.last_mut() {
                chunk.push(entry.subscription.clone());
            }
        }
        chunks
    }

    fn raise(&mut self) -> u64 {
        self.rev += 1;
        self.rev
    }

    /// All chunks of the step were answered.
    pub(crate) fn answered(&mut self, step: &Step, replies: &[Reply]) -> Effects {
        let current = replies.iter().all(|reply| self.note_epoch(reply.epoch));
        if !current || self.unanswered.as_ref().is_none_or(|sent| sent.rev != step.rev) {
            return Effects::default();
        }
        self.unanswered = None;
        self.acked_rev = step.rev;
        let exceptions: HashMap<SubId, &Exception> =
            replies.iter().flat_map(|reply| &reply.exceptions).map(|exception| (exception.sub_id, exception)).collect();
        for sub_id in &step.asked {
            self.settle(*sub_id, exceptions.get(sub_id).copied());
        }
        if !step.snapshot && replies.iter().any(|reply| reply.want_snapshot) {
            // The leader didn't know us: whoever was live may have missed something.
            let others = self.entries.iter().any(|(sub_id, entry)| entry.acked && !step.asked.contains(sub_id));
            self.want_snapshot(others);
        }
        Effects { gap: step.gap }
    }

    fn settle(&mut self, sub_id: SubId, exception: Option<&Exception>) {
        let Some(entry) = self.entries.get_mut(&sub_id) else { return };
        let status = match exception {
            None => Status::Live,
            Some(exception) if exception.fatal => Status::Rejected(exception.message.clone()),
            Some(exception) => Status::Waiting(exception.message.clone()),
        };
        entry.acked = true;
        let rejected = matches!(status, Status::Rejected(_));
        entry.status.send_replace(status);
        if rejected {
            // The leader forgot it, so a later binding asks afresh.
            self.entries.remove(&sub_id);
            self.asks.remove(&sub_id);
            self.leaves.remove(&sub_id);
        }
    }
}

#[cfg(test)]
mod tests {
    use aura_domain::{Claims, EventFilter, Lsn, ProjectId, SubscriptionSpec};
    use serde_json::json;

    use super::*;

    fn book() -> SourceBook {
        SourceBook::new(FrontId("f".to_owned()))
    }

    fn subscription(id: u64) -> Subscription {
        let spec = SubscriptionSpec {
            project: ProjectId(uuid::Uuid::nil()),
            schema: "public".to_owned(),
            table: Some("t".to_owned()),
            event: EventFilter::All,
            filter: None,
            select: None,
            role: "anon".to_owned(),
            claims: Claims::from_payload(&json!({})).expect("an object"),
        };
        Subscription { sub_id: SubId(id), twin: SubId(id + 1000), spec }
    }

    fn reply(exceptions: &[(u64, bool)]) -> Reply {
        let exceptions = exceptions
            .iter()
            .map(|(id, fatal)| Exception { sub_id: SubId(*id), message: "no".to_owned(), fatal: *fatal })
            .collect();
        Reply { epoch: Epoch(1), since: Lsn(1), streaming: true, exceptions, want_snapshot: false }
    }

    /// Answers the next step with `reply` for each of its chunks.
    fn step(book: &mut SourceBook, reply: &Reply) -> (Step, Effects) {
        let step = book.next().expect("something to send");
        let effects = book.answered(&step, &vec![reply.clone(); step.requests.len()]);
        (step, effects)
    }

    #[test]
    fn equal_subscriptions_share_one_entry_and_leave_with_the_last() {
        let mut book = book();
        let (ticket, status) = book.acquire(subscription(1));
        let (again, _) = book.acquire(subscription(1));
        assert_eq!(ticket, again);
        let (join, _) = step(&mut book, &reply(&[]));
        assert!(
            matches!(&join.requests[..], [Request::Join { rev: 1, subscriptions, .. }] if subscriptions.len() == 1)
        );
        assert_eq!(*status.borrow(), Status::Live);
        book.release(SubId(1), ticket);
        assert_eq!(book.next(), None);
        book.release(SubId(1), ticket);
        let (leave, _) = step(&mut book, &reply(&[]));
        assert!(matches!(&leave.requests[..], [Request::Leave { rev: 2, sub_ids, .. }] if sub_ids[..] == [SubId(1)]));
        assert_eq!(book.state(), Some((2, 0)));
    }

    #[test]
    fn an_unanswered_step_is_sent_again_with_its_revision() {
        let mut book = book();
        book.acquire(subscription(1));
        let first = book.next();
        book.acquire(subscription(2));
        assert_eq!(book.next(), first, "the same again");
        book.answered(&first.expect("a join"), &[reply(&[])]);
        let (second, _) = step(&mut book, &reply(&[]));
        assert!(
            matches!(&second.requests[..], [Request::Join { rev: 2, subscriptions, .. }] if subscriptions.len() == 1)
        );
    }

    #[test]
    fn exceptions_wait_or_end() {
        let mut book = book();
        let (_, rejected) = book.acquire(subscription(1));
        let (_, waiting) = book.acquire(subscription(2));
        step(&mut book, &reply(&[(1, true), (2, false)]));
        assert_eq!(*rejected.borrow(), Status::Rejected("no".to_owned()));
        assert_eq!(*waiting.borrow(), Status::Waiting("no".to_owned()));
        assert_eq!(book.state(), Some((1, 1)), "the leader forgot the rejected one");
        book.ask_again();
        step(&mut book, &reply(&[]));
        assert_eq!(*waiting.borrow(), Status::Live);
        book.ask_some_again();
        assert_eq!(book.next(), None, "what lives isn't asked about");
    }

    #[test]
    fn a_leader_without_our_revision_gets_a_snapshot_and_subscribers_a_gap() {
        let mut book = book();
        book.acquire(subscription(1));
        step(&mut book, &reply(&[]));
        book.leader(Epoch(2), &[(FrontId("f".to_owned()), 1)]);
        assert_eq!(book.next(), None, "it has us");
        book.leader(Epoch(3), &[(FrontId("f".to_owned()), 0)]);
        let (snapshot, effects) = step(&mut book, &Reply { epoch: Epoch(3), ..reply(&[]) });
        assert!(matches!(&snapshot.requests[..], [Request::Snapshot { rev: 2, part: 0, parts: 1, .. }]));
        assert_eq!(effects, Effects { gap: true });
        book.leader(Epoch(2), &[]);
        assert_eq!(book.next(), None, "an old leader's word is nothing");
    }

    #[test]
    fn a_snapshot_in_time_is_no_gap_and_replaces_what_was_on_its_way() {
        let mut book = book();
        let (ticket, _) = book.acquire(subscription(1));
        step(&mut book, &reply(&[]));
        book.acquire(subscription(2));
        book.next().expect("a join that nobody answers");
        book.release(SubId(1), ticket);
        book.want_snapshot(false);
        let sent = book.next().expect("a snapshot");
        book.leader(Epoch(2), &[(FrontId("f".to_owned()), 3)]);
        assert_eq!(book.next(), Some(sent.clone()), "the announcement overtook the answer");
        let effects = book.answered(&sent, &[Reply { epoch: Epoch(2), ..reply(&[]) }]);
        assert_eq!(effects, Effects::default());
        let Request::Snapshot { subscriptions, .. } = &sent.requests[0] else { panic!("a snapshot") };
        assert_eq!(subscriptions.iter().map(|s| s.sub_id).collect::<Vec<_>>(), [SubId(2)]);
        assert_eq!(book.next(), None);
    }

    #[test]
    fn a_leader_that_does_not_know_us_is_told_everything() {
        let mut book = book();
        book.acquire(subscription(1));
        step(&mut book, &reply(&[]));
        book.acquire(subscription(2));
        step(&mut book, &Reply { want_snapshot: true, ..reply(&[]) });
        let (snapshot, effects) = step(&mut book, &reply(&[]));
        assert!(
            matches!(&snapshot.requests[..], [Request::Snapshot { subscriptions, .. }] if subscriptions.len() == 2)
        );
        assert!(effects.gap, "the first one was live");
    }

    #[test]
    fn snapshots_come_in_chunks_below_the_bus_limit() {
        let mut book = book();
        for id in 0..100 {
            let mut wide = subscription(id);
            wide.spec.filter = Some("\u{1}".repeat(10_000));
            book.acquire(wide);
        }
        book.want_snapshot(false);
        let (snapshot, _) = step(&mut book, &reply(&[]));
        assert!(snapshot.requests.len() > 1);
        for request in &snapshot.requests {
            assert!(serde_json::to_vec(request).expect("JSON").len() <= CHUNK_BYTES);
        }
    }
}
