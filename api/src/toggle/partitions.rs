//! Of a partitioned table the partitions have the replica identity (R-REG-4).

use aura_domain::Relation;
use aura_pgsource::admin::{Leaf, TableInfo};
use aura_store::{FoundPartition, Registration, ReplicaIdentity, Store};

use crate::error::Result;

/// A table or partition, and the replica identity that it had.
#[derive(Debug)]
pub(crate) struct Former {
    pub(crate) relation: Relation,
    pub(crate) oid: u32,
    pub(crate) identity: ReplicaIdentity,
}

pub(super) fn to_identity(info: &TableInfo) -> ReplicaIdentity {
    ReplicaIdentity { kind: info.replica_identity, index: info.identity_index.clone() }
}

/// Where the table's rows are, if it is partitioned.
pub(super) fn to_partitions(info: &TableInfo) -> Vec<FoundPartition> {
    let partition = |leaf: &Leaf| FoundPartition {
        oid: leaf.oid,
        relation: leaf.relation.clone(),
        identity: ReplicaIdentity { kind: leaf.replica_identity, index: leaf.identity_index.clone() },
    };
    info.leaves.iter().map(partition).collect()
}

/// For people: what we would run to set FULL. What runs is built by pgsource.
pub(super) fn full_sql(info: &TableInfo) -> Vec<String> {
    let rows: Vec<(&Relation, char)> = if info.leaves.is_empty() {
        vec![(&info.relation, info.replica_identity)]
    } else {
        info.leaves.iter().map(|leaf| (&leaf.relation, leaf.replica_identity)).collect()
    };
    rows.into_iter().filter(|(_, identity)| *identity != 'f').map(|(relation, _)| alter_sql(relation, "FULL")).collect()
}

/// For people.
pub(super) fn restore_sql(former: &Former) -> String {
    let identity = match (former.identity.kind, &former.identity.index) {
        ('i', Some(index)) => format!("USING INDEX {}", index.quoted()),
        ('n', _) => "NOTHING".to_owned(),
        _ => "DEFAULT".to_owned(),
    };
    alter_sql(&former.relation, &identity)
}

fn alter_sql(relation: &Relation, identity: &str) -> String {
    format!("ALTER TABLE {} REPLICA IDENTITY {identity}", relation.quoted())
}

/// What gets its former identity back when the table is turned off: what still is FULL since we set it, and is of no other
/// registration, as a partition may be.
pub(crate) async fn to_restore(store: &Store, known: &Registration, info: Option<&TableInfo>) -> Result<Vec<Former>> {
    let (Some(info), Some(previous)) = (info.filter(|info| info.oid == known.oid), &known.previous_identity) else {
        return Ok(Vec::new());
    };
    let mut all = Vec::new();
    if info.leaves.is_empty() {
        let (relation, identity) = (info.relation.clone(), previous.clone());
        all.extend(info.is_full().then_some(Former { relation, oid: info.oid, identity }));
    } else {
        for partition in store.partitions(known.id).await? {
            let leaf = info.leaves.iter().find(|leaf| leaf.oid == partition.oid && leaf.replica_identity == 'f');
            if let (Some(leaf), Some(identity)) = (leaf, partition.previous_identity) {
                all.push(Former { relation: leaf.relation.clone(), oid: leaf.oid, identity });
            }
        }
    }
    let mut found = Vec::new();
    for former in all.into_iter().filter(|former| former.identity.kind != 'f') {
        if !store.is_wanted_by_others(known.source, former.oid, known.id).await? {
            found.push(former);
        }
    }
    Ok(found)
}
