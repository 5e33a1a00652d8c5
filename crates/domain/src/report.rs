//! What an engine and a process say when they end (F.10), and what an engine says while it lives.

use serde::{Deserialize, Serialize};

use crate::{Condition, Epoch, Lsn, ProjectId, SourceId, words};

words! {
    /// How an engine ended.
    Outcome {
        /// Everything that was read was delivered or skipped with a gap, and the position verified.
        Drained = "drained",
        /// The deadline came first; what was not delivered comes again after the next start.
        Forced = "forced",
        /// Our side was closed at the deadline and the server's left alone.
        Abandoned = "abandoned",
        /// It could not go on.
        Failed = "failed",
        /// Another worker may run it.
        LeaseLost = "lease_lost",
        /// The server threw away WAL that the slot needed, and the slot isn't made again automatically.
        SlotLost = "slot_lost",
    }
}

words! {
    /// A rung of the kill ladder (R-ENG-4), in order; the [`Timed::name`]s of [`EngineReport::rungs`].
    Rung {
        /// `shutdown(SHUT_RDWR)` on every socket of the engine.
        Shutdown = "shutdown",
        /// `SO_LINGER 0` and closed.
        Reset = "reset",
        /// `pg_terminate_backend` of who holds the slot.
        Terminate = "terminate",
        /// The same once more: needed where it is blocked writing.
        TerminateAgain = "terminate_again",
        /// Watching the slot.
        Poll = "poll",
        /// Sessions of ours that held no slot were ended.
        Sessions = "sessions",
    }
}

/// A named step and how long it took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Timed {
    /// Its name, of a closed set.
    #[cfg_attr(feature = "openapi", schema(example = "drain"))]
    pub name: String,
    /// Milliseconds.
    pub ms: u64,
}

impl Timed {
    /// A step of `ms` milliseconds.
    pub fn new(name: &str, took: std::time::Duration) -> Self {
        Self { name: name.to_owned(), ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX) }
    }
}

/// What a ladder that is climbed again and again shows: of each rung the last time.
pub fn climb_again(rungs: &mut Vec<Timed>, last: Vec<Timed>) {
    rungs.retain(|rung| last.iter().all(|again| again.name != rung.name));
    rungs.extend(last);
}

/// How one run of an engine under one lease ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EngineReport {
    /// Source.
    pub source: SourceId,
    /// Epoch of the run.
    pub epoch: Epoch,
    /// How.
    pub outcome: Outcome,
    /// Code or text of what it could not do.
    pub reason: Option<String>,
    /// What became of the rows.
    pub drain: DrainReport,
    /// Positions.
    pub lsn: LsnReport,
    /// Rungs of the kill ladder that were used, in order; empty after a polite end.
    pub rungs: Vec<Timed>,
    /// The slot was seen inactive.
    pub slot_released: bool,
    /// The lease was given back.
    pub lease_released: bool,
}

/// `admitted = delivered + skipped + abandoned`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DrainReport {
    /// Rows that were admitted, of the whole run.
    pub admitted: u64,
    /// Rows that the bus has received, or that nobody was to see.
    pub delivered: u64,
    /// Rows that were skipped with an announced gap.
    pub skipped: u64,
    /// Rows without acknowledgement at the end: they come again after the next start.
    pub abandoned: u64,
    /// The same, by shard.
    pub per_shard: Vec<ShardReport>,
    /// Phases of the end, in order.
    pub phases: Vec<Timed>,
    /// A phase took longer than its cap.
    pub overrun: bool,
}

/// One shard's part of a [`DrainReport`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ShardReport {
    /// See [`DrainReport::delivered`].
    pub delivered: u64,
    /// See [`DrainReport::skipped`].
    pub skipped: u64,
    /// See [`DrainReport::abandoned`].
    pub abandoned: u64,
}

/// Positions at the end of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LsnReport {
    /// End of what was read.
    pub received: Lsn,
    /// End of what the bus has received without a hole.
    pub resolved: Lsn,
    /// Last flush position sent to the server.
    pub sent: Lsn,
    /// What SQL said the slot has confirmed; `None` = it could not be verified.
    pub verified: Option<Lsn>,
    /// How long verifying took.
    pub verify_ms: u64,
}

/// Why a process ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trigger {
    /// A signal, by number.
    Signal(i32),
    /// Somebody in the process asked for it.
    Handle,
    /// A part failed.
    Fatal,
}

/// Whether a process ended as it should.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitState {
    /// All parts have ended.
    Completed,
    /// A part could not go on.
    Failed {
        /// Which.
        component: String,
        /// Why.
        reason: String,
    },
}

/// What a process says at its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitReport {
    /// How.
    pub state: ExitState,
    /// Why.
    pub trigger: Trigger,
    /// Its engines' reports; empty in processes without engines.
    pub engines: Vec<EngineReport>,
    /// Phases of the process's own end, in order.
    pub phases: Vec<Timed>,
    /// Signals that arrived.
    pub signals_seen: u8,
}

impl ExitReport {
    /// Exit code (F.10). Without `strict` 0 or 1; with it also 3 (rows abandoned or a position not verified), 4 (the only
    /// engine lost its lease) and 5 (the only engine lost its slot).
    pub fn exit_code(&self, strict: bool) -> u8 {
        if matches!(self.state, ExitState::Failed { .. }) {
            return 1;
        }
        if !strict {
            return 0;
        }
        match self.engines.as_slice() {
            [only] if only.outcome == Outcome::LeaseLost => 4,
            [only] if only.outcome == Outcome::SlotLost => 5,
            engines if engines.iter().any(EngineReport::is_incomplete) => 3,
            _ => 0,
        }
    }

    /// Nothing failed and nothing comes again.
    pub fn ok(&self) -> bool {
        self.exit_code(true) == 0
    }
}

impl EngineReport {
    /// Rows will come again: some were abandoned, or the position that was sent could not be verified.
    pub fn is_incomplete(&self) -> bool {
        self.drain.abandoned > 0 || self.lsn.verified.is_none_or(|verified| verified < self.lsn.resolved)
    }
}

/// How far an engine is behind its source.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Lag {
    /// Bytes of log between the server's end and what is confirmed; `None` = unknown, or lost.
    pub bytes: Option<u64>,
    /// Age of the oldest row that is out; 0 when none is; `None` = unknown, or lost.
    pub seconds: Option<f64>,
    /// The server has thrown away what was not read: no number says how much.
    pub lost: bool,
}

/// A condition, and since when it holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ConditionNote {
    /// Which.
    pub condition: Condition,
    /// RFC 3339, UTC.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub since: String,
    /// For the operator: pids, names, limits. No row values.
    pub detail: Option<String>,
}

/// Who holds the resolved LSN back (R-LSN-5).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Culprit {
    /// Shard.
    pub shard: usize,
    /// Project.
    pub project: ProjectId,
    /// LSN of its oldest unacknowledged row.
    pub lsn: Lsn,
    /// That row's age in seconds.
    pub seconds: f64,
}

/// Flow control of an engine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FlowLive {
    /// Bytes held.
    pub used_bytes: u64,
    /// The engine's share of the quota.
    pub quota_bytes: u64,
    /// Reading is paused since then, RFC 3339.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub paused_since: Option<String>,
    /// Why: `bus` or `source` is away, or `quota`: rows come faster than they go.
    #[serde(default)]
    pub pause_reason: Option<String>,
    /// Pauses so far.
    pub pauses: u64,
    /// Who holds the position back; `None` when nothing is out.
    pub culprit: Option<Culprit>,
}

/// The slot, as SQL last told it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotLive {
    /// `reserved`, `extended`, `unreserved`, `lost`; `None` when there is no slot.
    pub wal_status: Option<String>,
    /// Bytes until the slot may be lost; `None` without a limit, or when lost.
    pub safe_wal_bytes: Option<i64>,
    /// Process that holds it.
    pub active_pid: Option<i32>,
    /// Bytes of log that the slot keeps; `None` when lost.
    pub retained_bytes: Option<u64>,
}

/// What an engine says of itself while it runs; written to the platform database every few seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineLive {
    /// Conditions that hold.
    pub conditions: Vec<ConditionNote>,
    /// The slot.
    pub slot: SlotLive,
    /// Flow control.
    pub flow: FlowLive,
    /// Lag.
    pub lag: Lag,
    /// Output plugin.
    pub plugin: Option<String>,
    /// Registered tables that the running filter covers.
    pub tables: usize,
    /// Registered tables that it doesn't (R-HOLE-1).
    pub holes: usize,
    /// End of what was read.
    pub received_lsn: Lsn,
    /// End of what the bus has received without a hole.
    pub resolved_lsn: Lsn,
    /// Last flush position sent.
    pub confirmed_lsn: Lsn,
    /// Phases of a stop that are over, in order.
    pub phases: Vec<Timed>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(outcome: Outcome, abandoned: u64, verified: Option<Lsn>) -> EngineReport {
        EngineReport {
            source: SourceId(uuid::Uuid::nil()),
            epoch: Epoch(1),
            outcome,
            reason: None,
            drain: DrainReport { admitted: abandoned, abandoned, ..DrainReport::default() },
            lsn: LsnReport { resolved: Lsn(10), sent: Lsn(10), verified, ..LsnReport::default() },
            rungs: Vec::new(),
            slot_released: true,
            lease_released: true,
        }
    }

    fn exit(engines: Vec<EngineReport>) -> ExitReport {
        ExitReport {
            state: ExitState::Completed,
            trigger: Trigger::Signal(15),
            engines,
            phases: Vec::new(),
            signals_seen: 1,
        }
    }

    #[test]
    fn r_exit_codes() {
        let drained = || engine(Outcome::Drained, 0, Some(Lsn(10)));
        let cases = [
            (exit(vec![]), 0),
            (exit(vec![drained()]), 0),
            (exit(vec![drained(), engine(Outcome::Forced, 3, Some(Lsn(10)))]), 3),
            (exit(vec![engine(Outcome::Drained, 0, None)]), 3),
            (exit(vec![engine(Outcome::LeaseLost, 0, None)]), 4),
            (exit(vec![engine(Outcome::SlotLost, 0, None)]), 5),
            // Not the process's only engine: an incomplete one.
            (exit(vec![drained(), engine(Outcome::LeaseLost, 0, None)]), 3),
        ];
        for (report, strict) in cases {
            assert_eq!(report.exit_code(true), strict, "{report:?}");
            assert_eq!(report.exit_code(false), 0, "the default keeps 0 for everything that completed");
            assert_eq!(report.ok(), strict == 0);
        }
        let state = ExitState::Failed { component: "bus".to_owned(), reason: "gone".to_owned() };
        assert_eq!(ExitReport { state, ..exit(vec![drained()]) }.exit_code(false), 1);
    }
}
