//! The worker's own login: reads the catalogue, never runs anything that a tenant wrote.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use aura_domain::Relation;
use tokio_postgres::{
    Row, Statement,
    types::{ToSql, Type},
};

use crate::{
    Sockets, SourceError, SourceUrl, SqlConnection,
    catalog::{CATALOG_SQL, RawTable, TableCatalog},
    connect_sql,
    types::{JsonForm, TypeInfo, array_of},
};

/// Bounds one catalogue statement, connecting included.
const STATEMENT_LIMIT: Duration = Duration::from_secs(5);

/// Catalogue texts kept per source; one is a few kilobytes.
const MAX_KNOWN: usize = 4096;

/// How long what types consist of is believed: as long as a toggle may take to be noticed.
const TYPES_FRESH: Duration = Duration::from_secs(3);

const TYPES_SQL: &str = include_str!("../types.sql");

/// A catalogue text and what it says: an unchanged text isn't parsed again.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) text: String,
    pub(super) table: Arc<TableCatalog>,
    /// A column's type is somebody's own: what it consists of may change, and the text doesn't say so.
    own_types: bool,
    read: Instant,
}

impl Known {
    fn is_fresh(&self) -> bool {
        !self.own_types || self.read.elapsed() < TYPES_FRESH
    }
}

/// The own login's connection and all that was read so far.
pub(super) struct OwnLogin {
    url: SourceUrl,
    sockets: Sockets,
    application_name: String,
    session: tokio::sync::Mutex<Option<Arc<Session>>>,
    known: Mutex<HashMap<Relation, Arc<Known>>>,
}

struct Session {
    client: SqlConnection,
    catalogue: Statement,
    types: Statement,
}

/// One answer of the catalogue statement.
pub(super) struct Answer {
    /// `pg_current_snapshot()`.
    pub(super) snapshot: String,
    /// `None`: nothing stands under the name.
    pub(super) table: Option<String>,
}

impl Answer {
    pub(super) fn from_row(row: &Row) -> Result<Self, SourceError> {
        Ok(Self { snapshot: row.try_get(0)?, table: row.try_get(1)? })
    }
}

impl OwnLogin {
    pub(super) fn new(url: SourceUrl, sockets: Sockets, application_name: String) -> Self {
        let (session, known) = Default::default();
        Self { url, sockets, application_name, session, known }
    }

    /// What was last read of a table, unless that may be stale.
    pub(super) fn known(&self, relation: &Relation) -> Option<Arc<Known>> {
        lock(&self.known).get(relation).filter(|known| known.is_fresh()).map(Arc::clone)
    }

    /// Runs the catalogue statement in a transaction of its own.
    pub(super) async fn read(&self, relation: &Relation, roles: &[&str]) -> Result<Answer, SourceError> {
        match self.try_read(relation, roles).await {
            // The server may have closed an idle connection: the second try is on a fresh one.
            Err(error) if error.is_connection_error() => self.try_read(relation, roles).await,
            answer => answer,
        }
    }

    async fn try_read(&self, relation: &Relation, roles: &[&str]) -> Result<Answer, SourceError> {
        let (schema, table) = (relation.schema.as_str(), relation.table.as_str());
        let session = self.session().await?;
        let params: [&(dyn ToSql + Sync); 3] = [&schema, &table, &roles];
        let row = self.bounded(&session, session.client.query_one(&session.catalogue, &params)).await?;
        Answer::from_row(&row)
    }

    /// Parses an answer, unless it is what is known already.
    pub(super) async fn learn(&self, relation: &Relation, text: String) -> Result<Arc<Known>, SourceError> {
        if let Some(known) = self.known(relation).filter(|known| known.text == text) {
            return Ok(known);
        }
        let raw = RawTable::parse(&text)?;
        let types = self.types(&raw).await?;
        let own_types = types.keys().any(|oid| TypeInfo::built_in(*oid).is_none());
        let table = Arc::new(raw.resolve(relation, &types));
        let known = Arc::new(Known { table, text, own_types, read: Instant::now() });
        let mut cache = lock(&self.known);
        if cache.len() >= MAX_KNOWN {
            cache.clear();
        }
        cache.insert(relation.clone(), Arc::clone(&known));
        Ok(known)
    }

    /// Whether this login can connect and get an answer (R-RLS-6: only then is a failure elsewhere an outage).
    pub(super) async fn probe(&self) -> Result<(), SourceError> {
        let session = self.session().await?;
        self.bounded(&session, session.client.batch_execute("select")).await
    }

    /// Reads one row, or none, of the catalogue. The connection's settings are those of the catalogue statement.
    pub(super) async fn ask(
        &self,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Option<Row>, SourceError> {
        let session = self.session().await?;
        match self.bounded(&session, session.client.query_typed_opt(sql, params)).await {
            // The server may have closed an idle connection: the second try is on a fresh one.
            Err(error) if error.is_connection_error() => {
                let session = self.session().await?;
                self.bounded(&session, session.client.query_typed_opt(sql, params)).await
            }
            answer => answer,
        }
    }

    async fn types(&self, raw: &RawTable) -> Result<HashMap<u32, Arc<TypeInfo>>, SourceError> {
        let mut found = HashMap::new();
        let mut missing = Vec::new();
        for (oid, name) in raw.types() {
            match TypeInfo::built_in(oid).filter(|ty| &*ty.name == name) {
                Some(ty) => drop(found.insert(oid, ty)),
                None => missing.push(oid),
            }
        }
        if !missing.is_empty() {
            found.extend(self.read_types(missing).await?);
        }
        Ok(found)
    }

    async fn read_types(&self, oids: Vec<u32>) -> Result<HashMap<u32, Arc<TypeInfo>>, SourceError> {
        let session = self.session().await?;
        let rows = self.bounded(&session, session.client.query(&session.types, &[&oids])).await?;
        let rows = rows.iter().map(TypeRow::from_row).collect::<Result<Vec<_>, _>>()?;
        let rows: HashMap<u32, TypeRow> = rows.into_iter().map(|row| (row.oid, row)).collect();
        Ok(oids.into_iter().filter_map(|oid| Some((oid, build_type(oid, &rows, 0)?))).collect())
    }

    async fn session(&self) -> Result<Arc<Session>, SourceError> {
        let mut slot = self.session.lock().await;
        if let Some(session) = slot.as_ref().filter(|session| !session.client.is_closed()) {
            return Ok(Arc::clone(session));
        }
        let session = Arc::new(Session::open(self).await?);
        *slot = Some(Arc::clone(&session));
        Ok(session)
    }

    /// Awaits an answer; a connection that is late or broken isn't used again.
    async fn bounded<T>(
        &self,
        session: &Arc<Session>,
        answer: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, SourceError> {
        let late = SourceError::Timeout { what: "reading the catalogue", limit: STATEMENT_LIMIT };
        let answer = match tokio::time::timeout(STATEMENT_LIMIT, answer).await {
            Ok(answer) => answer.map_err(SourceError::from),
            Err(_) => Err(late),
        };
        if answer.as_ref().is_err_and(SourceError::is_connection_error) {
            self.forget(session).await;
        }
        answer
    }

    async fn forget(&self, session: &Arc<Session>) {
        let mut slot = self.session.lock().await;
        if slot.as_ref().is_some_and(|current| Arc::ptr_eq(current, session)) {
            *slot = None;
        }
    }
}

impl Session {
    async fn open(own: &OwnLogin) -> Result<Self, SourceError> {
        let client = connect_sql(&own.url, &own.application_name, Some(&own.sockets), STATEMENT_LIMIT).await?;
        let late = SourceError::Timeout { what: "preparing the catalogue statement", limit: STATEMENT_LIMIT };
        let prepared = async {
            // One plan for all tables: planning would take longer than running.
            // pg_get_expr waits for whoever has locked the table; all tables share this connection, so it may not for long.
            let settings =
                "set plan_cache_mode = force_generic_plan; set statement_timeout = 5000; set lock_timeout = 50";
            client.batch_execute(settings).await?;
            let catalogue = client.prepare_typed(CATALOG_SQL, &CATALOG_TYPES).await?;
            Ok::<_, SourceError>((catalogue, client.prepare_typed(TYPES_SQL, &[Type::OID_ARRAY]).await?))
        };
        let (catalogue, types) = tokio::time::timeout(STATEMENT_LIMIT, prepared).await.map_err(|_| late)??;
        Ok(Self { client, catalogue, types })
    }
}

/// Types of the catalogue statement's parameters.
pub(super) const CATALOG_TYPES: [Type; 3] = [Type::NAME, Type::NAME, Type::NAME_ARRAY];

struct TypeRow {
    oid: u32,
    name: String,
    base: u32,
    element: u32,
    delimiter: char,
    hstore: bool,
    /// Of a composite: name and type.
    attributes: Option<Vec<(Arc<str>, u32)>>,
}

impl TypeRow {
    fn from_row(row: &Row) -> Result<Self, SourceError> {
        let oid = |at: usize| -> Result<u32, SourceError> {
            let wide: i64 = row.try_get(at)?;
            u32::try_from(wide).map_err(|_| SourceError::Protocol("an oid out of range"))
        };
        let delimiter: String = row.try_get(4)?;
        Ok(Self {
            oid: oid(0)?,
            name: row.try_get(1)?,
            base: oid(2)?,
            element: oid(3)?,
            delimiter: delimiter.chars().next().unwrap_or(','),
            hstore: row.try_get(5)?,
            attributes: row.try_get::<_, Option<Vec<String>>>(6)?.map(attributes).transpose()?,
        })
    }
}

fn attributes(texts: Vec<String>) -> Result<Vec<(Arc<str>, u32)>, SourceError> {
    let parsed = texts.iter().map(|json| serde_json::from_str(json)).collect::<Result<_, _>>();
    parsed.map_err(|_| SourceError::Protocol("an attribute that can't be read"))
}

/// Deeper nesting is shown as text.
const MAX_TYPE_DEPTH: usize = 16;

fn build_type(oid: u32, rows: &HashMap<u32, TypeRow>, depth: usize) -> Option<Arc<TypeInfo>> {
    if let Some(built_in) = TypeInfo::built_in(oid) {
        return Some(built_in);
    }
    let row = rows.get(&oid)?;
    if depth >= MAX_TYPE_DEPTH {
        return Some(TypeInfo::text(oid, &row.name));
    }
    let part = |oid| build_type(oid, rows, depth + 1);
    if let Some(attributes) = &row.attributes {
        let attribute = |(name, oid): &(Arc<str>, u32)| Some((Arc::clone(name), part(*oid)?));
        let attributes = attributes.iter().map(attribute).collect::<Option<Vec<_>>>()?;
        let (name, form) = (row.name.as_str().into(), JsonForm::Composite { attributes });
        return Some(Arc::new(TypeInfo { oid, name, base_oid: oid, form }));
    }
    let (base_oid, form) = match (row.base, row.element) {
        (0, 0) if row.hstore => (oid, JsonForm::Hstore),
        (0, 0) => (oid, JsonForm::Text),
        (0, element) => (oid, array_of(part(element)?, row.delimiter)),
        (base, _) => part(base).map(|base| (base.base_oid, base.form.clone()))?,
    };
    Some(Arc::new(TypeInfo { oid, name: row.name.as_str().into(), base_oid, form }))
}

/// The maps are consistent at every step, so a panic elsewhere doesn't matter.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
