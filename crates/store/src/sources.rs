use aura_domain::{Desired, EngineState, SourceId};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};
use sqlx::{FromRow, PgConnection};
use uuid::Uuid;

use crate::{
    Caller, MasterKey, Store, StoreError, audit, bounded, decode::word, engines, operations, projects::open_text,
};

aura_domain::words! {
    /// Which output plugin decodes a source's log.
    Plugin {
        /// wal2json if its library is there, else pgoutput.
        Auto = "auto",
        /// wal2json, format 2.
        Wal2json = "wal2json",
        /// The built-in one.
        PgOutput = "pgoutput",
    }
}

aura_domain::words! {
    /// What happens when a source's slot is lost or missing (R-ENG-8).
    SlotRecreate {
        /// It is made again, and a gap announced.
        Auto = "auto",
        /// The engine fails, until an operator asks for a new slot.
        Manual = "manual",
    }
}

/// One Postgres server, database and logical slot.
#[derive(Debug, Clone)]
pub struct Source {
    /// Identity.
    pub id: SourceId,
    /// Unique name; `shared` is the shared plane.
    pub name: String,
    /// The worker's URL: REPLICATION, no superuser.
    pub replication_url: SecretString,
    /// The api's URL; `None` = the replication URL serves.
    pub admin_url: Option<SecretString>,
    /// Logical slot.
    pub slot_name: String,
    /// Output plugin.
    pub plugin: Plugin,
    /// What happens when the slot is lost.
    pub slot_recreate: SlotRecreate,
    /// Raised by each change of what the API sets.
    pub version: i64,
}

/// What a source is made or updated from.
#[derive(Debug, Clone)]
pub struct NewSource {
    /// See [`Source::name`]; decides between insert and update.
    pub name: String,
    /// See [`Source::replication_url`].
    pub replication_url: SecretString,
    /// See [`Source::admin_url`]; `None` keeps what is stored.
    pub admin_url: Option<SecretString>,
    /// See [`Source::slot_name`]; `None` = `aura_cdc_slot` for `shared`, else `aura_cdc_<8 hex of the id>` (R-ENG-8).
    pub slot_name: Option<String>,
    /// See [`Source::plugin`].
    pub plugin: Plugin,
    /// See [`Source::slot_recreate`].
    pub slot_recreate: SlotRecreate,
}

/// What changes of a source; `None` leaves a member as it is.
#[derive(Debug, Clone, Default)]
pub struct SourceChange {
    /// See [`Source::replication_url`].
    pub replication_url: Option<SecretString>,
    /// See [`Source::admin_url`]; `Some(None)` = the replication URL serves.
    pub admin_url: Option<Option<SecretString>>,
    /// See [`Source::slot_name`]; `Some(None)` = its default.
    pub slot_name: Option<Option<String>>,
    /// See [`Source::plugin`].
    pub plugin: Option<Plugin>,
    /// See [`Source::slot_recreate`].
    pub slot_recreate: Option<SlotRecreate>,
}

/// What became of a change or a deletion.
#[derive(Debug, Clone)]
pub enum SourceWrite {
    /// Done; the source as it is, or was.
    Done(Box<Source>),
    /// Its engine isn't stopped.
    NotStopped(EngineState),
    /// So many projects use it.
    InUse(i64),
    /// It isn't of the version that the change is based on.
    Changed,
}

impl NewSource {
    /// The source that it makes under this id.
    #[must_use]
    pub fn into_source(self, id: SourceId) -> Source {
        let Self { name, replication_url, admin_url, slot_name, plugin, slot_recreate } = self;
        let slot_name = slot_name.unwrap_or_else(|| default_slot(&name, id));
        Source { id, name, replication_url, admin_url, slot_name, plugin, slot_recreate, version: 1 }
    }
}

impl SourceChange {
    /// The source as it will be.
    #[must_use]
    pub fn applied_to(self, source: Source) -> Source {
        let slot_name = self.slot_name.map(|name| name.unwrap_or_else(|| default_slot(&source.name, source.id)));
        Source {
            replication_url: self.replication_url.unwrap_or(source.replication_url),
            admin_url: self.admin_url.unwrap_or(source.admin_url),
            slot_name: slot_name.unwrap_or(source.slot_name),
            plugin: self.plugin.unwrap_or(source.plugin),
            slot_recreate: self.slot_recreate.unwrap_or(source.slot_recreate),
            ..source
        }
    }
}

impl Source {
    /// Whether its slot has the name that we give, and so was made by us.
    pub fn has_default_slot(&self) -> bool {
        self.slot_name == default_slot(&self.name, self.id)
    }

    /// Whether a running engine must not see the difference: it reads from one server and slot, with one plugin.
    fn reads_as(&self, other: &Self) -> bool {
        self.replication_url.expose_secret() == other.replication_url.expose_secret()
            && self.slot_name == other.slot_name
            && self.plugin == other.plugin
    }

    /// Whether an engine that runs with `self` runs as `other` says.
    pub fn is_same(&self, other: &Self) -> bool {
        let admin = |source: &Self| source.admin_url.as_ref().map(|url| url.expose_secret().to_owned());
        self.reads_as(other) && admin(self) == admin(other) && self.slot_recreate == other.slot_recreate
    }

    /// For the audit; URLs hold passwords.
    fn shown(&self) -> Value {
        json!({
            "name": self.name, "slot_name": self.slot_name, "plugin": self.plugin.as_str(),
            "slot_recreate": self.slot_recreate.as_str(), "admin_url": self.admin_url.is_some()
        })
    }
}

#[derive(FromRow)]
struct SourceRow {
    id: Uuid,
    name: String,
    replication_url: Vec<u8>,
    admin_url: Option<Vec<u8>>,
    slot_name: String,
    plugin: String,
    slot_recreate: String,
    version: i64,
}

/// Columns of a [`SourceRow`].
macro_rules! columns {
    () => {
        "id, name, replication_url, admin_url, slot_name, plugin, slot_recreate, version"
    };
}

impl SourceRow {
    fn open(self, key: &MasterKey) -> Result<Source, StoreError> {
        let id = SourceId(self.id);
        let aad = url_aad(id);
        Ok(Source {
            id,
            name: self.name,
            replication_url: open_text(key, &self.replication_url, &aad)?,
            admin_url: self.admin_url.map(|sealed| open_text(key, &sealed, &aad)).transpose()?,
            slot_name: self.slot_name,
            plugin: word(&self.plugin, "plugin")?,
            slot_recreate: word(&self.slot_recreate, "slot_recreate")?,
            version: self.version,
        })
    }
}

/// Binds a sealed URL to its row, so that it can't be moved to another.
fn url_aad(id: SourceId) -> String {
    format!("source {id} url")
}

fn default_slot(name: &str, id: SourceId) -> String {
    // Slot names are cluster-wide: two sources on one cluster must not meet.
    if name == "shared" { "aura_cdc_slot".to_owned() } else { format!("aura_cdc_{}", &id.0.simple().to_string()[..8]) }
}

impl Store {
    /// Registers a source by its name, or updates the one that has it (URLs, plugin and, where given, slot), and makes
    /// its engine's row.
    pub async fn upsert_source(&self, new: NewSource) -> Result<Source, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            // Serialises first registrations of one name, so that the URLs are sealed for the id that stays.
            sqlx::query("select pg_advisory_xact_lock(hashtextextended('aura.sources ' || $1, 0))")
                .bind(&new.name)
                .execute(&mut *tx)
                .await?;
            let query = concat!("select ", columns!(), " from aura.sources where name = $1 for update");
            let known = sqlx::query_as::<_, SourceRow>(query).bind(&new.name).fetch_optional(&mut *tx).await?;
            let id = SourceId(known.as_ref().map_or_else(Uuid::new_v4, |row| row.id));
            // What is sealed differs each time: whether it is another version is seen in the open only.
            let known = known.map(|row| row.open(&self.key)).transpose()?;
            let row = self.write_source(&mut tx, id, &new).await?.open(&self.key)?;
            if known.is_some_and(|known| !row.is_same(&known)) {
                sqlx::query("update aura.sources set version = version + 1 where id = $1")
                    .bind(id.0)
                    .execute(&mut *tx)
                    .await?;
            }
            sqlx::query("insert into aura.engines (source_id) values ($1) on conflict do nothing")
                .bind(id.0)
                .execute(&mut *tx)
                .await?;
            sqlx::query("select pg_notify('aura_engines', $1)").bind(id.to_string()).execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(row)
        })
        .await
    }

    /// Registers a source under this id and makes its engine's row, unless that was done before. `Taken` = the name.
    pub async fn create_source(&self, id: SourceId, new: NewSource, caller: Caller<'_>) -> Result<Source, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let query = concat!("select ", columns!(), " from aura.sources where name = $1");
            let known = sqlx::query_as::<_, SourceRow>(query).bind(&new.name).fetch_optional(&mut *tx).await?;
            match known {
                Some(known) if known.id == id.0 => return known.open(&self.key),
                Some(_) => return Err(StoreError::Taken("source name")),
                None => {}
            }
            let source = new.into_source(id);
            let query = sqlx::query(
                "insert into aura.sources (id, name, replication_url, admin_url, slot_name, plugin, slot_recreate)
                 values ($1, $2, $3, $4, $5, $6, $7)",
            );
            self.bind_source(query, &source).execute(&mut *tx).await?;
            sqlx::query("insert into aura.engines (source_id) values ($1)").bind(id.0).execute(&mut *tx).await?;
            audit::append(&mut tx, caller.entry("source.create", id, None, Some(source.shown()))).await?;
            operations::notify(&mut tx, id).await?;
            tx.commit().await?;
            Ok(source)
        })
        .await
    }

    /// Changes a source, if `based_on` takes its version. What a running engine reads by is changed only while it is stopped.
    pub async fn update_source(
        &self,
        id: SourceId,
        change: SourceChange,
        based_on: impl Fn(i64) -> bool,
        caller: Caller<'_>,
    ) -> Result<SourceWrite, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let state = self.unstopped(&mut tx, id).await?;
            let before = self.locked_source(&mut tx, id).await?;
            if !based_on(before.version) {
                return Ok(SourceWrite::Changed);
            }
            let replaced = change.replication_url.is_some();
            let after = change.applied_to(before.clone());
            if let Some(state) = state.filter(|_| !after.reads_as(&before)) {
                return Ok(SourceWrite::NotStopped(state));
            }
            if after.is_same(&before) {
                return Ok(SourceWrite::Done(Box::new(before)));
            }
            let after = Source { version: before.version + 1, ..after };
            let query = sqlx::query(
                "update aura.sources set name = $2, replication_url = $3, admin_url = $4, slot_name = $5, plugin = $6,
                    slot_recreate = $7, version = version + 1 where id = $1",
            );
            self.bind_source(query, &after).execute(&mut *tx).await?;
            let mut shown = after.shown();
            shown["replication_url_replaced"] = replaced.into();
            audit::append(&mut tx, caller.entry("source.update", id, Some(before.shown()), Some(shown))).await?;
            operations::notify(&mut tx, id).await?;
            tx.commit().await?;
            Ok(SourceWrite::Done(Box::new(after)))
        })
        .await
    }

    /// Whether [`Store::delete_source`] would do it now.
    pub async fn source_deletable(
        &self,
        id: SourceId,
        force: bool,
        based_on: impl Fn(i64) -> bool,
    ) -> Result<SourceWrite, StoreError> {
        bounded(async {
            let outcome = self.deletable(&mut *self.pool.begin().await?, id, force).await?;
            let changed = matches!(&outcome, SourceWrite::Done(source) if !based_on(source.version));
            Ok(if changed { SourceWrite::Changed } else { outcome })
        })
        .await
    }

    /// Forgets a source that no project uses and whose engine is stopped, with `force` also one of another state: its
    /// engine, gaps and position with it.
    pub async fn delete_source(
        &self,
        id: SourceId,
        force: bool,
        caller: Caller<'_>,
    ) -> Result<SourceWrite, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let outcome = self.deletable(&mut tx, id, force).await?;
            let SourceWrite::Done(source) = &outcome else { return Ok(outcome) };
            // What deleted projects left behind comes first.
            for sql in ["delete from aura.projects where source_id = $1", "delete from aura.sources where id = $1"] {
                sqlx::query(sql).bind(id.0).execute(&mut *tx).await?;
            }
            audit::append(&mut tx, caller.entry("source.delete", id, Some(source.shown()), None)).await?;
            operations::notify(&mut tx, id).await?;
            tx.commit().await?;
            Ok(outcome)
        })
        .await
    }

    async fn deletable(
        &self,
        connection: &mut PgConnection,
        id: SourceId,
        force: bool,
    ) -> Result<SourceWrite, StoreError> {
        let state = self.unstopped(connection, id).await?;
        let source = self.locked_source(connection, id).await?;
        // Of a deleted project there may be something left to take back, for which the URLs are needed.
        let query = "select count(*) from aura.projects
            where source_id = $1 and (deleted_at is null or (cleaned_at is null and not $2))";
        let projects: i64 = sqlx::query_scalar(query).bind(id.0).bind(force).fetch_one(connection).await?;
        Ok(match state.filter(|_| !force) {
            _ if projects > 0 => SourceWrite::InUse(projects),
            Some(state) => SourceWrite::NotStopped(state),
            None => SourceWrite::Done(Box::new(source)),
        })
    }

    /// The engine's state unless it is stopped for good, kept so until the transaction ends.
    async fn unstopped(&self, connection: &mut PgConnection, id: SourceId) -> Result<Option<EngineState>, StoreError> {
        let engine = match engines::locked(connection, id).await {
            Err(StoreError::NotFound(_)) => return Err(StoreError::NotFound("source")),
            engine => engine?,
        };
        let idle = engine.operation.is_none() && engine.holder.is_none();
        let stopped = idle && engine.desired == Desired::Stopped && engine.state == EngineState::Stopped;
        Ok((!stopped).then_some(engine.state))
    }

    async fn locked_source(&self, connection: &mut PgConnection, id: SourceId) -> Result<Source, StoreError> {
        let query = sqlx::query_as::<_, SourceRow>(concat!(
            "select ",
            columns!(),
            " from aura.sources where id = $1 for update",
        ));
        let row = query.bind(id.0).fetch_optional(connection).await?;
        row.ok_or(StoreError::NotFound("source"))?.open(&self.key)
    }

    fn bind_source<'q>(
        &self,
        query: sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>,
        source: &Source,
    ) -> sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments> {
        let seal = |url: &SecretString| self.key.seal(url.expose_secret().as_bytes(), &url_aad(source.id));
        query
            .bind(source.id.0)
            .bind(source.name.clone())
            .bind(seal(&source.replication_url))
            .bind(source.admin_url.as_ref().map(seal))
            .bind(source.slot_name.clone())
            .bind(source.plugin.as_str())
            .bind(source.slot_recreate.as_str())
    }

    async fn write_source(
        &self,
        connection: &mut PgConnection,
        id: SourceId,
        new: &NewSource,
    ) -> Result<SourceRow, StoreError> {
        let seal = |url: &SecretString| self.key.seal(url.expose_secret().as_bytes(), &url_aad(id));
        let query = sqlx::query_as(concat!(
            "insert into aura.sources as s (id, name, replication_url, admin_url, slot_name, plugin, slot_recreate)
             values ($1, $2, $3, $4, coalesce($5, $6), $7, $8)
             on conflict (name) do update set replication_url = excluded.replication_url,
                admin_url = coalesce(excluded.admin_url, s.admin_url),
                slot_name = coalesce($5, s.slot_name), plugin = excluded.plugin,
                slot_recreate = excluded.slot_recreate
             returning ",
            columns!()
        ));
        Ok(query
            .bind(id.0)
            .bind(&new.name)
            .bind(seal(&new.replication_url))
            .bind(new.admin_url.as_ref().map(seal))
            .bind(&new.slot_name)
            .bind(default_slot(&new.name, id))
            .bind(new.plugin.as_str())
            .bind(new.slot_recreate.as_str())
            .fetch_one(connection)
            .await?)
    }

    /// One source.
    pub async fn source(&self, id: SourceId) -> Result<Option<Source>, StoreError> {
        Ok(self.select_sources(Some(id.0), None).await?.pop())
    }

    /// One source by its name.
    pub async fn source_by_name(&self, name: &str) -> Result<Option<Source>, StoreError> {
        Ok(self.select_sources(None, Some(name)).await?.pop())
    }

    /// Sources by name, `limit` of them, behind `after` (the cursor).
    pub async fn list_sources(&self, after: Option<&str>, limit: u32) -> Result<Vec<Source>, StoreError> {
        let query = sqlx::query_as::<_, SourceRow>(concat!(
            "select ",
            columns!(),
            " from aura.sources where $1::text is null or name > $1 order by name limit $2",
        ));
        let query = query.bind(after).bind(i64::from(limit));
        let rows = bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?;
        rows.into_iter().map(|row| row.open(&self.key)).collect()
    }

    /// All sources, by name.
    pub async fn sources(&self) -> Result<Vec<Source>, StoreError> {
        self.select_sources(None, None).await
    }

    async fn select_sources(&self, id: Option<Uuid>, name: Option<&str>) -> Result<Vec<Source>, StoreError> {
        let query = sqlx::query_as::<_, SourceRow>(concat!(
            "select ",
            columns!(),
            " from aura.sources where ($1::uuid is null or id = $1) and ($2::text is null or name = $2) order by name",
        ));
        let rows = bounded(async { Ok(query.bind(id).bind(name).fetch_all(&self.pool).await?) }).await?;
        rows.into_iter().map(|row| row.open(&self.key)).collect()
    }
}
