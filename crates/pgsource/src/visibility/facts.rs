//! What comparing values of a column takes: names for SQL, and how its collation orders.

use std::sync::Arc;

use aura_domain::quote_ident;
use tokio_postgres::{
    Row,
    types::{ToSql, Type},
};

use super::own::OwnLogin;
use crate::{
    SourceError,
    conditions::{Shape, Symbol},
};

const FACTS_SQL: &str = include_str!("facts.sql");

/// Of one type and collation.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Facts {
    /// As people call the column's type: `integer`, `character varying`.
    pub(super) shown: String,
    /// The schema of the type that is compared.
    pub(super) schema: String,
    /// The type that is compared, for SQL.
    pub(super) sql: String,
    /// The column's own type, for SQL.
    pub(super) own_sql: String,
    /// The collation, for SQL.
    collation: Option<String>,
    /// Whether equal texts are the same texts.
    pub(super) deterministic: bool,
    /// Whether texts are ordered by their bytes, which are UTF-8.
    pub(super) bytewise: bool,
    pub(super) utf8: bool,
    textual: bool,
    same: Vec<String>,
    with_text: Vec<String>,
}

impl Facts {
    /// Reads them on our own login. `None`: there is no such type.
    pub(super) async fn read(own: &OwnLogin, shape: Shape) -> Result<Option<Arc<Self>>, SourceError> {
        let params = [&shape.column_type, &shape.base, &shape.collation];
        let params = params.map(|oid| (oid as &(dyn ToSql + Sync), Type::OID));
        let row = own.ask(FACTS_SQL, &params).await?;
        Ok(row.as_ref().map(Self::from_row).transpose()?.map(Arc::new))
    }

    fn from_row(row: &Row) -> Result<Self, SourceError> {
        let (schema, name): (String, String) = (row.try_get(1)?, row.try_get(2)?);
        let category: String = row.try_get(3)?;
        let collation: Option<(String, String)> =
            row.try_get::<_, Option<String>>(4)?.zip(row.try_get::<_, Option<String>>(5)?);
        let utf8: bool = row.try_get(8)?;
        let bytewise: bool = row.try_get(7)?;
        Ok(Self {
            shown: row.try_get(0)?,
            sql: format!("{}.{}", quote_ident(&schema), quote_ident(&name)),
            own_sql: row.try_get(11)?,
            schema,
            collation: collation.map(|(schema, name)| format!("{}.{}", quote_ident(&schema), quote_ident(&name))),
            deterministic: row.try_get(6)?,
            bytewise: bytewise && utf8,
            utf8,
            textual: category == "S",
            same: row.try_get(9)?,
            with_text: row.try_get(10)?,
        })
    }

    /// Whether the type is text-like and has the pattern operator.
    pub(super) fn has_pattern(&self, symbol: Symbol) -> bool {
        let has = |list: &[String]| list.iter().any(|name| name == symbol.name());
        self.textual && (has(&self.same) || has(&self.with_text))
    }

    /// The type of what stands at the operator's right, for SQL.
    pub(super) fn right_sql(&self, symbol: Symbol) -> &str {
        let same = self.same.iter().any(|name| name == symbol.name());
        if symbol.takes_pattern() && !same { "pg_catalog.text" } else { &self.sql }
    }

    /// `collate "x"."y"`, or nothing.
    pub(super) fn collate(&self) -> String {
        self.collation.as_ref().map(|name| format!(" collate {name}")).unwrap_or_default()
    }
}
