//! Requests with an `Idempotency-Key`: who repeats one gets the first one's answer.

use sha2::{Digest, Sha256};
use sqlx::{FromRow, PgConnection};
use uuid::Uuid;

use crate::{Store, StoreError, bounded};

/// A request that is to be done once.
#[derive(Debug, Clone, Copy)]
pub struct OnceRequest<'a> {
    /// Who asks: a key is its asker's own.
    pub scope: &'a str,
    /// `Idempotency-Key`.
    pub key: &'a str,
    /// Method, path, query and body.
    pub content: &'a [u8],
}

/// What is known of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OnceClaim {
    /// It is the caller's to do, for a minute.
    Fresh {
        /// Id of what it makes: the same however often it is tried, so that a later try goes on where one was left.
        ticket: Uuid,
    },
    /// It was answered so.
    Answered(Vec<u8>),
    /// Somebody is at it.
    UnderWay,
    /// The key belongs to another request.
    Reused,
}

#[derive(FromRow)]
struct Row {
    fingerprint: Vec<u8>,
    ticket: Uuid,
    answer: Option<Vec<u8>>,
    over: bool,
    locked: bool,
}

impl OnceRequest<'_> {
    fn key_hash(&self) -> Vec<u8> {
        Sha256::digest(self.key.as_bytes()).to_vec()
    }

    fn fingerprint(&self) -> Vec<u8> {
        Sha256::digest(self.content).to_vec()
    }

    fn aad(&self) -> String {
        format!("idempotency {} {}", self.scope, self.key)
    }
}

impl Store {
    /// Begins a request, unless it was begun before in the last 24 h. Who doesn't end it within a minute
    /// ([`Store::answer_once`], [`Store::release_once`]) is held to be dead.
    pub async fn claim_once(&self, request: OnceRequest<'_>) -> Result<OnceClaim, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            let claim = self.claim(&mut tx, request).await?;
            tx.commit().await?;
            Ok(claim)
        })
        .await
    }

    async fn claim(&self, connection: &mut PgConnection, request: OnceRequest<'_>) -> Result<OnceClaim, StoreError> {
        let (key, fingerprint) = (request.key_hash(), request.fingerprint());
        let ticket = Uuid::new_v4();
        let query = sqlx::query(
            "insert into aura.idempotency (scope, key, fingerprint, ticket, locked_until)
             values ($1, $2, $3, $4, now() + interval '1 minute') on conflict do nothing",
        );
        let query = query.bind(request.scope).bind(&key).bind(&fingerprint).bind(ticket);
        if query.execute(&mut *connection).await?.rows_affected() == 1 {
            return Ok(OnceClaim::Fresh { ticket });
        }
        let query = sqlx::query_as::<_, Row>(
            "select fingerprint, ticket, answer, created_at < now() - interval '24 hours' as over,
                coalesce(locked_until > now(), false) as locked
             from aura.idempotency where scope = $1 and key = $2 for update",
        );
        let row = query.bind(request.scope).bind(&key).fetch_optional(&mut *connection).await?;
        let (ticket, created) = match row {
            Some(row) if row.over => (ticket, "now()"),
            Some(row) if row.fingerprint != fingerprint => return Ok(OnceClaim::Reused),
            Some(Row { answer: Some(sealed), .. }) => {
                return Ok(OnceClaim::Answered(self.key.open(&sealed, &request.aad())?));
            }
            Some(row) if !row.locked => (row.ticket, "created_at"),
            // Under way; or it was released just now.
            _ => return Ok(OnceClaim::UnderWay),
        };
        let sql = format!(
            "update aura.idempotency set fingerprint = $3, ticket = $4, answer = null, created_at = {created},
                locked_until = now() + interval '1 minute' where scope = $1 and key = $2"
        );
        let query = sqlx::query(sqlx::AssertSqlSafe(sql));
        query.bind(request.scope).bind(&key).bind(&fingerprint).bind(ticket).execute(connection).await?;
        Ok(OnceClaim::Fresh { ticket })
    }

    /// The request's answer, for whoever repeats it.
    pub async fn answer_once(&self, request: OnceRequest<'_>, answer: &[u8]) -> Result<(), StoreError> {
        let query =
            sqlx::query("update aura.idempotency set answer = $3, locked_until = null where scope = $1 and key = $2");
        let query = query.bind(request.scope).bind(request.key_hash()).bind(self.key.seal(answer, &request.aad()));
        bounded(async { Ok(query.execute(&self.pool).await.map(|_| ())?) }).await
    }

    /// The request failed. `refused`: nothing was done, and the key is free for another; else the next try goes on under the
    /// same ticket.
    pub async fn release_once(&self, request: OnceRequest<'_>, refused: bool) -> Result<(), StoreError> {
        let sql = if refused {
            "delete from aura.idempotency where scope = $1 and key = $2 and answer is null"
        } else {
            "update aura.idempotency set locked_until = null where scope = $1 and key = $2 and answer is null"
        };
        let query = sqlx::query(sql).bind(request.scope).bind(request.key_hash());
        bounded(async { Ok(query.execute(&self.pool).await.map(|_| ())?) }).await
    }

    /// Forgets answers that are older than 24 h.
    pub async fn forget_answers(&self) -> Result<u64, StoreError> {
        let query = sqlx::query("delete from aura.idempotency where created_at < now() - interval '24 hours'");
        bounded(async { Ok(query.execute(&self.pool).await?.rows_affected()) }).await
    }
}
