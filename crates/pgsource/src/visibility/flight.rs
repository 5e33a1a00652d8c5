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
    statement::{BECOME, BEGIN, DISCARD, ROLLBACK, ROLLBACK_TO, SAVEPOINT},
};
use crate::{SourceError, catalog::CATALOG_SQL};

/// One message to the server.
#[derive(Clone, Copy)]
pub(super) enum Step<'a> {
    Begin,
    Catalogue {
        schema: &'a str,
        table: &'a str,
        roles: &'a [&'a str],
    },
    Savepoint,
    Become {
        role: &'a str,
        word: &'a str,
        claims: &'a str,
        sub: &'a str,
        limit: &'a str,
        table: u32,
    },
    /// One identity.
    Alone {
        sql: &'a str,
        images: &'a [String],
    },
    /// Many, in one statement.
    Joined {
        sql: &'a str,
        images: &'a [String],
        who: Many<'a>,
    },
    /// Many, one after the other.
    Looped {
        sql: &'a str,
        query: &'a str,
        images: &'a [String],
        who: Many<'a>,
        role: &'a str,
        limit: &'a str,
    },
    RollbackTo,
    Rollback,
    Discard,
}

/// The identities of a statement for many.
#[derive(Clone, Copy)]
pub(super) struct Many<'a> {
    pub(super) claims: &'a [&'a str],
    pub(super) subs: &'a [String],
    pub(super) word: &'a str,
    /// Ordinals of identities and of images, if not every image is asked about for each.
    pub(super) pairs: Option<(&'a [i64], &'a [i64])>,
}

/// What the server said to a step.
pub(super) type Said = Result<Vec<Row>, SourceError>;

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
            Self::Savepoint => simple(client, SAVEPOINT).await,
            Self::RollbackTo => simple(client, ROLLBACK_TO).await,
            Self::Rollback => simple(client, ROLLBACK).await,
            Self::Discard => simple(client, DISCARD).await,
            Self::Catalogue { schema, table, roles } => {
                let [a, b, c] = CATALOG_TYPES;
                rows(client, CATALOG_SQL, &[(&schema, a), (&table, b), (&roles, c)]).await
            }
            Self::Become { role, word, claims, sub, limit, table } => {
                let [role, claims, word, sub, limit] = [&role, &claims, &word, &sub, &limit].map(text);
                rows(client, BECOME, &[role, claims, word, sub, limit, (&table, Type::OID)]).await
            }
            Self::Alone { sql, images } => rows(client, sql, &[(&images, Type::TEXT_ARRAY)]).await,
            Self::Joined { sql, images, who: Many { claims, subs, word, pairs } } => {
                let ([images, claims, subs], word) = ([&images as Param<'_>, &claims, &subs].map(texts), text(&word));
                let Some((who, which)) = &pairs else {
                    return rows(client, sql, &[images, claims, subs, word]).await;
                };
                let [who, which] = [who, which].map(|numbers| (numbers as Param<'_>, Type::INT8_ARRAY));
                rows(client, sql, &[images, claims, subs, word, who, which]).await
            }
            Self::Looped { sql, query, images, who: Many { claims, subs, word, pairs }, role, limit } => {
                let [images, claims, subs] = [&images as Param<'_>, &claims, &subs].map(texts);
                let [query, role, word, limit] = [&query, &role, &word, &limit].map(text);
                let (who, which) = pairs.unzip();
                let [who, which] = [&who, &which].map(|numbers| (numbers as Param<'_>, Type::INT8_ARRAY));
                rows(client, sql, &[query, images, claims, subs, role, word, limit, who, which]).await
            }
        }
    }
}

type Param<'a> = &'a (dyn ToSql + Sync);

fn texts(array: Param<'_>) -> (Param<'_>, Type) {
    (array, Type::TEXT_ARRAY)
}

fn text<'a>(value: &'a &'a str) -> (Param<'a>, Type) {
    (value, Type::TEXT)
}

async fn simple(client: &Client, sql: &str) -> Said {
    client.batch_execute(sql).await?;
    Ok(Vec::new())
}

async fn rows(client: &Client, sql: &str, params: &[(Param<'_>, Type)]) -> Said {
    Ok(client.query_typed(sql, params).await?)
}
