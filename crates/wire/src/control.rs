//! Subscription soft state between fronts and workers (design §9), JSON on `aura.control.>`.
//!
//! Fronts own the subscriptions; the worker that leads a source holds a copy. A front sends [`Request`]s to the leader and
//! [`Heartbeat`]s to all workers; the leader answers each request and sends [`Announcement`]s. `rev` counts a front's
//! changes of its subscriptions of one source; whoever sees an unexpected `rev` asks for, or sends, a whole snapshot.

use aura_domain::{Epoch, FrontId, Lsn, ProjectId, SourceId, SubId, SubscriptionSpec, Target};
use serde::{Deserialize, Serialize};

/// One subscription as a front registers it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subscription {
    /// Keyed hash with claims.
    pub sub_id: SubId,
    /// Keyed hash without; listed by the worker where the table has no row security.
    pub twin: SubId,
    /// What they stand for.
    pub spec: SubscriptionSpec,
}

/// From a front to the leader of a source, answered with [`Reply`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// These subscriptions are new on this front (or are asked about again).
    Join {
        /// Sender.
        front: FrontId,
        /// The front's revision with these applied.
        rev: u64,
        /// The subscriptions.
        subscriptions: Vec<Subscription>,
    },
    /// The front's last binding with these ids has gone.
    Leave {
        /// Sender.
        front: FrontId,
        /// The front's revision with these applied.
        rev: u64,
        /// The ids.
        sub_ids: Vec<SubId>,
    },
    /// All subscriptions of the front, in chunks of ≤ 256 KiB; replaces what the leader had once `part + 1 == parts`.
    Snapshot {
        /// Sender.
        front: FrontId,
        /// The front's revision.
        rev: u64,
        /// Chunk number from 0.
        part: u32,
        /// Number of chunks, at least 1.
        parts: u32,
        /// This chunk's subscriptions.
        subscriptions: Vec<Subscription>,
    },
}

/// The leader's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// Who answers.
    pub epoch: Epoch,
    /// Every transaction whose commit ends above this is judged with these subscriptions.
    pub since: Lsn,
    /// Whether the engine streams; else events come later, none is lost.
    pub streaming: bool,
    /// Per subscription of the request that isn't simply live.
    pub exceptions: Vec<Exception>,
    /// The leader's view of the front doesn't fit `rev`: send a snapshot.
    pub want_snapshot: bool,
}

/// From the api to all fronts: sockets and streams to close now. A client may come back with what is still accepted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disconnect {
    /// Whose; the same as the subject's.
    pub project: ProjectId,
    /// Which.
    #[serde(flatten)]
    pub target: Target,
}

/// A subscription that delivers nothing (for now).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exception {
    /// Which.
    pub sub_id: SubId,
    /// What the client is told, as the original words it where it has words for it.
    pub message: String,
    /// True: the leader forgot it and it will never deliver (bad filter, unknown column). False: it delivers as soon as
    /// the table is registered.
    pub fatal: bool,
}

/// Every 5 s from each front to all workers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Sender.
    pub front: FrontId,
    /// `(source, rev, count)` of each source that the front has subscriptions of.
    pub sources: Vec<SourceState>,
    /// The front is leaving; forget it.
    #[serde(default)]
    pub leaving: bool,
}

/// A front's subscriptions of one source, in numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceState {
    /// Source.
    pub source: SourceId,
    /// Revision.
    pub rev: u64,
    /// Number of subscriptions.
    pub count: u64,
}

/// From the leader of a source to all fronts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Announcement {
    /// A worker won the lease and asks for snapshots.
    WantSnapshots {
        /// Source.
        source: SourceId,
        /// Its epoch.
        epoch: Epoch,
        /// Only from these fronts; `None` = from all.
        fronts: Option<Vec<FrontId>>,
    },
    /// The leader begins to read. A front that isn't listed with its present revision sends its snapshot and announces a
    /// gap up to the reply's `since`.
    Leader {
        /// Source.
        source: SourceId,
        /// Its epoch.
        epoch: Epoch,
        /// Where reading begins.
        start: Lsn,
        /// Revisions it has.
        fronts: Vec<(FrontId, u64)>,
    },
    /// What is registered changed: bindings that aren't live may be asked about again.
    RegistryChanged {
        /// Source.
        source: SourceId,
        /// Its epoch.
        epoch: Epoch,
    },
    /// Every 5 s: the last `seq` of each project that published (tail loss, R-FRT-4), and that the leader lives.
    LeaderHeartbeat {
        /// Source.
        source: SourceId,
        /// Its epoch.
        epoch: Epoch,
        /// Whether the engine streams now.
        streaming: bool,
        /// Why not, in a closed set of codes (`plugin_missing`, `source_unreachable`, …).
        reason: Option<String>,
        /// Last `seq` per project.
        seqs: Vec<(ProjectId, u64)>,
    },
}
