//! An own client for the replication protocol, on `postgres-protocol`: the crates there are were measured and fall
//! short (fixed plugin, a limit on the message size, no say over the socket).

mod auth;
mod stream;
mod wire;

use std::{str::FromStr, time::Duration};

use aura_domain::{Lsn, quote_ident};
use bytes::BytesMut;
use postgres_protocol::message::{backend::Message, frontend};
pub use stream::{ReplicationStream, Status, StreamMessage};

use self::wire::{Wire, timed};
use crate::{Plugin, Sockets, SourceError, SourceUrl, transport};

/// A command other than the creation of a slot is answered within this time.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// Creating a slot waits for transactions that are open; the caller bounds that wait, this is only a last resort.
const CREATE_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// A connection in replication mode (`replication=database`) before it streams.
pub struct ReplicationConnection {
    wire: Wire,
    pid: i32,
}

/// What `IDENTIFY_SYSTEM` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SystemIdentity {
    /// Unique per cluster; a restored copy keeps it.
    pub system_identifier: String,
    /// Rises with every promotion.
    pub timeline: i32,
    /// The server's flush position.
    pub wal_end: Lsn,
    /// The connected database.
    pub database: String,
}

impl ReplicationConnection {
    /// Connects. The socket is registered before it is opened; `timeout` bounds look-up, connect, TLS and
    /// authentication together.
    pub async fn connect(
        url: &SourceUrl,
        application_name: &str,
        sockets: &Sockets,
        timeout: Duration,
    ) -> Result<Self, SourceError> {
        timed(crate::error::CONNECTING, timeout, Box::pin(Self::open(url, application_name, sockets))).await
    }

    async fn open(url: &SourceUrl, application_name: &str, sockets: &Sockets) -> Result<Self, SourceError> {
        let mut wire = Wire::new(transport::open(url, Some(sockets)).await?);
        let options = url.startup_options();
        let parameters = [
            ("user", url.user()),
            ("database", url.database()),
            ("replication", "database"),
            ("application_name", application_name),
            ("client_encoding", "UTF8"),
            ("options", &options),
        ];
        let encoded = frontend::startup_message(parameters, &mut wire.output);
        encoded.map_err(|_| SourceError::Url("user, database or options contain NUL"))?;
        wire.flush().await?;
        auth::authenticate(&mut wire, url.user(), url.config().get_password()).await?;
        let pid = wait_until_ready(&mut wire).await?;
        Ok(Self { wire, pid })
    }

    /// The server process, as `pg_stat_replication` knows it. A pooler's own number behind a pooler.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// `IDENTIFY_SYSTEM`.
    pub async fn identify_system(&mut self) -> Result<SystemIdentity, SourceError> {
        let row = self.one_row("IDENTIFY_SYSTEM", COMMAND_TIMEOUT).await?;
        Ok(SystemIdentity {
            system_identifier: column(&row, 0)?,
            timeline: column(&row, 1)?,
            wal_end: column(&row, 2)?,
            database: column(&row, 3)?,
        })
    }

    /// The session's `wal_sender_timeout`; `None` when it is switched off (R-FB-2).
    pub async fn wal_sender_timeout(&mut self) -> Result<Option<Duration>, SourceError> {
        let sql = "SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'";
        let row = self.one_row(sql, COMMAND_TIMEOUT).await?;
        let milliseconds: u64 = column(&row, 0)?;
        Ok((milliseconds > 0).then(|| Duration::from_millis(milliseconds)))
    }

    /// Creates a logical slot and answers its consistent point. Waits until every transaction that is open now has
    /// ended: bound it from outside, and drop the connection to give up (R-ENG-8).
    pub async fn create_slot(&mut self, name: &str, plugin: Plugin) -> Result<Lsn, SourceError> {
        let (slot, plugin) = (quote_ident(name), quote_ident(plugin.library()));
        let sql = format!("CREATE_REPLICATION_SLOT {slot} LOGICAL {plugin} NOEXPORT_SNAPSHOT");
        let row = self.one_row(&sql, CREATE_TIMEOUT).await?;
        column(&row, 1)
    }

    /// Drops a slot that nobody uses (else 55006).
    pub async fn drop_slot(&mut self, name: &str) -> Result<(), SourceError> {
        self.rows(&format!("DROP_REPLICATION_SLOT {}", quote_ident(name)), COMMAND_TIMEOUT).await.map(drop)
    }

    /// Starts streaming at `from`, or at the slot's confirmed position if that is later. The options are the plugin's
    /// ([`wal2json_options`](crate::wal2json_options), [`pgoutput_options`](crate::pgoutput_options)).
    pub async fn start(
        mut self,
        slot: &str,
        from: Lsn,
        options: &[(String, String)],
    ) -> Result<ReplicationStream, SourceError> {
        self.send(&start_command(slot, from, options))?;
        let mut wire = self.wire;
        timed("starting replication", COMMAND_TIMEOUT, Box::pin(wire.await_copy_both())).await?;
        Ok(ReplicationStream::new(wire))
    }

    /// Says goodbye and closes, within a quarter of a second.
    pub async fn close(self) {
        self.wire.close().await;
    }

    fn send(&mut self, sql: &str) -> Result<(), SourceError> {
        let encoded = frontend::query(sql, &mut self.wire.output);
        encoded.map_err(|_| SourceError::Protocol("a command contains NUL"))
    }

    async fn one_row(&mut self, sql: &str, limit: Duration) -> Result<Vec<Option<String>>, SourceError> {
        let rows = self.rows(sql, limit).await?;
        rows.into_iter().next().ok_or(SourceError::Protocol("a command answered no row"))
    }

    async fn rows(&mut self, sql: &str, limit: Duration) -> Result<Vec<Vec<Option<String>>>, SourceError> {
        self.send(sql)?;
        timed("a replication command", limit, self.collect()).await
    }

    async fn collect(&mut self) -> Result<Vec<Vec<Option<String>>>, SourceError> {
        self.wire.flush().await?;
        let (mut rows, mut failure) = (Vec::new(), None);
        loop {
            match self.wire.message().await {
                Ok(Message::DataRow(row)) => rows.push(texts(&row)?),
                Ok(Message::ReadyForQuery(_)) => return failure.map_or(Ok(rows), Err),
                Ok(_) => {}
                // After an ERROR the connection is ready again; the caller may retry on it.
                Err(error @ SourceError::Server(_)) if !error.is_connection_error() => failure = Some(error),
                Err(error) => return Err(error),
            }
        }
    }
}

/// `START_REPLICATION`, as the replication grammar wants it: names in double quotes, literals with `'` doubled and
/// backslashes plain.
fn start_command(slot: &str, from: Lsn, options: &[(String, String)]) -> String {
    let option = |(name, value): &(String, String)| format!("{} '{}'", quote_ident(name), value.replace('\'', "''"));
    let options: Vec<String> = options.iter().map(option).collect();
    format!("START_REPLICATION SLOT {} LOGICAL {from} ({})", quote_ident(slot), options.join(", "))
}

async fn wait_until_ready(wire: &mut Wire) -> Result<i32, SourceError> {
    let mut pid = 0;
    loop {
        match wire.message().await? {
            Message::BackendKeyData(key) => pid = key.process_id(),
            Message::ReadyForQuery(_) => return Ok(pid),
            _ => return Err(SourceError::Protocol("unexpected message before the session was ready")),
        }
    }
}

fn texts(row: &postgres_protocol::message::backend::DataRowBody) -> Result<Vec<Option<String>>, SourceError> {
    use fallible_iterator::FallibleIterator;
    let cell = |range: Option<std::ops::Range<usize>>| {
        Ok(range.and_then(|range| row.buffer().get(range)).map(|text| String::from_utf8_lossy(text).into_owned()))
    };
    row.ranges().map(cell).collect().map_err(SourceError::io("read a row"))
}

fn column<T: FromStr>(row: &[Option<String>], index: usize) -> Result<T, SourceError> {
    let text = row.get(index).and_then(Option::as_deref);
    text.and_then(|text| text.parse().ok()).ok_or(SourceError::Protocol("a command's answer can't be read"))
}

/// An empty buffer that grows in the size of a socket read.
fn buffer() -> BytesMut {
    BytesMut::with_capacity(wire::READ_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_reg_5_options_are_replication_literals() {
        let options = [("add-tables".to_owned(), "t.b\\'t\\\\".to_owned()), ("a\"b".to_owned(), String::new())];
        assert_eq!(
            start_command("s\"1", Lsn(0x1_0000_0002), &options),
            "START_REPLICATION SLOT \"s\"\"1\" LOGICAL 1/2 (\"add-tables\" 't.b\\''t\\\\', \"a\"\"b\" '')"
        );
    }
}
