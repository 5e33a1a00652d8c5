use anyhow::{Context, Result};
use aura_domain::{Image, Value, quote_ident, quote_literal};
use aura_pgsource::{Identity, SqlConnection};

use super::table::Table;

/// What makes the stage of all worlds, with the placeholders of [`crate::tenant::Tenants::run`].
pub(super) const SETUP: &str = include_str!("oracle.sql");

/// What the server itself gives an identity of a table that holds one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Said {
    Sees(bool),
    /// An SQLSTATE.
    Raises(String),
}

/// The server's word on each (image, identity).
pub(super) struct Oracle {
    /// As the planner of the moment does it, which may evaluate parts of a policy for an estimate.
    fresh: Vec<Vec<Said>>,
    /// What evaluating the row alone says, where the first raises.
    planned: Option<Vec<Vec<Said>>>,
}

impl Oracle {
    /// `images` are statements that put one row into the empty table. Leaves nothing behind.
    pub(super) async fn ask(
        sql: &SqlConnection,
        table: &Table,
        images: &[String],
        roles: &[String],
        identities: &[Identity],
    ) -> Result<Self> {
        let fresh = judge(sql, table, images, roles, identities, false).await?;
        let raises = fresh.iter().flatten().any(|said| matches!(said, Said::Raises(_)));
        let planned = if raises { Some(judge(sql, table, images, roles, identities, true).await?) } else { None };
        Ok(Self { fresh, planned })
    }

    pub(super) fn fresh(&self, image: usize, identity: usize) -> &Said {
        &self.fresh[image][identity]
    }

    /// The SQLSTATEs that the server raises here: of the planner, and of evaluating the row alone.
    pub(super) fn states(&self, image: usize, identity: usize) -> impl Iterator<Item = &str> {
        let both = [Some(&self.fresh), self.planned.as_ref()].into_iter().flatten();
        let raises = matches!(self.fresh(image, identity), Said::Raises(_));
        both.filter(move |_| raises).filter_map(move |said| match &said[image][identity] {
            Said::Raises(state) => Some(state.as_str()),
            Said::Sees(_) => None,
        })
    }

    /// Whether the verdict is the server's.
    pub(super) fn agrees(&self, image: usize, identity: usize, visible: bool) -> bool {
        let verdict = Said::Sees(visible);
        match self.fresh(image, identity) {
            Said::Raises(_) => self.planned.as_ref().is_some_and(|planned| planned[image][identity] == verdict),
            said => *said == verdict,
        }
    }
}

async fn judge(
    sql: &SqlConnection,
    table: &Table,
    images: &[String],
    roles: &[String],
    identities: &[Identity],
    planned: bool,
) -> Result<Vec<Vec<Said>>> {
    let words: Vec<&str> = identities.iter().map(|who| who.role.as_str()).collect();
    let claims: Vec<&str> = identities.iter().map(|who| who.claims.as_json()).collect();
    let statement = sql.prepare("select oracle.judge($1, $2, $3, $4, $5, $6)").await?;
    sql.batch_execute("begin").await?;
    let rows = sql.query(&statement, &[&table.quoted(), &images, &roles, &words, &claims, &planned]).await;
    sql.batch_execute("rollback").await?;
    let rows = rows.with_context(|| format!("the oracle fails on {images:#?}"))?;
    let said: Vec<Said> = rows.iter().map(|row| parse(row.get(0))).collect();
    Ok(if said.is_empty() {
        vec![Vec::new(); images.len()]
    } else {
        said.chunks(roles.len()).map(<[_]>::to_vec).collect()
    })
}

fn parse(text: &str) -> Said {
    match text.strip_prefix('E') {
        Some(code) => Said::Raises(code.to_owned()),
        None => Said::Sees(text == "1"),
    }
}

/// The statement that makes a table hold the image; where the image lacks a column, `other` has it.
pub(super) fn insert(table: &Table, image: &Image, other: &Image) -> String {
    let (mut names, mut values) = (Vec::new(), Vec::new());
    for cell in &other.0 {
        if table.columns.iter().any(|column| column.name == *cell.name && column.generated.is_some()) {
            continue;
        }
        let value = image.get(&cell.name).filter(|value| **value != Value::Unchanged).unwrap_or(&cell.value);
        names.push(quote_ident(&cell.name));
        values.push(match value {
            Value::Text(text) => quote_literal(text),
            _ => "null".to_owned(),
        });
    }
    format!("insert into {} ({}) values ({})", table.quoted(), names.join(", "), values.join(", "))
}
