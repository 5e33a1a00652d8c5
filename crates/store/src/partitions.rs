//! Partitions of registered partitioned tables: the log names them, not the table (R-REG-4, R-HOLE-4).

use aura_domain::{Epoch, Lsn, Relation, SourceId};
use sqlx::{FromRow, PgConnection, postgres::types::Oid};
use uuid::Uuid;

use crate::{
    ReplicaIdentity, Store, StoreError, bounded, decode,
    engines::fence,
    registrations::{identity, lock_registry, select_by_id},
    registry::raise_revision,
};

/// A partition that holds rows of a registered table, nested ones included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// The partitioned table's.
    pub registration: Uuid,
    /// `pg_class.oid`; leads over the name.
    pub oid: u32,
    /// Physical names.
    pub relation: Relation,
    /// To restore on disable.
    pub previous_identity: Option<ReplicaIdentity>,
    /// False: it was found later than the table was enabled, and what may have been missed is yet to be announced.
    pub told: bool,
    /// It was found detached or dropped: only what was committed up to here is the table's.
    pub gone_at: Option<Lsn>,
}

/// A partition as it was found in the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundPartition {
    /// `pg_class.oid`.
    pub oid: u32,
    /// Physical names.
    pub relation: Relation,
    /// Its replica identity, before any ALTER of ours.
    pub identity: ReplicaIdentity,
}

#[derive(FromRow)]
struct PartitionRow {
    registration_id: Uuid,
    partition_oid: Oid,
    schema_name: String,
    table_name: String,
    previous_identity: Option<String>,
    previous_identity_index: Option<String>,
    told: bool,
    gone_at: Option<String>,
}

/// Columns of a [`PartitionRow`], of `aura.realtime_partitions` as `m`.
macro_rules! columns {
    () => {
        "m.registration_id, m.partition_oid, m.schema_name, m.table_name, m.previous_identity, m.previous_identity_index,
         m.told, m.gone_at_lsn::text as gone_at"
    };
}

impl TryFrom<PartitionRow> for Partition {
    type Error = StoreError;

    fn try_from(row: PartitionRow) -> Result<Self, StoreError> {
        Ok(Self {
            registration: row.registration_id,
            oid: row.partition_oid.0,
            relation: Relation { schema: decode::name(row.schema_name)?, table: decode::name(row.table_name)? },
            previous_identity: identity(row.previous_identity, row.previous_identity_index)?,
            told: row.told,
            gone_at: decode::lsn(row.gone_at)?,
        })
    }
}

impl Store {
    /// Partitions of a registration that are there, by OID.
    pub async fn partitions(&self, registration: Uuid) -> Result<Vec<Partition>, StoreError> {
        let query = sqlx::query_as::<_, PartitionRow>(concat!(
            "select ",
            columns!(),
            " from aura.realtime_partitions m where m.registration_id = $1 and m.gone_at_lsn is null
              order by m.partition_oid",
        ));
        let rows = bounded(async { Ok(query.bind(registration).fetch_all(&self.pool).await?) }).await?;
        rows.into_iter().map(Partition::try_from).collect()
    }

    /// These are the partitions now of an enabled registration, which is still the table's of this OID. A new one, and one
    /// that has another name, is to be announced ([`Store::partitions_told`]); one that isn't there any more is read up to
    /// `seen_at`, the position of the log at which it was missed.
    pub async fn follow_partitions(
        &self,
        source: SourceId,
        epoch: Epoch,
        (id, oid): (Uuid, u32),
        found: &[FoundPartition],
        seen_at: Lsn,
    ) -> Result<(), StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            lock_registry(&mut tx, source).await?;
            fence(&mut tx, source, epoch).await?;
            let known = select_by_id(&mut tx, id).await?;
            if known.is_none_or(|known| !known.enabled || known.oid != oid) {
                return Ok(());
            }
            forget_passed(&mut tx, id).await?;
            let mut changed = upsert(&mut tx, id, found, false).await?;
            let query = sqlx::query(
                "update aura.realtime_partitions m set gone_at_lsn = $3::text::pg_lsn, gone_generation = e.generation
                 from aura.engines e where e.source_id = $4 and m.registration_id = $1 and m.gone_at_lsn is null
                    and m.partition_oid <> all ($2)",
            );
            let query = query.bind(id).bind(oids(found)).bind(seen_at.to_string()).bind(source.0);
            changed += query.execute(&mut *tx).await?.rows_affected();
            if changed > 0 {
                raise_revision(&mut tx, source).await?;
            }
            tx.commit().await?;
            Ok(())
        })
        .await
    }

    /// What these may have missed has been announced, or nothing was missed.
    pub async fn partitions_told(
        &self,
        source: SourceId,
        epoch: Epoch,
        id: Uuid,
        oids: &[u32],
    ) -> Result<(), StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            lock_registry(&mut tx, source).await?;
            fence(&mut tx, source, epoch).await?;
            let query = sqlx::query(
                "update aura.realtime_partitions set told = true where registration_id = $1 and partition_oid = any ($2)",
            );
            let oids: Vec<Oid> = oids.iter().copied().map(Oid).collect();
            query.bind(id).bind(oids).execute(&mut *tx).await?;
            raise_revision(&mut tx, source).await?;
            tx.commit().await?;
            Ok(())
        })
        .await
    }

    /// Whether a table's or partition's whole old rows are wanted by another registration than this.
    pub async fn is_wanted_by_others(&self, source: SourceId, oid: u32, id: Uuid) -> Result<bool, StoreError> {
        let query = sqlx::query_scalar(
            "select exists (select from aura.realtime_tables r where r.source_id = $1 and r.enabled and r.id <> $3
                and (r.table_oid = $2 or exists (select from aura.realtime_partitions p
                    where p.registration_id = r.id and p.partition_oid = $2 and p.gone_at_lsn is null)))",
        );
        let query = query.bind(source.0).bind(Oid(oid)).bind(id);
        bounded(async { Ok(query.fetch_one(&self.pool).await?) }).await
    }
}

/// Partitions of what a worker must cover: those that are there, and those that aren't while rows from before may still be
/// unconfirmed.
pub(crate) async fn of_source(connection: &mut PgConnection, source: SourceId) -> Result<Vec<Partition>, StoreError> {
    let query = sqlx::query_as::<_, PartitionRow>(concat!(
        "select ",
        columns!(),
        " from aura.realtime_partitions m
         join aura.realtime_tables r on r.id = m.registration_id
         join aura.engines e on e.source_id = r.source_id
         left join aura.source_positions p on p.source_id = r.source_id and p.generation = e.generation
         where r.source_id = $1 and (m.gone_at_lsn is null or (m.gone_generation = e.generation
            and (p.confirmed_lsn is null or m.gone_at_lsn > p.confirmed_lsn)))
         order by m.registration_id, m.partition_oid",
    ));
    let rows = query.bind(source.0).fetch_all(connection).await?;
    rows.into_iter().map(Partition::try_from).collect()
}

/// Part of the intent to enable: nothing is promised of what came before, so nothing is to be announced.
pub(crate) async fn enable(
    connection: &mut PgConnection,
    id: Uuid,
    found: &[FoundPartition],
) -> Result<(), StoreError> {
    let query =
        sqlx::query("delete from aura.realtime_partitions where registration_id = $1 and partition_oid <> all ($2)");
    query.bind(id).bind(oids(found)).execute(&mut *connection).await?;
    upsert(connection, id, found, true).await.map(drop)
}

/// A previous identity that was never restored is kept. How many are new, have come back, or have another name.
async fn upsert(
    connection: &mut PgConnection,
    id: Uuid,
    found: &[FoundPartition],
    told: bool,
) -> Result<u64, StoreError> {
    let query = sqlx::query(
        "insert into aura.realtime_partitions as p (registration_id, partition_oid, schema_name, table_name,
            previous_identity, previous_identity_index, told)
         select $1, f.oid, f.schema_name, f.table_name, f.kind, f.index_name, $7
         from unnest($2::oid[], $3::text[], $4::text[], $5::text[], $6::text[])
            as f (oid, schema_name, table_name, kind, index_name)
         on conflict (registration_id, partition_oid) do update set
            schema_name = excluded.schema_name, table_name = excluded.table_name, told = excluded.told,
            previous_identity = coalesce(p.previous_identity, excluded.previous_identity),
            previous_identity_index = case when p.previous_identity is null then excluded.previous_identity_index
                else p.previous_identity_index end,
            gone_at_lsn = null, gone_generation = null
         where excluded.told or p.gone_at_lsn is not null
            or (p.schema_name, p.table_name) <> (excluded.schema_name, excluded.table_name)",
    );
    let texts = |text: fn(&FoundPartition) -> String| found.iter().map(text).collect::<Vec<_>>();
    let indexes: Vec<_> = found.iter().map(|one| one.identity.index.as_ref().map(ToString::to_string)).collect();
    let query = query
        .bind(id)
        .bind(oids(found))
        .bind(texts(|one| one.relation.schema.to_string()))
        .bind(texts(|one| one.relation.table.to_string()))
        .bind(texts(|one| one.identity.kind.to_string()))
        .bind(indexes)
        .bind(told);
    Ok(query.execute(connection).await?.rows_affected())
}

/// Everything that was written to them while they were partitions is confirmed.
async fn forget_passed(connection: &mut PgConnection, id: Uuid) -> Result<(), StoreError> {
    let query = sqlx::query(
        "delete from aura.realtime_partitions m using aura.realtime_tables r
         join aura.engines e on e.source_id = r.source_id
         left join aura.source_positions p on p.source_id = r.source_id and p.generation = e.generation
         where m.registration_id = $1 and r.id = $1 and m.gone_at_lsn is not null
            and (m.gone_generation <> e.generation or m.gone_at_lsn <= p.confirmed_lsn)",
    );
    query.bind(id).execute(connection).await?;
    Ok(())
}

fn oids(found: &[FoundPartition]) -> Vec<Oid> {
    found.iter().map(|one| Oid(one.oid)).collect()
}
