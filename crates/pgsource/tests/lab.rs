//! A server, a session that writes, and shorthand for streams.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use aura_domain::{Change, Generation, Lsn, Relation, SqlName};
use aura_pgsource::{
    Decoder, FilterEntry, LogEvent, Plugin, ReplicationConnection, ReplicationStream, Sockets, SourceUrl,
    SqlConnection, Status, StreamMessage, connect_sql, wal2json_options,
};
use aura_testkit::Postgres;

pub(crate) const SLOT: &str = "aura_cdc_slot";
pub(crate) const APP: &str = "aura-cdc:0191d0a0-0000-7000-8000-000000000001:1";
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Lab {
    pub(crate) postgres: Postgres,
    pub(crate) url: SourceUrl,
    pub(crate) sql: SqlConnection,
    pub(crate) sockets: Sockets,
}

impl Lab {
    pub(crate) async fn start() -> Result<Self> {
        Self::on(Postgres::start().await?).await
    }

    pub(crate) async fn on(postgres: Postgres) -> Result<Self> {
        let url = SourceUrl::parse(&postgres.url("postgres"))?;
        let sql = connect_sql(&url, "test", None, PATIENCE).await?;
        sql.batch_execute("set search_path = public").await?;
        Ok(Self { postgres, url, sql, sockets: Sockets::new() })
    }

    pub(crate) async fn run(&self, sql: &str) -> Result<()> {
        self.sql.batch_execute(sql).await.with_context(|| sql.to_owned())
    }

    pub(crate) async fn replication(&self) -> Result<ReplicationConnection> {
        Ok(ReplicationConnection::connect(&self.url, APP, &self.sockets, PATIENCE).await?)
    }

    pub(crate) async fn create_slot(&self, plugin: Plugin) -> Result<Lsn> {
        let mut connection = self.replication().await?;
        let lsn = connection.create_slot(SLOT, plugin).await?;
        connection.close().await;
        Ok(lsn)
    }

    pub(crate) async fn tail(&self, from: Lsn, entries: &[FilterEntry]) -> Result<Tail> {
        let stream = self.replication().await?.start(SLOT, from, &wal2json_options(entries)).await?;
        Ok(Tail::new(stream, Plugin::Wal2json))
    }
}

/// A stream and its decoder.
pub(crate) struct Tail {
    pub(crate) stream: ReplicationStream,
    decoder: Decoder,
}

impl Tail {
    pub(crate) fn new(stream: ReplicationStream, plugin: Plugin) -> Self {
        Self { stream, decoder: Decoder::new(plugin, Generation(1)) }
    }

    pub(crate) async fn message(&mut self) -> Result<StreamMessage> {
        Ok(tokio::time::timeout(PATIENCE, self.stream.next()).await.context("nothing came")??)
    }

    pub(crate) async fn event(&mut self) -> Result<LogEvent> {
        loop {
            match self.message().await? {
                StreamMessage::Data { start, payload, .. } => return Ok(self.decoder.decode(start, &payload)),
                StreamMessage::Oversize { prefix, .. } => return Ok(self.decoder.oversize(&prefix)),
                StreamMessage::Keepalive { .. } => {}
                StreamMessage::End => bail!("the stream ended"),
            }
        }
    }

    /// The changes of the next transaction that has any, and its end.
    pub(crate) async fn transaction(&mut self) -> Result<(Vec<Change>, Lsn)> {
        let mut changes = Vec::new();
        loop {
            match self.event().await? {
                LogEvent::Change(change) => changes.push(change),
                LogEvent::Truncate(all) => changes.extend(all),
                LogEvent::Commit { end, .. } if !changes.is_empty() => return Ok((changes, end)),
                LogEvent::Skipped { reason, relation } => bail!("skipped: {reason:?} {relation:?}"),
                _ => {}
            }
        }
    }

    pub(crate) async fn confirm(&mut self, position: Lsn) -> Result<()> {
        let status = Status { written: position, flushed: position, applied: position, reply_requested: false };
        Ok(self.stream.send_status(status).await?)
    }
}

pub(crate) fn relation(schema: &str, table: &str) -> Result<Relation> {
    Ok(Relation { schema: SqlName::new(schema)?, table: SqlName::new(table)? })
}

pub(crate) fn table(schema: &str, table: &str) -> Result<FilterEntry> {
    Ok(FilterEntry::Table(relation(schema, table)?))
}
