//! Which row is whose: subscribers found, rows sorted by table, and no more of either at a time than memory is to hold
//! (R-MEM-2): a row becomes as many entries as it has subscribers, and a message that lists them.

use std::{collections::HashMap, sync::Arc};

use aura_bus::Message;
use aura_domain::{Image, Position};
use aura_flow::Reservation;
use aura_pgsource::{conditions::Answers, visibility::Identity};

use super::{registry::RegisteredTable, shard::Row};
use crate::subs::{
    index::{ActiveSubscription, SubscriptionIndex},
    table::Matched,
};

/// Rows × subscribers that are judged at a time: 16 bytes each, and a verdict.
const MATCHES: usize = 200_000;
/// Encoded bytes that are handed to the bus at a time.
const SLICE_BYTES: usize = 2 << 20;
/// What a message holds besides its payload.
const MESSAGE_OVERHEAD: usize = 256;

/// The rows of one table in a batch.
pub(super) struct TableBatch<'a> {
    pub(super) table: &'a Arc<RegisteredTable>,
    pub(super) xids: Vec<u32>,
    pub(super) images: Vec<&'a Image>,
    pub(super) identities: Vec<Arc<Identity>>,
    /// Per identity the images that it is to be judged for.
    pub(super) wanted: Vec<Vec<usize>>,
    identity_numbers: HashMap<Arc<Identity>, usize>,
}

/// Where a row's images and subscribers are in its [`TableBatch`].
pub(super) struct Placed {
    pub(super) batch: usize,
    pub(super) new: Option<usize>,
    pub(super) old: Option<usize>,
    pub(super) subscribers: Vec<(Arc<ActiveSubscription>, usize)>,
    /// Whose filter could not be decided for this row.
    pub(super) failed: Vec<(Arc<ActiveSubscription>, usize)>,
}

/// Finds the rows' subscribers and sorts the rows by table: the first row, and as many more as have [`MATCHES`] together,
/// questions counted.
/// What PostgreSQL is to be asked about filters is noted in `answers`; then it must be asked, and all placed again.
pub(super) fn place<'a>(
    index: &SubscriptionIndex,
    rows: &'a [Row],
    answers: &mut Answers,
) -> (Vec<TableBatch<'a>>, Vec<Placed>) {
    let mut batches: Vec<TableBatch<'a>> = Vec::new();
    let (mut placed, mut matches) = (Vec::new(), 0);
    for row in rows {
        let deciding = row.body.change.new.as_ref().or(row.body.change.old.as_ref());
        let matching = |image: &Image| index.matching(&row.body.table.key, row.body.change.kind, image, answers);
        let matched = deciding.map(matching).unwrap_or_default();
        matches += matched.found.len() + matched.failed.len();
        if matches + answers.open_pairs() > MATCHES && !placed.is_empty() {
            break;
        }
        let same = |batch: &TableBatch<'_>| Arc::ptr_eq(batch.table, &row.body.table);
        let at = batches.iter().position(same).unwrap_or_else(|| {
            batches.push(TableBatch::new(&row.body.table));
            batches.len() - 1
        });
        placed.push(batches[at].place(at, row, matched));
    }
    (batches, placed)
}

impl<'a> TableBatch<'a> {
    fn new(table: &'a Arc<RegisteredTable>) -> Self {
        let (xids, images, identities, wanted, identity_numbers) = Default::default();
        Self { table, xids, images, identities, wanted, identity_numbers }
    }

    fn place(&mut self, batch: usize, row: &'a Row, matched: Matched) -> Placed {
        if self.xids.last() != Some(&row.body.change.xid) {
            self.xids.push(row.body.change.xid);
        }
        let mut with_identity = |subs: Vec<Arc<ActiveSubscription>>| {
            let all = subs.into_iter().map(|sub| (Arc::clone(&sub), self.identity(&sub.identity)));
            all.collect::<Vec<_>>()
        };
        let (subscribers, failed) = (with_identity(matched.found), with_identity(matched.failed));
        // Without a subscriber there is nothing to judge about the images.
        let judged = !(subscribers.is_empty() && failed.is_empty());
        let new = row.body.change.new.as_ref().filter(|_| judged).map(|image| self.image(image));
        let old = row.body.change.old.as_ref().filter(|_| judged).map(|image| self.image(image));
        let last = new.max(old);
        for (_, identity) in subscribers.iter().chain(&failed) {
            let wanted = &mut self.wanted[*identity];
            // Not again for another subscription of the same.
            if wanted.last().copied() < last {
                wanted.extend(new.into_iter().chain(old));
            }
        }
        Placed { batch, new, old, subscribers, failed }
    }

    fn image(&mut self, image: &'a Image) -> usize {
        self.images.push(image);
        self.images.len() - 1
    }

    fn identity(&mut self, identity: &Arc<Identity>) -> usize {
        if let Some(n) = self.identity_numbers.get(identity) {
            return *n;
        }
        self.identities.push(Arc::clone(identity));
        self.wanted.push(Vec::new());
        let n = self.identities.len() - 1;
        self.identity_numbers.insert(Arc::clone(identity), n);
        n
    }
}

/// Messages on their way to the bus, and the rows that they are about.
pub(super) struct Slice {
    pub(super) messages: Vec<Message>,
    /// First and last position.
    pub(super) range: Option<(Position, Position)>,
    pub(super) rows: usize,
    /// Messages that are counted.
    counted: usize,
    bytes: usize,
    /// What is encoded is held until the bus has it (R-MEM-2).
    memory: Reservation,
}

impl Slice {
    pub(super) fn new(row: &Row) -> Self {
        Self { messages: Vec::new(), range: None, rows: 0, counted: 0, bytes: 0, memory: row.growth() }
    }

    /// The messages since the last call are this row's.
    pub(super) fn took(&mut self, row: &Row) {
        let at = row.body.change.position;
        self.range = Some((self.range.map_or(at, |(first, _)| first), at));
        self.rows += 1;
        let more = self.messages[self.counted..].iter().map(|message| message.payload.len() + MESSAGE_OVERHEAD).sum();
        self.counted = self.messages.len();
        self.bytes += more;
        self.memory.grow(more);
    }

    pub(super) fn is_full(&self) -> bool {
        self.bytes >= SLICE_BYTES
    }
}
