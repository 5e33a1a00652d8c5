//! The source's slot: found, freed of our own older epochs, created when missing, made again when lost (R-ENG-8).

use std::time::Duration;

use aura_domain::{Epoch, Lsn, Relation};
use aura_pgsource::{
    Plugin, ReplicationConnection, SqlConnection, SystemIdentity, connect_sql, ladder, publication, slot,
};
use aura_store::Plugin as Wanted;
use tokio::time::timeout;

use super::{Engine, error::EngineError, session::CONNECT};

/// A slot that can be streamed from.
#[derive(Debug)]
pub(super) struct ReadySlot {
    pub(super) plugin: Plugin,
    /// What the server will not send again.
    pub(super) confirmed: Lsn,
}

/// Creating a slot waits for transactions that are open; a try is given up after this, shown, and made again.
const CREATE_PATIENCE: Duration = Duration::from_secs(10);

impl Engine {
    /// See the module.
    pub(super) async fn ensure_slot(
        &self,
        connection: &mut ReplicationConnection,
        sql: &SqlConnection,
        identity: &SystemIdentity,
    ) -> Result<ReadySlot, EngineError> {
        let name = &self.source.slot_name;
        let older = ladder::Target { slot: name, source: self.source.id, up_to: Epoch(self.epoch.0 - 1) };
        if let Some(ended) = ladder::climb(sql, older, Duration::from_secs(5)).await.ended {
            tracing::warn!(source = %self.source.id, pid = ended.pid, "ended a walsender of an older epoch");
        }
        match slot::status(sql, name).await? {
            Some(status) if status.is_lost() => {
                tracing::error!(source = %self.source.id, slot = %name, "the slot is lost, making it again");
                metrics::counter!("cdc_slot_recreated_total").increment(1);
                self.leave_generation(identity).await?;
                connection.drop_slot(name).await?;
                self.create_slot(connection).await
            }
            Some(status) => self.existing(&status),
            None => {
                self.leave_generation(identity).await?;
                self.create_slot(connection).await
            }
        }
    }

    /// Before a slot is made where there was one: positions of the old one mean nothing in the new one. Raised first, so
    /// that a crash in between leaves a generation without a position, which is announced as a gap (R-LSN-6).
    async fn leave_generation(&self, identity: &SystemIdentity) -> Result<(), EngineError> {
        let entered = self.deps.store.position(self.source.id).await?.map(|(generation, _)| generation);
        let now = self.deps.store.engine(self.source.id).await?.map(|engine| engine.generation);
        if entered.is_some() && entered == now {
            self.generation(identity, true).await?;
        }
        Ok(())
    }

    fn existing(&self, status: &slot::SlotStatus) -> Result<ReadySlot, EngineError> {
        if status.database != self.url.database() {
            return Err(EngineError::SlotOfOtherDatabase(status.database.clone()));
        }
        let ours = |holder: &&slot::SlotHolder| {
            slot::epoch_of(&holder.application_name, self.source.id).is_none_or(|epoch| epoch != self.epoch)
        };
        if let Some(holder) = status.holder.as_ref().filter(|_| status.active).filter(ours) {
            return Err(EngineError::SlotInUse { pid: holder.pid, name: holder.application_name.clone() });
        }
        let plugin = if status.plugin == Plugin::Wal2json.library() { Plugin::Wal2json } else { Plugin::PgOutput };
        Ok(ReadySlot { plugin, confirmed: status.confirmed_flush.unwrap_or(Lsn::ZERO) })
    }

    async fn create_slot(&self, connection: &mut ReplicationConnection) -> Result<ReadySlot, EngineError> {
        let name = &self.source.slot_name;
        let first = if self.source.plugin == Wanted::PgOutput { Plugin::PgOutput } else { Plugin::Wal2json };
        let created = match self.try_create(connection, first).await {
            Err(EngineError::PluginMissing) if self.source.plugin == Wanted::Auto => {
                // With what to do about it.
                tracing::warn!(source = %self.source.id, "using pgoutput: {}", EngineError::PluginMissing);
                self.try_create(connection, Plugin::PgOutput).await.map(|lsn| (Plugin::PgOutput, lsn))
            }
            other => other.map(|lsn| (first, lsn)),
        };
        let (plugin, confirmed) = created?;
        tracing::info!(source = %self.source.id, slot = %name, plugin = plugin.library(), "slot created");
        Ok(ReadySlot { plugin, confirmed })
    }

    /// pgoutput's filter. Answers the position from which on it holds: a change of a publication takes effect there.
    pub(super) async fn sync_publication(&self, tables: &[Relation]) -> Result<(String, Lsn), EngineError> {
        let name = slot::slot_name(self.source.id);
        let admin = connect_sql(&self.admin_url, &self.application_name(), Some(&self.sockets), CONNECT).await?;
        let changed = publication::sync_publication(&admin, &name, tables).await?;
        for (relation, code) in changed.refused {
            tracing::warn!(source = %self.source.id, table = %relation.table, code = code.code(),
                "the publication refuses a table");
        }
        Ok((name, slot::wal_end(&admin).await?))
    }

    async fn try_create(&self, connection: &mut ReplicationConnection, plugin: Plugin) -> Result<Lsn, EngineError> {
        if plugin == Plugin::PgOutput {
            // pgoutput looks its publication up as of the record that it decodes.
            self.sync_publication(&[]).await?;
        }
        match timeout(CREATE_PATIENCE, connection.create_slot(&self.source.slot_name, plugin)).await {
            Ok(Ok(lsn)) => Ok(lsn),
            Ok(Err(error)) if error.is_plugin_unavailable() => Err(EngineError::PluginMissing),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Err(EngineError::WaitingForTransactions),
        }
    }
}
