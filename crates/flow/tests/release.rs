//! Invariant 6: memory that was reserved for a row is given back once, whichever way the row goes, in a real runtime.

use std::{future::pending, panic::resume_unwind, time::Instant};

use aura_domain::{Lsn, ProjectId};
use aura_flow::{Job, Outcome, Owner, Reader, ReaderLimits, Row, Shard, ShardLimits};
use proptest::prelude::*;
use tokio::{
    runtime::{Builder, Runtime},
    sync::{mpsc, oneshot},
};
use uuid::Uuid;

const SECOND: std::time::Duration = std::time::Duration::from_secs(1);

/// How a row ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Receipt,
    Skip,
    /// While it waits in its shard.
    Abandon,
    TaskAbort,
    Panic,
    QueueDrop,
    RuntimeDrop,
}

const WAYS: [Way; 7] =
    [Way::Receipt, Way::Skip, Way::Abandon, Way::TaskAbort, Way::Panic, Way::QueueDrop, Way::RuntimeDrop];

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).build().expect("a runtime")
}

/// A task that holds the row for ever, and has begun to.
fn hold(runtime: &Runtime, row: Row<()>) -> tokio::task::JoinHandle<()> {
    let (begun, begins) = oneshot::channel();
    let task = runtime.spawn(async move {
        let _row = row;
        begun.send(()).expect("somebody waits");
        pending::<()>().await;
    });
    runtime.block_on(begins).expect("it has begun");
    task
}

impl Way {
    /// Whether the row's claim on the position is given up, too.
    fn acknowledges(self) -> bool {
        matches!(self, Self::Receipt | Self::Skip)
    }

    fn go(self, runtime: &Runtime, row: Row<()>, quota: usize, now: Instant) {
        match self {
            Self::Receipt | Self::Skip | Self::Abandon => self.through_a_shard(row, quota, now),
            Self::TaskAbort => {
                let task = hold(runtime, row);
                task.abort();
                assert!(runtime.block_on(task).is_err_and(|error| error.is_cancelled()));
            }
            Self::Panic => {
                let task = runtime.spawn(async move {
                    let _row = row;
                    // Without a word on stderr.
                    resume_unwind(Box::new("on purpose"));
                });
                assert!(runtime.block_on(task).is_err_and(|error| error.is_panic()));
            }
            Self::QueueDrop => {
                let (queue, rows) = mpsc::unbounded_channel();
                queue.send(row).expect("it is open");
                drop(rows);
            }
            Self::RuntimeDrop => {
                let other = self::runtime();
                drop(hold(&other, row));
                drop(other);
            }
        }
    }

    fn through_a_shard(self, row: Row<()>, quota: usize, now: Instant) {
        let limits =
            ShardLimits { quota, skip_after: SECOND, linger: SECOND, busy: 1, batch_rows: 1, batch_bytes: quota };
        let mut shard = Shard::new(limits);
        let project = row.project();
        shard.push(row, now);
        match self {
            Self::Abandon => shard.abandon(),
            Self::Skip => {
                // Its batch hangs, is given up, and comes again to be announced.
                let batch = shard.start(now).expect("a batch");
                assert_eq!(shard.cancels(now + SECOND), [project]);
                shard.finish(project, batch.rows, Outcome::Cancelled, now + SECOND);
                let batch = shard.start(now + SECOND).expect("a batch");
                assert_eq!(batch.job, Job::Skip);
                shard.finish(project, batch.rows, Outcome::Done { skipped: 1 }, now + SECOND);
            }
            _ => {
                let batch = shard.start(now).expect("a batch");
                shard.finish(project, batch.rows, Outcome::Done { skipped: 0 }, now);
            }
        }
        assert!(shard.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// However many rows end in whatever ways in whatever order, at each step just what still lives is held; and only a
    /// receipt or an announced loss lets the position pass.
    #[test]
    fn invariant_06_each_way_out_releases_once(
        rows in prop::collection::vec((0..WAYS.len(), 1usize..1000, 0usize..100), 1..16),
        order in any::<prop::sample::Index>(),
    ) {
        let (now, quota, runtime) = (Instant::now(), 1 << 20, runtime());
        let (stall_limit, outage_limit) = (SECOND, SECOND);
        let limits = ReaderLimits { quota, advance_interval: SECOND, stall_limit, outage_limit };
        let mut reader = Reader::new(limits, now);
        let mut live = Vec::new();
        let mut first_kept = u64::MAX;
        for (n, (way, bytes, growth)) in rows.iter().enumerate() {
            let (way, lsn) = (WAYS[*way], 10 + 10 * n as u64);
            let owner = Owner { shard: 0, project: ProjectId(Uuid::from_u128(1 + n as u128 % 3)) };
            reader.begin();
            let row = reader.admit(owner, Lsn(lsn), *bytes, now).expect("room").carry(());
            let mut grown = row.growth();
            grown.grow(*growth);
            reader.commit(Lsn(lsn + 5));
            live.push((way, row, grown));
            first_kept = if way.acknowledges() { first_kept } else { first_kept.min(lsn) };
        }
        let turn = order.index(live.len());
        live.rotate_left(turn);
        let mut held: usize = rows.iter().map(|(_, bytes, growth)| bytes + growth).sum();
        prop_assert_eq!(reader.quota().used(), held);
        for (way, row, grown) in live {
            held -= row.bytes() + grown.bytes();
            drop(grown);
            way.go(&runtime, row, quota, now);
            prop_assert_eq!(reader.quota().used(), held, "after {:?}", way);
        }
        prop_assert_eq!((reader.quota().used(), reader.quota().overdraft()), (0, 0));
        drop(reader.next(now));
        let all = 10 + 10 * (rows.len() as u64 - 1) + 5;
        let passed = if first_kept == u64::MAX { all } else { first_kept.saturating_sub(5) };
        let resolved = reader.resolved().0;
        prop_assert!(if first_kept == 10 { resolved < 10 } else { resolved == passed }, "{resolved}, not {passed}");
    }
}
