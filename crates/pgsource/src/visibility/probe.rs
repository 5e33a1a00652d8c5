//! Finds out whether somebody who ran into the time limit can be asked again, while batches go on without him.

use std::{sync::Arc, time::Instant};

use aura_domain::{ProjectId, Relation};
use secrecy::SecretString;

use super::{
    CheckRequest, Identity, IdentityErrorKind, VisibilityPool,
    flight::{Step, fly},
    judge::{CHECK_LIMIT_MS, FLIGHT_LIMIT, answer, error_kind},
    plan::{Identities, Question, subject},
    sessions::Sessions,
};
use crate::{SourceError, TableCatalog};

/// What a probe needs of a check that is long over.
struct Probe {
    project: ProjectId,
    password: SecretString,
    relation: Relation,
    table: u32,
    identity: Identity,
    role: String,
    sql: String,
    images: Vec<String>,
}

/// Starts those of a question, one per identity and one per project at a time: the others' turn is with a later batch. They
/// end within the limits of a check.
pub(super) fn start(pool: &VisibilityPool, request: &CheckRequest<'_>, table: &TableCatalog, question: &Question<'_>) {
    for at in &question.probes {
        let probe = Probe {
            project: request.project,
            password: request.password.clone(),
            relation: request.relation.clone(),
            table: table.oid,
            identity: request.identities[*at].clone(),
            role: question.role.clone(),
            sql: question.alone.clone(),
            images: question.rows.clone(),
        };
        let (sessions, identities) = (Arc::clone(&pool.sessions), Arc::clone(&pool.identities));
        tokio::spawn(async move { probe.run(&sessions, &identities).await });
    }
}

impl Probe {
    async fn run(self, sessions: &Sessions, identities: &Identities) {
        let Self { relation, identity, .. } = &self;
        match self.ask(sessions).await {
            Ok(true) => identities.recovered(relation, identity),
            Ok(false) => identities.put_off(relation, identity),
            Err(error) if error_kind(&error) == IdentityErrorKind::TimedOut => {
                identities.timed_out(relation, &identity.role, identity, Instant::now());
            }
            Err(_) => identities.raised(relation, &identity.role, identity, Instant::now()),
        }
    }

    /// Whether it could be asked now.
    async fn ask(&self, sessions: &Sessions) -> Result<bool, SourceError> {
        let Some(session) = sessions.spare(self.project, &self.password).await? else { return Ok(false) };
        let (claims, sub) = (self.identity.claims.as_json(), subject(&self.identity));
        let (role, word, table) = (&self.role, &self.identity.role, self.table);
        let steps = [
            Step::Begin,
            Step::Become { role, word, claims, sub: &sub, limit: CHECK_LIMIT_MS, table },
            Step::Alone { sql: &self.sql, images: &self.images },
            Step::Rollback,
            Step::Discard,
        ];
        let mut said = fly(&session.client, &steps, FLIGHT_LIMIT).await?.into_iter();
        let answer = answer(&mut said);
        if said.len() == 2 && said.all(|said| said.is_ok()) {
            sessions.put_back(session);
        }
        answer.map(|_| true)
    }
}
