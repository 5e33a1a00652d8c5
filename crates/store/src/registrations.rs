use aura_domain::{Generation, Lsn, ProjectId, Relation, SourceId, SqlName};
use sqlx::{FromRow, PgConnection, postgres::types::Oid};
use uuid::Uuid;

use crate::{
    FoundPartition, Store, StoreError,
    audit::{self, NewAudit},
    bounded,
    decode::{self, generation, generation_column, lsn, rfc3339, word},
    partitions,
    registry::raise_revision,
};

aura_domain::words! {
    /// Observed state of a registration.
    RegistrationStatus {
        /// The running filter doesn't cover it yet.
        Pending = "pending",
        /// Live.
        Active = "active",
        /// The plugin refuses the name or table (R-REG-6).
        Blocked = "blocked",
        /// Dropped; a new table of the name is another table (R-REG-2).
        Missing = "missing",
        /// Off.
        Disabled = "disabled",
    }
}

aura_domain::words! {
    /// Who sees to the table's replica identity (R-REG-4).
    RegistrationMode {
        /// We set it, and restore it when the table is turned off.
        Auto = "auto",
        /// Its owner does; we only look.
        Manual = "manual",
    }
}

/// A table of a project by its physical names.
#[derive(Debug, Clone, Copy)]
pub struct TableRef<'a> {
    /// Tenant.
    pub project: ProjectId,
    /// Physical schema.
    pub schema: &'a SqlName,
    /// Table.
    pub table: &'a SqlName,
}

/// `pg_class.relreplident`, and the index where it is `i`.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ReplicaIdentity {
    /// `d` default, `n` nothing, `f` full, `i` index.
    pub kind: char,
    /// Index of kind `i`.
    pub index: Option<SqlName>,
}

/// Intent of a PUT `{"enabled": true}`.
#[derive(Debug, Clone, Copy)]
pub struct NewRegistration<'a> {
    /// Which table.
    pub table: TableRef<'a>,
    /// Its source.
    pub source: SourceId,
    /// Its OID now.
    pub oid: u32,
    /// Who sees to its replica identity.
    pub mode: RegistrationMode,
    /// Its replica identity now, before any ALTER of ours: kept to restore it on disable, whatever crashes in between.
    /// `None` where nothing is to be restored.
    pub identity: Option<&'a ReplicaIdentity>,
    /// Where a partitioned table's rows are; empty for any other.
    pub partitions: &'a [FoundPartition],
    /// Key id and role.
    pub actor: &'a str,
    /// Of the HTTP request.
    pub request_id: Option<&'a str>,
}

/// Desired and observed state of one table.
#[derive(Debug, Clone, PartialEq)]
pub struct Registration {
    /// Identity.
    pub id: Uuid,
    /// Tenant.
    pub project: ProjectId,
    /// Source.
    pub source: SourceId,
    /// Physical schema.
    pub schema: SqlName,
    /// Table.
    pub table: SqlName,
    /// `pg_class.oid`; leads over the name.
    pub oid: u32,
    /// Desired.
    pub enabled: bool,
    /// Who sees to its replica identity.
    pub mode: RegistrationMode,
    /// Observed.
    pub status: RegistrationStatus,
    /// Why it is blocked or missing, or what it waits for.
    pub reason: Option<String>,
    /// The ALTER has committed: only then it may enter the filter (R-HOLE-3).
    pub identity_set: bool,
    /// To restore on disable.
    pub previous_identity: Option<ReplicaIdentity>,
    /// Nothing with a commit LSN below it is published, within [`Registration::enabled_generation`].
    pub enabled_at_lsn: Option<Lsn>,
    /// In a later generation every row qualifies.
    pub enabled_generation: Option<Generation>,
    /// Nothing committed above it is published, within [`Registration::disabled_generation`].
    pub disabled_at_lsn: Option<Lsn>,
    /// Generation of `disabled_at_lsn`.
    pub disabled_generation: Option<Generation>,
    /// Nothing committed above it is lost (R-HOLE-2).
    pub active_since_lsn: Option<Lsn>,
    /// Its name before it was renamed, moved or dropped, until that is announced (R-HOLE-4).
    pub changed_from: Option<SqlName>,
    /// When its last change was published, to within some seconds: RFC 3339, UTC.
    pub last_event_at: Option<String>,
    /// Registry revision of its last change: applied once the engine's applied revision is as high.
    pub revision: i64,
    /// RFC 3339, UTC.
    pub updated_at: String,
    /// Who changed it last.
    pub updated_by: String,
}

/// Which registrations to list.
#[derive(Debug, Clone, Copy, Default)]
pub struct RegistrationFilter<'a> {
    /// Only (not) enabled ones.
    pub enabled: Option<bool>,
    /// Only tables whose name contains it, ignoring case.
    pub q: Option<&'a str>,
    /// Only those behind this (schema, table): the cursor.
    pub after: Option<(&'a str, &'a str)>,
    /// At most so many.
    pub limit: u32,
}

impl Registration {
    /// Where it is, by physical names.
    pub fn relation(&self) -> Relation {
        Relation { schema: self.schema.clone(), table: self.table.clone() }
    }
}

#[derive(FromRow)]
pub(crate) struct RegistrationRow {
    id: Uuid,
    project_id: Uuid,
    source_id: Uuid,
    schema_name: String,
    table_name: String,
    table_oid: Oid,
    enabled: bool,
    mode: String,
    status: String,
    reason: Option<String>,
    identity_set: bool,
    previous_identity: Option<String>,
    previous_identity_index: Option<String>,
    enabled_at_lsn: Option<String>,
    enabled_generation: Option<i32>,
    disabled_at_lsn: Option<String>,
    disabled_generation: Option<i32>,
    active_since_lsn: Option<String>,
    changed_from: Option<String>,
    last_event_at: Option<String>,
    revision: i64,
    updated_at: String,
    updated_by: String,
}

/// Columns of a [`RegistrationRow`], of `aura.realtime_tables` as `r`.
macro_rules! columns {
    () => {
        concat!(
            "r.id, r.project_id, r.source_id, r.schema_name, r.table_name, r.table_oid, r.enabled, r.mode, r.status,
             r.reason,
             r.identity_set, r.previous_identity, r.previous_identity_index,
             r.enabled_at_lsn::text as enabled_at_lsn, r.enabled_generation,
             r.disabled_at_lsn::text as disabled_at_lsn, r.disabled_generation,
             r.active_since_lsn::text as active_since_lsn, r.changed_from, r.revision, ",
            rfc3339!("r.updated_at"),
            " as updated_at, r.updated_by, ",
            rfc3339!("r.last_event_at"),
            " as last_event_at"
        )
    };
}

pub(crate) use columns;

impl TryFrom<RegistrationRow> for Registration {
    type Error = StoreError;

    fn try_from(row: RegistrationRow) -> Result<Self, StoreError> {
        Ok(Self {
            id: row.id,
            project: ProjectId(row.project_id),
            source: SourceId(row.source_id),
            schema: decode::name(row.schema_name)?,
            table: decode::name(row.table_name)?,
            oid: row.table_oid.0,
            enabled: row.enabled,
            mode: word(&row.mode, "mode")?,
            status: word(&row.status, "status")?,
            reason: row.reason,
            identity_set: row.identity_set,
            previous_identity: identity(row.previous_identity, row.previous_identity_index)?,
            enabled_at_lsn: lsn(row.enabled_at_lsn)?,
            enabled_generation: row.enabled_generation.map(generation).transpose()?,
            disabled_at_lsn: lsn(row.disabled_at_lsn)?,
            disabled_generation: row.disabled_generation.map(generation).transpose()?,
            active_since_lsn: lsn(row.active_since_lsn)?,
            changed_from: row.changed_from.map(decode::name).transpose()?,
            last_event_at: row.last_event_at,
            revision: row.revision,
            updated_at: row.updated_at,
            updated_by: row.updated_by,
        })
    }
}

pub(crate) fn identity(kind: Option<String>, index: Option<String>) -> Result<Option<ReplicaIdentity>, StoreError> {
    let Some(kind) = decode::parsed::<char>(kind, "replica identity")? else { return Ok(None) };
    Ok(Some(ReplicaIdentity { kind, index: index.map(decode::name).transpose()? }))
}

pub(crate) fn registrations(rows: Vec<RegistrationRow>) -> Result<Vec<Registration>, StoreError> {
    rows.into_iter().map(Registration::try_from).collect()
}

impl Store {
    /// Writes the intent to enable, with its audit line, in one transaction, and signals the worker. Changes nothing
    /// where the table is enabled under the same OID and neither blocked nor missing (R-REG-1).
    ///
    /// The ALTER comes next, then [`Store::identity_set`]. `NotFound` = the source, or the project is deleted.
    pub async fn enable_table(&self, new: NewRegistration<'_>) -> Result<Registration, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            lock_registry(&mut tx, new.source).await?;
            let before = select(&mut tx, new.table).await?;
            if let Some(live) = before.as_ref().filter(|before| is_live(before, &new)) {
                return Ok(live.clone());
            }
            living(&mut tx, new.table.project).await?;
            let revision = raise_revision(&mut tx, new.source).await?;
            let after = write_enabled(&mut tx, &new, revision).await?;
            partitions::enable(&mut tx, after.id, new.partitions).await?;
            let entry = entry("table.enable", before.as_ref(), &after, new.actor, new.request_id);
            audit::append(&mut tx, entry).await?;
            tx.commit().await?;
            Ok(after)
        })
        .await
    }

    /// Records that the ALTER has committed; the table may now enter the filter. The LSN is kept from the first time
    /// after off to on, so that drift repair doesn't move it; the previous identity only where the intent had none.
    pub async fn identity_set(
        &self,
        id: Uuid,
        previous: Option<&ReplicaIdentity>,
        enabled_at_lsn: Lsn,
        generation: Generation,
    ) -> Result<Registration, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let source = source_of(&mut tx, id).await?;
            lock_registry(&mut tx, source).await?;
            let before = select_by_id(&mut tx, id).await?.ok_or(StoreError::NotFound("registration"))?;
            if before.identity_set || !before.enabled {
                return Ok(before);
            }
            let revision = raise_revision(&mut tx, source).await?;
            let query = sqlx::query_as::<_, RegistrationRow>(concat!(
                "update aura.realtime_tables as r set identity_set = true, revision = $2, updated_at = now(),
                    previous_identity = coalesce(previous_identity, $3),
                    previous_identity_index = case when previous_identity is null then $4
                        else previous_identity_index end,
                    enabled_at_lsn = coalesce(enabled_at_lsn, $5::text::pg_lsn),
                    enabled_generation = coalesce(enabled_generation, $6)
                 where id = $1 returning ",
                columns!()
            ));
            let after = query
                .bind(id)
                .bind(revision)
                .bind(previous.map(|identity| identity.kind.to_string()))
                .bind(previous.and_then(|identity| identity.index.as_ref()).map(SqlName::as_str))
                .bind(enabled_at_lsn.to_string())
                .bind(generation_column(generation))
                .fetch_one(&mut *tx)
                .await?
                .try_into()?;
            tx.commit().await?;
            Ok(after)
        })
        .await
    }

    /// Turns a table off above `disabled_at_lsn`, with its audit line, and signals the worker. `None` = it was never
    /// registered. Changes nothing if it is off. Restoring the identity comes later: [`Store::identity_restored`].
    pub async fn disable_table(
        &self,
        table: TableRef<'_>,
        disabled_at_lsn: Lsn,
        actor: &str,
        request_id: Option<&str>,
    ) -> Result<Option<Registration>, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let Some(known) = select(&mut tx, table).await? else { return Ok(None) };
            lock_registry(&mut tx, known.source).await?;
            let before = select(&mut tx, table).await?.ok_or(StoreError::NotFound("registration"))?;
            if !before.enabled {
                return Ok(Some(before));
            }
            let revision = raise_revision(&mut tx, before.source).await?;
            let query = sqlx::query_as::<_, RegistrationRow>(concat!(
                "update aura.realtime_tables as r set enabled = false, status = 'disabled', reason = null,
                    disabled_at_lsn = $3::text::pg_lsn, disabled_generation = e.generation, active_since_lsn = null,
                    changed_from = null, revision = $2, updated_at = now(), updated_by = $4
                 from aura.engines e where r.id = $1 and e.source_id = r.source_id returning ",
                columns!()
            ));
            let query = query.bind(before.id).bind(revision).bind(disabled_at_lsn.to_string()).bind(actor);
            let after: Registration = query.fetch_one(&mut *tx).await?.try_into()?;
            audit::append(&mut tx, entry("table.disable", Some(&before), &after, actor, request_id)).await?;
            tx.commit().await?;
            Ok(Some(after))
        })
        .await
    }

    /// Records that a disabled table has its previous identity back (or that it was no longer what we had set), and each of
    /// its partitions.
    pub async fn identity_restored(&self, id: Uuid) -> Result<(), StoreError> {
        let query = sqlx::query(
            "with off as (update aura.realtime_tables set identity_set = false, previous_identity = null,
                previous_identity_index = null where id = $1 and not enabled returning id)
             update aura.realtime_partitions p set previous_identity = null, previous_identity_index = null
             from off where p.registration_id = off.id",
        );
        bounded(async { Ok(query.bind(id).execute(&self.pool).await.map(|_| ())?) }).await
    }

    /// One registration by name.
    pub async fn registration(&self, table: TableRef<'_>) -> Result<Option<Registration>, StoreError> {
        bounded(async { select(&mut *self.pool.acquire().await?, table).await }).await
    }

    /// One registration by identity.
    pub async fn registration_by_id(&self, id: Uuid) -> Result<Option<Registration>, StoreError> {
        bounded(async { select_by_id(&mut *self.pool.acquire().await?, id).await }).await
    }

    /// A project's registrations by schema and table name.
    pub async fn registrations_of_project(
        &self,
        project: ProjectId,
        filter: RegistrationFilter<'_>,
    ) -> Result<Vec<Registration>, StoreError> {
        let query = sqlx::query_as(concat!(
            "select ",
            columns!(),
            r#" from aura.realtime_tables r where project_id = $1 and ($2::bool is null or enabled = $2)
                and ($3::text is null or position(lower($3) in lower(table_name)) > 0)
                and ($4::text is null or (schema_name collate "C", table_name collate "C") > ($4, $5))
              order by schema_name collate "C", table_name collate "C" limit $6"#
        ));
        let query = query
            .bind(project.0)
            .bind(filter.enabled)
            .bind(filter.q)
            .bind(filter.after.map(|(schema, _)| schema))
            .bind(filter.after.map(|(_, table)| table))
            .bind(i64::from(filter.limit));
        registrations(bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?)
    }
}

/// A project that is deleted gets no more tables. Deleting takes the registry's lock, too.
async fn living(connection: &mut PgConnection, project: ProjectId) -> Result<(), StoreError> {
    let query = sqlx::query("select from aura.projects where id = $1 and deleted_at is null").bind(project.0);
    query.fetch_optional(connection).await?.map(|_| ()).ok_or(StoreError::NotFound("project"))
}

/// Puts writers of one source's registrations in a row; released at the transaction's end.
pub(crate) async fn lock_registry(connection: &mut PgConnection, source: SourceId) -> Result<(), StoreError> {
    let query = sqlx::query("select from aura.sources where id = $1 for no key update").bind(source.0);
    query.fetch_optional(connection).await?.map(|_| ()).ok_or(StoreError::NotFound("source"))
}

/// Whether a PUT of `enabled: true` has nothing to write.
fn is_live(registration: &Registration, new: &NewRegistration<'_>) -> bool {
    let healthy = matches!(registration.status, RegistrationStatus::Pending | RegistrationStatus::Active);
    registration.enabled && (registration.oid, registration.mode) == (new.oid, new.mode) && healthy
}

/// Off to on, another table under the name, or another try of a blocked one. In the last case what the ALTER left is
/// kept; so is a previous identity that was never restored.
async fn write_enabled(
    connection: &mut PgConnection,
    new: &NewRegistration<'_>,
    revision: i64,
) -> Result<Registration, StoreError> {
    let query = sqlx::query_as::<_, RegistrationRow>(concat!(
        "insert into aura.realtime_tables as r (id, project_id, source_id, schema_name, table_name, table_oid, enabled,
            previous_identity, previous_identity_index, revision, updated_by, mode)
         values ($1, $2, $3, $4, $5, $6, true, $7, $8, $9, $10, $11)
         on conflict (project_id, schema_name, table_name) do update set
            source_id = excluded.source_id, table_oid = excluded.table_oid, enabled = true, status = 'pending',
            reason = null, mode = excluded.mode,
            identity_set = r.identity_set and r.enabled and r.table_oid = excluded.table_oid,
            previous_identity = case when r.previous_identity is null or r.table_oid <> excluded.table_oid
                then excluded.previous_identity else r.previous_identity end,
            previous_identity_index = case when r.previous_identity is null or r.table_oid <> excluded.table_oid
                then excluded.previous_identity_index else r.previous_identity_index end,
            enabled_at_lsn = case when r.enabled and r.table_oid = excluded.table_oid then r.enabled_at_lsn end,
            enabled_generation = case when r.enabled and r.table_oid = excluded.table_oid
                then r.enabled_generation end,
            disabled_at_lsn = null, disabled_generation = null, active_since_lsn = null, changed_from = null,
            revision = excluded.revision, updated_at = now(), updated_by = excluded.updated_by
         returning ",
        columns!()
    ));
    query
        .bind(Uuid::now_v7())
        .bind(new.table.project.0)
        .bind(new.source.0)
        .bind(new.table.schema.as_str())
        .bind(new.table.table.as_str())
        .bind(Oid(new.oid))
        .bind(new.identity.map(|identity| identity.kind.to_string()))
        .bind(new.identity.and_then(|identity| identity.index.as_ref()).map(SqlName::as_str))
        .bind(revision)
        .bind(new.actor)
        .bind(new.mode.as_str())
        .fetch_one(connection)
        .await?
        .try_into()
}

pub(crate) async fn select(
    connection: &mut PgConnection,
    table: TableRef<'_>,
) -> Result<Option<Registration>, StoreError> {
    let query = sqlx::query_as::<_, RegistrationRow>(concat!(
        "select ",
        columns!(),
        " from aura.realtime_tables r where project_id = $1 and schema_name = $2 and table_name = $3"
    ));
    let query = query.bind(table.project.0).bind(table.schema.as_str()).bind(table.table.as_str());
    query.fetch_optional(connection).await?.map(Registration::try_from).transpose()
}

pub(crate) async fn select_by_id(connection: &mut PgConnection, id: Uuid) -> Result<Option<Registration>, StoreError> {
    let query = sqlx::query_as::<_, RegistrationRow>(concat!(
        "select ",
        columns!(),
        " from aura.realtime_tables r where id = $1"
    ));
    query.bind(id).fetch_optional(connection).await?.map(Registration::try_from).transpose()
}

async fn source_of(connection: &mut PgConnection, id: Uuid) -> Result<SourceId, StoreError> {
    let query = sqlx::query_scalar("select source_id from aura.realtime_tables where id = $1").bind(id);
    query.fetch_optional(connection).await?.map(SourceId).ok_or(StoreError::NotFound("registration"))
}

pub(crate) fn entry<'a>(
    action: &'static str,
    before: Option<&Registration>,
    after: &Registration,
    actor: &'a str,
    request_id: Option<&'a str>,
) -> NewAudit<'a> {
    let state = |r: &Registration| serde_json::json!({"enabled": r.enabled, "mode": r.mode, "status": r.status, "table": r.table, "oid": r.oid});
    NewAudit {
        project: Some(after.project),
        actor,
        action,
        target: format!("{}.{}", after.schema, after.table),
        before: before.map(state),
        after: Some(state(after)),
        request_id,
    }
}
