//! What ends a session of an engine, and what follows from it.

use std::time::Duration;

use aura_domain::{EngineState, Finding};
use aura_flow::Stall;
use aura_pgsource::{SourceError, SqlState};
use aura_store::StoreError;

use super::gaps::Refusal;
use crate::states::Observed;

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineError {
    /// The source database.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The platform database.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// `wal2json` was asked for and the server doesn't have it.
    #[error(
        "the source has no output plugin wal2json (apt-get install postgresql-<version>-wal2json), or its output_plugin_libraries doesn't list it"
    )]
    PluginMissing,
    /// Somebody who isn't ours streams from the slot.
    #[error("the slot is used by another client (pid {pid}, {name:?})")]
    SlotInUse { pid: i32, name: String },
    /// Slots are cluster-wide, and ours has the name of one that reads another database.
    #[error("the slot reads another database ({0}): give the source a slot name of its own")]
    SlotOfOtherDatabase(String),
    /// Somebody else has made a slot of our name.
    #[error(
        "the slot is of another output plugin ({0}), so somebody else has made it: give the source a slot name of its own"
    )]
    SlotOfOtherPlugin(String),
    /// It needs an operator (R-ENG-8).
    #[error("the slot is {what}, and {why}")]
    SlotLost { what: &'static str, why: &'static str },
    /// A try to make the slot was cut off, and what was left of it has been ended.
    #[error("the slot is half made")]
    SlotHalfMade,
    /// Rows are out and nothing moves (R-SH-5).
    #[error("{}", stalled(*.0))]
    Stalled(Stall),
    /// Nobody can be told of a project's loss, though the bus is there: what holds the position back (R-SH-5).
    #[error("the bus has refused for too long to announce a loss of project {}: {}", .0.project, .0.reason)]
    GapRefused(Refusal),
    /// Something that the engine can't or mustn't run with (R-ENG-9).
    #[error("{}; {}", .0.evidence, .0.fix)]
    Preflight(Finding),
    /// The server has ended the stream, and its word didn't arrive.
    #[error("the connection is half open: the server has ended the stream")]
    HalfOpen,
    /// The server says goodbye in the middle of the stream.
    #[error("the server ends the stream")]
    SourceEnds,
}

/// What an error means for the engine: a pure table, so that it can be read and tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Policy {
    /// Closed set of codes; shown in states, `/status` and the clients' `system` message.
    pub(crate) reason: &'static str,
    pub(crate) state: EngineState,
    /// First pause; doubles up to [`MAX_PAUSE`].
    pub(crate) pause: Duration,
}

/// Pause before a server that has said goodbye is called again (R-FB-8).
pub(crate) const SOURCE_ENDS: Duration = Duration::from_secs(10);
/// Longest pause between two tries.
pub(crate) const MAX_PAUSE: Duration = Duration::from_secs(10);

impl EngineError {
    /// The platform database takes nothing of this epoch.
    pub(crate) fn is_fenced(&self) -> bool {
        matches!(self, Self::Store(StoreError::Fenced))
    }

    /// As the engine's row shows it.
    pub(crate) fn observed(&self) -> Observed {
        let Policy { reason, state, .. } = self.policy();
        let detail = match self {
            Self::SlotInUse { pid, name } => Some(format!("pid {pid} ({name})")),
            Self::SlotOfOtherDatabase(database) => Some(format!("it reads {database}")),
            Self::SlotOfOtherPlugin(plugin) => Some(format!("its plugin is {plugin}")),
            Self::Source(error) => Some(error.to_string()),
            Self::SlotLost { .. } | Self::Stalled(_) | Self::GapRefused(_) | Self::Preflight(_) | Self::HalfOpen => {
                Some(self.to_string())
            }
            Self::Store(_) | Self::PluginMissing | Self::SlotHalfMade | Self::SourceEnds => None,
        };
        Observed { state, code: Some(reason), detail }
    }

    /// Everything is tried again, since what is missing may be installed; `failed` says that a human is needed.
    pub(crate) fn policy(&self) -> Policy {
        let backoff = |reason| Policy { reason, state: EngineState::Backoff, pause: Duration::from_millis(200) };
        let failed = |reason| Policy { reason, state: EngineState::Failed, pause: Duration::from_secs(3) };
        // R-FB-8: a server that is shutting down wants to be left alone. A kill and a lost slot look the same, so whoever
        // pauses looks first whether it is there.
        let leaving = Policy { pause: SOURCE_ENDS, ..backoff("source_shutting_down") };
        match self {
            Self::PluginMissing => failed("plugin_missing"),
            Self::SlotInUse { .. } => backoff("slot_in_use_by_other"),
            Self::SlotOfOtherDatabase(_) => failed("slot_of_other_database"),
            Self::SlotOfOtherPlugin(_) => failed("slot_of_other_plugin"),
            Self::SlotLost { .. } => failed("slot_lost"),
            Self::Preflight(finding) => failed(finding.code),
            Self::SlotHalfMade => backoff("slot_half_made"),
            Self::SourceEnds => leaving,
            Self::HalfOpen => backoff("source_unreachable"),
            Self::Stalled(Stall::Sink) | Self::GapRefused(_) => failed("sink"),
            Self::Stalled(Stall::Outage) => failed("outage"),
            Self::Store(StoreError::Fenced) => failed("fenced"),
            Self::Store(_) => backoff("platform_database_unreachable"),
            Self::Source(error) => match error.sqlstate() {
                Some(code) if *code == SqlState::INSUFFICIENT_PRIVILEGE => failed("not_permitted"),
                Some(code) if code.code().starts_with("28") => failed("authentication_failed"),
                Some(code) if *code == SqlState::OBJECT_IN_USE => backoff("slot_in_use"),
                Some(code) if code.code().starts_with("57P") => leaving,
                Some(code) if *code == SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE => failed("wal_level_not_logical"),
                Some(_) => backoff("source_error"),
                None => backoff("source_unreachable"),
            },
        }
    }
}

fn stalled(stall: Stall) -> &'static str {
    match stall {
        Stall::Sink => "rows are out and none was acknowledged for too long, though nothing is known to be away",
        Stall::Outage => "the bus or the source has been away for too long",
    }
}

#[cfg(test)]
mod tests {
    use aura_domain::ProjectId;

    use super::*;

    #[test]
    fn what_needs_a_human_is_failed_and_the_rest_is_tried_again() {
        let failed = [
            (EngineError::PluginMissing, "plugin_missing"),
            (EngineError::SlotOfOtherDatabase("app".to_owned()), "slot_of_other_database"),
            (EngineError::SlotOfOtherPlugin("test_decoding".to_owned()), "slot_of_other_plugin"),
            (EngineError::Store(StoreError::Fenced), "fenced"),
            (EngineError::Preflight(Finding::critical("wal_level", "replica", "logical")), "wal_level"),
            (EngineError::SlotLost { what: "lost", why: "of a test" }, "slot_lost"),
            (EngineError::Stalled(Stall::Sink), "sink"),
            (EngineError::Stalled(Stall::Outage), "outage"),
            (
                EngineError::GapRefused(Refusal { project: ProjectId(uuid::Uuid::nil()), reason: "no".to_owned() }),
                "sink",
            ),
        ];
        for (error, reason) in failed {
            let policy = error.policy();
            assert_eq!((policy.reason, policy.state), (reason, EngineState::Failed), "{error}");
        }
        let retried = [
            (EngineError::SlotInUse { pid: 1, name: "psql".to_owned() }, "slot_in_use_by_other"),
            (EngineError::SourceEnds, "source_shutting_down"),
            (EngineError::Source(SourceError::Closed), "source_unreachable"),
            (EngineError::HalfOpen, "source_unreachable"),
        ];
        for (error, reason) in retried {
            let policy = error.policy();
            assert_eq!((policy.reason, policy.state), (reason, EngineState::Backoff), "{error}");
        }
    }
}
