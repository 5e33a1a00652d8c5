//! Asking the policies, one transaction per (table, role): everybody at once, in the form that costs least; after an
//! error in a form that can't be at fault for it, and then every identity under a savepoint (R-RLS-6).

use std::time::{Duration, Instant};

use tokio_postgres::error::SqlState;

use super::{
    CheckRequest, IdentityErrorKind, Verdict, VisibilityPool,
    asked::{Alone, Asked},
    flight::{Many, Said, Step, fly},
    own::{Answer, Known},
    plan::Question,
    sees_all,
    sessions::Session,
    standing::Ask,
    statement::ROW_SECURITY_ACTIVE,
};
use crate::SourceError;

/// `statement_timeout` of one identity's statements, in milliseconds (R-RLS-6).
pub(super) const CHECK_LIMIT_MS: &str = "2000";
/// The same of a statement for many: who made it late has its own limit when asked alone, and all others wait for both.
const SHARED_LIMIT_MS: &str = "500";
/// Bounds a round trip: the statement's limit and some time for the network.
pub(super) const FLIGHT_LIMIT: Duration = Duration::from_millis(3000);
/// (identity, image) pairs of one statement for many: 20 to 100 ms, and some 300 with the costliest policy that was measured.
const JOINED_PAIRS: usize = 1_000_000;
const LOOPED_PAIRS: usize = 20_000;
/// Identities of one such statement.
const MANY: usize = 1000;
/// Identities asked in one round trip, each under a savepoint, and about how many bytes of images go with them.
const ISOLATED: usize = 16;
const ISOLATED_BYTES: usize = 4 << 20;
/// Tries of one identity whose check ends in a serialization failure, a deadlock or a lost connection.
const TRIES: usize = 3;

/// How a role's transaction ended.
pub(super) enum Pass {
    /// Every identity that was to be asked has its verdict; how many statements for many failed on the way.
    Done(Vec<(usize, Verdict)>, usize),
    /// The catalogue is not what the statements were made from; this is it now, `None` if nothing is there.
    Changed(Option<String>),
    /// A transaction of the batch is not visible yet.
    NotYet,
}

/// One role's part of a check, against one catalogue state.
pub(super) struct Judge<'a> {
    pub(super) pool: &'a VisibilityPool,
    pub(super) request: &'a CheckRequest<'a>,
    pub(super) roles: &'a [&'a str],
    pub(super) known: &'a Known,
    pub(super) question: &'a Question<'a>,
}

/// How many are asked in one statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Joined,
    Looped,
}

enum Shared {
    Good(Vec<(usize, Verdict)>),
    Opening(Pass),
    /// Somebody raised an error.
    Failed,
}

/// Ordinals of the visible images; `None`: row security doesn't apply.
type Ordinals = Option<Vec<i64>>;

/// Somebody who is still to be asked under a savepoint.
#[derive(Clone, Copy)]
struct Waiting {
    at: usize,
    tries: usize,
    /// In a round trip of his own, since one that he was in ended with the connection.
    alone: bool,
}

impl Judge<'_> {
    /// Asks for the verdict of everybody in the question.
    pub(super) async fn run(&self) -> Result<Pass, SourceError> {
        let fit = || self.pool.forms.how(self.request.relation, &(), [&self.question.role], Instant::now())[0];
        let mut form = Form::Looped;
        if self.question.joined.is_some() && fit() == Ask::Together {
            form = Form::Joined;
        }
        let mut failed = 0;
        loop {
            match self.shared(form).await {
                Ok(Shared::Good(answers)) => {
                    if form == Form::Looped && failed > 0 {
                        // What was hoisted raised, though the policy doesn't: it must not be tried with every batch. Only
                        // a failure is noted, or it would never be tried again.
                        self.pool.forms.raised(self.request.relation, &(), &self.question.role, Instant::now());
                    }
                    return Ok(Pass::Done(answers, failed));
                }
                Ok(Shared::Opening(pass)) => return Ok(pass),
                Ok(Shared::Failed) if form == Form::Joined => form = Form::Looped,
                Ok(Shared::Failed) => return self.one_by_one(failed + 1).await,
                Err(Failed::Session(error)) => return self.without_session(error, self.everybody(), Vec::new()).await,
                Err(Failed::Check(error)) if error.is_connection_error() => return self.one_by_one(failed + 1).await,
                Err(Failed::Check(error)) => return Err(error),
            }
            failed += 1;
        }
    }

    fn everybody(&self) -> Vec<usize> {
        self.question.together.iter().chain(&self.question.apart).copied().collect()
    }

    async fn session(&self) -> Result<Session, SourceError> {
        self.pool.sessions.take(self.request.project, self.request.password).await
    }

    /// The project's login can't connect: an outage only if ours can't either. That no place was free says nothing of it.
    async fn without_session(
        &self,
        error: SourceError,
        left: Vec<usize>,
        mut verdicts: Vec<(usize, Verdict)>,
    ) -> Result<Pass, SourceError> {
        if matches!(error, SourceError::Shut | SourceError::Busy { .. }) {
            return Err(error);
        }
        self.pool.own.probe().await?;
        tracing::warn!(project = %self.request.project, %error, "a project's visibility login can't connect");
        verdicts.extend(left.into_iter().map(|at| (at, Verdict::Error(IdentityErrorKind::LoginFailed))));
        Ok(Pass::Done(verdicts, 0))
    }

    /// Everybody in one transaction, in one round trip unless there are many: those who go together without savepoints,
    /// then the others.
    async fn shared(&self, form: Form) -> Result<Shared, Failed> {
        let session = self.session().await.map_err(Failed::Session)?;
        let (together, apart) = (&self.question.together, &self.question.apart);
        let mut chunks = together.chunks(self.chunk_len(form)).peekable();
        let (mut answers, mut outcome, mut clean, mut first) = (Vec::new(), None, false, true);
        while outcome.is_none() && (first || chunks.peek().is_some()) {
            let chunk = chunks.next().unwrap_or_default();
            let last = chunks.peek().is_none();
            let apart = if last { apart.as_slice() } else { &[] };
            let asked = Asked::new(self.request, self.question, chunk, apart);
            let steps = self.steps(form, &asked, first, last);
            let mut said = fly(&session.client, &steps, FLIGHT_LIMIT).await?.into_iter();
            if first && let Some(pass) = self.opening(&mut said)? {
                outcome = Some(Shared::Opening(pass));
            }
            if !chunk.is_empty() {
                match self.many(form, chunk, &mut said) {
                    Ok(verdicts) => answers.extend(verdicts),
                    Err(error) if error.is_connection_error() => return Err(error.into()),
                    Err(error) => {
                        // Its text may quote a row, so only the code is told.
                        tracing::debug!(project = %self.request.project, table = %self.request.relation.table, ?form,
                            %error, "asking many at once failed");
                        outcome = outcome.or(Some(Shared::Failed));
                    }
                }
            }
            for at in apart {
                let (answer, _rolled_back) = (answer(&mut said), said.next());
                match answer {
                    Err(error) if error.is_connection_error() => return Err(error.into()),
                    // After an error of those before, it says nothing.
                    _ if outcome.is_some() => {}
                    answer => answers.push((*at, self.judged(*at, answer))),
                }
            }
            let closed: Vec<Said> = said.collect();
            clean = !closed.is_empty() && closed.iter().all(Result::is_ok);
            first = false;
        }
        if clean || self.close(&session).await {
            self.pool.sessions.put_back(session);
        }
        Ok(outcome.unwrap_or(Shared::Good(answers)))
    }

    fn chunk_len(&self, form: Form) -> usize {
        let pairs = if form == Form::Joined { JOINED_PAIRS } else { LOOPED_PAIRS };
        (pairs / self.question.images_of_each().max(1)).clamp(1, MANY)
    }

    fn steps<'b>(&'b self, form: Form, asked: &'b Asked<'b>, first: bool, last: bool) -> Vec<Step<'b>> {
        let mut steps = Vec::with_capacity(4 * asked.claims.len().min(ISOLATED) + 6);
        if first {
            steps.extend([Step::Begin, self.catalogue()]);
        }
        if !asked.many().0.is_empty() {
            // Valid JSON, whoever asks for it: those who are judged are named in the statement.
            steps.push(self.become_one("{}", "", SHARED_LIMIT_MS));
            steps.extend(self.question.bound.then(|| self.many_step(form, asked)));
        }
        steps.extend(self.alone(asked));
        if last {
            steps.extend([Step::Rollback, Step::Discard]);
        }
        steps
    }

    fn catalogue(&self) -> Step<'_> {
        let relation = self.request.relation;
        Step::Catalogue { schema: &relation.schema, table: &relation.table, roles: self.roles }
    }

    fn become_one<'b>(&'b self, claims: &'b str, sub: &'b str, limit: &'b str) -> Step<'b> {
        let Question { role, word, .. } = self.question;
        Step::Become { role, word, claims, sub, limit, table: self.known.table.oid }
    }

    /// Each under a savepoint.
    fn alone<'b>(&'b self, asked: &'b Asked<'b>) -> impl Iterator<Item = Step<'b>> {
        asked.alone(self.question).flat_map(|Alone { claims, sub, images }| {
            let question = Step::Alone { sql: &self.question.alone, images };
            [Step::Savepoint, self.become_one(claims, sub, CHECK_LIMIT_MS), question, Step::RollbackTo]
        })
    }

    fn many_step<'b>(&'b self, form: Form, asked: &'b Asked<'b>) -> Step<'b> {
        let Question { role, word, rows: images, joined, looped: (sql, query), .. } = self.question;
        let ((claims, subs), pairs) = (asked.many(), asked.pairs());
        let who = Many { claims, subs, word, pairs };
        match joined {
            Some(sql) if form == Form::Joined => Step::Joined { sql, images, who },
            _ => Step::Looped { sql, query, images, who, role, limit: SHARED_LIMIT_MS },
        }
    }

    /// Reads the answers about many.
    fn many(
        &self,
        form: Form,
        chunk: &[usize],
        said: &mut impl Iterator<Item = Said>,
    ) -> Result<Vec<(usize, Verdict)>, SourceError> {
        // All must be taken off the iterator, whatever they are.
        let (became, rows) = (said.next(), self.question.bound.then(|| said.next()).flatten());
        let became = became.ok_or(SourceError::Closed)??;
        if !became.first().ok_or(SourceError::Closed)?.try_get::<_, bool>(ROW_SECURITY_ACTIVE)? {
            return Ok(chunk.iter().map(|at| (*at, self.question.everything())).collect());
        }
        // None: the catalogue said that it isn't active. Everybody is asked alone, then.
        let rows = rows.ok_or(SourceError::Protocol("row security is active, though nothing says so"))??;
        if form == Form::Looped && rows.len() != chunk.len() {
            return Err(SourceError::Protocol("the function that judges isn't bootstrap's"));
        }
        let mut seen = vec![Vec::new(); chunk.len()];
        for row in rows {
            let who = usize::try_from(row.try_get::<_, i64>(0)? - 1).ok().and_then(|n| seen.get_mut(n));
            *who.ok_or(SourceError::Protocol("a verdict for nobody"))? = row.try_get(1)?;
        }
        let verdict = |at: usize, seen: &[i64]| match form {
            Form::Joined => self.question.verdict(seen),
            Form::Looped => self.question.verdict_of_wanted(at, seen),
        };
        Ok(chunk.iter().zip(seen).map(|(at, seen)| (*at, verdict(*at, &seen))).collect())
    }

    /// Everybody under a savepoint of his own.
    async fn one_by_one(&self, failed: usize) -> Result<Pass, SourceError> {
        let waiting = |at| Waiting { at, tries: 0, alone: false };
        let mut left: Vec<Waiting> = self.everybody().into_iter().rev().map(waiting).collect();
        let mut verdicts = Vec::new();
        while !left.is_empty() {
            let session = match self.session().await {
                Ok(session) => session,
                Err(error) => {
                    let left = left.into_iter().map(|waiting| waiting.at).collect();
                    return self.without_session(error, left, verdicts).await;
                }
            };
            let steps = [Step::Begin, self.catalogue()];
            let pass = match fly(&session.client, &steps, FLIGHT_LIMIT).await {
                Ok(said) => self.opening(&mut said.into_iter())?,
                Err(error) => return Err(error),
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
        Ok(Pass::Done(verdicts, failed))
    }

    /// Asks until nobody is left or the connection is lost (false).
    async fn drain(&self, session: &Session, left: &mut Vec<Waiting>, verdicts: &mut Vec<(usize, Verdict)>) -> bool {
        let limit = (ISOLATED_BYTES / self.question.bytes().max(1)).clamp(1, ISOLATED);
        while let Some(first) = left.pop() {
            let mut few = vec![first];
            while !first.alone && few.len() < limit {
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
        let who: Vec<usize> = few.iter().map(|waiting| waiting.at).collect();
        let asked = Asked::new(self.request, self.question, &[], &who);
        let steps: Vec<Step<'_>> = self.alone(&asked).collect();
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

    /// Reads the answers to begin and catalogue: `Some` if the transaction can't be used for verdicts.
    fn opening(&self, said: &mut impl Iterator<Item = Said>) -> Result<Option<Pass>, SourceError> {
        let answer = Answer::from_row(&last_row(said, 2)?)?;
        Ok(if !sees_all(&answer.snapshot, self.request.xids)? {
            Some(Pass::NotYet)
        } else if answer.table.as_ref() != Some(&self.known.text) {
            Some(Pass::Changed(answer.table))
        } else {
            None
        })
    }

    fn circuit_opened(&self, at: usize) -> Option<Verdict> {
        let (group, who) = (self.question.word.to_owned(), &self.request.identities[at]);
        let open = self.pool.identities.is_open(self.request.relation, &group, who);
        open.then_some(Verdict::Error(IdentityErrorKind::CircuitOpen))
    }

    /// The verdict of an answer; errors are remembered.
    fn judged(&self, at: usize, answer: Result<Ordinals, SourceError>) -> Verdict {
        match answer {
            Ok(Some(ordinals)) => self.question.verdict_of_wanted(at, &ordinals),
            Ok(None) => self.question.everything(),
            Err(error) => {
                let kind = error_kind(&error);
                let (relation, group) = (self.request.relation, self.question.word.to_owned());
                let (who, standing, now) = (&self.request.identities[at], &self.pool.identities, Instant::now());
                match kind {
                    IdentityErrorKind::TimedOut => standing.timed_out(relation, &group, who, now),
                    _ => standing.raised(relation, &group, who, now),
                }
                Verdict::Error(kind)
            }
        }
    }
}

/// Why [`Judge::shared`] has no answer.
enum Failed {
    /// No connection as the project's login.
    Session(SourceError),
    Check(SourceError),
}

impl From<SourceError> for Failed {
    fn from(error: SourceError) -> Self {
        Self::Check(error)
    }
}

/// Reads the answers to savepoint, become and the question: the first error, or the verdict.
pub(super) fn answer(said: &mut impl Iterator<Item = Said>) -> Result<Ordinals, SourceError> {
    // All three must be taken off the iterator, whatever they are.
    let said: Vec<Said> = said.take(3).collect();
    let [_, became, seen] =
        <[_; 3]>::try_from(said.into_iter().collect::<Result<Vec<_>, _>>()?).map_err(|_| SourceError::Closed)?;
    let (became, seen) = (became.first().ok_or(SourceError::Closed)?, seen.first().ok_or(SourceError::Closed)?);
    Ok(if became.try_get::<_, bool>(ROW_SECURITY_ACTIVE)? { Some(seen.try_get(0)?) } else { None })
}

/// The only row of the last of some answers, or the first error.
fn last_row(said: &mut impl Iterator<Item = Said>, answers: usize) -> Result<tokio_postgres::Row, SourceError> {
    let said: Vec<Said> = said.take(answers).collect();
    let rows = said.into_iter().collect::<Result<Vec<_>, _>>()?;
    rows.into_iter().next_back().and_then(|rows| rows.into_iter().next()).ok_or(SourceError::Closed)
}

fn may_succeed_again(error: &SourceError) -> bool {
    let transient = [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED];
    match error {
        SourceError::Timeout { .. } => false,
        _ => error.is_connection_error() || error.sqlstate().is_some_and(|code| transient.contains(code)),
    }
}

pub(super) fn error_kind(error: &SourceError) -> IdentityErrorKind {
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
