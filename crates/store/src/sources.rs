use aura_domain::SourceId;
use secrecy::{ExposeSecret, SecretString};
use sqlx::FromRow;
use uuid::Uuid;

use crate::{MasterKey, Store, StoreError, bounded, decode::word, projects::open_text};

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

#[derive(FromRow)]
struct SourceRow {
    id: Uuid,
    name: String,
    replication_url: Vec<u8>,
    admin_url: Option<Vec<u8>>,
    slot_name: String,
    plugin: String,
    slot_recreate: String,
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
            let known = sqlx::query_scalar::<_, Uuid>("select id from aura.sources where name = $1")
                .bind(&new.name)
                .fetch_optional(&mut *tx)
                .await?;
            let id = SourceId(known.unwrap_or_else(Uuid::new_v4));
            let row = self.write_source(&mut tx, id, &new).await?;
            sqlx::query("insert into aura.engines (source_id) values ($1) on conflict do nothing")
                .bind(id.0)
                .execute(&mut *tx)
                .await?;
            sqlx::query("select pg_notify('aura_engines', $1)").bind(id.to_string()).execute(&mut *tx).await?;
            tx.commit().await?;
            row.open(&self.key)
        })
        .await
    }

    async fn write_source(
        &self,
        connection: &mut sqlx::PgConnection,
        id: SourceId,
        new: &NewSource,
    ) -> Result<SourceRow, StoreError> {
        let seal = |url: &SecretString| self.key.seal(url.expose_secret().as_bytes(), &url_aad(id));
        let query = sqlx::query_as(
            "insert into aura.sources as s (id, name, replication_url, admin_url, slot_name, plugin, slot_recreate)
             values ($1, $2, $3, $4, coalesce($5, $6), $7, $8)
             on conflict (name) do update set replication_url = excluded.replication_url,
                admin_url = coalesce(excluded.admin_url, s.admin_url),
                slot_name = coalesce($5, s.slot_name), plugin = excluded.plugin,
                slot_recreate = excluded.slot_recreate
             returning id, name, replication_url, admin_url, slot_name, plugin, slot_recreate",
        );
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

    /// All sources, by name.
    pub async fn sources(&self) -> Result<Vec<Source>, StoreError> {
        self.select_sources(None, None).await
    }

    async fn select_sources(&self, id: Option<Uuid>, name: Option<&str>) -> Result<Vec<Source>, StoreError> {
        let query = sqlx::query_as::<_, SourceRow>(
            "select id, name, replication_url, admin_url, slot_name, plugin, slot_recreate from aura.sources
             where ($1::uuid is null or id = $1) and ($2::text is null or name = $2) order by name",
        );
        let rows = bounded(async { Ok(query.bind(id).bind(name).fetch_all(&self.pool).await?) }).await?;
        rows.into_iter().map(|row| row.open(&self.key)).collect()
    }
}
