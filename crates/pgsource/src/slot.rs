//! Slots as SQL sees them, and the rungs of the kill ladder that run on an SQL connection (R-ENG-4).

use std::time::Duration;

use aura_domain::{Epoch, Lsn, SlotLive, SourceId};
use tokio::time::Instant;
use tokio_postgres::{Client, Row, error::SqlState, types::ToSql};

use crate::SourceError;

/// Slot name of the source `shared` unless `CDC_SLOT_NAME` says otherwise.
pub const SHARED_SLOT: &str = "aura_cdc_slot";
/// How often a slot is looked at while waiting for it.
const POLL: Duration = Duration::from_millis(25);
/// Each statement of this module is answered within this time.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Name of a source's own slot and publication: cluster-wide, so it carries the id's first 8 hex digits (R-ENG-8).
pub fn slot_name(source: SourceId) -> String {
    let id = source.0.simple().to_string();
    format!("aura_cdc_{}", &id[..8])
}

/// `application_name` of every connection of an engine (R-ENG-2): SQL alone tells whose walsender holds a slot.
pub fn application_name(source: SourceId, epoch: Epoch) -> String {
    format!("aura-cdc:{source}:{epoch}")
}

/// The epoch in an `application_name` of this source; `None` for anybody else's.
pub fn epoch_of(application_name: &str, source: SourceId) -> Option<Epoch> {
    let (id, epoch) = application_name.strip_prefix("aura-cdc:")?.split_once(':')?;
    (id.parse() == Ok(source)).then(|| epoch.parse().ok().map(Epoch))?
}

/// A slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotStatus {
    /// Whether a walsender uses it.
    pub active: bool,
    /// Who does. Its columns need the same role, membership in it, or `pg_monitor`.
    pub holder: Option<SlotHolder>,
    /// `reserved`, `extended`, `unreserved`, `lost`.
    pub wal_status: Option<String>,
    /// What the server will not send again. Kept when lost.
    pub confirmed_flush: Option<Lsn>,
    /// From where WAL is retained; `None` when lost.
    pub restart: Option<Lsn>,
    /// Library of its output plugin.
    pub plugin: String,
    /// Its database.
    pub database: String,
    /// Bytes of WAL until the slot may be lost; `None` without limit or when lost. May be negative.
    pub safe_wal_size: Option<i64>,
    /// The server's flush position now (of a standby: replay).
    pub wal_end: Lsn,
}

/// The process that holds a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotHolder {
    /// Process id.
    pub pid: i32,
    /// Empty when this role may not see it.
    pub application_name: String,
    /// When the process started, PostgreSQL's text form: guards a kill against a reused pid.
    pub backend_start: Option<String>,
    /// What it waits for, `WalSenderWriteData` when its client doesn't read.
    pub wait_event: Option<String>,
}

impl SlotStatus {
    /// Whether the server has thrown away WAL that the slot needs: it can only be created again.
    pub fn is_lost(&self) -> bool {
        self.wal_status.as_deref() == Some("lost")
    }

    /// Why it can't be read from any more, only made again: it is lost, or ahead of the server, which was restored, and
    /// would pass over what is written from now on (control-plane.md, finding 9).
    pub fn useless(&self) -> Option<&'static str> {
        let ahead = self.confirmed_flush.is_some_and(|confirmed| confirmed > self.wal_end);
        if self.is_lost() { Some("lost") } else { ahead.then_some("ahead of the server") }
    }

    /// For an engine's live status.
    pub fn live(&self) -> SlotLive {
        SlotLive {
            wal_status: self.wal_status.clone(),
            safe_wal_bytes: self.safe_wal_size,
            active_pid: self.holder.as_ref().map(|holder| holder.pid),
            retained_bytes: self.restart.map(|restart| self.wal_end.0.saturating_sub(restart.0)),
        }
    }
}

const STATUS: &str = "\
    SELECT s.active, s.active_pid, s.wal_status, s.confirmed_flush_lsn::pg_catalog.text, s.restart_lsn::pg_catalog.text, \
           s.plugin::pg_catalog.text, s.database::pg_catalog.text, s.safe_wal_size, \
           (CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn() \
                 ELSE pg_catalog.pg_current_wal_flush_lsn() END)::pg_catalog.text, \
           a.application_name, a.backend_start::pg_catalog.text, a.wait_event \
    FROM pg_catalog.pg_replication_slots s LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = s.active_pid \
    WHERE s.slot_name = $1::pg_catalog.text::pg_catalog.name AND s.slot_type = 'logical'";

/// Reads a logical slot; `None` when there is none of that name.
pub async fn status(client: &Client, name: &str) -> Result<Option<SlotStatus>, SourceError> {
    let row = bounded(STATEMENT_TIMEOUT, client.query_opt(STATUS, &[&name])).await?;
    row.map(|row| read_status(&row)).transpose()
}

fn read_status(row: &Row) -> Result<SlotStatus, SourceError> {
    let pid: Option<i32> = row.try_get(1)?;
    let application_name: Option<String> = row.try_get(9)?;
    let (backend_start, wait_event) = (row.try_get(10)?, row.try_get(11)?);
    let application_name = application_name.unwrap_or_default();
    Ok(SlotStatus {
        active: row.try_get(0)?,
        holder: pid.map(|pid| SlotHolder { pid, application_name, backend_start, wait_event }),
        wal_status: row.try_get(2)?,
        confirmed_flush: lsn(row, 3)?,
        restart: lsn(row, 4)?,
        plugin: row.try_get(5)?,
        database: row.try_get(6)?,
        safe_wal_size: row.try_get(7)?,
        wal_end: lsn(row, 8)?.unwrap_or(Lsn::ZERO),
    })
}

pub(crate) fn lsn(row: &Row, index: usize) -> Result<Option<Lsn>, SourceError> {
    let text: Option<&str> = row.try_get(index)?;
    let parsed = text.map(str::parse).transpose();
    parsed.map_err(|_| SourceError::Protocol("an LSN can't be read"))
}

/// A walsender, as the server sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sender {
    /// Process id.
    pub pid: i32,
    /// `startup`, `catchup`, `streaming`, `backup`, `stopping`; empty when this role may not see it.
    pub state: String,
    /// What was sent.
    pub sent: Option<Lsn>,
    /// What the client says to have flushed; `None` when it said zero.
    pub flush: Option<Lsn>,
    /// When the client was last heard, milliseconds since 1970, by the client's own clock.
    pub reply_ms: Option<i64>,
    /// Since the process started.
    pub age: Duration,
    /// What it waits for; `None` = nothing, it computes.
    pub wait_event: Option<String>,
}

const SENDER: &str = "\
    SELECT r.pid, coalesce(r.state, ''), r.sent_lsn::pg_catalog.text, r.flush_lsn::pg_catalog.text, \
           (extract(epoch FROM r.reply_time) * 1000)::pg_catalog.int8, \
           coalesce(extract(epoch FROM pg_catalog.clock_timestamp() - r.backend_start), 0)::pg_catalog.float8, a.wait_event \
    FROM pg_catalog.pg_stat_replication r JOIN pg_catalog.pg_stat_activity a ON a.pid = r.pid WHERE r.pid = $1";

/// Reads a walsender; `None` when there is none of that process id.
pub async fn sender(client: &Client, pid: i32) -> Result<Option<Sender>, SourceError> {
    let row = bounded(STATEMENT_TIMEOUT, client.query_opt(SENDER, &[&pid])).await?;
    let read = |row: Row| {
        Ok(Sender {
            pid: row.try_get(0)?,
            state: row.try_get(1)?,
            sent: lsn(&row, 2)?,
            flush: lsn(&row, 3)?,
            reply_ms: row.try_get(4)?,
            age: Duration::from_secs_f64(row.try_get::<_, f64>(5)?.max(0.0)),
            wait_event: row.try_get(6)?,
        })
    };
    row.map(read).transpose()
}

/// `max_slot_wal_keep_size` in bytes; `None` = without a limit.
pub async fn keep_size(client: &Client) -> Result<Option<u64>, SourceError> {
    let sql = "SELECT setting::pg_catalog.int8 FROM pg_catalog.pg_settings WHERE name = 'max_slot_wal_keep_size'";
    let row = bounded(STATEMENT_TIMEOUT, client.query_opt(sql, &[])).await?;
    let megabytes: Option<i64> = row.map(|row| row.try_get(0)).transpose()?;
    Ok(megabytes.and_then(|megabytes| u64::try_from(megabytes).ok()).map(|megabytes| megabytes << 20))
}

/// The server's current flush position.
pub async fn wal_end(client: &Client) -> Result<Lsn, SourceError> {
    let sql = "SELECT pg_catalog.pg_current_wal_flush_lsn()::pg_catalog.text";
    let row = bounded(STATEMENT_TIMEOUT, client.query_one(sql, &[])).await?;
    Ok(lsn(&row, 0)?.unwrap_or(Lsn::ZERO))
}

/// Ends the process that holds a slot, if it is still the same one: guarded by pid, start time and application name.
/// Waits up to `wait` for it to be gone and says whether it is; a walsender that is blocked writing needs it twice.
pub async fn terminate(client: &Client, slot: &str, holder: &SlotHolder, wait: Duration) -> Result<bool, SourceError> {
    let sql = "SELECT pg_catalog.pg_terminate_backend(a.pid, $5::pg_catalog.int8) \
        FROM pg_catalog.pg_stat_activity a JOIN pg_catalog.pg_replication_slots s ON s.active_pid = a.pid \
        WHERE s.slot_name = $1::pg_catalog.text::pg_catalog.name AND a.pid = $2 \
          AND a.backend_start::pg_catalog.text = $3 AND a.application_name = $4";
    let milliseconds = i64::try_from(wait.as_millis()).unwrap_or(i64::MAX);
    let limit = wait + STATEMENT_TIMEOUT;
    let name = &holder.application_name;
    let parameters: [&(dyn ToSql + Sync); 5] = [&slot, &holder.pid, &holder.backend_start, name, &milliseconds];
    let row = bounded(limit, client.query_opt(sql, &parameters)).await?;
    // No row: it is gone already.
    row.map_or(Ok(true), |row| row.try_get(0).map_err(SourceError::from))
}

/// Drops a slot that nobody uses (else 55006) and says whether there was one. Needs a session in the slot's database, and
/// REPLICATION.
pub async fn drop_slot(client: &Client, name: &str) -> Result<bool, SourceError> {
    let sql = "SELECT pg_catalog.pg_drop_replication_slot($1::pg_catalog.text::pg_catalog.name)";
    match bounded(STATEMENT_TIMEOUT, client.execute(sql, &[&name])).await {
        Ok(_) => Ok(true),
        Err(error) if error.sqlstate() == Some(&SqlState::UNDEFINED_OBJECT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Transactions that hold up the creation of a slot, at most ten: who, since when. No query texts. Names and times of
/// other logins need `pg_monitor`.
pub async fn open_transactions(client: &Client) -> Result<Vec<String>, SourceError> {
    let rows = bounded(STATEMENT_TIMEOUT, client.query(OPEN_TRANSACTIONS, &[])).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// Whoever has a transaction id holds a lock on it, which everybody may see; of a prepared one no process does.
const OPEN_TRANSACTIONS: &str = "\
    SELECT CASE WHEN l.pid IS NULL THEN pg_catalog.format('a prepared transaction (%s)', p.gid) \
                ELSE pg_catalog.format('pid %s (%s)', l.pid, \
                    coalesce(nullif(a.application_name, ''), a.usename::pg_catalog.text, 'unknown')) END \
           || coalesce(pg_catalog.format(' for %s s', pg_catalog.round(extract(epoch FROM \
                pg_catalog.clock_timestamp() - coalesce(a.xact_start, p.prepared)))), '') \
    FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid \
    LEFT JOIN pg_catalog.pg_prepared_xacts p ON l.pid IS NULL AND p.transaction = l.transactionid \
    WHERE l.locktype = 'transactionid' AND l.granted AND l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid() \
    ORDER BY coalesce(a.xact_start, p.prepared) LIMIT 10";

/// Waits until a slot is seen inactive, or gone, and says whether it was in time.
pub async fn wait_inactive(client: &Client, name: &str, limit: Duration) -> Result<bool, SourceError> {
    let deadline = Instant::now() + limit;
    loop {
        if status(client, name).await?.is_none_or(|status| !status.active) {
            return Ok(true);
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Waits until the slot's confirmed position is at least `position`, and answers it; `None` when not in time.
pub async fn wait_confirmed(
    client: &Client,
    name: &str,
    position: Lsn,
    limit: Duration,
) -> Result<Option<Lsn>, SourceError> {
    let deadline = Instant::now() + limit;
    loop {
        let confirmed = status(client, name).await?.and_then(|status| status.confirmed_flush);
        if confirmed.is_some_and(|confirmed| confirmed >= position) {
            return Ok(confirmed);
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        tokio::time::sleep(POLL).await;
    }
}

pub(crate) async fn bounded<T>(
    limit: Duration,
    statement: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Result<T, SourceError> {
    let outcome = tokio::time::timeout(limit, statement).await;
    Ok(outcome.map_err(|_| SourceError::Timeout { what: "a statement", limit })??)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_eng_2_the_name_tells_source_and_epoch() {
        let source: SourceId = "0191d0a0-0000-7000-8000-000000000001".parse().unwrap();
        let other: SourceId = "0191d0a0-0000-7000-8000-000000000002".parse().unwrap();
        let name = application_name(source, Epoch(42));
        assert_eq!(name, "aura-cdc:0191d0a0-0000-7000-8000-000000000001:42");
        assert!(name.len() <= 63);
        assert_eq!(epoch_of(&name, source), Some(Epoch(42)));
        for foreign in ["", "psql", "aura-cdc:", "aura-cdc:x:1", "aura-cdc:0191d0a0-0000-7000-8000-000000000001:x"] {
            assert_eq!(epoch_of(foreign, source), None, "{foreign}");
        }
        assert_eq!(epoch_of(&name, other), None);
        assert_eq!(slot_name(source), "aura_cdc_0191d0a0");
    }

    #[test]
    fn r_eng_8_a_slot_that_was_lost_or_is_ahead_of_a_restored_server_is_of_no_use() {
        let status = |wal_status: &str, confirmed, end| SlotStatus {
            active: false,
            holder: None,
            wal_status: Some(wal_status.to_owned()),
            confirmed_flush: Some(Lsn(confirmed)),
            restart: Some(Lsn(1)),
            plugin: "wal2json".to_owned(),
            database: "app".to_owned(),
            safe_wal_size: None,
            wal_end: Lsn(end),
        };
        assert_eq!(status("reserved", 10, 10).useless(), None);
        assert_eq!(status("lost", 10, 20).useless(), Some("lost"));
        assert_eq!(status("reserved", 11, 10).useless(), Some("ahead of the server"));
    }
}
