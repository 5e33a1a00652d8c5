//! Partitions of registered partitioned tables (R-REG-4): a new one is given REPLICA IDENTITY FULL and read as the table's, one
//! that was detached isn't any more. What came before the filter knew it may be lost, and is announced (R-HOLE-4).

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use aura_domain::Relation;
use aura_pgsource::{
    Partitions, SourceError, SqlConnection,
    admin::{Admin, IdentityError, Leaf},
    never_written, partitions_of,
};
use aura_store::{FoundPartition, Partition, Registration, RegistrationMode, ReplicaIdentity};
use aura_wire::GapReason;

use super::{Engine, error::EngineError, gaps::Loss, loader::Loaded};

/// All tries of one ALTER together: the census waits for it.
const ALTER_BUDGET: Duration = Duration::from_secs(1);
/// Between two of them, doubled up to five minutes, since each holds up who reads the partition (R-REG-3).
const FIRST_PAUSE: Duration = Duration::from_secs(3);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// See the module.
pub(super) struct Follower {
    engine: Arc<Engine>,
    /// When to try the ALTER of which partition again.
    again: HashMap<u32, (Instant, Duration)>,
}

impl Follower {
    pub(super) fn new(engine: Arc<Engine>) -> Self {
        Self { engine, again: HashMap::new() }
    }

    /// Looks at the partitions of these registered tables.
    pub(super) async fn look(
        &mut self,
        sql: &SqlConnection,
        loaded: &Loaded,
        partitioned: &[&Registration],
    ) -> Result<(), SourceError> {
        if partitioned.is_empty() {
            return Ok(());
        }
        let oids: Vec<_> = partitioned.iter().map(|registration| registration.oid).collect();
        let all = partitions_of(sql, &oids).await?;
        for registration in partitioned {
            let Some(found) = all.get(&registration.oid) else { continue };
            let of_it =
                |partition: &&Partition| partition.registration == registration.id && partition.gone_at.is_none();
            let known: Vec<_> = loaded.snapshot.partitions.iter().filter(of_it).collect();
            let outcome = if is_same(&known, found) {
                self.tell(sql, loaded, registration, &known, found).await
            } else {
                self.write(registration, found).await
            };
            match outcome {
                Ok(()) => {}
                Err(EngineError::Source(error)) => return Err(error),
                // Whoever has taken over sees to it.
                Err(error) if error.is_fenced() => {}
                Err(error) => {
                    tracing::warn!(source = %self.engine.source.id, %error, "what became of partitions is not written");
                }
            }
        }
        Ok(())
    }

    async fn write(&self, registration: &Registration, found: &Partitions) -> Result<(), EngineError> {
        let (engine, leaves) = (&self.engine, &found.leaves);
        tracing::info!(source = %engine.source.id, table = %registration.table, partitions = leaves.len(),
            "the partitions of a registered table have changed");
        let partition = |leaf: &Leaf| FoundPartition {
            oid: leaf.oid,
            relation: leaf.relation.clone(),
            identity: ReplicaIdentity { kind: leaf.replica_identity, index: leaf.identity_index.clone() },
        };
        let leaves: Vec<_> = leaves.iter().map(partition).collect();
        let which = (registration.id, registration.oid);
        let (source, epoch) = (engine.source.id, engine.epoch);
        Ok(engine.deps.store.follow_partitions(source, epoch, which, &leaves, found.seen_at).await?)
    }

    /// What was lost goes up to where the filter takes a partition in with whole old rows, so that comes first.
    async fn tell(
        &mut self,
        sql: &SqlConnection,
        loaded: &Loaded,
        registration: &Registration,
        known: &[&Partition],
        found: &Partitions,
    ) -> Result<(), EngineError> {
        let mut ready = Vec::new();
        let untold = |leaf: &&Leaf| known.iter().any(|partition| partition.oid == leaf.oid && !partition.told);
        // Who sees to replica identities, sees to new partitions', too; what isn't FULL is shown as drift.
        let theirs = registration.mode == RegistrationMode::Manual;
        for leaf in found.leaves.iter().filter(untold) {
            if (theirs || self.is_full(leaf).await?) && self.engine.covers_partition(registration, leaf) {
                ready.push(leaf.oid);
            }
        }
        let Some(project) = loaded.projects.get(&registration.project).filter(|_| !ready.is_empty()) else {
            return Ok(());
        };
        if never_written(sql, &ready).await?.len() < ready.len() {
            let table = [project.client_schema(&registration.schema).to_owned(), registration.table.to_string()];
            self.engine.gaps.announce(Loss::up_to_now(project.id, GapReason::TableChanged, Some(table))).await;
        }
        let (source, epoch) = (self.engine.source.id, self.engine.epoch);
        Ok(self.engine.deps.store.partitions_told(source, epoch, registration.id, &ready).await?)
    }

    /// Sees to it that a new partition's old rows are logged whole. False: not yet. One that we may not alter stays as it
    /// is, which the toggle shows as drift.
    async fn is_full(&mut self, leaf: &Leaf) -> Result<bool, SourceError> {
        if leaf.replica_identity == 'f' {
            return Ok(true);
        }
        let pause = match self.again.get(&leaf.oid) {
            Some((at, _)) if Instant::now() < *at => return Ok(false),
            Some((_, pause)) => (*pause * 2).min(LONGEST_PAUSE),
            None => FIRST_PAUSE,
        };
        let admin = Admin::connect(&self.engine.admin_url).await?;
        match admin.set_replica_identity_full(&leaf.relation, leaf.oid, ALTER_BUDGET).await {
            Ok(_) => {}
            Err(IdentityError::Source(error)) => return Err(error),
            Err(error @ IdentityError::LockTimeout { .. }) => {
                tracing::warn!(source = %self.engine.source.id, partition = %leaf.relation.table, %error,
                    "a new partition's replica identity is not set yet");
                self.again.insert(leaf.oid, (Instant::now() + pause, pause));
                return Ok(false);
            }
            Err(error) => {
                tracing::warn!(source = %self.engine.source.id, partition = %leaf.relation.table, %error,
                    "a new partition's replica identity can't be set");
            }
        }
        self.again.remove(&leaf.oid);
        Ok(true)
    }
}

impl Engine {
    fn covers_partition(&self, registration: &Registration, leaf: &Leaf) -> bool {
        let reports = self.reports.borrow();
        reports.as_ref().is_some_and(|all| all.covers_partition(registration.id, &leaf.relation))
    }
}

/// Whether all are known under the names that they have.
fn is_same(known: &[&Partition], found: &Partitions) -> bool {
    let known: BTreeMap<u32, &Relation> = known.iter().map(|partition| (partition.oid, &partition.relation)).collect();
    known == found.leaves.iter().map(|leaf| (leaf.oid, &leaf.relation)).collect()
}
