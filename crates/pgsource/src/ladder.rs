//! The rungs of the kill ladder that need nothing of ours but an SQL connection (R-ENG-4, rungs 4 to 6): a worker climbs
//! them after it has cut its sockets, the api when there is no worker to ask (R-ENG-6).

use std::time::Duration;

use aura_domain::{EngineReport, Epoch, Lsn, Outcome, Rung, SourceId, Timed, climb_again, quote_literal};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_postgres::{Client, error::SqlState};

use crate::{
    SourceError, SourceUrl, SqlConnection, connect_sql,
    slot::{self, SlotHolder, SlotStatus},
};

/// Limit of the ladder's own connection.
const CONNECT: Duration = Duration::from_secs(2);
/// How long the server waits for a process that it was told to end (R-ENG-4). A walsender that is blocked writing survives
/// the first time, whatever the wait.
const TERMINATE: Duration = Duration::from_secs(2);
/// The server ends the ladder's own statements after this long: they must not hang on somebody's lock either.
const STATEMENT_TIMEOUT_MS: u64 = 4000;
/// First and longest pause between two looks at the slot.
const POLL: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));

/// Whose hold on which slot is to end.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    /// The slot.
    pub slot: &'a str,
    /// Its source: only processes under its `application_name` (R-ENG-2) are ever ended.
    pub source: SourceId,
    /// The newest epoch that may be ended: a successor's is left alone.
    pub up_to: Epoch,
}

/// What became of the slot.
#[derive(Debug)]
pub enum Freed {
    /// It was seen inactive, or isn't there.
    Free,
    /// Somebody whose `application_name` is not ours, or of a newer epoch, holds it, and was left alone.
    Foreign(SlotHolder),
    /// Ours still holds it: a zombie.
    Held(SlotHolder),
    /// The source can't be asked. What holds the slot is not known.
    Unknown(SourceError),
}

/// What the ladder did.
#[derive(Debug)]
pub struct Climb {
    /// Rungs that were used, in order.
    pub rungs: Vec<Timed>,
    /// Who was ended.
    pub ended: Option<SlotHolder>,
    /// The slot, as last seen.
    pub slot: Option<SlotStatus>,
    /// How it came out.
    pub freed: Freed,
}

impl Target<'_> {
    /// Whether a process under this name may be ended.
    fn covers(&self, application_name: &str) -> bool {
        slot::epoch_of(application_name, self.source).is_some_and(|epoch| epoch <= self.up_to)
    }
}

/// Frees the slot from outside, within `limit`: terminates who holds it if it is ours, once more if that doesn't help, and
/// watches the slot; then ends what else is left of ours, such as a session that waits for a lock and doesn't notice that
/// its client is gone. On a connection of its own: the one that the engine uses may be what hangs.
pub async fn free_slot(url: &SourceUrl, target: Target<'_>, limit: Duration) -> Climb {
    let deadline = Instant::now() + limit;
    match connect(url, deadline).await {
        Ok(client) => climb(&client, target, deadline.saturating_duration_since(Instant::now())).await,
        Err(error) => Climb::failed(error),
    }
}

/// Only watches the slot, for at most `limit`: nobody is ended. Who holds it at the end is [`Freed::Held`].
pub async fn watch_slot(url: &SourceUrl, slot: &str, limit: Duration) -> Climb {
    let deadline = Instant::now() + limit;
    let mut climb = Climb::new();
    let watching = async {
        let client = connect(url, deadline).await?;
        climb.poll(&client, slot, deadline, |_| true).await
    };
    match watching.await {
        Ok(freed) => Climb { freed, ..climb },
        Err(error) => Climb { freed: Freed::Unknown(error), ..climb },
    }
}

async fn connect(url: &SourceUrl, deadline: Instant) -> Result<SqlConnection, SourceError> {
    // Not the engine's name: the ladder must not end itself.
    let limit = CONNECT.min(deadline.saturating_duration_since(Instant::now()));
    let client = connect_sql(url, "aura-ladder", None, limit).await?;
    let guard = format!("SET statement_timeout = {STATEMENT_TIMEOUT_MS}");
    bounded(deadline, async { Ok(client.batch_execute(&guard).await?) }).await?;
    Ok(client)
}

/// As [`free_slot`], on a connection that is known to answer.
pub async fn climb(client: &Client, target: Target<'_>, limit: Duration) -> Climb {
    let mut climb = Climb::new();
    climb.freed = match climb.free(client, target, Instant::now() + limit).await {
        Ok(freed) => freed,
        Err(error) => Freed::Unknown(error),
    };
    climb
}

impl Climb {
    fn new() -> Self {
        Self { rungs: Vec::new(), ended: None, slot: None, freed: Freed::Free }
    }

    /// The source can't be asked.
    pub fn failed(error: SourceError) -> Self {
        Self { freed: Freed::Unknown(error), ..Self::new() }
    }

    /// What the slot has confirmed.
    pub fn confirmed(&self) -> Option<Lsn> {
        self.slot.as_ref()?.confirmed_flush
    }

    /// What the ladder did, into the report of the run that it ended.
    pub fn tell(&self, report: &mut EngineReport) {
        if self.ended.is_some() {
            report.outcome = Outcome::Forced;
        }
        climb_again(&mut report.rungs, self.rungs.clone());
        report.slot_released = matches!(self.freed, Freed::Free);
        report.lsn.verified = self.confirmed().or(report.lsn.verified);
    }

    async fn free(&mut self, client: &Client, target: Target<'_>, deadline: Instant) -> Result<Freed, SourceError> {
        let freed = match self.look(client, target.slot, deadline).await? {
            None => Freed::Free,
            Some(holder) if !target.covers(&holder.application_name) => Freed::Foreign(holder),
            Some(holder) => self.end(client, target, holder, deadline).await?,
        };
        if !matches!(freed, Freed::Held(_)) {
            self.end_sessions(client, target, deadline).await?;
        }
        Ok(freed)
    }

    /// Rungs 4 to 6.
    async fn end(
        &mut self,
        client: &Client,
        target: Target<'_>,
        holder: SlotHolder,
        deadline: Instant,
    ) -> Result<Freed, SourceError> {
        if holder.backend_start.is_none() {
            // Ours in name only: this login may not even see when it began, and can't end it.
            tracing::error!(
                slot = target.slot,
                pid = holder.pid,
                "this login may not see the process that holds the slot"
            );
            return Ok(Freed::Held(holder));
        }
        for rung in [Rung::Terminate, Rung::TerminateAgain] {
            let began = Instant::now();
            // Half of what is left: the second time needs some, too.
            let wait = TERMINATE.min((deadline - began) / 2);
            let gone = bounded(deadline, slot::terminate(client, target.slot, &holder, wait)).await;
            self.note(rung, began);
            match gone {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) if error.sqlstate() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
                    tracing::error!(
                        slot = target.slot,
                        pid = holder.pid,
                        "this login may not end the process that holds the slot"
                    );
                    return Ok(Freed::Held(holder));
                }
                Err(error) => {
                    tracing::warn!(slot = target.slot, pid = holder.pid, %error, "ending the process that holds the slot");
                }
            }
        }
        let freed = self.poll(client, target.slot, deadline, |holder| target.covers(&holder.application_name)).await?;
        if matches!(freed, Freed::Free) {
            self.ended = Some(holder);
        }
        Ok(freed)
    }

    /// Who holds the slot now.
    async fn look(
        &mut self,
        client: &Client,
        slot: &str,
        deadline: Instant,
    ) -> Result<Option<SlotHolder>, SourceError> {
        let status = bounded(deadline, slot::status(client, slot)).await?;
        let holder = status.as_ref().filter(|status| status.active).and_then(|status| status.holder.clone());
        self.slot = status.or_else(|| self.slot.take());
        Ok(holder)
    }

    /// Watches the slot until it is free, or the deadline.
    async fn poll(
        &mut self,
        client: &Client,
        slot: &str,
        deadline: Instant,
        ours: impl Fn(&SlotHolder) -> bool,
    ) -> Result<Freed, SourceError> {
        let began = Instant::now();
        let (mut pause, longest) = POLL;
        let freed = loop {
            let Some(holder) = self.look(client, slot, deadline).await? else { break Freed::Free };
            if !ours(&holder) {
                break Freed::Foreign(holder);
            }
            if Instant::now() + pause >= deadline {
                break Freed::Held(holder);
            }
            sleep(pause).await;
            pause = (pause * 2).min(longest);
        };
        self.note(Rung::Poll, began);
        Ok(freed)
    }

    /// What else is under our name, without the slot. Best effort for what this role may signal.
    async fn end_sessions(
        &mut self,
        client: &Client,
        target: Target<'_>,
        deadline: Instant,
    ) -> Result<(), SourceError> {
        let began = Instant::now();
        let rows =
            bounded(deadline, async { Ok(client.query(SESSIONS, &[&own_prefix(target.source)]).await?) }).await?;
        let left = rows.iter().filter(|row| target.covers(row.get(1))).map(|row| row.get(0)).collect::<Vec<i32>>();
        if !left.is_empty() {
            bounded(deadline, async { Ok(client.execute(END_SESSIONS, &[&left]).await?) }).await?;
            self.note(Rung::Sessions, began);
        }
        Ok(())
    }

    fn note(&mut self, rung: Rung, began: Instant) {
        self.rungs.push(Timed::new(rung.as_str(), began.elapsed()));
    }
}

/// Only what this role may signal: one that it may not would fail the statement for all.
const SESSIONS: &str = "\
    SELECT pid, application_name FROM pg_catalog.pg_stat_activity \
    WHERE pg_catalog.starts_with(application_name, $1) AND pid <> pg_catalog.pg_backend_pid() \
      AND (pg_catalog.pg_has_role(usesysid, 'USAGE') OR pg_catalog.pg_has_role('pg_signal_backend', 'USAGE'))";
/// Looked up again, so that a pid that was reused meanwhile is left alone.
const END_SESSIONS: &str = "\
    SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity \
    WHERE pid = ANY ($1::pg_catalog.int4[]) AND pg_catalog.starts_with(application_name, 'aura-cdc:')";

fn own_prefix(source: SourceId) -> String {
    format!("aura-cdc:{source}:")
}

async fn bounded<T>(deadline: Instant, step: impl Future<Output = Result<T, SourceError>>) -> Result<T, SourceError> {
    let limit = deadline.saturating_duration_since(Instant::now());
    timeout_at(deadline, step).await.map_err(|_| SourceError::Timeout { what: "the kill ladder", limit })?
}

/// For an engine's `reason` in `zombie`: who holds the slot, what it waits for, and what an operator can paste.
pub fn zombie_reason(slot: &str, holder: &SlotHolder) -> String {
    let SlotHolder { pid, application_name, backend_start, wait_event } = holder;
    let name = if application_name.is_empty() { "a name that this role may not see" } else { application_name };
    let waits = wait_event.as_deref().map_or_else(|| "on the CPU".to_owned(), |event| format!("waiting for {event}"));
    let started = backend_start.as_deref().map(|at| format!(" AND backend_start = {}", quote_literal(at)));
    let started = started.unwrap_or_default();
    format!(
        "slot {slot} is held by pid {pid} ({name}), {waits}; to end it: \
         SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity WHERE pid = {pid}{started};"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_eng_7_a_zombies_reason_has_pid_wait_event_and_sql() {
        let holder = SlotHolder {
            pid: 77,
            application_name: "aura-cdc:x:1".to_owned(),
            backend_start: Some("2026-01-01 00:00:00+00".to_owned()),
            wait_event: Some("ClientWrite".to_owned()),
        };
        assert_eq!(
            zombie_reason("s", &holder),
            "slot s is held by pid 77 (aura-cdc:x:1), waiting for ClientWrite; to end it: SELECT pg_terminate_backend(pid, 2000) \
             FROM pg_stat_activity WHERE pid = 77 AND backend_start = '2026-01-01 00:00:00+00';"
        );
    }
}
