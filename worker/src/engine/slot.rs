//! The source's slot: found, freed of our own older epochs, created when missing, made again when lost (R-ENG-8).

use std::time::{Duration, Instant};

use aura_domain::{Condition, Epoch, Lsn, Relation};
use aura_pgsource::{
    Plugin, ReplicationConnection, SqlConnection, SqlState, SystemIdentity, connect_sql,
    ladder::{self, Freed, Target},
    publication,
    slot::{self, SlotStatus},
};
use aura_store::{NewGap, Plugin as Wanted, SlotRecreate};
use aura_wire::GapReason;
use tokio::time::sleep;

use super::{Engine, error::EngineError, gaps, session::CONNECT};
use crate::states::Observed;

/// A slot that can be streamed from.
#[derive(Debug)]
pub(super) struct ReadySlot {
    pub(super) plugin: Plugin,
    /// What the server will not send again.
    pub(super) confirmed: Lsn,
    /// It was made just now in place of one that had been used.
    pub(super) replaced: bool,
}

/// Creating a slot waits for transactions that are open. Usually there are none: only after this is anything shown.
const UNUSUAL: Duration = Duration::from_millis(500);
/// Then they are looked at this often.
const LOOK: Duration = Duration::from_secs(2);
/// Limit of freeing the slot from an older epoch.
const FREE: Duration = Duration::from_millis(4500);
/// R-ENG-8: what is lost again and again is lost for a reason, and a loop would hide it.
const PER_HOUR: i64 = 3;

/// A publication that holds the tables of a registry.
pub(super) struct Publication {
    pub(super) name: String,
    /// From here on.
    pub(super) from: Lsn,
    /// Tables that it doesn't hold, with the reason.
    pub(super) refused: Vec<(Relation, SqlState)>,
}

impl Engine {
    /// See the module.
    pub(super) async fn ensure_slot(
        &self,
        connection: &mut ReplicationConnection,
        sql: &SqlConnection,
        identity: &SystemIdentity,
    ) -> Result<ReadySlot, EngineError> {
        let name = &self.source.slot_name;
        self.end_older(sql).await;
        let status = slot::status(sql, name).await?;
        let row = self.deps.store.engine(self.source.id).await?;
        let asked = row.as_ref().is_some_and(|engine| engine.recreate_slot);
        let generation = row.map(|engine| engine.generation);
        let entered = self.deps.store.position(self.source.id).await?.map(|(generation, _)| generation);
        // A position of this generation says that there was a slot.
        let used = entered.is_some() && entered == generation;
        let found = status.as_ref().map(|status| self.plugin_of(status)).transpose()?;
        let useless = status.as_ref().and_then(SlotStatus::useless);
        if let Some(what) = useless.filter(|_| entered.is_none() && !asked) {
            return Err(EngineError::SlotLost { what, why: "nothing says that it was ours" });
        }
        match status.zip(found) {
            Some((status, plugin)) if useless.is_none() => {
                if asked {
                    self.deps.store.new_slot_made(self.source.id, self.epoch).await?;
                }
                self.existing(sql, &status, plugin).await
            }
            None if !used => self.create_slot(connection, sql).await,
            status => {
                let what = useless.unwrap_or("missing");
                if !asked {
                    self.may_replace(what).await?;
                }
                self.replace(what, connection, sql, identity, status.is_some()).await
            }
        }
    }

    /// R-ENG-7 Z6: a walsender of ours with an older epoch, and sessions of ours that are left over.
    pub(super) async fn end_older(&self, sql: &SqlConnection) {
        let up_to = Epoch(self.epoch.0 - 1);
        let target = Target { slot: &self.source.slot_name, source: self.source.id, up_to };
        let climb = ladder::climb(sql, target, FREE).await;
        if let Some(ended) = climb.ended {
            metrics::counter!("cdc_zombies_freed_total").increment(1);
            tracing::warn!(source = %self.source.id, pid = ended.pid, name = %ended.application_name,
                "ended a walsender of an older epoch");
        }
        if let Freed::Unknown(error) = climb.freed {
            tracing::warn!(source = %self.source.id, %error, "can't look for older epochs");
        }
    }

    /// Whether the slot may be made again without being asked.
    async fn may_replace(&self, what: &'static str) -> Result<(), EngineError> {
        if self.source.slot_recreate == SlotRecreate::Manual {
            return Err(EngineError::SlotLost { what, why: "slot_recreate is manual" });
        }
        if self.deps.store.slots_recreated(self.source.id).await? >= PER_HOUR {
            return Err(EngineError::SlotLost { what, why: "it was made again three times within an hour" });
        }
        Ok(())
    }

    /// Positions of the old slot mean nothing in the new one. Recorded first, so that tries that fail count; the generation
    /// is raised before anything is dropped, so that a crash in between leaves one without a position, which is announced.
    async fn replace(
        &self,
        what: &'static str,
        connection: &mut ReplicationConnection,
        sql: &SqlConnection,
        identity: &SystemIdentity,
        exists: bool,
    ) -> Result<ReadySlot, EngineError> {
        let (store, source, name) = (&self.deps.store, self.source.id, &self.source.slot_name);
        tracing::error!(%source, slot = %name, "the slot is {what}, making it again");
        let reason = gaps::word(GapReason::SlotRecreated);
        store.record_gap(self.epoch, NewGap { source, project: None, from: None, to: None, reason: &reason }).await?;
        self.generation(identity, true).await?;
        if exists {
            connection.drop_slot(name).await?;
        }
        let made = self.create_slot(connection, sql).await?;
        metrics::counter!("cdc_slot_recreated_total").increment(1);
        store.new_slot_made(source, self.epoch).await?;
        Ok(ReadySlot { replaced: true, ..made })
    }

    /// Names of slots are cluster-wide, and anybody may have taken ours. Whatever state a slot is in that we can't have made:
    /// it isn't ours to read, nor to drop.
    fn plugin_of(&self, status: &SlotStatus) -> Result<Plugin, EngineError> {
        if status.database != self.url.database() {
            return Err(EngineError::SlotOfOtherDatabase(status.database.clone()));
        }
        status.plugin.parse().map_err(|_| EngineError::SlotOfOtherPlugin(status.plugin.clone()))
    }

    async fn existing(
        &self,
        sql: &SqlConnection,
        status: &SlotStatus,
        plugin: Plugin,
    ) -> Result<ReadySlot, EngineError> {
        let holder = status.holder.as_ref().filter(|_| status.active);
        let is_ours =
            |holder: &slot::SlotHolder| slot::epoch_of(&holder.application_name, self.source.id) == Some(self.epoch);
        match holder {
            Some(holder) if !is_ours(holder) => {
                return Err(EngineError::SlotInUse { pid: holder.pid, name: holder.application_name.clone() });
            }
            // Ours, cut off while it was making the slot: it would wait on, and its slot never be finished.
            Some(holder) if status.confirmed_flush.is_none() => {
                slot::terminate(sql, &self.source.slot_name, holder, CONNECT).await?;
                return Err(EngineError::SlotHalfMade);
            }
            // Our own last stream, about to go.
            _ => {}
        }
        Ok(ReadySlot { plugin, confirmed: status.confirmed_flush.unwrap_or(Lsn::ZERO), replaced: false })
    }

    async fn create_slot(
        &self,
        connection: &mut ReplicationConnection,
        sql: &SqlConnection,
    ) -> Result<ReadySlot, EngineError> {
        let name = &self.source.slot_name;
        let first = if self.source.plugin == Wanted::PgOutput { Plugin::PgOutput } else { Plugin::Wal2json };
        let created = match self.try_create(connection, sql, first).await {
            Err(EngineError::PluginMissing) if self.source.plugin == Wanted::Auto => {
                // With what to do about it.
                tracing::warn!(source = %self.source.id, "using pgoutput: {}", EngineError::PluginMissing);
                self.try_create(connection, sql, Plugin::PgOutput).await.map(|lsn| (Plugin::PgOutput, lsn))
            }
            other => other.map(|lsn| (first, lsn)),
        };
        let (plugin, confirmed) = created?;
        tracing::info!(source = %self.source.id, slot = %name, plugin = plugin.library(), "slot created");
        Ok(ReadySlot { plugin, confirmed, replaced: false })
    }

    /// pgoutput's filter. Answers the position from which on it holds: a change of a publication takes effect there.
    pub(super) async fn sync_publication(&self, tables: &[Relation]) -> Result<Publication, EngineError> {
        let name = slot::slot_name(self.source.id);
        let admin = connect_sql(&self.admin_url, &self.application_name(), Some(&self.sockets), CONNECT).await?;
        let changed = publication::sync_publication(&admin, &name, tables).await?;
        Ok(Publication { name, from: slot::wal_end(&admin).await?, refused: changed.refused })
    }

    async fn try_create(
        &self,
        connection: &mut ReplicationConnection,
        sql: &SqlConnection,
        plugin: Plugin,
    ) -> Result<Lsn, EngineError> {
        if plugin == Plugin::PgOutput {
            // pgoutput looks its publication up as of the record that it decodes.
            self.sync_publication(&[]).await?;
        }
        let creating = connection.create_slot(&self.source.slot_name, plugin);
        let created = tokio::select! {
            created = creating => created,
            never = self.show_blockers(sql) => match never {},
        };
        self.conditions.clear(Condition::WaitingForTransactions);
        match created {
            Ok(lsn) => Ok(lsn),
            Err(error) if error.is_plugin_unavailable() => Err(EngineError::PluginMissing),
            Err(error) => Err(error.into()),
        }
    }

    /// Shows who holds up the creation, for as long as it is polled.
    async fn show_blockers(&self, sql: &SqlConnection) -> std::convert::Infallible {
        sleep(UNUSUAL).await;
        let began = Instant::now();
        loop {
            let detail = match slot::open_transactions(sql).await {
                Ok(open) => open.join(", "),
                Err(error) => format!("can't be read: {error}"),
            };
            let seconds = began.elapsed().as_secs();
            tracing::info!(source = %self.source.id, seconds, transactions = %detail, "creating the slot waits for transactions");
            self.conditions.set(Condition::WaitingForTransactions, Some(detail.clone()));
            let code = Some("waiting_for_transactions");
            self.observe(Observed { state: aura_domain::EngineState::Starting, code, detail: Some(detail) });
            sleep(LOOK).await;
        }
    }
}
