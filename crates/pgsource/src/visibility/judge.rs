//! Asking the policies: the first transaction has no savepoints; after an error every identity is asked by itself
//! (R-RLS-6).

use std::time::{Duration, Instant};

use tokio_postgres::error::SqlState;

use super::{
    CheckRequest, IdentityErrorKind, Verdict, VisibilityPool,
    flight::{Said, Step, fly},
    own::{Answer, Known},
    plan::{Entry, Plan},
    sees_all,
    sessions::Session,
};
use crate::SourceError;

/// `statement_timeout` of one identity's statements, in milliseconds (R-RLS-6).
const CHECK_LIMIT_MS: &str = "2000";
/// Bounds a round trip: the statement's limit and some time for the network.
const FLIGHT_LIMIT: Duration = Duration::from_millis(3000);
/// Identities asked in one round trip, and about how many bytes of images go with them.
const CHUNK: usize = 64;
const CHUNK_BYTES: usize = 4 << 20;
/// The same when each is under a savepoint: fewer, since several may run into the time limit.
const ISOLATED_CHUNK: usize = 16;
/// Tries of one identity whose check ends in a serialization failure, a deadlock or a lost connection.
const TRIES: usize = 3;

/// How a transaction ended.
pub(super) enum Pass {
    /// Every identity has its verdict.
    Done(Vec<Verdict>),
    /// The catalogue is not what the statements were made from; this is it now, `None` if nothing is there.
    Changed(Option<String>),
    /// A transaction of the batch is not visible yet.
    NotYet,
}

/// One check against one catalogue state.
pub(super) struct Judge<'a> {
    pub(super) pool: &'a VisibilityPool,
    pub(super) request: &'a CheckRequest<'a>,
    pub(super) roles: &'a [&'a str],
    pub(super) known: &'a Known,
    pub(super) plan: &'a Plan<'a>,
}

/// Ordinals of the visible images; `None`: row security doesn't apply.
type Ordinals = Option<Vec<i64>>;

enum Together {
    Good(Vec<(usize, Ordinals)>),
    Opening(Pass),
    /// Somebody raised an error.
    Failed,
}

/// Somebody who is still to be asked under a savepoint.
#[derive(Clone, Copy)]
struct Waiting {
    at: usize,
    tries: usize,
    /// In a round trip of his own, since one that he was in ended with the connection.
    alone: bool,
}

impl Judge<'_> {
    /// Asks for everybody's verdict.
    pub(super) async fn run(&self) -> Result<Pass, SourceError> {
        let session = match self.session().await {
            Ok(session) => session,
            Err(error) => return self.without_session(error, self.plan.to_ask(), Vec::new()).await,
        };
        match self.together(session).await {
            Ok(Together::Good(answers)) => Ok(Pass::Done(
                self.fill(answers.into_iter().map(|(at, seen)| (at, self.judged(at, Ok(seen)))).collect()),
            )),
            Ok(Together::Opening(pass)) => Ok(pass),
            Ok(Together::Failed) => self.one_by_one().await,
            Err(error) if error.is_connection_error() => self.one_by_one().await,
            Err(error) => Err(error),
        }
    }

    async fn session(&self) -> Result<Session, SourceError> {
        self.pool.sessions.take(self.request.project, self.request.password).await
    }

    /// The project's login can't connect: an outage only if ours can't either.
    async fn without_session(
        &self,
        error: SourceError,
        left: Vec<usize>,
        mut verdicts: Vec<(usize, Verdict)>,
    ) -> Result<Pass, SourceError> {
        if matches!(error, SourceError::Shut) {
            return Err(error);
        }
        self.pool.own.probe().await?;
        tracing::warn!(project = %self.request.project, %error, "a project's visibility login can't connect");
        verdicts.extend(left.into_iter().map(|at| (at, Verdict::Error(IdentityErrorKind::LoginFailed))));
        Ok(Pass::Done(self.fill(verdicts)))
    }

    /// Everybody in one transaction without savepoints, in one round trip unless there are many.
    async fn together(&self, session: Session) -> Result<Together, SourceError> {
        let asked = self.plan.to_ask();
        let (mut answers, mut outcome, mut clean) = (Vec::with_capacity(asked.len()), None, false);
        let mut chunks = asked.chunks(self.chunk_len()).peekable();
        let mut first = true;
        while let Some(chunk) = chunks.next() {
            let steps = self.steps(chunk, first, chunks.peek().is_none());
            let mut said = fly(&session.client, &steps, FLIGHT_LIMIT).await?.into_iter();
            if first && let Some(pass) = self.opening(&mut said)? {
                outcome = Some(Together::Opening(pass));
            }
            for at in chunk {
                match answer(&mut said) {
                    Ok(ordinals) => answers.push((*at, ordinals)),
                    Err(error) if error.is_connection_error() => return Err(error),
                    Err(_) => outcome = outcome.or(Some(Together::Failed)),
                }
            }
            let closed: Vec<Said> = said.collect();
            clean = !closed.is_empty() && closed.iter().all(Result::is_ok);
            first = false;
            if outcome.is_some() {
                break;
            }
        }
        if clean || self.close(&session).await {
            self.pool.sessions.put_back(session);
        }
        Ok(outcome.unwrap_or(Together::Good(answers)))
    }

    /// Everybody under a savepoint of his own.
    async fn one_by_one(&self) -> Result<Pass, SourceError> {
        let waiting = |at| Waiting { at, tries: 0, alone: false };
        let mut left: Vec<Waiting> = self.plan.to_ask().into_iter().rev().map(waiting).collect();
        let mut verdicts = Vec::new();
        while !left.is_empty() {
            let (session, pass) = match self.open().await {
                Ok(opened) => opened,
                Err(error) => {
                    let left = left.into_iter().map(|waiting| waiting.at).collect();
                    return self.without_session(error, left, verdicts).await;
                }
            };
            let alive = pass.is_some() || self.drain(&session, &mut left, &mut verdicts).await;
            if alive && self.close(&session).await {
                self.pool.sessions.put_back(session);
            } else {
                self.pool.own.probe().await?;
            }
            if let Some(pass) = pass {
                return Ok(pass);
            }
        }
        Ok(Pass::Done(self.fill(verdicts)))
    }

    /// A session with an open transaction, and how the pass ends if the catalogue says so.
    async fn open(&self) -> Result<(Session, Option<Pass>), SourceError> {
        let session = self.session().await?;
        let steps = [Step::Begin, self.catalogue()];
        let mut said = fly(&session.client, &steps, FLIGHT_LIMIT).await?.into_iter();
        let pass = self.opening(&mut said)?;
        Ok((session, pass))
    }

    /// Asks until nobody is left or the connection is lost (false).
    async fn drain(&self, session: &Session, left: &mut Vec<Waiting>, verdicts: &mut Vec<(usize, Verdict)>) -> bool {
        while let Some(first) = left.pop() {
            let mut few = vec![first];
            while !first.alone && few.len() < ISOLATED_CHUNK.min(self.chunk_len()) {
                match left.pop_if(|next| !next.alone) {
                    Some(next) => few.push(next),
                    None => break,
                }
            }
            few.retain(|waiting| match self.circuit_opened(waiting.at) {
                Some(verdict) => {
                    verdicts.push((waiting.at, verdict));
                    false
                }
                None => true,
            });
            if !self.isolated(session, &few, left, verdicts).await {
                return false;
            }
        }
        true
    }

    /// One round trip for a few, each under a savepoint; whether the connection is still good.
    async fn isolated(
        &self,
        session: &Session,
        few: &[Waiting],
        left: &mut Vec<Waiting>,
        verdicts: &mut Vec<(usize, Verdict)>,
    ) -> bool {
        let mut steps = Vec::with_capacity(4 * few.len());
        for waiting in few {
            steps.extend(self.ask(waiting.at, Step::Savepoint).into_iter().flatten());
            steps.push(Step::RollbackTo);
        }
        let mut said = match fly(&session.client, &steps, FLIGHT_LIMIT).await {
            Ok(said) => said.into_iter(),
            Err(late) => {
                self.late(late, few, left, verdicts);
                return false;
            }
        };
        let mut good = true;
        for waiting in few {
            let answer = answer(&mut said);
            let _rolled_back = said.next();
            let lost = answer.as_ref().is_err_and(SourceError::is_connection_error);
            // The first whose answer is missing is the likely cause, the others only follow.
            let tries = waiting.tries + usize::from(good || !lost);
            let again = answer.as_ref().is_err_and(may_succeed_again);
            if again && (tries < TRIES || (lost && !waiting.alone)) {
                left.push(Waiting { tries, alone: waiting.alone || lost, ..*waiting });
            } else {
                verdicts.push((waiting.at, self.judged(waiting.at, answer)));
            }
            good &= !lost;
        }
        good
    }

    /// A round trip took too long: by one's fault alone, or by one of several's.
    fn late(&self, late: SourceError, few: &[Waiting], left: &mut Vec<Waiting>, verdicts: &mut Vec<(usize, Verdict)>) {
        match few {
            [one] => verdicts.push((one.at, self.judged(one.at, Err(late)))),
            _ => left.extend(few.iter().rev().map(|waiting| Waiting { alone: true, ..*waiting })),
        }
    }

    /// Ends the transaction and cleans the session; whether it can be used again.
    async fn close(&self, session: &Session) -> bool {
        let said = fly(&session.client, &[Step::Rollback, Step::Discard], FLIGHT_LIMIT).await;
        said.is_ok_and(|said| said.iter().all(Result::is_ok))
    }

    fn steps(&self, chunk: &[usize], first: bool, last: bool) -> Vec<Step<'_>> {
        let mut steps = Vec::with_capacity(3 * chunk.len() + 4);
        if first {
            steps.extend([Step::Begin, self.catalogue()]);
        }
        steps.extend(chunk.iter().flat_map(|at| self.ask(*at, Step::Reset)).flatten());
        if last {
            steps.extend([Step::Rollback, Step::Discard]);
        }
        steps
    }

    fn catalogue(&self) -> Step<'_> {
        let relation = self.request.relation;
        Step::Catalogue { schema: &relation.schema, table: &relation.table, roles: self.roles }
    }

    /// The three steps of one identity.
    fn ask<'b>(&'b self, at: usize, first: Step<'b>) -> Option<[Step<'b>; 3]> {
        let (asked, question) = self.plan.asked(at)?;
        let role = Step::Become {
            role: &question.role,
            word: &asked.identity.role,
            claims: asked.identity.claims.as_json(),
            sub: &asked.sub,
            limit: CHECK_LIMIT_MS,
        };
        Some([first, role, Step::Verdict { sql: &question.sql, images: &question.rows }])
    }

    fn chunk_len(&self) -> usize {
        (CHUNK_BYTES / self.plan.image_bytes().max(1)).clamp(1, CHUNK)
    }

    /// Reads the answers to begin and catalogue: `Some` if the transaction can't be used for verdicts.
    fn opening(&self, said: &mut impl Iterator<Item = Said>) -> Result<Option<Pass>, SourceError> {
        let rows = said.take(2).collect::<Result<Vec<_>, _>>()?;
        let row = rows.into_iter().next_back().flatten().ok_or(SourceError::Closed)?;
        let answer = Answer::from_row(&row)?;
        Ok(if !sees_all(&answer.snapshot, self.request.xids)? {
            Some(Pass::NotYet)
        } else if answer.table.as_ref() != Some(&self.known.text) {
            Some(Pass::Changed(answer.table))
        } else {
            None
        })
    }

    fn circuit_opened(&self, at: usize) -> Option<Verdict> {
        let (asked, _) = self.plan.asked(at)?;
        let open = self.pool.circuits.is_open(self.request.relation, asked.identity, Instant::now());
        open.then_some(Verdict::Error(IdentityErrorKind::CircuitOpen))
    }

    /// The verdict of an answer; time-outs are remembered.
    fn judged(&self, at: usize, answer: Result<Ordinals, SourceError>) -> Verdict {
        let (circuits, relation) = (&self.pool.circuits, self.request.relation);
        let Some((asked, question)) = self.plan.asked(at) else {
            return Verdict::Error(IdentityErrorKind::ConnectionLost);
        };
        match answer {
            Ok(ordinals) => {
                circuits.went_well(relation, asked.identity);
                self.plan.verdict(question, ordinals)
            }
            Err(error) => {
                let kind = error_kind(&error);
                if kind == IdentityErrorKind::TimedOut {
                    circuits.timed_out(relation, asked.identity, Instant::now());
                }
                Verdict::Error(kind)
            }
        }
    }

    /// All verdicts in the request's order: those that needed no question, and these.
    pub(super) fn fill(&self, answered: Vec<(usize, Verdict)>) -> Vec<Verdict> {
        let fixed = |entry: &Entry<'_>| match entry {
            Entry::Fixed(verdict) => verdict.clone(),
            Entry::Ask(_) => Verdict::Error(IdentityErrorKind::ConnectionLost),
        };
        let mut verdicts: Vec<Verdict> = self.plan.entries.iter().map(fixed).collect();
        for (at, verdict) in answered {
            verdicts[at] = verdict;
        }
        verdicts
    }
}

/// Reads the three answers of one identity: its first error, or its verdict.
fn answer(said: &mut impl Iterator<Item = Said>) -> Result<Ordinals, SourceError> {
    // All three must be taken off the iterator, whatever they are.
    let said: Vec<Said> = said.take(3).collect();
    let rows = said.into_iter().collect::<Result<Vec<_>, _>>()?;
    let row = rows.into_iter().next_back().flatten().ok_or(SourceError::Closed)?;
    Ok(row.try_get(0)?)
}

fn may_succeed_again(error: &SourceError) -> bool {
    let transient = [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED];
    match error {
        SourceError::Timeout { .. } => false,
        _ => error.is_connection_error() || error.sqlstate().is_some_and(|code| transient.contains(code)),
    }
}

fn error_kind(error: &SourceError) -> IdentityErrorKind {
    if matches!(error, SourceError::Timeout { .. }) {
        return IdentityErrorKind::TimedOut;
    }
    if error.is_connection_error() {
        return IdentityErrorKind::ConnectionLost;
    }
    match error.sqlstate() {
        Some(code) if *code == SqlState::QUERY_CANCELED => IdentityErrorKind::TimedOut,
        // A policy that asks for a system column, or that writes (R-RLS-4).
        Some(code) if [SqlState::UNDEFINED_COLUMN, SqlState::READ_ONLY_SQL_TRANSACTION].contains(code) => {
            IdentityErrorKind::NotJudgeable
        }
        Some(code) => IdentityErrorKind::Policy(code.clone()),
        None => IdentityErrorKind::ConnectionLost,
    }
}
