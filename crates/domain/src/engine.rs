//! The life of an engine as one type (design §7): its states, what an operator may ask in each, and where each leads.

use crate::words;

words! {
    /// What the operator wants of an engine.
    Desired {
        /// Run it somewhere.
        Running = "running",
        /// Run it nowhere.
        Stopped = "stopped",
    }
}

words! {
    /// What an engine does.
    EngineState {
        /// Nothing runs, and the slot was seen inactive.
        Stopped = "stopped",
        /// On its way up.
        Starting = "starting",
        /// Streaming.
        Running = "running",
        /// Waiting to try again.
        Backoff = "backoff",
        /// Finishing what it has read.
        Draining = "draining",
        /// Leaving the slot.
        Closing = "closing",
        /// On the kill ladder.
        ForceClosing = "force_closing",
        /// Somebody holds the slot and can't be made to leave.
        Zombie = "zombie",
        /// Needs an operator.
        Failed = "failed",
    }
}

words! {
    /// What an operator may ask of an engine.
    Verb {
        /// Desired state `running`.
        Start = "start",
        /// Desired state `stopped`: drain, close, at the deadline the kill ladder.
        Stop = "stop",
        /// Desired state `stopped`: the kill ladder at once.
        ForceClose = "force-close",
        /// A new slot in place of a lost or missing one.
        RecreateSlot = "recreate-slot",
    }
}

words! {
    /// What a verb does in a state.
    VerbEffect {
        /// It begins something.
        Begins = "begins",
        /// It joins, and may tighten, what is under way.
        Joins = "joins",
        /// There is nothing to do.
        Already = "already",
        /// 409: not in this state.
        Refused = "refused",
    }
}

words! {
    /// What holds besides the state.
    Condition {
        /// Reading is paused since too much is held.
        Paused = "paused",
        /// Work is out and nothing moves, and no outage explains it.
        Stalled = "stalled",
        /// More than [`LAGGING_BYTES`] behind.
        Lagging = "lagging",
        /// The server may soon throw away WAL that the slot needs.
        SlotAtRisk = "slot_at_risk",
        /// Registered tables that the running filter doesn't cover.
        Holes = "holes",
        /// The bus can't be reached.
        Outage = "outage",
        /// Transactions that are open hold up the creation of the slot.
        WaitingForTransactions = "waiting_for_transactions",
        /// The source database can't be reached.
        SourceUnreachable = "source_unreachable",
        /// It is to run, and no worker that lives runs it: the state is the last one's word.
        NoWorker = "no_worker",
    }
}

words! {
    /// What a stop does when its deadline has come.
    OnDeadline {
        /// The kill ladder; what was not acknowledged comes again after the next start.
        Force = "force",
        /// Our side is closed and no process of the server is ended.
        Abandon = "abandon",
    }
}

words! {
    /// What an operation is.
    OperationKind {
        /// See [`Verb::Stop`].
        Stop = "stop",
        /// See [`Verb::ForceClose`].
        ForceClose = "force-close",
    }
}

/// [`Condition::Lagging`] beyond this: about a second of a busy server's log, and more than a healthy engine is ever behind.
pub const LAGGING_BYTES: u64 = 64 << 20;

impl EngineState {
    /// What a verb does in this state. An open operation makes [`Verb::Start`] refused in any state.
    pub fn effect(self, verb: Verb) -> VerbEffect {
        use EngineState::{Backoff, Closing, Draining, Failed, ForceClosing, Running, Starting, Stopped, Zombie};
        use VerbEffect::{Already, Begins, Joins, Refused};
        match (verb, self) {
            (Verb::Start, Stopped | Failed) => Begins,
            (Verb::Start, Starting | Running | Backoff) => Already,
            // Never on top of something that still holds the slot.
            (Verb::Start, Draining | Closing | ForceClosing | Zombie) => Refused,
            (Verb::Stop, Stopped) => Already,
            (Verb::Stop, Draining | Closing | ForceClosing) => Joins,
            (Verb::Stop, Starting | Running | Backoff | Zombie | Failed) => Begins,
            // Always: also where a slot is held although the state says that it isn't.
            (Verb::ForceClose, ForceClosing) => Joins,
            (Verb::ForceClose, _) => Begins,
            (Verb::RecreateSlot, Failed | Backoff) => Begins,
            (Verb::RecreateSlot, _) => Refused,
        }
    }

    /// Verbs that aren't refused in this state.
    pub fn legal_verbs(self) -> impl Iterator<Item = Verb> {
        Verb::ALL.iter().copied().filter(move |verb| self.effect(*verb) != VerbEffect::Refused)
    }

    /// States that may follow. A worker that dies leaves its state behind, so `starting` (of the next one), `force_closing`,
    /// `closing` (both by the api) and `zombie` may follow where nothing else does.
    pub fn next(self) -> &'static [Self] {
        use EngineState::{Backoff, Closing, Draining, Failed, ForceClosing, Running, Starting, Stopped, Zombie};
        match self {
            Stopped => &[Starting, ForceClosing, Zombie],
            Starting => &[Starting, Running, Backoff, Draining, Closing, Failed, Stopped, ForceClosing, Zombie],
            Running => &[Starting, Backoff, Draining, Closing, Failed, Stopped, ForceClosing, Zombie],
            Backoff => &[Starting, Running, Draining, Closing, Failed, Stopped, ForceClosing, Zombie],
            Draining => &[Starting, Closing, Failed, Stopped, ForceClosing, Zombie],
            Closing => &[Starting, Stopped, Failed, ForceClosing, Zombie],
            ForceClosing => &[Starting, Stopped, Failed, ForceClosing, Zombie],
            Zombie => &[Starting, Closing, Failed, Stopped, ForceClosing, Zombie],
            Failed => &[Starting, Backoff, Running, Draining, Closing, Stopped, ForceClosing, Zombie],
        }
    }

    /// One line for the documentation.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Stopped => "nothing runs, and the slot was seen inactive",
            Self::Starting => "lease won; checking, waiting for the slot, START_REPLICATION sent",
            Self::Running => "the stream's first frame has arrived",
            Self::Backoff => "something failed that may pass; `reason` says what, the next try is near",
            Self::Draining => "a stop was accepted: nothing new is read, what was read is delivered",
            Self::Closing => "the stream is being closed, the slot not yet seen inactive",
            Self::ForceClosing => "the kill ladder is under way",
            Self::Zombie => {
                "somebody holds the slot and can't be made to leave; `reason` has the pid and the SQL to paste"
            }
            Self::Failed => {
                "needs a person; `reason` begins with a word that [engine-reasons.md](engine-reasons.md) explains"
            }
        }
    }
}

/// The documentation's tables of states and verbs, as Markdown.
pub fn state_tables() -> String {
    let mut text = String::from("| state | meaning | then |\n|---|---|---|\n");
    for state in EngineState::ALL {
        let next: Vec<_> = state.next().iter().filter(|next| *next != state).map(|next| format!("`{next}`")).collect();
        text += &format!("| `{state}` | {} | {} |\n", state.meaning(), next.join(" "));
    }
    text += "\n| state |";
    for verb in Verb::ALL {
        text += &format!(" `{verb}` |");
    }
    text += "\n|---|---|---|---|---|\n";
    for state in EngineState::ALL {
        text += &format!("| `{state}` |");
        for verb in Verb::ALL {
            text += &format!(" {} |", state.effect(*verb));
        }
        text += "\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_eng_3_start_never_goes_on_top_of_what_holds_the_slot() {
        for state in [EngineState::Draining, EngineState::Closing, EngineState::ForceClosing, EngineState::Zombie] {
            assert_eq!(state.effect(Verb::Start), VerbEffect::Refused, "{state}");
        }
        for state in EngineState::ALL {
            assert_ne!(state.effect(Verb::Stop), VerbEffect::Refused, "{state}: stop is always legal");
            assert_ne!(state.effect(Verb::ForceClose), VerbEffect::Refused, "{state}");
        }
    }

    #[test]
    fn r_eng_1_every_state_can_be_left_and_reached() {
        for state in EngineState::ALL {
            assert!(state.next().iter().any(|next| next != state), "{state}");
            assert!(EngineState::ALL.iter().any(|from| from != state && from.next().contains(state)), "{state}");
        }
    }
}
