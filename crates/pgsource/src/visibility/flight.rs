//! Several statements in one round trip. Names of prepared statements would belong to whatever the tenant's code
//! prepared, so everything here is unnamed.

use std::time::Duration;

use futures_util::{future::maybe_done, poll};
use tokio_postgres::{
    Client, Row,
    types::{ToSql, Type},
};

use super::{
    own::CATALOG_TYPES,
    statement::{BECOME, BEGIN, DISCARD, RESET, ROLLBACK, ROLLBACK_TO, SAVEPOINT},
};
use crate::{SourceError, catalog::CATALOG_SQL};

/// One message to the server.
#[derive(Clone, Copy)]
pub(super) enum Step<'a> {
    Begin,
    Catalogue { schema: &'a str, table: &'a str, roles: &'a [&'a str] },
    Reset,
    Savepoint,
    Become { role: &'a str, word: &'a str, claims: &'a str, sub: &'a str, limit: &'a str },
    Verdict { sql: &'a str, images: &'a [String] },
    RollbackTo,
    Rollback,
    Discard,
}

/// What the server said to a step: its only row, if it has one.
pub(super) type Said = Result<Option<Row>, SourceError>;

/// Sends every step before awaiting the first answer. A step behind a failed one fails, too, except the rollbacks.
/// `Err`: not all answers came within `limit`; the connection must not be used again.
pub(super) async fn fly(client: &Client, steps: &[Step<'_>], limit: Duration) -> Result<Vec<Said>, SourceError> {
    let late = SourceError::Timeout { what: "a row-level security check", limit };
    tokio::time::timeout(limit, fly_unbounded(client, steps)).await.map_err(|_| late)
}

async fn fly_unbounded(client: &Client, steps: &[Step<'_>]) -> Vec<Said> {
    let mut answers: Vec<_> = steps.iter().map(|step| Box::pin(maybe_done(step.send(client)))).collect();
    // A request is on its way once its future was polled, so this fixes the order.
    for answer in &mut answers {
        let _ = poll!(answer.as_mut());
    }
    let mut said = Vec::with_capacity(answers.len());
    for mut answer in answers {
        answer.as_mut().await;
        said.extend(answer.as_mut().take_output());
    }
    said
}

impl Step<'_> {
    async fn send(self, client: &Client) -> Said {
        match self {
            Self::Begin => simple(client, BEGIN).await,
            Self::Reset => simple(client, RESET).await,
            Self::Savepoint => simple(client, SAVEPOINT).await,
            Self::RollbackTo => simple(client, ROLLBACK_TO).await,
            Self::Rollback => simple(client, ROLLBACK).await,
            Self::Discard => simple(client, DISCARD).await,
            Self::Catalogue { schema, table, roles } => {
                let [a, b, c] = CATALOG_TYPES;
                row(client, CATALOG_SQL, &[(&schema, a), (&table, b), (&roles, c)]).await
            }
            Self::Become { role, word, claims, sub, limit } => {
                let texts = [role, claims, word, sub, limit];
                row(client, BECOME, &texts.each_ref().map(|text| (text as &(dyn ToSql + Sync), Type::TEXT))).await
            }
            Self::Verdict { sql, images } => row(client, sql, &[(&images, Type::TEXT_ARRAY)]).await,
        }
    }
}

async fn simple(client: &Client, sql: &str) -> Said {
    client.batch_execute(sql).await?;
    Ok(None)
}

async fn row(client: &Client, sql: &str, params: &[(&(dyn ToSql + Sync), Type)]) -> Said {
    Ok(client.query_typed_opt(sql, params).await?)
}
