use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result};
use tokio_postgres::{Client, Row};

use crate::{Postgres, eventually_some};

/// A replication slot as SQL shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotState {
    /// Somebody streams from it.
    pub active: bool,
    /// Who.
    pub pid: Option<i32>,
    /// Who, by the name it gave itself.
    pub application_name: Option<String>,
    /// What its process waits for.
    pub wait_event: Option<String>,
    /// What the server won't send again, in bytes of log.
    pub confirmed: Option<u64>,
    /// From where log is kept; `None` when lost.
    pub restart: Option<u64>,
    /// `reserved`, `extended`, `unreserved` or `lost`.
    pub wal_status: Option<String>,
    /// What its process has written to the connection.
    pub sent: Option<u64>,
    /// What the holder says it has flushed; `None` when it says zero.
    pub flush: Option<u64>,
}

/// Looks at one slot through a session of its own.
#[derive(Debug)]
pub struct SlotWatch {
    client: Client,
    name: String,
}

const STATE: &str = "
    select s.active, s.active_pid, a.application_name, a.wait_event, (s.confirmed_flush_lsn - '0/0'::pg_lsn)::int8,
        (s.restart_lsn - '0/0'::pg_lsn)::int8, s.wal_status, (r.flush_lsn - '0/0'::pg_lsn)::int8,
        (r.sent_lsn - '0/0'::pg_lsn)::int8
    from pg_replication_slots s left join pg_stat_activity a on a.pid = s.active_pid
        left join pg_stat_replication r on r.pid = s.active_pid
    where s.slot_name = $1::text";

impl Postgres {
    /// A session that looks at a slot, there or not; good until the server ends.
    pub async fn slot(&self, name: &str) -> Result<SlotWatch> {
        Ok(SlotWatch { client: self.client("postgres").await?, name: name.to_owned() })
    }
}

impl SlotWatch {
    /// The slot now; `None` when there is none.
    pub async fn state(&self) -> Result<Option<SlotState>> {
        let row = self.client.query_opt(STATE, &[&self.name]).await?;
        let position = |row: &Row, column: usize| row.get::<_, Option<i64>>(column).map(i64::cast_unsigned);
        Ok(row.map(|row| SlotState {
            active: row.get(0),
            pid: row.get(1),
            application_name: row.get(2),
            wait_event: row.get(3),
            confirmed: position(&row, 4),
            restart: position(&row, 5),
            wal_status: row.get(6),
            flush: position(&row, 7),
            sent: position(&row, 8),
        }))
    }

    /// Waits until the slot, there or not, is as wanted, and answers it; what it was last is in the error.
    pub async fn wait(
        &self,
        within: Duration,
        wanted: impl Fn(Option<&SlotState>) -> bool,
    ) -> Result<Option<SlotState>> {
        let last = Mutex::new(None);
        let found = eventually_some(within, || async {
            let state = self.state().await;
            let found = state.as_ref().ok().filter(|state| wanted(state.as_ref())).cloned();
            *last.lock().unwrap_or_else(PoisonError::into_inner) = Some(state);
            found
        });
        let found = found.await;
        let last = last.into_inner().unwrap_or_else(PoisonError::into_inner);
        found.with_context(|| format!("slot {}: {last:?}", self.name))
    }

    /// Waits until nobody streams from it.
    pub async fn wait_free(&self, within: Duration) -> Result<()> {
        self.wait(within, |state| state.is_none_or(|state| !state.active)).await.map(drop)
    }

    /// Waits until somebody streams from it, and answers the process.
    pub async fn wait_active(&self, within: Duration) -> Result<i32> {
        let state = self.wait(within, |state| state.is_some_and(|state| state.active && state.pid.is_some())).await?;
        state.and_then(|state| state.pid).context("an active slot has a process")
    }

    /// The server's write position now, in bytes of log.
    pub async fn log_end(&self) -> Result<u64> {
        let sql = "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::int8";
        Ok(self.client.query_one(sql, &[]).await?.get::<_, i64>(0).cast_unsigned())
    }

    /// Ends the process that streams from it, as an administrator does.
    pub async fn terminate(&self) -> Result<()> {
        let sql =
            "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = $1::text and active";
        self.client.execute(sql, &[&self.name]).await?;
        Ok(())
    }
}
