//! Tells the platform database, and through it the api's waiting PUTs, what the running filter covers.

use std::{collections::HashSet, sync::Arc, time::Duration};

use aura_domain::{Epoch, Lsn, Relation, SourceId};
use aura_store::{Store, StoreError};
use tokio::sync::{RwLock, watch};
use tokio_util::sync::CancellationToken;

use super::{
    Engine,
    registry::{RegisteredTable, Registry},
};
use crate::subs::control::Control;

/// A registry that the stream covers from `from` on.
#[derive(Debug)]
pub(crate) struct Covered {
    registry: Arc<Registry>,
    from: Lsn,
}

impl Covered {
    /// Whether the stream covers the registration under this name.
    pub(crate) fn covers(&self, registration: uuid::Uuid, relation: &Relation) -> bool {
        self.registry.table(relation).is_some_and(|table| table.registration == registration)
    }

    /// Whether what comes under this name is taken as the registration's.
    pub(crate) fn covers_partition(&self, registration: uuid::Uuid, name: &Relation) -> bool {
        self.registry.of(name).any(|table| table.registration == registration)
    }

    /// From where on every change of a table that it covers is read (R-HOLE-2).
    pub(crate) fn since(&self, table: &RegisteredTable) -> Lsn {
        table.active_since(self.from)
    }
}

/// Works reports off, the newest wins: it covers all that the older ones did.
pub(super) struct Reporter {
    store: Store,
    control: Arc<Control>,
    source: SourceId,
    epoch: Epoch,
    disabling: Arc<RwLock<()>>,
    /// Tables whose disable has been reported.
    disabled: HashSet<uuid::Uuid>,
    stop: CancellationToken,
}

impl Reporter {
    pub(super) fn new(engine: &Engine, stop: CancellationToken) -> Self {
        Self {
            disabling: Arc::clone(&engine.disabling),
            disabled: HashSet::new(),
            store: engine.deps.store.clone(),
            control: Arc::clone(&engine.control),
            source: engine.source.id,
            epoch: engine.epoch,
            stop,
        }
    }

    pub(super) async fn run(mut self, mut reports: watch::Receiver<Option<Arc<Covered>>>) {
        let mut done = true;
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                changed = reports.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(Duration::from_millis(500)), if !done => {}
            }
            let Some(covered) = reports.borrow_and_update().clone() else { continue };
            done = match self.report(&covered).await {
                Ok(complete) => complete,
                // The session meets it, too, and ends the engine.
                Err(StoreError::Fenced) => true,
                Err(error) => {
                    tracing::warn!(source = %self.source, %error, "can't report what the filter covers, trying again");
                    false
                }
            };
        }
    }

    /// False = some tables aren't reported, since a subscription that waits for them couldn't be checked.
    async fn report(&mut self, covered: &Covered) -> Result<bool, StoreError> {
        // Waiting subscriptions first: once a PUT is answered, every later change must find them.
        let asleep = self.control.wake(&covered.registry).await;
        let revision = covered.registry.revision;
        // The platform database knows which are pending: after a new generation all are.
        let awake = |table: &&Arc<RegisteredTable>| table.is_enabled() && !asleep.contains(&table.key);
        let awake = covered.registry.tables().filter(awake);
        let active: Vec<_> = awake.map(|table| (table.registration, table.active_since(covered.from))).collect();
        if !active.is_empty() {
            self.store.mark_active(self.source, self.epoch, revision, &active).await?;
        }
        let disabled = covered.registry.disabled();
        if !disabled.is_subset(&self.disabled) {
            // Batches that were judged before the tables went may still be on their way to the bus.
            drop(self.disabling.write().await);
        }
        self.disabled = disabled;
        self.store.set_applied_revision(self.source, self.epoch, revision).await?;
        self.control.announce_registry().await;
        Ok(asleep.is_empty())
    }
}

impl Engine {
    /// Hands a report over; never waits.
    pub(super) fn report_active(&self, registry: &Arc<Registry>, from: Lsn) {
        self.reports.send_replace(Some(Arc::new(Covered { registry: Arc::clone(registry), from })));
    }
}
